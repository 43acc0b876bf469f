"""Place the containers of a pod on the cards of one Node (vgpu-manager §5.5).

Pure functions on the state of a Node, called in the scheduler extender. They choose among the cards
with room as the agent does on its own node (`placement.topology`).
"""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vgpu_agent.placement.mixing import OTHERS
from vgpu_agent.placement.nodes.demand import PHYSICAL, VIRTUAL, most_of_a_container, total
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.topology import (
    LINK,
    LINK_STRICT,
    NONE,
    NUMA_STRICT,
    Candidate,
    Links,
    by_topology,
    in_order,
    policy_score,
)
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vgpu_agent.placement.nodes.cards import Card, Hardware
    from vgpu_agent.placement.nodes.demand import ContainerDemand, Demand

# slots, MiB of memory, percent of compute
Amounts = tuple[int, int, int]
NOTHING: Amounts = (0, 0, 0)

_KINDS = tuple(ContainerKind)  # iterating an enum is slow
# `Candidate.rank`, the same for all cards: the families that they serve are not known here. Not
# `OTHERS`, which would mark all cards as those of another family.
_RANK = OTHERS - 1


class CardShare(msgspec.Struct, frozen=True):
    """One card of a container: its number on the Node, percent of compute, MiB of memory."""

    card: int
    cores_percent: int
    memory_mib: int


class Placement(msgspec.Struct, frozen=True):
    """The cards of a pod on a Node.

    Attributes:
        shares: of each container of the demand, in its order; each sorted by card number.
        footprint: card → the amounts that the pod takes of it (`footprint`).
        fallback: where the pod's topology mode could not be followed, what the cards have instead
            of the links or the NUMA node that it asks for, as text for the pod's owner, e.g. ``no
            NVLinks, but one NUMA node``; empty where the mode was followed, or there is none.
    """

    shares: tuple[tuple[CardShare, ...], ...]
    footprint: Mapping[int, Amounts]
    fallback: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """The reason why a pod does not fit on a Node.

    Attributes:
        reason: that of most cards, where the cards have different ones.
        cards: reason → the number of cards that it concerns; empty where it concerns the Node.
    """

    reason: Reason
    cards: Mapping[Reason, int] = {}


def add(one: Amounts, other: Amounts) -> Amounts:
    """Add up amounts."""
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def footprint(
    kinds: Sequence[ContainerKind], shares: Sequence[Sequence[CardShare]]
) -> dict[int, Amounts]:
    """Return the amounts that a pod takes of each card at most: those of its sidecars, plus the
    larger of the sum of its main containers and the largest of its init containers. Slots, memory
    and compute are computed separately (vgpu-manager §4.4).

    Args:
        kinds: of the containers.
        shares: of the containers, in the same order.
    """
    of_kind: dict[ContainerKind, dict[int, Amounts]] = {kind: {} for kind in _KINDS}
    for kind, cards in zip(kinds, shares, strict=True):
        found = of_kind[kind]
        for share in cards:
            amounts = (1, share.memory_mib, share.cores_percent)
            before = found.get(share.card, NOTHING)
            found[share.card] = (
                _larger(before, amounts) if kind is ContainerKind.INIT else add(before, amounts)
            )
    sidecars, mains, inits = (
        of_kind[kind] for kind in (ContainerKind.SIDECAR, ContainerKind.MAIN, ContainerKind.INIT)
    )
    return {
        card: add(
            sidecars.get(card, NOTHING),
            _larger(mains.get(card, NOTHING), inits.get(card, NOTHING)),
        )
        for card in sorted(sidecars.keys() | mains.keys() | inits.keys())
    }


def allocate(
    demand: Demand,
    hardware: Hardware,
    taken: Sequence[Amounts],
    unwanted: Mapping[int, Reason] | None = None,
) -> Placement | Refusal:
    """Place all containers of a pod.

    Args:
        demand: what the pod asks for.
        hardware: the Node's cards.
        taken: by card, what other pods take of it.
        unwanted: card → why the pod does not want it.
    """
    if refusal := _refused_by_node(demand, hardware, taken, unwanted or {}):
        return refusal
    # what is taken of each card, with the containers that are placed so far
    taken_now: Sequence[Amounts] = taken
    # by position of the container in the demand
    shares: dict[int, tuple[CardShare, ...]] = {}
    positions = {
        kind: [position for position, each in enumerate(demand.containers) if each.kind is kind]
        for kind in _KINDS
    }

    fallback = ""

    def cards(position: int, among: Collection[int] | None = None) -> Sequence[CardShare] | Refusal:
        nonlocal fallback
        found = _cards(
            demand, demand.containers[position], hardware, taken_now, unwanted or {}, among=among
        )
        if isinstance(found, Refusal):
            return found
        fallback = fallback or found.fallback
        return found.shares

    for position in (*positions[ContainerKind.SIDECAR], *positions[ContainerKind.MAIN]):
        found = cards(position)
        if isinstance(found, Refusal):
            return found
        shares[position] = tuple(found)
        taken_now = _with(taken_now, found)
    used = {share.card for each in shares.values() for share in each}
    # An init container runs alone beside the sidecars. It gets cards that the pod has anyway, if
    # they have room.
    taken_now = taken
    for position in positions[ContainerKind.SIDECAR]:
        taken_now = _with(taken_now, shares[position])
    for position in positions[ContainerKind.INIT]:
        found = cards(position, used)
        if isinstance(found, Refusal):
            found = cards(position)
        if isinstance(found, Refusal):
            return found
        shares[position] = tuple(found)
    ordered = tuple(shares[position] for position in range(len(demand.containers)))
    kinds = [each.kind for each in demand.containers]
    return Placement(ordered, footprint(kinds, ordered), fallback)


def some_footprint(
    demand: Demand,
    hardware: Hardware,
    taken: Sequence[Amounts],
    unwanted: Mapping[int, Reason],
) -> Mapping[int, Amounts] | Refusal:
    """Return what the pod may take of the cards, or why it does not fit, to compare Nodes.

    The refusals, and the sums over all cards, are those of `allocate`, with the same arguments. The
    cards may be others, because for most pods the choice of cards takes twice as long as this, and
    is needed on one Node only.
    """
    if len(demand.containers) == 1 and demand.topology_mode == NONE:
        if refusal := _refused_by_node(demand, hardware, taken, unwanted):
            return refusal
        [container] = demand.containers
        fitting = _fitting(container, hardware, taken, unwanted, among=None)
        if isinstance(fitting, Refusal):
            return fitting
        memory = {
            container.memory_mib(hardware.cards[number].memory_mib, hardware.memory_factor)
            for number in fitting
        }
        if len(memory) == 1:  # otherwise the sum depends on the choice
            amounts = (1, memory.pop(), container.cores_percent)
            return dict.fromkeys(fitting[: container.card_count], amounts)
    found = allocate(demand, hardware, taken, unwanted)
    return found if isinstance(found, Refusal) else found.footprint


def card_reasons(
    demand: Demand,
    hardware: Hardware,
    taken: Sequence[Amounts],
    unwanted: Mapping[int, Reason] | None = None,
) -> Mapping[Reason, int]:
    """Return why single cards cannot serve the pod, for explanations: reason → number of cards.

    Each container is compared with the Node as if it was the pod's only one. The reasons are those
    of the first container that does not fit; empty where each container fits. If the pod does not
    want a card that is also full, the pod's own reason counts (in `allocate`, the card's).
    Arguments as in `allocate`.
    """
    skipped = unwanted or {}
    for container in demand.containers:
        reasons: collections.Counter[Reason] = collections.Counter()
        for card_number, card in enumerate(hardware.cards):
            reason = skipped.get(card_number) or why_not(
                container, hardware, card, taken[card_number]
            )
            if reason:
                reasons[reason] += 1
        if len(hardware.cards) - reasons.total() < container.card_count:
            return dict(reasons)
    return {}


def why_not(
    container: ContainerDemand, hardware: Hardware, card: Card, taken: Amounts
) -> Reason | None:
    """Return why the container cannot have a share of the card (vgpu-manager §5.5), None if it can.

    Args:
        container: what it asks for; if ``alone``, no other container may be on its cards.
        hardware: the Node's cards, and the size of one unit of memory in requests there.
        card: one of them.
        taken: what others take of it.
    """
    slots, memory, cores = taken
    free_cores = card.cores_percent - cores
    if card.blocked is not None:  # no new container may get a share of it
        return card.blocked
    if slots >= card.slots or (container.alone and slots):
        return Reason.InsufficientVGPUSlot
    if container.memory_mib(card.memory_mib, hardware.memory_factor) > card.memory_mib - memory:
        return Reason.InsufficientVGPUMemory
    if container.cores_percent > free_cores or free_cores <= 0:
        return Reason.InsufficientVGPUCore
    return None


def _refused_by_node(
    demand: Demand,
    hardware: Hardware,
    taken: Sequence[Amounts],
    unwanted: Mapping[int, Reason],
) -> Refusal | None:
    """Check, from sums over all cards and without choosing any, whether the Node can serve the pod
    (vgpu-manager §5.2, 3e); return the reason if not, otherwise None.
    """
    # `VIRTUAL` is for Nodes that offer more memory than their cards have
    if demand.memory_policy and demand.memory_policy != (
        VIRTUAL if hardware.is_oversold else PHYSICAL
    ):
        return Refusal(Reason.NodeMemoryTypeMismatch)
    free = _free(hardware, tuple(taken))
    # the number of cards that take containers, without those that the pod rules out
    acceptable = free.cards - sum(hardware.cards[card].blocked is None for card in unwanted)
    most = most_of_a_container(demand)  # for each amount, that of the container that asks for most
    # where cards differ, a request for a percentage of a card's memory counts as 0 MiB
    slots, memory, cores = total(
        demand, hardware.memory_factor, free.largest_mib if free.are_alike else 0
    )
    checks = (
        (most.cards > free.cards, Reason.InsufficientGPUCards),
        (most.cores_percent > free.strongest_percent, Reason.InsufficientVGPUCore),
        (
            most.memory_units * hardware.memory_factor > free.largest_mib,
            Reason.InsufficientVGPUMemory,
        ),
        (slots > free.slots, Reason.InsufficientGPUResources),
        (cores > free.cores_percent, Reason.InsufficientVGPUCore),
        (memory > free.memory_mib, Reason.InsufficientVGPUMemory),
        (most.cards > acceptable, next(iter(unwanted.values()), Reason.DeviceTypeMismatch)),
    )
    return next((Refusal(reason) for fails, reason in checks if fails), None)


class _Free(NamedTuple):
    """The sums over all cards of a Node that take containers: what is free, and how large they are.

    Attributes:
        cards: their number.
        slots: free slots.
        memory_mib: free memory.
        cores_percent: free compute.
        largest_mib: the memory of the largest card, taken or not.
        strongest_percent: the highest percentage of compute that any card offers, taken or not.
        are_alike: all have the same memory.
    """

    cards: int
    slots: int
    memory_mib: int
    cores_percent: int
    largest_mib: int
    strongest_percent: int
    are_alike: bool


# Each demand is compared with each new state of a Node. Few are kept, because the description of a
# Node with many linked cards takes a megabyte.
@functools.lru_cache(maxsize=64)
def _free(hardware: Hardware, taken: tuple[Amounts, ...]) -> _Free:
    number = slots = memory = cores = 0
    sizes, strongest = set(), 0
    for card, (used_slots, used_memory, used_cores) in zip(hardware.cards, taken, strict=True):
        if card.blocked is not None:
            continue
        number += 1
        slots += max(card.slots - used_slots, 0)
        memory += max(card.memory_mib - used_memory, 0)
        cores += max(card.cores_percent - used_cores, 0)
        sizes.add(card.memory_mib)
        strongest = max(strongest, card.cores_percent)
    largest = max(sizes, default=0)
    return _Free(number, slots, memory, cores, largest, strongest, are_alike=len(sizes) == 1)


class _ContainerCards(NamedTuple):
    """The cards of one container; ``fallback`` as in `Placement`."""

    shares: tuple[CardShare, ...]
    fallback: str


def _cards(
    demand: Demand,
    container: ContainerDemand,
    hardware: Hardware,
    taken: Sequence[Amounts],
    unwanted: Mapping[int, Reason],
    *,
    among: Collection[int] | None,
) -> _ContainerCards | Refusal:
    """Choose the cards of one container, from the numbers in ``among`` or, if None, from all."""
    fitting = _fitting(container, hardware, taken, unwanted, among=among)
    if isinstance(fitting, Refusal):
        return fitting
    candidates = []
    for number in fitting:
        card = hardware.cards[number]
        score = 0.0
        # binpack takes the fullest cards first, spread the emptiest
        if demand.device_policy != NONE:
            slots, memory, cores = taken[number]
            parts = (  # the free parts of its slots, memory and compute, from 0 to 1
                (card.slots - slots) / card.slots,
                (card.memory_mib - memory) / max(card.memory_mib, 1),
                (card.cores_percent - cores) / card.cores_percent,
            )
            score = policy_score(demand.device_policy, parts)
        candidates.append(Candidate(str(number), number, card.numa, _RANK, score))
    chosen = by_topology(
        in_order(candidates, demand.device_policy),
        container.card_count,
        demand.device_policy,
        demand.topology_mode,
        _links(hardware) if demand.topology_mode in {LINK, LINK_STRICT} else _NO_LINKS,
    )
    if chosen is None:
        return Refusal(
            Reason.NUMATopologyUnsatisfied
            if demand.topology_mode == NUMA_STRICT
            else Reason.LinkTopologyUnsatisfied
        )
    shares = tuple(
        CardShare(
            card_number,
            container.cores_percent,
            container.memory_mib(hardware.cards[card_number].memory_mib, hardware.memory_factor),
        )
        for card_number in sorted(card.number for card in chosen.cards)
    )
    return _ContainerCards(shares, chosen.fallback)


def _fitting(
    container: ContainerDemand,
    hardware: Hardware,
    taken: Sequence[Amounts],
    unwanted: Mapping[int, Reason],
    *,
    among: Collection[int] | None,
) -> list[int] | Refusal:
    """Return the numbers of the cards that can serve the container, at least as many as it asks
    for; only those in ``among``, unless that is None.
    """
    reasons: collections.Counter[Reason] = collections.Counter()
    fitting = []
    for number, card in enumerate(hardware.cards):
        if among is not None and number not in among:
            continue
        if reason := why_not(container, hardware, card, taken[number]) or unwanted.get(number):
            reasons[reason] += 1
        else:
            fitting.append(number)
    if len(fitting) < container.card_count:
        [(most, _)] = reasons.most_common(1) or [(Reason.InsufficientGPUCards, 0)]
        return Refusal(most, dict(reasons))
    return fitting


_NO_LINKS = Links({}, ())


def _links(hardware: Hardware) -> Links:
    types = {(str(one), str(other)): each for one, other, each in hardware.links}
    return Links(types, [str(number) for number in range(len(hardware.cards))])


def _with(taken: Sequence[Amounts], shares: Sequence[CardShare]) -> list[Amounts]:
    """Return ``taken`` with the shares of one container."""
    found = list(taken)
    for share in shares:
        found[share.card] = add(found[share.card], (1, share.memory_mib, share.cores_percent))
    return found


def _larger(one: Amounts, other: Amounts) -> Amounts:
    return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2])
