"""Place pods of one group near each other: on cards with NVLinks between them, or, on other Nodes,
on cards of the same network rails (vgpu-manager §5.7).

The *peers* of a pod are the other pods of its gang, or of its controller. A *component* is the set
of cards of a Node that are joined by NVLinks. A *rail* is the network that a card is nearest to, as
the operator has named it. The *domain* of a component is the set of its rails or, without rails,
its position among the components of its Node. The *anchor* of a pod is where its peers are: the
rails of their cards, their components, and the domains of these.

The anchor determines sets of cards on each Node, and the pod goes to the first set with room: cards
on the peers' rails, then the component of a peer on this Node, or else a component of the same
domain as the peers' components on other Nodes. With the topology mode ``link-strict``, it does not
go to a Node where no such set has room. Otherwise it may get any cards there.

A Node with such a set is better than one without, and among those with one, a Node with peers is
better. For the first pod of a group, and among equally good Nodes, what counts is the number of
waiting peers that would find room on the same cards. vgpu-manager does not look ahead (vgpu-manager
§12.3). Nothing is reserved for peers: two half-placed gangs would block each other.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from vgpu_agent.placement.linked import components
from vgpu_agent.placement.nodes.allocation import Placement, allocate, why_not
from vgpu_agent.placement.nodes.book import Choice, Survey, holding_of, unwanted
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.topology import LINK_STRICT, NONE, NVLINK

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

    from vgpu_agent.placement.nodes.allocation import Amounts
    from vgpu_agent.placement.nodes.book import Book, CardsInUse, Holding
    from vgpu_agent.placement.nodes.cards import Card, Hardware
    from vgpu_agent.placement.nodes.demand import ContainerDemand, Demand

T = TypeVar("T")

Component = tuple[int, ...]
"""The numbers of the cards that are joined by NVLinks, at least two; also the type of other sets of
cards.
"""
Domain = frozenset[str] | int
"""The rails of a component; where no rails are known, its position among those of its Node."""

# How near a pod is to its peers, the best last: on any cards; on another Node, on cards of the
# peers' rails or domain; on a Node with peers, on such cards or in a peer's component.
ANYWHERE, ELSEWHERE, TOGETHER = range(3)


# The largest number of different Nodes on which `survey_aligned` tries to place the pod: each takes
# a tenth of a millisecond, and other filter calls wait.
_MAX_SEARCHED = 128


class Anchor(msgspec.Struct, frozen=True):
    """The places of a pod's peers.

    Attributes:
        rails: the rails of most peers; empty where none are known.
        domain: the domain of most peers; None where no peer is in a component.
        by_component: Node → component → the number of peers in it.
        peers: Node → the number of peers on it.
    """

    rails: frozenset[str] = frozenset()
    domain: Domain | None = None
    by_component: Mapping[str, Mapping[Component, int]] = {}
    peers: Mapping[str, int] = {}


class _Key(NamedTuple):
    """The quality of a Node; the larger the better.

    Attributes:
        nearness: see `_Quality`, also for the next two.
        peers: the number of the pod's peers on the Node.
        rank: how well the Node's cards and their free amounts suit the pod (`ranking.rank`).
    """

    nearness: int
    is_linked: bool
    room: int
    peers: int
    rank: tuple[int, float]


class _Quality(NamedTuple):
    """The quality of a Node's cards; the larger the better.

    Attributes:
        nearness: to the pod's peers.
        is_linked: they are joined by NVLinks or on the peers' rails.
        room: the number of equal pods that the cards have room for, at most the pod and its waiting
            peers; 0 where no peer waits.
    """

    nearness: int
    is_linked: bool
    room: int

    def key(self, peers: int, rank: tuple[int, float]) -> _Key:
        """Return the quality of the Node, which has this number of peers and this rank."""
        return _Key(*self, peers, rank)


class _CardSet(NamedTuple):
    """A set of cards of a Node on which the pod may be placed."""

    cards: Component
    quality: _Quality


def anchor_of(book: Book, peers: Iterable[str]) -> Anchor:
    """Return the anchor that the pods with these UIDs give; pods without cards do not count."""
    rails: collections.Counter[frozenset[str]] = collections.Counter()
    domains: collections.Counter[Domain] = collections.Counter()
    by_component: dict[str, collections.Counter[Component]] = {}
    on_node: collections.Counter[str] = collections.Counter()
    for uid in peers:
        name = book.node_of(uid)
        view = book.cards_in_use(name) if name else None
        cards = view.footprints[uid].keys() if view else ()  # those that the pod has shares of
        if view is None or not cards:
            continue
        on_node[name] += 1
        if view.rails:  # by card; empty where the operator has named none
            rails[frozenset(view.rails[card] for card in cards) - {""}] += 1
        for place, component in enumerate(components_of(view.hardware)):
            if cards & set(component):
                by_component.setdefault(name, collections.Counter())[component] += 1
                domains[_domain(view, place, component)] += 1
    del rails[frozenset()]
    del domains[frozenset()]
    return Anchor(_most(rails, _text) or frozenset(), _most(domains, _text), by_component, on_node)


def card_sets_near(
    anchor: Anchor, name: str, view: CardsInUse, known: Components | None = None
) -> list[tuple[int, Component]]:
    """Return the sets of cards of a Node that are near the peers, each with its nearness, in the
    order in which they are tried.

    Args:
        anchor: the places of the peers.
        name: the Node's name.
        view: the Node's cards, with what pods have of them.
        known: keeps the components of Nodes from call to call.
    """
    if not anchor.peers:
        return []
    found = []
    is_here = name in anchor.peers
    if anchor.rails and view.rails:
        on_rails = tuple(card for card, rail in enumerate(view.rails) if rail in anchor.rails)
        if on_rails:
            found.append((TOGETHER if is_here else ELSEWHERE, on_rails))
    if counts := anchor.by_component.get(name):
        found += [
            (TOGETHER, component)
            for component in sorted(counts, key=lambda each: (-counts[each], each))
        ]
    else:
        found += [
            (ELSEWHERE, component)
            for place, component in enumerate((known or Components()).of(view.hardware))
            if _domain(view, place, component) == anchor.domain
        ]
    return found


def choose_aligned(
    book: Book, demand: Demand, names: Sequence[str], peers: Collection[str], waiting: int
) -> tuple[Choice, int]:
    """Return the best of the named Nodes for a pod that holds nothing, and how near it is to its
    peers there.

    Args:
        book: the cards of all Nodes.
        demand: of the pod.
        names: of the Nodes.
        peers: UIDs of the other pods of its group.
        waiting: how many of them have no cards yet.
    """
    anchor = anchor_of(book, peers)
    ranks, refused = book.ranks(demand, names)
    reasons = dict(refused)
    search = _Search(demand, anchor, waiting)
    # its quality and name, the pod's cards there, and what these have instead of the links or the
    # NUMA node that the topology mode asks for
    best: tuple[_Key, str, Holding, str] | None = None
    with_peers = [name for name in ranks if name in anchor.peers]
    elsewhere = [name for name in ranks if name not in anchor.peers]
    for group in (with_peers, elsewhere):
        if best is not None and best[0].nearness == TOGETHER:
            break  # no other Node is better
        views = {name: view for name in group if (view := book.cards_in_use(name)) is not None}
        cases = {
            name: search.best_case(name, view).key(anchor.peers.get(name, 0), ranks[name])
            for name, view in views.items()
        }
        # Those first that can be the best. Of equal ones the first name counts where the pod has a
        # policy for Nodes (binpack or spread), otherwise the first in ``names``; sorting keeps that
        # order.
        order = sorted(views) if demand.node_policy != NONE else list(views)
        order.sort(key=cases.__getitem__, reverse=True)
        for name in order:
            if best is not None and best[0] >= cases[name]:
                break
            if (found := search.place(name, views[name])) is None:
                reasons[name] = Reason.LinkTopologyUnsatisfied
                continue
            quality, placed = found
            key = quality.key(anchor.peers.get(name, 0), ranks[name])
            if best is None or key > best[0]:
                holding = holding_of(name, views[name].uuids, demand, placed)
                best = key, name, holding, placed.fallback
    if best is None:
        return Choice(node="", holding=None, reasons=reasons), ANYWHERE
    key, name, holding, fallback = best
    return Choice(name, holding, reasons, fallback), key.nearness


def too_far(book: Book, demand: Demand, names: Iterable[str], peers: Collection[str]) -> set[str]:
    """Return those of the named Nodes that a pod must not go to, because it would be too far from
    its peers there. Each of them has room for the pod according to `Book`. Arguments as in
    `choose_aligned`.
    """
    if (search := _strict_search(book, demand, peers)) is None:
        return set()
    views = ((name, book.cards_in_use(name)) for name in names)
    return {name for name, view in views if view and search.place(name, view) is None}


def survey_aligned(
    book: Book, demand: Demand, peers: Collection[str], call_reasons: Iterable[Reason] = ()
) -> Survey:
    """Compare a demand with all Nodes as `Book.survey` does: tell whether a Node may take the pod,
    and why the others cannot. Also check the nearness to peers. For a demand that names cards by
    UUID nothing is compared: the result has only ``call_reasons``, why the Nodes of
    kube-scheduler's call refused the pod, and says that others may fit.
    """
    found = book.survey(demand, call_reasons)
    # A demand that names cards by UUID would have to be compared with each Node, which takes long.
    if not found.may_fit or demand.names_cards:
        return found
    if (search := _strict_search(book, demand, peers)) is None:
        return found
    fitting, _ = book.ranks(demand, book.names())
    is_near = is_far = False
    for name in fitting:
        if is_near and is_far:
            break
        if search.states == _MAX_SEARCHED:
            is_near = is_far = True  # it would take too long to tell
        elif (view := book.cards_in_use(name)) is not None:
            placed = search.place(name, view)
            is_near, is_far = is_near or placed is not None, is_far or placed is None
    if not is_far:
        return found
    reasons = {*found.reasons, Reason.LinkTopologyUnsatisfied}
    return Survey(is_near, tuple(each for each in Reason if each in reasons))


def _strict_search(book: Book, demand: Demand, peers: Collection[str]) -> _Search | None:
    """Return the search for a pod that must be near its peers; None where it need not be."""
    if demand.topology_mode != LINK_STRICT or not peers:
        return None
    anchor = anchor_of(book, peers)
    return _Search(demand, anchor, waiting=0) if anchor.peers else None


def components_of(hardware: Hardware) -> tuple[Component, ...]:
    """Return the components of a Node, also of cards in use."""
    if not hardware.links:
        return ()
    # pair of cards → the best type of link between them; from `NVLINK` on, a type is an NVLink
    types = {(str(one), str(other)): max(each, default=0) for one, other, each in hardware.links}
    groups = components(
        [str(number) for number in range(len(hardware.cards))],
        lambda one, other: types.get((one, other), 0) >= NVLINK,
    )
    return tuple(tuple(map(int, group)) for group in groups if len(group) > 1)


class Components:
    """The components of Nodes, computed once for each kind of hardware.

    State: the components by the id of the `Hardware` object, with that object, so that the id is
    not used again.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Hardware, tuple[Component, ...]]] = {}

    def of(self, hardware: Hardware) -> tuple[Component, ...]:
        """Return those of a Node; see `components_of`."""
        if (found := self._known.get(id(hardware))) is None:
            found = self._known[id(hardware)] = hardware, components_of(hardware)
        return found[1]


def _domain(view: CardsInUse, place: int, component: Component) -> Domain:
    if not view.rails:
        return place
    return frozenset(view.rails[card] for card in component) - {""}


class _Search:
    """The placement of one pod on Nodes. Nodes in the same state are compared once.

    State: the results, by the key of a Node (`_key`).
    """

    def __init__(self, demand: Demand, anchor: Anchor, waiting: int) -> None:
        self._demand, self._anchor, self._waiting = demand, anchor, waiting
        self._components = Components()
        self._card_sets: dict[Hashable, list[_CardSet]] = {}
        self._places: dict[Hashable, tuple[_Quality, Placement] | None] = {}

    @property
    def states(self) -> int:
        """The number of different Nodes that were searched."""
        return len(self._places)

    def best_case(self, name: str, view: CardsInUse) -> _Quality:
        """Return the quality of the best set of cards of a Node, whether it has room or not."""
        return max(card_set.quality for card_set in self._tried(name, view))

    def place(self, name: str, view: CardsInUse) -> tuple[_Quality, Placement] | None:
        """Return the cards on a Node and their quality; None where the pod must not go there."""
        key = self._key(name, view)
        if key not in self._places:
            self._places[key] = self._place(name, view)
        return self._places[key]

    def _place(self, name: str, view: CardsInUse) -> tuple[_Quality, Placement] | None:
        demand = self._demand
        bad = unwanted(demand, view.hardware, view.uuids)  # card → why the pod does not want it
        every = set(range(len(view.hardware.cards)))
        for card_set in self._tried(name, view):
            others = every.difference(card_set.cards)
            outside = dict.fromkeys(others, Reason.LinkTopologyUnsatisfied)
            placed = allocate(demand, view.hardware, view.taken, outside | bad)
            if isinstance(placed, Placement):
                return card_set.quality, placed
        return None

    def _key(self, name: str, view: CardsInUse) -> Hashable:
        own = name if name in self._anchor.peers or self._demand.names_cards else ""
        # `state`: equal for Nodes with equal cards of which equal amounts are taken
        return view.state, view.rails, own

    def _tried(self, name: str, view: CardsInUse) -> list[_CardSet]:
        """Return the cards to try, in order."""
        key = self._key(name, view)
        if (found := self._card_sets.get(key)) is None:
            found = self._card_sets[key] = self._find_card_sets(name, view)
        return found

    def _find_card_sets(self, name: str, view: CardsInUse) -> list[_CardSet]:
        found = [
            _CardSet(cards, _Quality(nearness, is_linked=True, room=self._room(view, cards)))
            for nearness, cards in card_sets_near(self._anchor, name, view, self._components)
        ]
        if found and self._demand.topology_mode == LINK_STRICT:
            return found
        if not self._anchor.peers and self._waiting:
            found = self._for_the_first(view)
        every = tuple(range(len(view.hardware.cards)))
        return [
            *found,
            _CardSet(every, _Quality(ANYWHERE, is_linked=False, room=self._room(view, every))),
        ]

    def _for_the_first(self, view: CardsInUse) -> list[_CardSet]:
        """Return the components for the first pod of a group: the smallest with room for all of it,
        otherwise the one with the most.
        """
        rooms = {
            component: room_for(self._demand, view.hardware, view.taken, component)
            for component in self._components.of(view.hardware)
        }
        order = sorted(
            rooms,
            key=lambda each: (
                rooms[each] <= self._waiting,
                rooms[each] if rooms[each] > self._waiting else -rooms[each],
                each,
            ),
        )
        return [
            _CardSet(
                cards, _Quality(ANYWHERE, is_linked=True, room=min(rooms[cards], self._waiting + 1))
            )
            for cards in order
        ]

    def _room(self, view: CardsInUse, cards: Component) -> int:
        if not self._waiting:
            return 0
        room = room_for(self._demand, view.hardware, view.taken, cards)
        return min(room, self._waiting + 1)


def room_for(demand: Demand, hardware: Hardware, taken: Sequence[Amounts], cards: Component) -> int:
    """Return the number of pods with this demand that the cards have room for: exact if a pod has
    one container, otherwise perhaps too high.
    """
    return min(
        (
            _fitting(
                each.card_count,
                [_copies(each, hardware, hardware.cards[card], taken[card]) for card in cards],
            )
            for each in demand.containers
        ),
        default=0,
    )


def _copies(container: ContainerDemand, hardware: Hardware, card: Card, taken: Amounts) -> int:
    """Return how many such containers fit on one card."""
    if why_not(container, hardware, card, taken) is not None:
        return 0
    if container.alone:  # no other container may be on the card
        return 1
    slots, memory, cores = taken
    copies = [card.slots - slots]
    # `memory_factor`: the size of one unit of a pod's request (`Hardware`)
    if wanted := container.memory_mib(card.memory_mib, hardware.memory_factor):
        copies.append((card.memory_mib - memory) // wanted)
    if container.cores_percent:
        copies.append((card.cores_percent - cores) // container.cores_percent)
    return min(copies)


def _fitting(number: int, copies: Sequence[int]) -> int:
    """Return how many containers with ``number`` different cards each there is room for."""
    low, high = 0, sum(copies) // number
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(each, middle) for each in copies) >= number * middle:
            low = middle
        else:
            high = middle - 1
    return low


def _most(counts: Mapping[T, int], text: Callable[[T], str]) -> T | None:
    """Return the most frequent one; of several the one whose text comes first."""
    return min(counts, key=lambda each: (-counts[each], text(each)), default=None)


def _text(domain: Domain) -> str:
    return str(domain) if isinstance(domain, int) else ",".join(sorted(domain))
