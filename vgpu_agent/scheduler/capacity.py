"""The free capacity of a cluster: the largest single requests that fit, and the cards by type and
state.

A pure function, and a generator that yields after each small piece of work, because the extender
answers kube-scheduler on the same thread. Equal cards that are equally in use are counted together,
so that 40,000 cards take some milliseconds.
"""

from __future__ import annotations

import bisect
import collections
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vgpu_agent.placement.nodes.allocation import NOTHING
from vgpu_agent.placement.nodes.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from vgpu_agent.placement.nodes.allocation import Amounts
    from vgpu_agent.placement.nodes.book import NodeView, State
    from vgpu_agent.placement.nodes.cards import Card, Hardware

T = TypeVar("T")

MAX_NAMES = 5  # of Nodes with one reason
_GIB = 1024  # MiB
_WHOLE_PERCENT = 100
_AT_ONCE = 256  # Nodes, or amounts taken of cards, that are counted between two yields
# Lower ends of the buckets of free memory, in MiB; the usual sizes of cards are among them.
BUCKETS_MIB = (
    1,
    *(gib * _GIB for gib in (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)),
)


class Largest(msgspec.Struct):
    """The largest requests that fit now, each by itself: a pod that asks for all of them at once
    may not fit.

    Attributes:
        memory_mib: of one card, for a container without a limit of compute.
        cores_percent: of one card, for a container that asks for one unit of memory.
        whole_cards: cards of one Node of which no pod has a share, for a pod that asks for a
            number of cards only.
    """

    memory_mib: int = 0
    cores_percent: int = 0
    whole_cards: int = 0


class Cards(msgspec.Struct):
    """Cards by state; each is counted once.

    Attributes:
        untouched: no pod has a share of them.
        partly: pods have shares of them, and they can serve another container.
        full: they have no slot, no memory or no compute left.
        unhealthy: they serve no new container.
        mig: they are divided into MIG instances.
    """

    untouched: int = 0
    partly: int = 0
    full: int = 0
    unhealthy: int = 0
    mig: int = 0


class Amount(msgspec.Struct):
    """An amount (of memory, compute or slots), summed over all healthy cards.

    Attributes:
        total: on all of them.
        free: on those that can serve another container.
        unreachable: free on cards that cannot serve another container, because they have no slot,
            no memory or no compute left.
    """

    total: int = 0
    free: int = 0
    unreachable: int = 0


class Bucket(msgspec.Struct, frozen=True):
    """Cards that can serve another container, by free memory.

    Attributes:
        from_mib: the least free memory.
        below_mib: the free memory is below that; null for the last bucket.
        cards: the number of cards.
    """

    from_mib: int
    below_mib: int | None
    cards: int


class CardType(msgspec.Struct):
    """All cards of one product name.

    Attributes:
        type: the product name.
        nodes: the number of Nodes that have some.
        cards: the cards by state.
        largest: the largest requests that fit on cards of this type.
        memory_mib: of these cards.
        cores_percent: of these cards.
        slots: of these cards.
        free_memory: the cards that can serve another container, by free memory; buckets without
            cards are left out.
    """

    type: str
    nodes: int = 0
    cards: Cards = msgspec.field(default_factory=Cards)
    largest: Largest = msgspec.field(default_factory=Largest)
    memory_mib: Amount = msgspec.field(default_factory=Amount)
    cores_percent: Amount = msgspec.field(default_factory=Amount)
    slots: Amount = msgspec.field(default_factory=Amount)
    free_memory: tuple[Bucket, ...] = ()


class UnfitNodes(msgspec.Struct, frozen=True):
    """Nodes that can take no pod, by reason.

    Attributes:
        code: of the reason.
        reason: in words.
        note: what exactly is wrong; mostly empty.
        nodes: the number of Nodes.
        names: of the Nodes, the first few.
    """

    code: str
    reason: str
    note: str
    nodes: int
    names: tuple[str, ...]


class Capacity(msgspec.Struct, frozen=True):
    """The answer of ``/capacity``.

    Attributes:
        nodes: the number of Nodes.
        unfit_nodes: the number of Nodes that can take no pod.
        pods: the number of pods that hold cards or have cards kept for them.
        largest: the largest requests that fit, on cards of any type.
        cards: all cards by state.
        types: the cards by type, the most frequent first.
        unfit: the Nodes that can take no pod, by reason.
        doubts: reasons why this answer may be out of date or incomplete, in sentences; mostly
            empty.
    """

    nodes: int
    unfit_nodes: int
    pods: int
    largest: Largest
    cards: Cards
    types: tuple[CardType, ...]
    unfit: tuple[UnfitNodes, ...]
    doubts: tuple[str, ...] = ()


def capacity(views: Sequence[NodeView]) -> Generator[None, None, Capacity]:
    """Count all cards; ``views`` are all Nodes, with their cards and what pods have of them."""
    unfit: dict[tuple[Reason, str], list[str]] = {}
    for view in views:
        if view.unfit is not None:
            unfit.setdefault((view.unfit.reason, view.unfit.note), []).append(view.name)
    yield
    types = _Types()
    for alike in _by_hardware(views):
        yield from types.count(alike[0].hardware, [state.taken for state in alike])
    yield from types.add_up()
    found = types.found()
    largest = Largest(
        memory_mib=max((each.largest.memory_mib for each in found), default=0),
        cores_percent=max((each.largest.cores_percent for each in found), default=0),
        whole_cards=types.whole_cards,
    )
    return Capacity(
        nodes=len(views),
        unfit_nodes=sum(map(len, unfit.values())),
        pods=sum(len(view.holdings) for view in views),
        largest=largest,
        cards=_sum([each.cards for each in found]),
        types=tuple(found),
        unfit=tuple(
            UnfitNodes(
                code=reason.name,
                reason=reason.value,
                note=note,
                nodes=len(names),
                names=tuple(names[:MAX_NAMES]),
            )
            for (reason, note), names in sorted(unfit.items(), key=lambda each: -len(each[1]))
        ),
    )


def _by_hardware(views: Sequence[NodeView]) -> list[list[State]]:
    """Group the states of all Nodes (cards, and what is taken of each) by equal cards."""
    found: dict[int, list[State]] = {}
    for view in views:
        if view.state is not None:
            # Nodes with equal cards share one `Hardware`
            found.setdefault(id(view.state.hardware), []).append(view.state)
    return list(found.values())


class _Types:
    """The cards by type, while they are counted.

    Attributes:
        whole_cards: the most cards of one Node, of any type, of which no pod has a share.
    """

    def __init__(self) -> None:
        self.whole_cards = 0
        self._types: dict[str, CardType] = {}
        # kind of a card, and the MiB that one unit of memory stands for on its Node → what is taken
        # (slots, memory, compute) → the number of such cards
        self._taken: dict[tuple[Card, int], collections.Counter[Amounts]] = {}
        self._buckets: dict[str, collections.Counter[int]] = {}

    def count(
        self, hardware: Hardware, taken: Sequence[tuple[Amounts, ...]]
    ) -> Generator[None, None, None]:
        """Count the cards of Nodes with equal cards; ``taken`` has for each Node what pods have of
        each of its cards.
        """
        for model in {card.model for card in hardware.cards}:
            self._of(model).nodes += len(taken)
        # `of_card`: what is taken of this card, on each of the Nodes
        for card, of_card in zip(hardware.cards, zip(*taken, strict=True), strict=True):
            # cards that differ in nothing but their NUMA node are counted together
            kind = msgspec.structs.replace(card, numa=None), hardware.memory_factor
            self._taken.setdefault(kind, collections.Counter()).update(of_card)
            yield
        whole = _whole(hardware)
        for nodes in _parts(taken):
            for of_node in nodes:
                self._add_whole(of_node, whole)
            yield

    def add_up(self) -> Generator[None, None, None]:
        """Add up all counted cards."""
        for (card, memory_factor), taken in self._taken.items():
            for counted in _parts(list(taken.items())):
                for amounts, cards in counted:
                    self._add(card, amounts, cards, memory_factor)
                yield

    def _add(self, card: Card, taken: Amounts, count: int, memory_factor: int) -> None:
        """Count equal cards of which equal amounts are taken."""
        found = self._of(card.model)
        if card.blocked is not None:  # why no new container may get a share of it
            if card.blocked is Reason.DeviceMIGEnabled:
                found.cards.mig += count
            else:
                found.cards.unhealthy += count
            return
        slots, memory_mib, cores_percent = taken
        free_mib = max(card.memory_mib - memory_mib, 0)
        free_cores_percent = max(card.cores_percent - cores_percent, 0)
        free = max(card.slots - slots, 0), free_mib, free_cores_percent
        is_usable = min(free) > 0
        for amount, total, left in zip(
            (found.slots, found.memory_mib, found.cores_percent),
            (card.slots, card.memory_mib, card.cores_percent),
            free,
            strict=True,
        ):
            amount.total += total * count
            if is_usable:
                amount.free += left * count
            else:
                amount.unreachable += left * count
        if not is_usable:
            found.cards.full += count
            return
        if taken == NOTHING:
            found.cards.untouched += count
        else:
            found.cards.partly += count
        self._buckets[card.model][bisect.bisect_right(BUCKETS_MIB, free_mib) - 1] += count
        largest = found.largest
        largest.memory_mib = max(largest.memory_mib, free_mib // memory_factor * memory_factor)
        if free_mib >= memory_factor:
            # a card may be offered with more than 100 %, and a container gets no more than that
            largest.cores_percent = max(largest.cores_percent, min(free_cores_percent, 100))

    def _add_whole(self, taken: Sequence[Amounts], whole: Mapping[str, Sequence[int]]) -> None:
        """Record how many cards of a Node no pod uses, by type and in total. ``whole`` has the
        numbers of the cards that could serve a pod that asks for whole cards.
        """
        of_all = 0
        for model, numbers in whole.items():
            count = (
                taken.count(NOTHING)
                if len(numbers) == len(taken)
                else sum(taken[number] == NOTHING for number in numbers)
            )
            of_all += count
            largest = self._of(model).largest
            largest.whole_cards = max(largest.whole_cards, count)
        self.whole_cards = max(self.whole_cards, of_all)

    def found(self) -> list[CardType]:
        """Return all types, the most frequent first."""
        for model, found in self._types.items():
            found.free_memory = tuple(
                Bucket(
                    BUCKETS_MIB[place],
                    BUCKETS_MIB[place + 1] if place + 1 < len(BUCKETS_MIB) else None,
                    count,
                )
                for place, count in sorted(self._buckets[model].items())
            )

        def frequency(found: CardType) -> tuple[int, str]:
            return -sum(msgspec.structs.astuple(found.cards)), found.type

        return sorted(self._types.values(), key=frequency)

    def _of(self, model: str) -> CardType:
        if (found := self._types.get(model)) is None:
            found = self._types[model] = CardType(model)
            self._buckets[model] = collections.Counter()
        return found


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for place in range(0, len(items), _AT_ONCE):
        yield items[place : place + _AT_ONCE]


def _whole(hardware: Hardware) -> Mapping[str, Sequence[int]]:
    """Return by type the numbers of the cards that can be granted as a whole, with 100 % of their
    compute.
    """
    found: dict[str, list[int]] = {}
    for number, card in enumerate(hardware.cards):
        offered = card.slots > 0 and card.memory_mib > 0 and card.cores_percent >= _WHOLE_PERCENT
        if card.blocked is None and offered:
            found.setdefault(card.model, []).append(number)
    return found


def _sum(cards: Sequence[Cards]) -> Cards:
    rows = [msgspec.structs.astuple(each) for each in cards]
    return Cards(*(sum(parts) for parts in zip(*rows, strict=True)))
