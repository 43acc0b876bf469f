"""The book: the cards of all Nodes, and the amounts that pods hold of them, in memory.

Updated by the watches of Nodes and pods, and by the extender's promises. To place a pod needs no
other data. Nodes with equal cards of which equal amounts are taken share a `State`, so a demand is
compared with each state once and not with each Node.
"""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.placement.nodes.allocation import (
    NOTHING,
    CardShare,
    Placement,
    Refusal,
    add,
    allocate,
    footprint,
    some_footprint,
)
from vgpu_agent.placement.nodes.cards import Unfit
from vgpu_agent.placement.nodes.ranking import rank
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.selection import has_text, is_excluded, is_included, model_rule
from vgpu_agent.placement.topology import NONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.placement.nodes.allocation import Amounts
    from vgpu_agent.placement.nodes.cards import Hardware, NodeCards
    from vgpu_agent.placement.nodes.demand import Demand
    from vgpu_agent.pods import ContainerKind

# Demands whose verdicts (results of comparing a demand with a state) are kept, how many for each,
# and how many in all. Pods of many sizes come in turn, and a new demand has to be compared with
# each state.
_MAX_DEMANDS, _MAX_OF_A_DEMAND, _MAX_VERDICTS = 128, 8192, 262_144
_LEAST_OF_A_DEMAND = 1024  # so many are kept in a small cluster, too
# States with which one survey newly compares a demand, times the number of its containers. A state
# takes 0.1 ms for each container that asks for linked cards, and less for others.
_MAX_SURVEYED = 4000
# States that are kept for reuse, of all kinds of `Hardware` (the cards of a Node without UUIDs)
# together: a few times the Nodes of a large cluster.
_MAX_STATES = 16_384


class HeldCard(msgspec.Struct, frozen=True, gc=False):
    """One card of a container, by UUID, with percent of compute and memory, in MiB or in the Node's
    units as in `Card`.
    """

    uuid: str
    cores_percent: int
    memory_mib: int


class Holding(msgspec.Struct, frozen=True, gc=False):
    """The cards that a pod holds on a Node: the kinds of its containers, and the cards of each."""

    node: str
    kinds: tuple[ContainerKind, ...]
    cards: tuple[tuple[HeldCard, ...], ...]


class Choice(msgspec.Struct, frozen=True):
    """The Node of a pod.

    Attributes:
        node: its name; empty where the pod fits on none.
        holding: what the pod would hold there; None where it fits on none.
        reasons: Node → why not, of those that do not fit.
        fallback: what its cards have instead of the links or the NUMA node that its topology mode
            asks for; empty where the mode was followed, or there is no placement.
    """

    node: str
    holding: Holding | None
    reasons: Mapping[str, Reason]
    fallback: str = ""


class Survey(msgspec.Struct, frozen=True):
    """The answer of all Nodes together to a demand, by `Book.survey` (not by the module `survey`).

    Attributes:
        may_fit: a Node has room, or it would take too long to tell.
        reasons: why the other Nodes have none, in the order of `Reason`.
    """

    may_fit: bool
    reasons: tuple[Reason, ...]


class State:
    """Cards, and the amounts (slots, MiB of memory, percent of compute) that are taken of them;
    equal Nodes share one object.
    """

    __slots__ = ("hardware", "taken")

    def __init__(self, hardware: Hardware, taken: tuple[Amounts, ...]) -> None:
        self.hardware, self.taken = hardware, taken


class CardsInUse(msgspec.Struct, frozen=True):
    """The book's entries about one Node with cards, at one moment.

    Attributes:
        hardware: its cards.
        taken: by card, what pods take of it.
        uuids: of the cards, by number: the place of a card in ``hardware.cards``, from 0.
        holdings: UID of a pod → what it holds.
        footprints: UID of a pod → number of a card → what the pod takes of it at most, because not
            all of its containers run at the same time.
        rails: by number of the card, the network that it is nearest to (`NodeCards`).
        state: a number that is equal for Nodes that share a `State`; valid until the book changes.
    """

    hardware: Hardware
    taken: tuple[Amounts, ...]
    uuids: tuple[str, ...]
    holdings: Mapping[str, Holding]
    footprints: Mapping[str, Mapping[int, Amounts]]
    rails: tuple[str, ...] = ()
    state: int = 0


class NodeView(msgspec.Struct, frozen=True, gc=False):
    """A Node at one moment; later changes of the book do not change it.

    Attributes:
        name: of the Node.
        unfit: why it can take no pod; None where it has cards.
        state: its cards and what is taken of them; None where it is unfit.
        uuids: of its cards, by number.
        holdings: UID of a pod → what it holds here.
    """

    name: str
    unfit: Unfit | None
    state: State | None
    uuids: tuple[str, ...]
    holdings: Mapping[str, Holding]

    def place(self, demand: Demand) -> Placement | Refusal:
        """Return the cards that a pod would get, or why it does not fit."""
        if self.state is None:
            return Refusal(self.unfit.reason if self.unfit else Reason.NodeCacheMiss)
        return allocate(demand, self.state.hardware, self.state.taken, self.unwanted(demand))

    def unwanted(self, demand: Demand) -> Mapping[int, Reason]:
        """Return the cards that a pod does not want: number → reason."""
        return {} if self.state is None else unwanted(demand, self.state.hardware, self.uuids)


class _Verdict(msgspec.Struct, frozen=True):
    """The result of comparing a demand with a state: why it does not fit, or the rank of the
    Node, of which the larger is better.
    """

    reason: Reason | None
    rank: tuple[int, float] = (0, 0.0)
    cards: Mapping[Reason, int] = {}  # reason → the number of cards that it concerns


class _Node:
    """One Node.

    State: why no pod fits on it at all, with a note for explanations, the UUIDs of its cards, its
    pods' holdings and footprints by UID, and, where it has cards, the amounts taken of these.
    """

    __slots__ = ("footprints", "holdings", "note", "rails", "state", "states", "unfit", "uuids")

    def __init__(self) -> None:
        # `NodeCacheMiss`: the Node is not described (yet)
        self.unfit, self.note = Reason.NodeCacheMiss, ""
        self.uuids: tuple[str, ...] = ()
        self.rails: tuple[str, ...] = ()
        self.holdings: Mapping[str, Holding] = {}  # replaced, never changed: views have it
        self.footprints: dict[str, Mapping[int, Amounts]] = {}
        self.state: State | None = None
        self.states: _States | None = None  # those of its hardware


class _StateLimit:
    """The limit on the number of kept states of all hardware together: a cluster may have many
    kinds of Nodes.

    State: the number of kept states.
    """

    __slots__ = ("_kinds", "_number")

    def __init__(self, kinds: Mapping[Hardware, _States]) -> None:
        # the states of each hardware, and the number of all states
        self._kinds, self._number = kinds, 0

    def take(self) -> None:
        """Count one more state; at the limit, first drop those of the hardware that has the
        most.
        """
        if self._number >= _MAX_STATES:
            self.free(max(self._kinds.values(), key=lambda each: len(each.by_taken)))
        self._number += 1

    def free(self, states: _States) -> None:
        """Drop the kept states of one hardware. States that Nodes have stay in use, but new Nodes
        do not share them.
        """
        self._number -= len(states.by_taken)
        states.by_taken.clear()


class _States:
    """The states of Nodes with equal hardware, by what is taken."""

    __slots__ = ("_limit", "by_taken", "hardware", "nodes")

    def __init__(self, hardware: Hardware, limit: _StateLimit) -> None:
        self.hardware, self._limit = hardware, limit
        self.nodes = 0  # the number of Nodes with this hardware
        self.by_taken: dict[tuple[Amounts, ...], State] = {}

    def state(self, taken: tuple[Amounts, ...]) -> State:
        """Return the shared state with these taken amounts."""
        if (found := self.by_taken.get(taken)) is None:
            self._limit.take()
            found = self.by_taken[taken] = State(self.hardware, taken)
        return found


class Book:
    """The book of all cards; see the module.

    State: in memory only: the Nodes, the holdings by the pods' UIDs, and verdicts.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        # name of a Node with cards → its state. For most names `choose` looks up nothing else: that
        # touches less memory.
        self._state_of: dict[str, State] = {}
        self._node_of: dict[str, str] = {}  # UID of a pod → its Node
        self._states: dict[Hardware, _States] = {}
        self._limit = _StateLimit(self._states)
        # demand → state → verdict; the demand that was used last comes last
        self._verdicts: collections.OrderedDict[Demand, dict[object, _Verdict]] = (
            collections.OrderedDict()
        )
        self._kept_verdicts = 0  # the number of all of these

    # -- Nodes and holdings ------------------------------------------------------------------------

    def put_node(self, name: str, described: NodeCards | Unfit) -> None:
        """Record the description of a Node, known or new."""
        node = self._nodes.setdefault(name, _Node())
        states = None
        if isinstance(described, Unfit):
            node.uuids, node.rails = (), ()
            node.unfit, node.note = described.reason, described.note
        else:
            hardware = described.hardware
            node.uuids, node.rails = described.uuids, described.rails
            states = self._states.setdefault(hardware, _States(hardware, self._limit))
            states.nodes += 1  # before the old ones go, which may be the same
        self._drop_states(node)
        node.states = states
        node.footprints = {
            uid: _footprint(node.uuids, holding) for uid, holding in node.holdings.items()
        }
        self._refresh(name, node)

    def remove_node(self, name: str) -> None:
        """Forget the description of a Node. Its pods' holdings stay until they end."""
        if (node := self._nodes.get(name)) is None:
            return
        if node.holdings:
            self.put_node(name, Unfit(Reason.NodeCacheMiss))
        else:
            self._drop_states(node)
            self._remove(name)

    def _remove(self, name: str) -> None:
        del self._nodes[name]
        self._state_of.pop(name, None)

    def _refresh(self, name: str, node: _Node) -> None:
        """Compute the Node's state, after its description or its holdings have changed."""
        if node.states is None:
            node.state = None
            self._state_of.pop(name, None)
        else:
            taken = _sum(node.uuids, node.footprints.values())
            self._state_of[name] = node.state = node.states.state(taken)

    def _drop_states(self, node: _Node) -> None:
        """Remove the Node from its hardware, whose states are dropped with its last Node."""
        if node.states is not None:
            node.states.nodes -= 1
            if not node.states.nodes:
                self._limit.free(node.states)
                del self._states[node.states.hardware]
            node.states = None

    def hold(self, uid: str, holding: Holding) -> None:
        """Record what a pod holds, in the place of what it held before, even on another Node."""
        node_name = self._node_of.get(uid)
        if node_name is not None and node_name != holding.node:
            self.release(uid)
        node = self._nodes.setdefault(holding.node, _Node())
        if node.holdings.get(uid) == holding:
            return
        node.holdings = {**node.holdings, uid: holding}
        node.footprints[uid] = _footprint(node.uuids, holding)
        self._node_of[uid] = holding.node
        self._refresh(holding.node, node)

    def release(self, uid: str) -> Holding | None:
        """Forget what a pod held and return it; None where it held nothing."""
        if (name := self._node_of.pop(uid, None)) is None:
            return None
        node = self._nodes[name]
        holding = node.holdings[uid]
        node.holdings = {key: each for key, each in node.holdings.items() if key != uid}
        del node.footprints[uid]
        if node.states is None and node.unfit is Reason.NodeCacheMiss and not node.holdings:
            self._remove(name)
        else:
            self._refresh(name, node)
        return holding

    def taken(self, name: str) -> tuple[Amounts, ...]:
        """Return the amounts that pods take of each card of a Node; empty where it is not
        described.
        """
        node = self._nodes.get(name)
        return () if node is None or node.state is None else node.state.taken

    def knows(self, name: str) -> bool:
        """Tell whether a Node is described."""
        node = self._nodes.get(name)
        return node is not None and (
            node.states is not None or node.unfit is not Reason.NodeCacheMiss
        )

    def holding(self, uid: str) -> Holding | None:
        """Return what a pod holds, None if that is nothing."""
        name = self._node_of.get(uid)
        return None if name is None else self._nodes[name].holdings[uid]

    def cards_in_use(self, name: str) -> CardsInUse | None:
        """Return the cards of a Node and their pods; None where it has no cards."""
        node = self._nodes.get(name)
        if node is None or (state := node.state) is None:
            return None
        return CardsInUse(
            state.hardware,
            state.taken,
            node.uuids,
            node.holdings,
            node.footprints,
            node.rails,
            id(state),
        )

    def can_keep(self, uid: str) -> bool:
        """Tell whether a pod can keep its cards: the Node has all of them, none is blocked, and
        none is overcommitted.
        """
        if (holding := self.holding(uid)) is None:
            return False
        node = self._nodes[holding.node]
        if (state := node.state) is None:
            return False
        numbers = self.numbers(holding.node)
        for uuid in {card.uuid for of_container in holding.cards for card in of_container}:
            if (number := numbers.get(uuid)) is None:
                return False
            card, (slots, memory, cores) = state.hardware.cards[number], state.taken[number]
            if (
                card.blocked is not None  # no new container may get a share of it
                or slots > card.slots
                or memory > card.memory_mib
                or cores > card.cores_percent
            ):
                return False
        return True

    def numbers(self, name: str) -> Mapping[str, int]:
        """Return UUID → number of the cards of a Node; empty where it is not described."""
        node = self._nodes.get(name)
        return {} if node is None else {uuid: number for number, uuid in enumerate(node.uuids)}

    def views(self) -> list[NodeView]:
        """Return all Nodes as they are now, in the order of their names. It takes some milliseconds
        for 5,000 Nodes with pods.
        """
        return [
            NodeView(
                name,
                Unfit(node.unfit, node.note) if node.state is None else None,
                node.state,
                node.uuids,
                node.holdings,
            )
            for name, node in sorted(self._nodes.items())
        ]

    # -- comparing demands with Nodes --------------------------------------------------------------

    def node_states(self) -> dict[str, int]:
        """Return the number of Nodes by state: ``usable``, or the code of why no pod fits there."""
        return dict(
            collections.Counter(
                "usable" if node.state is not None else node.unfit.name
                for node in self._nodes.values()
            )
        )

    def choose(self, demand: Demand, names: Iterable[str]) -> Choice:
        """Return the best of the named Nodes for a pod that holds nothing.

        Nodes are ranked by the topology mode, then by the policy over Nodes. Ties go to the first
        name in ``names`` without a policy, otherwise to the alphabetically first (vgpu-manager
        §5.4).
        """
        table = self._table(demand)
        verdict_of = self._verdict_of(demand, table)
        by_name = demand.node_policy != NONE
        nodes, state_of = self._nodes, self._state_of
        reasons: dict[str, Reason] = {}
        best, best_rank = "", (-1, 0.0)
        no_better: State | None = None  # a Node in this state fits, and is no better than the best
        for name in names:  # thousands for each pod, so this loop avoids function calls
            if (state := state_of.get(name)) is None:  # it has no cards, or is unknown
                verdict = verdict_of(nodes[name]) if name in nodes else _UNKNOWN
            elif state is no_better:
                continue
            elif (known := table.get(state)) is None:
                verdict = verdict_of(nodes[name])
            else:
                verdict = known
            if (reason := verdict.reason) is not None:
                reasons[name] = reason
                continue
            if (rank_ := verdict.rank) > best_rank or (
                by_name and rank_ == best_rank and name < best
            ):
                best, best_rank = name, rank_
            # (for a demand that names cards by UUID, Nodes in one state may differ)
            if not by_name and not demand.names_cards:
                no_better = state
        if best:
            node = self._nodes[best]
            placed = _place(demand, node.state, node.uuids) if node.state else None
            if isinstance(placed, Placement):
                holding = holding_of(best, node.uuids, demand, placed)
                return Choice(best, holding, reasons, placed.fallback)
        return Choice(node="", holding=None, reasons=reasons)

    def refusals(
        self, demand: Demand, names: Iterable[str], *, without: str = ""
    ) -> Mapping[str, Refusal | None]:
        """Return why a pod does not fit on each of the named Nodes, None where it fits.

        The cards that the pod with the UID ``without`` holds count as free.
        """
        verdict_of = self._verdict_of(demand)
        own = self._node_of.get(without, "")
        found: dict[str, Refusal | None] = {}
        for name in names:
            node = self._nodes.get(name)
            verdict = (
                _UNKNOWN
                if node is None
                else verdict_of(node)
                if name != own
                else _verdict(demand, node, _without(node, without))
            )
            reason = verdict.reason
            found[name] = None if reason is None else Refusal(reason, verdict.cards)
        return found

    def survey(self, demand: Demand, call_reasons: Iterable[Reason]) -> Survey:
        """Compare a demand with all Nodes with cards, not only with those that a scheduler has
        named; if no Node has cards, return why. A demand that names cards by UUID would have to be
        compared with each Node. So for such a demand the result has only ``call_reasons``, why the
        Nodes of the scheduler's call refused the pod, and says that others may fit.

        Where there is more to compare than one call may take, it says so, too, and has the reasons
        that are known by then. The next survey of the demand goes on from there.
        """
        if demand.names_cards:
            found = set(call_reasons)
            return Survey(may_fit=True, reasons=tuple(each for each in Reason if each in found))
        verdict_of = self._verdict_of(demand)
        by_state = {node.state: node for node in self._nodes.values()}
        without_cards = by_state.pop(None, None)
        known, left = self._table(demand), max(1, _MAX_SURVEYED // len(demand.containers))
        reasons: set[Reason | None] = set()
        for node in by_state.values():
            if node.state not in known:
                left -= 1
                if left < 0:
                    reasons.add(None)
                    break
            reasons.add(verdict_of(node).reason)
        if not by_state and without_cards is not None:
            reasons = {node.unfit for node in self._nodes.values()}
        return Survey(
            may_fit=None in reasons, reasons=tuple(each for each in Reason if each in reasons)
        )

    def names(self) -> list[str]:
        """Return the names of all Nodes."""
        return list(self._nodes)

    def __len__(self) -> int:
        """The number of Nodes."""
        return len(self._nodes)

    def ranks(
        self, demand: Demand, names: Iterable[str]
    ) -> tuple[Mapping[str, tuple[int, float]], Mapping[str, Reason]]:
        """Return how good each of the named Nodes is on which a pod fits (`ranking.rank`), and why
        not, of the others.
        """
        verdict_of = self._verdict_of(demand)
        fitting: dict[str, tuple[int, float]] = {}
        reasons: dict[str, Reason] = {}
        for name in names:
            node = self._nodes.get(name)
            verdict = _UNKNOWN if node is None else verdict_of(node)
            if verdict.reason is None:
                fitting[name] = verdict.rank
            else:
                reasons[name] = verdict.reason
        return fitting, reasons

    def node_of(self, uid: str) -> str:
        """Return the Node on which a pod holds something; empty where it holds nothing."""
        return self._node_of.get(uid, "")

    def _verdict_of(
        self, demand: Demand, table: dict[object, _Verdict] | None = None
    ) -> Callable[[_Node], _Verdict]:
        """Return a function that compares the demand with a Node and keeps the verdict in
        ``table``.
        """
        table = self._table(demand) if table is None else table

        def known(node: _Node) -> _Verdict:
            if (state := node.state) is None:
                return _verdict(demand, node)
            key: object = state
            if demand.names_cards:  # Nodes with the same unwanted cards are alike
                key = state, tuple(unwanted(demand, state.hardware, node.uuids).items())
            if (found := table.get(key)) is None:
                found = table[key] = _verdict(demand, node)
                self._kept_verdicts += not demand.names_cards
            return found

        return known

    def _table(self, demand: Demand) -> dict[object, _Verdict]:
        """Return the known verdicts of a demand; none are kept for a demand that names cards."""
        if demand.names_cards:
            return {}
        table = self._verdicts.setdefault(demand, {})
        self._verdicts.move_to_end(demand)
        # Most of so many are of states that no Node has any more.
        if len(table) > min(_MAX_OF_A_DEMAND, max(_LEAST_OF_A_DEMAND, 2 * len(self._nodes))):
            self._kept_verdicts -= len(table)
            table.clear()
        # the last one is that of this demand, to which the caller adds
        while len(self._verdicts) > 1 and (
            len(self._verdicts) > _MAX_DEMANDS or self._kept_verdicts > _MAX_VERDICTS
        ):
            self._kept_verdicts -= len(self._verdicts.popitem(last=False)[1])
        return table


_UNKNOWN = _Verdict(Reason.NodeCacheMiss)


def refusal_on(demand: Demand, described: NodeCards | Unfit) -> Refusal | None:
    """Return why a pod does not fit on a Node without pods, None where it fits."""
    book = Book()
    book.put_node("", described)
    return book.refusals(demand, [""])[""]


def _verdict(demand: Demand, node: _Node, state: State | None = None) -> _Verdict:
    """Compare the demand with the Node, or with another state of it."""
    state = state or node.state
    if state is None:
        return _Verdict(node.unfit)
    skipped = unwanted(demand, state.hardware, node.uuids)
    found = some_footprint(demand, state.hardware, state.taken, skipped)
    if isinstance(found, Refusal):
        return _Verdict(found.reason, cards=found.cards)
    return _Verdict(reason=None, rank=rank(demand, state.hardware, state.taken, found))


def _place(demand: Demand, state: State, uuids: Sequence[str]) -> Placement | Refusal:
    return allocate(demand, state.hardware, state.taken, unwanted(demand, state.hardware, uuids))


def _without(node: _Node, uid: str) -> State | None:
    """Return the state that the Node would have without a pod; None where it has no cards."""
    others = (footprint for key, footprint in node.footprints.items() if key != uid)
    return node.states.state(_sum(node.uuids, others)) if node.states else None


def holding_of(name: str, uuids: Sequence[str], demand: Demand, placed: Placement) -> Holding:
    """Return what a pod holds by a placement on the Node ``name``: its cards by UUID, no longer by
    number.
    """
    return Holding(
        name,
        tuple(each.kind for each in demand.containers),
        tuple(
            tuple(
                HeldCard(uuids[share.card], share.cores_percent, share.memory_mib)
                for share in shares
            )
            for shares in placed.shares
        ),
    )


def unwanted(demand: Demand, hardware: Hardware, uuids: Sequence[str]) -> dict[int, Reason]:
    """Return why the pod does not want some cards: card → reason."""
    found: dict[int, Reason] = {}
    if not (demand.include_types or demand.exclude_types or demand.names_cards):
        return found
    types = demand.include_types, demand.exclude_types
    # Most of many entries are on no card of the Node, which one search in all UUIDs shows.
    together = "\n".join(uuids).lower()
    included = [entry for entry in demand.include_uuids if entry in together]
    excluded = [entry for entry in demand.exclude_uuids if entry in together]
    for number, (card, uuid) in enumerate(zip(hardware.cards, uuids, strict=True)):
        if not _is_model_wanted(card.model, *types, substrings=demand.types_match_substrings):
            found[number] = Reason.DeviceTypeMismatch
        elif (
            (demand.include_uuids and not included)
            or not is_included(uuid, included, has_text)
            or is_excluded(uuid, excluded, has_text)
        ):
            found[number] = Reason.DeviceUUIDMismatch
    return found


@functools.lru_cache(maxsize=1024)  # a pod may name many, and a cluster has few models
def _is_model_wanted(
    model: str, included: tuple[str, ...], excluded: tuple[str, ...], *, substrings: bool
) -> bool:
    # with ``substrings``, ``A10`` also matches ``A100``
    rule = model_rule(substrings=substrings)
    return is_included(model, included, rule) and not is_excluded(model, excluded, rule)


def _footprint(uuids: Sequence[str], holding: Holding) -> Mapping[int, Amounts]:
    """Return the amounts that a pod takes of each card, without cards that the Node no longer
    has.
    """
    numbers = {uuid: number for number, uuid in enumerate(uuids)}
    shares = [
        [
            CardShare(numbers[each.uuid], each.cores_percent, each.memory_mib)
            for each in of_container
            if each.uuid in numbers
        ]
        for of_container in holding.cards
    ]
    return footprint(holding.kinds, shares)


def _sum(uuids: Sequence[str], footprints: Iterable[Mapping[int, Amounts]]) -> tuple[Amounts, ...]:
    """Add up what pods take of each card."""
    taken = [NOTHING] * len(uuids)
    for each in footprints:
        for card, amounts in each.items():
            taken[card] = add(taken[card], amounts)
    return tuple(taken)
