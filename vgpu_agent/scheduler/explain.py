"""The explanation of one pod, compared with all Nodes, in sentences and one table: why it does not
start, or where it is.

Pure functions: everything that is known is an argument, `Facts`. `explain` is a generator that
yields after each small piece of work, because the extender answers kube-scheduler on the same
thread.
"""

from __future__ import annotations

import collections
import datetime as dt
import enum
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import AgentError, RequestRefusedError, quoted, shortened
from vgpu_agent.placement.nodes import survey
from vgpu_agent.placement.topology import LINK_STRICT, NONE
from vgpu_agent.pods import ContainerKind
from vgpu_agent.scheduler import shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from vgpu_agent.families.scheduling import KeyNames, SchedulingFamily
    from vgpu_agent.placement.nodes.book import Holding, NodeView
    from vgpu_agent.placement.nodes.demand import ContainerDemand, Demand, PodDemand
    from vgpu_agent.placement.nodes.reasons import Reason
    from vgpu_agent.placement.nodes.survey import Group
    from vgpu_agent.pods import Pod
    from vgpu_agent.scheduler.extender import Kept
    from vgpu_agent.scheduler.records import FilterCalls
    from vgpu_agent.scheduler.shortage import CardRoom

FITS = "Fits"  # in place of the code of a reason, for Nodes on which the pod fits
MAX_ROWS = 30  # of the table, unless each Node has one
MAX_NAMES = 5  # of Nodes in a row
_LONGEST_MESSAGE = 600  # characters of kube-scheduler's own report


class Situation(enum.StrEnum):
    """The state of a pod, as far as its cards are concerned."""

    UNKNOWN = "unknown"  # there is no such pod
    ENDED = "ended"
    NO_REQUEST = "no-request"  # it asks for no cards of this extender
    BAD_REQUEST = "bad-request"  # no Node can ever serve what it asks for
    BOUND = "bound"
    KEPT = "kept"  # cards are kept for it, and it is not bound yet
    FITS = "fits"  # it would fit now
    NO_ROOM = "no-room"  # it fits once other pods have ended
    NEVER_FITS = "never-fits"  # it would not fit even if all other pods ended


class Waiting(msgspec.Struct, frozen=True):
    """The facts in the pod object about why it waits.

    Attributes:
        gates: names of its scheduling gates.
        reason: of its condition PodScheduled while that is False; empty if there is none.
        message: of that condition.
    """

    gates: tuple[str, ...] = ()
    reason: str = ""
    message: str = ""


class Facts(msgspec.Struct, frozen=True):
    """Everything that is known at one moment.

    Attributes:
        pod: as the API server has it.
        waiting: more from the same object.
        family: reads the pod.
        views: all Nodes, with their cards and what pods have of them.
        holding: the cards that the pod holds, or that are kept for it; None if there are none.
        kept: the cards that are kept for the pod until it is bound, its *promise*; None if there
            are none.
        filter_calls: kube-scheduler's filter calls about it; None if there was none.
        started_at: unix seconds since which filter calls are remembered.
        schedulers: ``schedulerName`` of all pods in filter calls: the schedulers that use this
            extender.
        name_of: returns the name of a pod with this UID.
        now: unix seconds.
        doubts: reasons why these facts may be out of date or incomplete, in sentences; mostly
            empty.
    """

    pod: Pod
    waiting: Waiting
    family: SchedulingFamily
    views: Sequence[NodeView]
    holding: Holding | None
    kept: Kept | None
    filter_calls: FilterCalls | None
    started_at: float
    schedulers: tuple[str, ...]
    name_of: Callable[[str], str]
    now: float
    doubts: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True, gc=False):
    """Nodes with the same answer to the pod.

    Attributes:
        code: of the reason, or ``Fits``.
        reason: in words.
        cards: code of a reason → the number of cards of these Nodes that it concerns.
        note: what exactly is wrong with the Nodes; mostly empty.
        nodes: the number of Nodes.
        names: of the Nodes, the first few.
        largest_free_mib: the most memory that is free on one card that the pod may use.
        largest_free_cores_percent: the same for compute, maybe on another card.
        untouched_cards: the most cards of one Node that the pod may use and of which no pod has a
            share.
    """

    code: str
    reason: str
    cards: dict[str, int]
    note: str
    nodes: int
    names: tuple[str, ...]
    largest_free_mib: int = 0
    largest_free_cores_percent: int = 0
    untouched_cards: int = 0


class Explanation(msgspec.Struct, frozen=True):
    """The answer of ``/explain``.

    Attributes:
        pod: ``namespace/name``.
        situation: see `Situation`.
        answer: sentences, the most important first.
        request: what each container asks for.
        missing: sentences, one for each reason for which Nodes cannot take the pod.
        changes: sentences about changes of the pod with which it would fit now.
        fitting_pods: how many equal pods fit now, one after the other. A pod that holds cards, or
            has cards kept for it, is not counted. Null if it was not computed.
        fitting_pods_is_exact: false if counting took too long; then at least that many fit.
        nodes: the number of Nodes.
        fitting_nodes: the number of Nodes on which one more such pod fits.
        table: all Nodes by their answer.
        left_out: the number of rows that the table does not show.
    """

    pod: str
    situation: str
    answer: tuple[str, ...] = ()
    request: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    fitting_pods: int | None = None
    fitting_pods_is_exact: bool = True
    nodes: int = 0
    fitting_nodes: int = 0
    table: tuple[Row, ...] = ()
    left_out: int = 0


def unknown(name: str) -> Explanation:
    """Explain a pod that the API server does not have."""
    namespace, _, _ = name.partition("/")
    text = (
        f"There is no pod {name}. It was deleted, or its name or namespace is different: "
        f"kubectl get pods -n {namespace}"
    )
    return Explanation(name, Situation.UNKNOWN.value, (text,))


def explain(
    facts: Facts, *, every_node: bool = False, is_over: Callable[[], bool] = survey.NEVER_OVER
) -> Generator[None, None, Explanation]:
    """Explain a pod that the API server has.

    Args:
        facts: what is known.
        every_node: the table has a row for each Node, not one for each group of equal Nodes.
        is_over: tells when the time is up, so that two long searches stop: how many such pods
            fit, and which changes of the pod would help. The reasons are always complete.
    """
    pod = facts.pod
    if pod.ended:
        text = f"Pod {pod.full_name} has ended ({pod.phase}). It holds no cards any more."
        return Explanation(pod.full_name, Situation.ENDED.value, (text,))
    try:
        wanted = facts.family.read_demand(pod)
    except RequestRefusedError as err:
        return _without_demand(
            facts,
            Situation.BAD_REQUEST,
            (
                f"The request of the pod cannot be met on any Node: {err}.",
                "Correct the pod; the extender refuses it on every Node until then.",
            ),
        )
    if wanted is None:
        return _without_demand(facts, Situation.NO_REQUEST, tuple(_no_request(facts)))
    return (yield from _about(facts, wanted, every_node=every_node, is_over=is_over))


def _about(
    facts: Facts, wanted: PodDemand, *, every_node: bool, is_over: Callable[[], bool]
) -> Generator[None, None, Explanation]:
    demand, keys = wanted.demand, facts.family.key_names  # names of resources and annotations
    # Nodes with equal cards, equally in use: all fit, or are refused for the same reason
    groups = yield from survey.grouped(demand, facts.views)
    fitting = sum(len(group.views) for group in groups if group.fits)
    # how many such pods fit, one after the other
    copies = yield from survey.copies(groups, demand, is_over)
    is_placed = facts.pod.node or facts.kept is not None
    if_empty = fitting  # the number of Nodes on which it would fit without other pods
    missing: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    if not is_placed:
        missing = yield from shortage.sentences(demand, groups, keys, facts.name_of)
    if not is_placed and not fitting:
        empty = yield from survey.grouped(demand, survey.emptied(facts.views))
        if_empty = sum(len(group.views) for group in empty if group.fits)
        tried = yield from survey.changes(demand, facts.views, is_over)
        changes = shortage.possible_changes(tried, demand, keys)
    if facts.pod.node:
        situation = Situation.BOUND
    elif facts.kept is not None:
        situation = Situation.KEPT
    elif fitting:
        situation = Situation.FITS
    else:
        situation = Situation.NO_ROOM if if_empty else Situation.NEVER_FITS
    answer = (
        *facts.doubts,
        *_where(facts, wanted),
        *_room(facts, situation, fitting, if_empty, copies),
        *(_near(demand, keys) if situation is Situation.FITS else ()),
        *(() if facts.pod.node else _scheduling(facts)),
    )
    rows = yield from _rows(demand, groups, every_node=every_node)
    shown = rows if every_node else rows[:MAX_ROWS]
    return Explanation(
        pod=facts.pod.full_name,
        situation=situation.value,
        answer=answer,
        request=tuple(_request(wanted, facts.views, keys)),
        missing=missing,
        changes=changes,
        fitting_pods=copies.count,
        fitting_pods_is_exact=copies.is_exact,
        nodes=len(facts.views),
        fitting_nodes=fitting,
        table=tuple(shown),
        left_out=len(rows) - len(shown),
    )


def _without_demand(facts: Facts, situation: Situation, why: tuple[str, ...]) -> Explanation:
    """Explain a pod that asks for no cards of this family, or whose request is invalid."""
    found = Situation.BOUND if facts.pod.node and facts.holding is not None else situation
    where = tuple(_where(facts, None)) if facts.pod.node else ()
    return Explanation(facts.pod.full_name, found.value, (*facts.doubts, *why, *where))


def _no_request(facts: Facts) -> Iterator[str]:
    keys = facts.family.key_names  # `number`: the resource for the number of cards
    named = sorted({name for each in facts.pod.containers for name in each.limits})
    yield (
        f"No container of pod {facts.pod.full_name} asks for {keys.number}, so the extender has "
        f"no part in its placement; its limits name {', '.join(named) or 'no extended resource'}."
    )
    if {keys.cores, keys.memory} & set(named):
        yield f"A container that asks for memory or compute must also ask for {keys.number}."
    if not facts.pod.node:
        yield from _scheduling(facts)


# -- where the pod is ------------------------------------------------------------------------------


def _where(facts: Facts, wanted: PodDemand | None) -> Iterator[str]:
    """Say where the pod is and what it holds."""
    pod, keys = facts.pod, facts.family.key_names
    if pod.node:
        yield (
            f"Pod {pod.full_name} is bound to Node {pod.node}; its phase is {pod.phase}"
            f"{', and it is being deleted' if pod.deleting else ''}."
        )
        if facts.holding is not None and facts.holding.node == pod.node:
            yield f"It holds {_held(facts.holding, facts.views)}."
            if pod.phase == "Pending":
                yield (
                    f"The kubelet of {pod.node} starts it: on that Node, vgpu-agent status --pod "
                    f"{pod.full_name} tells more."
                )
        elif wanted is not None:
            yield _holds_nothing(facts)
        yield from _unfit_node(facts)
    elif facts.kept is not None:
        kept = facts.kept
        holding = _held(kept.holding, facts.views)
        yield f"Pod {pod.full_name} is not bound yet. It will have {holding}."
        yield (
            "It is being bound, or the API server has not said whether it is. The cards are kept "
            "until the API server shows the pod bound or deleted."
            if kept.binding
            else f"The cards are kept for it until {_time(facts.now + kept.seconds)} "
            f"({kept.seconds:.0f} s from now). If it is not bound by then, other pods may have "
            "them, and it is placed again when kube-scheduler asks again."
        )
    else:
        deleted = " It is being deleted." if pod.deleting else ""
        yield f"Pod {pod.full_name} is not bound, and no cards are kept for it.{deleted}"
    if wanted is None and facts.holding is None:
        yield f"It holds nothing of {keys.number}."


def _holds_nothing(facts: Facts) -> str:
    """Say why no cards are counted for a bound pod that asks for some."""
    pod = facts.pod
    try:
        found = facts.family.read_holding(pod)
    except AgentError as err:
        return (
            f"The extender counts no cards for it, because its annotations cannot be read: {err}. "
            "Other pods may get the same cards: delete the pod, or restore its annotations."
        )
    if found is not None:
        return (
            "Its annotations name cards that the extender does not count yet: the watch of pods is "
            "a moment behind."
        )
    return (
        "The extender counts no cards for it, because its annotations name none: it was bound "
        f"without an extender (schedulerName {pod.scheduler or 'unknown'}). The agent of the Node "
        "chooses cards when it starts; until then other pods may get the same cards."
    )


def _unfit_node(facts: Facts) -> Iterator[str]:
    view = next((view for view in facts.views if view.name == facts.pod.node), None)
    if view is None or view.unfit is None:
        return
    note = f" ({view.unfit.note})" if view.unfit.note else ""
    yield (f"Node {facts.pod.node} can take no other pods: {view.unfit.reason.value}{note}.")


def _held(holding: Holding, views: Sequence[NodeView]) -> str:
    """Describe the cards of a pod."""
    view = next((view for view in views if view.name == holding.node), None)
    numbers = {uuid: number for number, uuid in enumerate(view.uuids)} if view else {}
    texts = []
    # for each container: its kind, and its cards
    for kind, cards in zip(holding.kinds, holding.cards, strict=True):
        of_kind = "" if kind is ContainerKind.MAIN else f" in {_KINDS[kind]}"
        for card in cards:
            number = numbers.get(card.uuid)
            called = (
                f"card {number} ({card.uuid})"
                if number is not None
                else f"card {card.uuid}, which the Node does not have now,"
            )
            texts.append(
                f"{card.memory_mib} MiB and {_percent(card.cores_percent)} of {called}{of_kind}"
            )
    return f"{'; '.join(texts) or 'nothing'} on Node {holding.node}"


# -- whether there is room -------------------------------------------------------------------------


def _room(
    facts: Facts, situation: Situation, fitting: int, if_empty: int, copies: survey.Copies
) -> Iterator[str]:
    nodes = shortage.counted(len(facts.views), "Node")
    count = f"{'' if copies.is_exact else 'At least '}{copies.count}"
    if situation in {Situation.BOUND, Situation.KEPT}:
        yield f"{count} more such pods fit now, besides it."
        return
    if fitting:
        yield (
            f"It fits on {fitting} of {nodes} now. {count} such pods fit one after the other,"
            " this one included."
        )
        return
    yield f"It fits on none of {nodes} now."
    if if_empty:
        yield (
            f"It would fit on {if_empty} of them without other pods: it waits until pods end, "
            "unless one of the changes below helps."
        )
    else:
        yield (
            "It would fit on none of them even without other pods, so waiting does not help: "
            "change the pod, repair Nodes, or add Nodes."
        )


def _near(demand: Demand, keys: KeyNames) -> Iterator[str]:
    """Say that the figures leave out a condition: the pod must be near its peers."""
    # `aligned`: it asks to be placed near its peers
    if demand.aligned and demand.topology_mode == LINK_STRICT:
        yield (
            "Once another pod of its group has cards, it goes only to cards near those "
            f"({keys.topology_mode}: {LINK_STRICT}, with cross-pod topology); that is not counted "
            "here."
        )


def _scheduling(facts: Facts) -> Iterator[str]:
    """Say what kube-scheduler has done so far with a pod that is not bound."""
    pod, calls, waiting = facts.pod, facts.filter_calls, facts.waiting
    scheduler = pod.scheduler or "default-scheduler"
    if waiting.gates:
        yield (
            f"It has scheduling gates ({', '.join(waiting.gates)}), so kube-scheduler does not "
            "look at it until they are removed from spec.schedulingGates."
        )
    if calls is not None:
        answer = f"the answer was {calls.node}" if calls.node else "it fitted on none of these"
        yield (
            f"kube-scheduler ({scheduler}) has asked about it {_times(calls.times)}, last at "
            f"{_time(calls.at)} ({max(facts.now - calls.at, 0):.0f} s ago) with "
            f"{shortage.counted(calls.nodes, 'Node')}; {answer}."
        )
    else:
        yield (
            f"No kube-scheduler has asked this extender about it since {_time(facts.started_at)}. "
            f"Its schedulerName is {scheduler}."
        )
        if facts.schedulers and scheduler not in facts.schedulers:
            yield (
                f"The extender was asked about pods of {', '.join(facts.schedulers)}, and of no "
                f"other scheduler. If {scheduler} does not use the extender, set spec.schedulerName"
                " to one that does; a pod that exists must be created again."
            )
        elif not waiting.gates:
            yield (
                f"Either {scheduler} does not run or does not use this extender, or it has not "
                "reached the pod: it asks only when a Node has passed its own checks."
            )
    if waiting.reason:
        yield (
            f"kube-scheduler last reported {waiting.reason}: "
            f"{quoted(waiting.message, _LONGEST_MESSAGE)}"
        )
    yield (
        "kube-scheduler also checks taints, cordons, selectors, CPU and memory of Nodes; they are "
        "not counted here."
    )


# -- the request -----------------------------------------------------------------------------------

_KINDS = {ContainerKind.INIT: "an init container", ContainerKind.SIDECAR: "a sidecar"}


def _request(wanted: PodDemand, views: Sequence[NodeView], keys: KeyNames) -> Iterator[str]:
    """Say what each container asks for, and how its cards are to be chosen."""
    # how many MiB one unit of memory is, on Nodes that can take pods
    factors = {view.state.hardware.memory_factor for view in views if view.state is not None}
    for name, container in zip(wanted.names, wanted.demand.containers, strict=True):
        kind = "" if container.kind is ContainerKind.MAIN else f" ({container.kind.value})"
        yield f"container {name}{kind}: {_amounts(container, factors, keys)}"
    yield from (f"{name}: {text}" for name, text in _conditions(wanted.demand, keys).items())


def _amounts(container: ContainerDemand, factors: AbstractSet[int], keys: KeyNames) -> str:
    each = (
        "1 card with" if container.card_count == 1 else f"{container.card_count} cards, each with"
    )
    if container.memory_units is None:  # a percentage of the card's memory instead
        part = container.memory_percent
        memory = "all of its memory" if part == 100 else f"{part} % of its memory"
    elif len(factors) == 1:
        (factor,) = factors
        memory = f"{container.memory_units * factor} MiB"
    else:
        differently = ", which Nodes count differently," if factors else ""
        memory = f"{container.memory_units} units of {keys.memory}{differently}"
    alone = ", with no other pod on it" * container.alone
    return f"{each} {memory} and {_percent(container.cores_percent)}{alone}"


def _percent(cores_percent: int) -> str:
    return f"{cores_percent} % of the compute" if cores_percent else "no limit of compute"


def _conditions(demand: Demand, keys: KeyNames) -> Mapping[str, str]:
    found = {
        keys.topology_mode: "" if demand.topology_mode == NONE else demand.topology_mode,
        keys.memory_policy: demand.memory_policy,  # Nodes with or without oversold memory
        keys.include_types: ",".join(demand.include_types),
        keys.exclude_types: ",".join(demand.exclude_types),
        keys.include_uuids: ",".join(demand.include_uuids),
        keys.exclude_uuids: ",".join(demand.exclude_uuids),
    }
    return {name: shortened(text, _LONGEST_MESSAGE) for name, text in found.items() if text}


# -- the table -------------------------------------------------------------------------------------


class _Collected:
    """A row while it is collected: Nodes with one answer to the pod, and with the same reasons of
    their cards. ``memory``, ``cores`` and ``untouched`` are the last three figures of `Row`.
    """

    __slots__ = ("cards", "cores", "memory", "names", "nodes", "untouched")

    def __init__(self) -> None:
        self.nodes = self.memory = self.cores = self.untouched = 0
        self.names: list[str] = []
        self.cards: collections.Counter[str] = collections.Counter()

    def add(self, group: Group, left: Sequence[CardRoom], views: Sequence[NodeView]) -> None:
        """Count Nodes of a group; ``left`` has what is free of the cards of each of them."""
        self.nodes += len(views)
        self.names += [each.name for each in views[: max(MAX_NAMES - len(self.names), 0)]]
        for reason, cards in group.cards.items():
            self.cards[reason.name] += cards * len(views)
        for room in left:
            self.memory = max(self.memory, room.memory_mib)
            self.cores = max(self.cores, room.cores_percent)
        self.untouched = max(self.untouched, sum(room.is_untouched for room in left))


def _rows(
    demand: Demand, groups: Sequence[Group], *, every_node: bool
) -> Generator[None, None, list[Row]]:
    """Return the rows: first Nodes that fit, then reasons, the most frequent first. With
    ``every_node``, return one row for each Node, by name.
    """
    # code, reason, note, the reasons of cards, and the Node's name with ``every_node``, else ""
    found: dict[tuple[str, str, str, frozenset[Reason], str], _Collected] = collections.defaultdict(
        _Collected
    )
    for group in groups:
        view = group.views[0]
        # without the cards that the pod rules out by product name or UUID
        left = shortage.rooms(view, view.unwanted(demand))
        code, reason = _code(group.refusal.reason if group.refusal else None)
        key = code, reason, view.unfit.note if view.unfit else "", frozenset(group.cards)
        if every_node:
            for each in group.views:
                found[*key, each.name].add(group, left, (each,))
                yield
        else:
            found[*key, ""].add(group, left, group.views)
            yield
    rows = []
    for (code, reason, note, _, _), row in found.items():
        cards, names = dict(row.cards.most_common()), tuple(sorted(row.names))
        rows.append(
            Row(
                code=code,
                reason=reason,
                cards=cards,
                note=note,
                nodes=row.nodes,
                names=names,
                largest_free_mib=row.memory,
                largest_free_cores_percent=row.cores,
                untouched_cards=row.untouched,
            )
        )
        yield
    if every_node:
        return sorted(rows, key=lambda row: row.names)
    return sorted(rows, key=lambda row: (row.code != FITS, -row.nodes, row.code, row.names))


def _code(reason: Reason | None) -> tuple[str, str]:
    return (FITS, "fits") if reason is None else (reason.name, reason.value)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _time(unix_seconds: float) -> str:
    return dt.datetime.fromtimestamp(unix_seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
