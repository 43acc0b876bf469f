"""The demand of a pod: what its containers ask for and how its cards are to be chosen.

Pods of one job have equal demands, so a demand is compared with the cards of a Node once for all of
them (`book`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import msgspec

from vgpu_agent.placement.topology import NONE
from vgpu_agent.pods import ContainerKind

VIRTUAL, PHYSICAL = "virtual", "physical"


class ContainerDemand(msgspec.Struct, frozen=True, cache_hash=True):
    """The demand of a container on each of its cards.

    Attributes:
        kind: when it runs.
        card_count: the number of its cards, at least 1.
        cores_percent: compute; 0 for no limit.
        memory_units: memory in the Node's units of requests (`Hardware.memory_factor`); None for a
            percentage of the card's memory.
        memory_percent: that percentage.
        alone: no other container may be on the card.
    """

    kind: ContainerKind
    card_count: int
    cores_percent: int
    memory_units: int | None
    memory_percent: int = 100
    alone: bool = False

    def memory_mib(self, card_mib: int, memory_factor: int) -> int:
        """Return the memory that the container takes of a card with ``card_mib``, in the same unit
        as ``card_mib``; ``memory_factor`` is that of `Hardware`.
        """
        if self.memory_units is None:
            return card_mib * self.memory_percent // 100
        return self.memory_units * memory_factor


class Demand(msgspec.Struct, frozen=True, cache_hash=True):
    """The demand of a pod on its Node, without names: equal for all pods of a job.

    Attributes:
        containers: those that ask for cards, init containers and sidecars first.
        node_policy: ``binpack``, ``spread`` or ``none``, over Nodes.
        device_policy: the same, over the cards of a Node.
        topology_mode: ``none``, ``numa``, ``numa-strict``, ``link`` or ``link-strict``: a
            container's cards are to be of one NUMA node, or joined by links; with ``-strict`` there
            is no fallback.
        memory_policy: `VIRTUAL` for Nodes that offer more memory than their cards have, `PHYSICAL`
            for all other Nodes, or empty for both.
        include_types: a card's product name must match one of these entries, if there are any.
        exclude_types: it must match none of these.
        types_match_substrings: an entry matches as any part of the name: ``A10`` matches ``A100``,
            as in vgpu-manager. Otherwise it must not cut a number: ``V100`` matches ``V100S``, but
            ``A10`` does not match ``A100``.
        include_uuids: a card's UUID must contain one of these texts, if there are any.
        exclude_uuids: it must contain none of these.
        aligned: the pod is to be placed near its peers: on cards with NVLinks to theirs or, on
            other Nodes, on the same network rails. A rail is the network that a card is nearest to.
    """

    containers: tuple[ContainerDemand, ...]
    node_policy: str = NONE
    device_policy: str = NONE
    topology_mode: str = NONE
    memory_policy: str = ""
    include_types: tuple[str, ...] = ()
    exclude_types: tuple[str, ...] = ()
    include_uuids: tuple[str, ...] = ()
    exclude_uuids: tuple[str, ...] = ()
    types_match_substrings: bool = False
    aligned: bool = False

    @property
    def names_cards(self) -> bool:
        """Tell whether the demand selects cards by UUID."""
        return bool(self.include_uuids or self.exclude_uuids)

    @property
    def most_cards(self) -> int:
        """The number of different cards of the container that asks for most."""
        return most_of_a_container(self).cards


class PodDemand(msgspec.Struct, frozen=True):
    """The demand of one pod, and the names of the containers of ``demand.containers``."""

    demand: Demand
    names: tuple[str, ...]


class MostOfAContainer(NamedTuple):
    """The largest number of cards, and on one card the largest percent of compute and units of
    memory, that any container asks for; the three may come from different containers. A percentage
    of the memory counts as 0 units.
    """

    cards: int
    cores_percent: int
    memory_units: int


@functools.lru_cache(maxsize=1024)  # called again whenever a Node's cards change
def most_of_a_container(demand: Demand) -> MostOfAContainer:
    """Return the most that a container of the pod asks for."""
    return MostOfAContainer(
        max((each.card_count for each in demand.containers), default=0),
        max((each.cores_percent for each in demand.containers), default=0),
        max((each.memory_units or 0 for each in demand.containers), default=0),
    )


@functools.lru_cache(maxsize=1024)  # likewise
def total(demand: Demand, memory_factor: int, whole_card_mib: int) -> tuple[int, int, int]:
    """Return the slots, memory and percent of compute that the pod needs at its peak, over all its
    cards: its sidecars, plus all main containers or the init container that asks for most.

    Memory is in the unit of ``whole_card_mib``, the memory of each card of the Node, for containers
    that ask for a percentage of it. With 0, e.g. where cards differ, a percentage counts as
    nothing.
    """

    def of(container: ContainerDemand) -> tuple[int, int, int]:
        return (
            container.card_count,
            container.card_count * container.memory_mib(whole_card_mib, memory_factor),
            container.card_count * container.cores_percent,
        )

    by_kind = {
        kind: [of(each) for each in demand.containers if each.kind is kind]
        for kind in ContainerKind
    }
    slots, memory, cores = (
        sum(each[part] for each in by_kind[ContainerKind.SIDECAR])
        + max(
            sum(each[part] for each in by_kind[ContainerKind.MAIN]),
            max((each[part] for each in by_kind[ContainerKind.INIT]), default=0),
        )
        for part in range(3)
    )
    return slots, memory, cores
