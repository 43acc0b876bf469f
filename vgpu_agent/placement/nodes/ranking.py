"""The rank of a Node among those on which a pod fits (vgpu-manager §5.4)."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from vgpu_agent.placement.linked import components
from vgpu_agent.placement.nodes.allocation import add
from vgpu_agent.placement.nodes.demand import total
from vgpu_agent.placement.rooms import BINPACK
from vgpu_agent.placement.topology import LINK, LINK_STRICT, NONE, NUMA, NUMA_STRICT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.placement.nodes.allocation import Amounts
    from vgpu_agent.placement.nodes.cards import Hardware
    from vgpu_agent.placement.nodes.demand import Demand

# Fitness, and the least type of link with which cards count as linked (vgpu-manager §5.4, §5.6):
# NVLink, PCIe switch, NUMA node, any.
_LINK_FITNESS = ((5, 7), (4, 4), (3, 2), (2, 1))
_MIB_PER_WEIGHT = 1024  # of memory, for as much weight as one slot or 100 % of the compute


def rank(
    demand: Demand,
    hardware: Hardware,
    taken: Sequence[Amounts],
    footprint: Mapping[int, Amounts],
) -> tuple[int, float]:
    """Return how good a Node on which the pod fits is: of two, the larger is better. First counts
    how well its cards suit the pod's topology mode, then its score for the pod's node policy.

    `Amounts` are (slots, MiB of memory, percent of compute).

    Args:
        demand: of the pod.
        hardware: the Node's cards.
        taken: by card, what other pods take of it.
        footprint: card → what the pod would take of it.
    """
    mode = demand.topology_mode
    # without a mode not even looked up in the cache, which hashes all cards and links
    fitness = _fitness(hardware, mode, demand.most_cards) if mode != NONE else 0
    return fitness, _score(demand, hardware, taken, footprint)


@functools.lru_cache(maxsize=256)  # an entry of the largest Nodes takes half a megabyte
def _fitness(hardware: Hardware, mode: str, cards: int) -> int:
    """Return how well the Node's cards, also those in use, suit the topology mode, which asks for
    cards of one NUMA node or with good links; ``cards`` is the most that a container wants.
    """
    if mode in {NUMA, NUMA_STRICT}:
        nodes = [card.numa for card in hardware.cards if card.numa is not None]
        if any(nodes.count(numa) >= cards for numa in nodes):
            return 2
        return 1 if nodes else 0
    if mode not in {LINK, LINK_STRICT} or not hardware.links:
        return 0
    # of each pair of cards, the type of its best link
    types = {(str(one), str(other)): max(each, default=0) for one, other, each in hardware.links}
    every = [str(number) for number in range(len(hardware.cards))]
    for fitness, least in _LINK_FITNESS:

        def linked(one: str, other: str, least: int = least) -> bool:
            return types.get((one, other), 0) >= least

        groups = components(every, linked)
        # one card counts only if it is linked to another one, in use or not
        if any(len(group) >= max(cards, 2) for group in groups):
            return fitness
    return 1


def _score(
    demand: Demand,
    hardware: Hardware,
    taken: Sequence[Amounts],
    footprint: Mapping[int, Amounts],
) -> float:
    """Return 0 to 1: for ``binpack`` the part of the Node's cards that is in use with the pod, for
    ``spread`` the part that is free without it; 0 without a node policy. Slots, memory and compute
    count by `_weights`.
    """
    if demand.node_policy == NONE:
        return 0.0
    pack = demand.node_policy == BINPACK
    weights = _weights(demand)
    have, used = [0, 0, 0], [0, 0, 0]
    for number, card in enumerate(hardware.cards):
        if card.blocked is None:  # new containers may get a share of it
            amounts = taken[number]
            if pack and number in footprint:
                amounts = add(amounts, footprint[number])
            for part, size in enumerate((card.slots, card.memory_mib, card.cores_percent)):
                have[part] += size
                used[part] += amounts[part]
    parts = [part / size if size else 0.0 for part, size in zip(used, have, strict=True)]
    # Equal Nodes must have equal scores, however they were computed.
    return round(
        sum(
            weight * (part if pack else 1 - part)
            for weight, part in zip(weights, parts, strict=True)
        ),
        12,
    )


@functools.lru_cache(maxsize=1024)
def _weights(demand: Demand) -> tuple[float, float, float]:
    """Return the weights of slots, memory and compute; they depend on the demand only."""
    # Nodes differ in the size of a unit of memory and of a card: here a unit counts as 1 MiB, and a
    # percentage of a card's memory as 0.
    number, memory, cores = total(demand, memory_factor=1, whole_card_mib=0)
    parts = (
        float(number),
        float(max(math.ceil(memory / _MIB_PER_WEIGHT), number)) if memory else float(number),
        cores / 100,
    )
    return parts[0] / sum(parts), parts[1] / sum(parts), parts[2] / sum(parts)
