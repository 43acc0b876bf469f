"""A demand compared with all Nodes of a cluster, for ``/explain``: why each Node cannot take the
pod, how many such pods fit, and which smaller demand would fit.

A cluster has thousands of Nodes, and the caller has other work to do. So each function is a
generator that yields after each small piece of work, mostly less than a millisecond, and returns
its result (`finish`). It works on views of Nodes (`NodeView`), which do not change meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from vgpu_agent.placement.nodes.allocation import (
    NOTHING,
    Placement,
    Refusal,
    add,
    allocate,
    card_reasons,
)
from vgpu_agent.placement.nodes.book import NodeView, State
from vgpu_agent.placement.nodes.cards import Hardware
from vgpu_agent.placement.topology import LINK, LINK_STRICT, NUMA, NUMA_STRICT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence

    from vgpu_agent.placement.nodes.allocation import Amounts
    from vgpu_agent.placement.nodes.demand import ContainerDemand, Demand
    from vgpu_agent.placement.nodes.reasons import Reason

T = TypeVar("T")

# the caller sets no time limit
NEVER_OVER: Callable[[], bool] = lambda: False  # noqa: E731 - a constant of a function's type

# A strict topology mode, which refuses the pod where its cards cannot be joined as it demands → the
# mode that only prefers such cards.
_WITHOUT_STRICT = {LINK_STRICT: LINK, NUMA_STRICT: NUMA}


class Group(msgspec.Struct, frozen=True, gc=False):
    """Nodes with the same result for a demand, because they have equal cards that are equally in
    use.

    Attributes:
        views: the Nodes.
        refusal: why the pod does not fit on them; None where it does.
        cards: reason why a card cannot serve the pod → the number of cards of one Node that it
            concerns, also where the Node as a whole is refused.
    """

    views: tuple[NodeView, ...]
    refusal: Refusal | None
    cards: Mapping[Reason, int] = {}

    @property
    def fits(self) -> bool:
        """Tell whether the pod fits on these Nodes."""
        return self.refusal is None


class Copies(msgspec.Struct, frozen=True):
    """The number of equal pods that fit.

    Attributes:
        count: their number.
        is_exact: all were counted; otherwise time ran out, and more may fit.
    """

    count: int
    is_exact: bool


class Change(msgspec.Struct, frozen=True):
    """A change of the pod with which it would fit at once.

    Attributes:
        field: the field of the demand that changes: ``memory_units``, ``cores_percent``,
            ``card_count``, ``topology_mode``, ``memory_policy`` (Nodes with or without oversold
            memory), ``types`` (product names of cards) or ``uuids``.
        value: for an amount, the largest with which it fits; otherwise the new value, empty for
            none.
        nodes: the number of Nodes on which it would fit.
    """

    field: str
    value: int | str
    nodes: int


class Changes(msgspec.Struct, frozen=True):
    """All changes each of which lets the pod fit by itself.

    Attributes:
        found: the changes.
        is_complete: all were tried; otherwise time ran out, and none is given.
    """

    found: tuple[Change, ...]
    is_complete: bool


def finish(work: Generator[None, None, T]) -> T:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def grouped(demand: Demand, views: Sequence[NodeView]) -> Generator[None, None, list[Group]]:
    """Compare a demand with all Nodes. The Nodes of a group are in the order of ``views``."""
    groups = []
    for alike in _alike(demand, views):
        groups.append(_group(demand, alike))
        yield
    return groups


def copies(
    groups: Sequence[Group], demand: Demand, is_over: Callable[[], bool] = NEVER_OVER
) -> Generator[None, None, Copies]:
    """Count how many pods of a demand fit one after the other, by placing them.

    Nodes do not influence each other, so the sum over the Nodes is what fits in the cluster, in
    whatever order Nodes are chosen.

    Args:
        groups: the result of `grouped` for the demand.
        demand: of each pod.
        is_over: tells whether the caller's time is up.
    """
    count = 0
    one_by_one = _CardByCard(demand) if _takes_any_card(demand) else None
    for group in groups:
        view = group.views[0]
        if not group.fits or view.state is None:  # None: the Node can take no pod
            continue
        unwanted = view.unwanted(demand)  # the cards that the demand excludes
        if one_by_one is not None:
            count += len(group.views) * (yield from one_by_one.count(view.state, unwanted))
        else:
            for _ in _placed(demand, view.state.hardware, view.state.taken, unwanted):
                count += len(group.views)
                if is_over():
                    return Copies(count, is_exact=False)
                yield
        if is_over():
            return Copies(count, is_exact=False)
        yield
    return Copies(count, is_exact=True)


class _CardByCard:
    """The count of the pods of a demand that fit on single cards. Equal cards of which equal parts
    are taken are counted once.

    State: the kinds of cards seen so far, and how many pods fit on a card, by its kind and what is
    taken of it.
    """

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._kinds: dict[Hardware, int] = {}  # of hardware with one card
        self._of_cards: dict[int, list[tuple[Hardware, int]]] = {}  # by id of a Node's hardware
        self._pods: dict[tuple[int, Amounts], int] = {}

    def count(self, state: State, unwanted: Collection[int]) -> Generator[None, None, int]:
        """Count them on the cards of a Node; ``unwanted`` are those that the demand excludes."""
        count = 0
        for number, (single_card, kind) in enumerate(self._single_cards(state.hardware)):
            if number in unwanted:
                continue
            taken = state.taken[number]
            if (found := self._pods.get((kind, taken))) is None:
                found = sum(1 for _ in _placed(self._demand, single_card, (taken,), {}))
                self._pods[kind, taken] = found
                yield
            count += found
        return count

    def _single_cards(self, hardware: Hardware) -> list[tuple[Hardware, int]]:
        """Return each card as the hardware of a Node with this card only, and its kind."""
        if (found := self._of_cards.get(id(hardware))) is None:
            found = self._of_cards[id(hardware)] = []
            for card in hardware.cards:
                single_card = Hardware((card,), hardware.memory_factor, hardware.is_oversold)
                kind = self._kinds.setdefault(single_card, len(self._kinds))
                found.append((single_card, kind))
        return found


def _takes_any_card(demand: Demand) -> bool:
    """Tell whether each pod takes one card, and may take any that has room. Then cards can be
    counted one by one, and equal ones once.
    """
    return (
        len(demand.containers) == 1
        and demand.most_cards == 1
        and demand.topology_mode not in _WITHOUT_STRICT
    )


def _placed(
    demand: Demand,
    hardware: Hardware,
    taken: Sequence[Amounts],
    unwanted: Mapping[int, Reason],
) -> Iterator[Placement]:
    """Place pods of a demand one after the other until no more fits."""
    while isinstance(placed := allocate(demand, hardware, taken, unwanted), Placement):
        yield placed
        # `footprint`: number of a card → the amounts that the pod takes of it
        taken = tuple(
            add(amounts, placed.footprint.get(number, NOTHING))
            for number, amounts in enumerate(taken)
        )


def emptied(views: Sequence[NodeView]) -> list[NodeView]:
    """Return the Nodes as they would be without any pod."""
    # by id of the hardware: equal Nodes share one state, by which `_alike` groups them
    states: dict[int, State] = {}
    found = []
    for view in views:
        if view.state is None:
            found.append(view)
            continue
        hardware = view.state.hardware
        if (state := states.get(id(hardware))) is None:
            state = states[id(hardware)] = State(hardware, (NOTHING,) * len(hardware.cards))
        found.append(
            NodeView(name=view.name, unfit=None, state=state, uuids=view.uuids, holdings={})
        )
    return found


def changes(
    demand: Demand, views: Sequence[NodeView], is_over: Callable[[], bool] = NEVER_OVER
) -> Generator[None, None, Changes]:
    """Find the single changes with which a pod that fits nowhere would fit now. Each is tried by
    placing the changed pod.
    """
    alike = _alike(demand, views)
    found = []
    for field in ("memory_units", "cores_percent", "card_count"):
        if largest := (yield from _largest(demand, field, alike, is_over)):
            changed = _capped(demand, field, largest)
            nodes = yield from _nodes_that_fit(changed, alike, is_over)
            found.append(Change(field, largest, nodes))
    for field, value, changed in _relaxed(demand):
        if nodes := (yield from _nodes_that_fit(changed, alike, is_over)):
            found.append(Change(field, value, nodes))
        if is_over():
            break
    is_complete = not is_over()
    return Changes(tuple(found) if is_complete else (), is_complete=is_complete)


def _alike(demand: Demand, views: Sequence[NodeView]) -> list[list[NodeView]]:
    """Group Nodes that must have the same result."""
    alike: dict[object, list[NodeView]] = {}
    for view in views:
        key: object = view.unfit  # why the Node can take no pod at all
        if view.state is not None:
            # Nodes with equal cards that are equally in use share one state. But a demand that
            # names cards by UUID may have another result on each Node.
            key = view.name if demand.names_cards else id(view.state)
        alike.setdefault(key, []).append(view)
    return list(alike.values())


def _group(demand: Demand, views: Sequence[NodeView]) -> Group:
    view = views[0]
    found = view.place(demand)
    if isinstance(found, Placement):
        return Group(tuple(views), refusal=None)
    cards: Mapping[Reason, int] = {}
    if (state := view.state) is not None:
        cards = card_reasons(demand, state.hardware, state.taken, view.unwanted(demand))
    # No card is at fault if each container would fit by itself: take the reasons of the refusal.
    return Group(tuple(views), found, cards or found.cards)


def _largest(
    demand: Demand,
    field: str,
    alike: Sequence[Sequence[NodeView]],
    is_over: Callable[[], bool],
) -> Generator[None, None, int]:
    """Return the largest amount below that of the demand with which the pod fits on a Node; 0 where
    it fits with no amount.
    """
    largest, asked = 0, _most_asked(demand, field, alike)
    for views in alike:
        if is_over():
            return 0
        low, high = largest, asked  # it fits with `low` on some Node, and not with `high` on any
        while high - low > 1:
            # Most Nodes have no more room than one tried before; the first try, with one more than
            # `largest`, shows it.
            middle = low + 1 if low == largest else (low + high) // 2
            if isinstance(views[0].place(_capped(demand, field, middle)), Placement):
                low = middle
            else:
                high = middle
        largest = low
        yield
    return largest


def _most_asked(demand: Demand, field: str, alike: Sequence[Sequence[NodeView]]) -> int:
    """Return the largest amount that a container asks for. A percentage of a card's memory, for
    which the amount is None, counts as more than the memory of every card.
    """
    asked = [getattr(each, field) for each in demand.containers]
    if None not in asked:
        return max(asked, default=0)
    hardware = [views[0].state.hardware for views in alike if views[0].state is not None]
    # `memory_factor`: the size of a request's unit of memory, in the unit of `memory_mib`
    return 1 + max(
        (card.memory_mib // each.memory_factor for each in hardware for card in each.cards),
        default=0,
    )


def _capped(demand: Demand, field: str, most: int) -> Demand:
    """Return the demand with no container above ``most`` of ``field``."""

    def capped(container: ContainerDemand) -> ContainerDemand:
        asked = getattr(container, field)
        if asked is not None and asked <= most:
            return container
        return msgspec.structs.replace(container, **{field: most})

    return msgspec.structs.replace(demand, containers=tuple(map(capped, demand.containers)))


def _relaxed(demand: Demand) -> list[tuple[str, str, Demand]]:
    """Return copies of the demand, each with one condition removed or relaxed: field, new value,
    changed demand.
    """
    replace = msgspec.structs.replace
    found = []
    if mode := _WITHOUT_STRICT.get(demand.topology_mode):
        found.append(("topology_mode", mode, replace(demand, topology_mode=mode)))
    if demand.memory_policy:
        found.append(("memory_policy", "", replace(demand, memory_policy="")))
    if demand.include_types or demand.exclude_types:
        found.append(("types", "", replace(demand, include_types=(), exclude_types=())))
    if demand.names_cards:
        found.append(("uuids", "", replace(demand, include_uuids=(), exclude_uuids=())))
    return found


def _nodes_that_fit(
    demand: Demand, alike: Sequence[Sequence[NodeView]], is_over: Callable[[], bool]
) -> Generator[None, None, int]:
    nodes = 0
    for views in alike:
        if isinstance(views[0].place(demand), Placement):
            nodes += len(views)
        yield
        if is_over():
            break
    return nodes
