"""The extender's verbs filter and bind (vgpu-manager §5.2, §5.8). Filter chooses the Node and the
cards of a pod, and keeps the cards for it: a *promise*. Bind binds the pod, and writes its Node and
cards into its annotations. The *claims* of a pod are here the cards in its annotations, as in
vgpu-manager.

Until the bind, a promise is in memory only. If the process ends before, nothing is lost: the next
process refuses the bind, and kube-scheduler filters the pod again. A promise ends when the pod is
not bound in time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import log
from vgpu_agent.cluster.api import pod_path
from vgpu_agent.cluster.quantities import whole_number
from vgpu_agent.errors import AgentError, ClusterError, RequestRefusedError
from vgpu_agent.log import ChangeFilter
from vgpu_agent.placement.linked import searches_seen_by
from vgpu_agent.placement.nodes.book import Choice
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.scheduler.alignment import Alignment
from vgpu_agent.scheduler.binding import Bindings
from vgpu_agent.scheduler.known_pods import KnownPods
from vgpu_agent.scheduler.messages import (
    BindingResult,
    FilterResult,
    binding_arguments,
    filter_arguments,
)
from vgpu_agent.scheduler.metrics import BIND, ERROR, FILTER, REFUSED, SUCCESS, Metrics
from vgpu_agent.scheduler.records import PodRecords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.families.scheduling import SchedulingFamily
    from vgpu_agent.journal import Journal
    from vgpu_agent.nodes import Node
    from vgpu_agent.placement.nodes.book import Book, Holding
    from vgpu_agent.placement.nodes.cards import NodeCards, Unfit
    from vgpu_agent.placement.nodes.demand import Demand, PodDemand
    from vgpu_agent.pods import DesiredPod, Pod
    from vgpu_agent.scheduler.messages import BindingArguments, FilterArguments
    from vgpu_agent.scheduler.pod_events import PodEvents

_logger = log.get(__name__)

# Status codes of the API server for requests that it has not carried out.
_REFUSED = range(400, 500)
_NOT_FOUND, _CONFLICT = 404, 409
_AGAIN = "kube-scheduler will filter it again"
_TEXTS = {reason: reason.value for reason in Reason}
# A pod's annotation cannot have cards kept for longer, unless the operator's setting is longer.
_MOST_GRACE_SECONDS = 300.0
# kube-scheduler tries each pod again after five minutes, whatever the answer was. Within them, the
# text of a refusal makes it try again at most ten times (`_refusal`). With 300 Nodes, 102 of them
# in a sample and only one with room, that was enough for each of 100 pods, of which one needed all
# tries; three tries were not enough for one of 15. At most `_MAX_REFUSED` pods are remembered.
_TRIES_SECONDS, _MAX_TRIES, _MAX_REFUSED = 300.0, 10, 10_000
# At most this many of the pods that wait for a Node are kept as they were decoded, unless they are
# large: as JSON most have one KiB, and a tenant can make one of some hundred.
_MAX_WAITING, _MAX_WAITING_BYTES = 2000, 8 * 1024
# kube-scheduler names all Nodes that it finds if these are fewer (minFeasibleNodesToFind).
_LEAST_SAMPLE = 100


def cards_of(family: SchedulingFamily, node: Node) -> NodeCards | Unfit:
    """Read the cards of a Node from its annotations and from the allocatable number of the family's
    resource for the number of cards. On a Node that is the sum of the slots of its cards.
    """
    slots = whole_number(node.allocatable.get(family.number_resource, "0")) or 0
    return family.read_cards(node.annotations, slots)


@functools.lru_cache(maxsize=256)
def _shared(names: frozenset[str]) -> frozenset[str]:
    """Return one object for equal sets of names, to save memory: many Nodes have equal ones."""
    return names


def _joined(reasons: Iterable[Reason]) -> str:
    """Return the texts of reasons, in the order of `Reason`; without any, the text for a Node that
    is not described (yet).
    """
    found = set(reasons)
    texts = [_TEXTS[each] for each in Reason if each in found]
    return " or ".join(texts) or _TEXTS[Reason.NodeCacheMiss]


class _Promise(msgspec.Struct):
    """The cards that are kept for a pod that is not bound yet.

    Attributes:
        pod: as it was when it was filtered.
        holding: its cards.
        wanted: its demand, with the names of the containers, to which the bind assigns the cards.
            The part that cards are chosen by, without the names, is ``wanted.demand``.
        until: when the promise ends (the loop's time).
        binding: the pod is being bound, or the result of a bind is unknown. Then only the watch of
            pods, or an answer of the API server about the pod, ends the promise.
        under_way: a request about the pod has no answer yet.
        state: the annotations and labels that the bind writes; None before it.
    """

    pod: Pod
    holding: Holding
    wanted: PodDemand
    until: float
    binding: bool = False
    under_way: bool = False
    state: DesiredPod | None = None


def _is_as_promised(found: Pod | None, promise: _Promise) -> bool:
    """Tell whether a pod, as the API server has it, is bound to the Node of its promise.

    Then the promise stays until the watch shows the pod. The answer alone must not turn it into a
    holding: if the watch never shows the pod, it never shows the pod's end either.
    """
    return found is not None and not found.ended and found.node == promise.holding.node


def _lost(promise: _Promise) -> RequestRefusedError:
    """Return the refusal of a bind whose cards are not those of the filter any more."""
    return RequestRefusedError(
        f"pod {promise.pod.full_name} can no longer have its cards on {promise.holding.node}: they "
        f"have changed, or another pod has them; {_AGAIN}"
    )


class Kept(msgspec.Struct, frozen=True):
    """A promise for ``/explain``: cards that are kept for a pod that is not bound yet.

    Attributes:
        holding: the cards.
        seconds: how long they are kept from now on, if the pod is not bound meanwhile.
        binding: the pod is being bound, or the result of a bind is unknown; then they are kept
            until the watch shows the pod, or the API server answers that it is not bound.
    """

    holding: Holding
    seconds: float
    binding: bool


class Extender:
    """The verbs filter and bind; see the module.

    State: the promises, by the pods' UIDs, which the book has, too; the latest refusals; and pods
    that wait for a Node.

    Attributes:
        records: names of pods and the last filter calls about them, for ``/explain``.
        alignment: places pods of one group (a gang, or one controller's pods) near each other.
    """

    def __init__(
        self,
        *,
        book: Book,
        family: SchedulingFamily,
        read_pod: Callable[[msgspec.Raw | bytes], Pod],
        api: Api,
        journal: Journal,
        grace_seconds: float,
        clock: Callable[[], float] = time.time,
        metrics: Metrics | None = None,
        events: PodEvents | None = None,
        known_pods: KnownPods | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """Build it.

        Args:
            book: the cards of all Nodes.
            family: reads Nodes and pods.
            read_pod: decodes a pod; it raises `ClusterError`.
            api: the API server.
            journal: records what is done.
            grace_seconds: how long cards are kept for a pod that is not bound, unless the pod's
                annotation says how long.
            clock: unix seconds.
            metrics: counts what is done.
            events: writes events about pods; None writes none.
            known_pods: receives the facts about pods beside their cards, such as the group of each.
            leads: tells whether this extender may bind pods now.
        """
        self._leads = leads
        self._metrics, self._events = metrics or Metrics(), events
        self._known_pods = KnownPods() if known_pods is None else known_pods
        self.alignment = Alignment(book, self._known_pods, family.number_resource, self._metrics)
        self._book, self._family, self._read_pod = book, family, read_pod
        self._api, self._journal = api, journal
        self._grace_seconds, self._clock = grace_seconds, clock
        self._bindings = Bindings(api, look_up=self._look_up, journal=journal)
        self._promises: dict[str, _Promise] = {}
        self._last_bind_ns = 0  # unix time
        self._resources: dict[str, frozenset[str]] = {}  # Node → its extended resources
        self.records = PodRecords(clock)
        self._waiting: dict[str, Pod] = {}  # pods that are not bound, by UID; see `_waiting_pod`
        # UID of a pod that was refused though there may be room → since when, how often, and why
        self._refused: dict[str, tuple[float, int, frozenset[Reason]]] = {}
        # by UID, so that malformed claims of a pod are logged once and not at each of its changes
        self._unreadable = ChangeFilter()

    # -- updates from the watches ------------------------------------------------------------------

    def see_node(self, node: Node) -> None:
        """Record a Node that is new or has changed."""
        self._book.put_node(node.name, cards_of(self._family, node))
        self._resources[node.name] = _shared(frozenset(node.allocatable))

    def forget_node(self, name: str) -> None:
        """Forget a Node that was deleted."""
        self._book.remove_node(name)
        self._resources.pop(name, None)

    def resources_of_node(self, name: str) -> frozenset[str]:
        """Return the extended resources in a Node's ``allocatable``, for preemption: kube-scheduler
        counts only those that a Node has.
        """
        return self._resources.get(name, frozenset())

    def see_pod(self, pod: Pod) -> None:
        """Record a pod that is new or has changed.

        A promise stays until the pod is bound, because the watch may be behind. Any user who may
        edit a bound pod can change, corrupt or remove its claims, and its containers run on. So the
        pod keeps the cards that it held. Only claims of further containers count, which an agent
        adds one after the other.
        """
        self._known_pods.see(pod)
        if not pod.node and not pod.ended:
            self._keep_waiting(pod)
            return
        self._waiting.pop(pod.uid, None)
        holding = None
        try:
            holding = self._family.read_holding(pod)
        except AgentError as err:
            if self._unreadable.is_new(pod.uid, str(err)):
                self._journal.record(
                    "scheduler.claims_unreadable",
                    level="warning",
                    pod=pod.full_name,
                    error=str(err),
                )
        promise = self._promises.pop(pod.uid, None)
        if promise is not None and promise.state and pod.node == promise.holding.node:
            # notes whether the binding has written the labels too, which not every API server does
            self._bindings.note_bound(pod, promise.state)
        held = self._book.holding(pod.uid)
        if held is not None and held.node == pod.node and not pod.ended:
            # a promise without a bind says nothing about a pod that another scheduler has bound
            is_bound_with_held = promise is None or promise.binding
            if holding is None or (is_bound_with_held and len(holding.cards) <= len(held.cards)):
                holding = held
        if holding is None:
            self._book.release(pod.uid)
        else:
            self._book.hold(pod.uid, holding)
            self.records.note_holder(pod)

    def _keep_waiting(self, pod: Pod) -> None:
        """Keep a pod that waits for a Node, in the place of an earlier version of it."""
        self._waiting.pop(pod.uid, None)
        if len(msgspec.json.encode(pod)) > _MAX_WAITING_BYTES:
            return
        self._waiting[pod.uid] = pod
        if len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def forget_pod(self, uid: str) -> None:
        """Forget a pod that was deleted or has ended."""
        self._unreadable.forget(uid)
        self._known_pods.forget(uid)
        self._waiting.pop(uid, None)
        self._refused.pop(uid, None)
        self._promises.pop(uid, None)
        self._book.release(uid)
        self.records.forget(uid)

    def expire_promises(self) -> None:
        """End the promises whose time is up; call this regularly."""
        now = asyncio.get_running_loop().time()
        for uid, promise in tuple(self._promises.items()):
            if promise.until <= now and not promise.binding:
                self._end_promise(uid)
                self._journal.record("scheduler.promise_ended", uid=uid, node=promise.holding.node)

    def stop_leading(self) -> None:
        """End the promises of pods that are not being bound. The new leader does not know them, and
        may give the cards to other pods.
        """
        for uid, promise in tuple(self._promises.items()):
            if not promise.binding:
                self._end_promise(uid)

    async def check_unconfirmed_binds(self, beat: Callable[[], None] = lambda: None) -> None:
        """Ask the API server about pods whose bind has ended, and which the watch has not shown as
        bound since; call this regularly. Such a pod may have been deleted while the watch was
        interrupted, and nothing else would end its promise.

        Args:
            beat: called before each request, as the heartbeat of the caller's loop.
        """
        for uid, promise in tuple(self._promises.items()):
            now = asyncio.get_running_loop().time()
            if promise.until > now or not promise.binding or promise.under_way:
                continue
            promise.until, promise.under_way = now + self._grace_seconds, True
            beat()
            try:
                found = await self._look_up(promise.pod)
            except ClusterError:
                continue  # the next call tries again
            finally:
                promise.under_way = False
            if self._promises.get(uid) is not promise:
                continue
            if not _is_as_promised(found, promise):
                self._end_promise(uid)
                self._journal.record("scheduler.promise_ended", uid=uid, node=promise.holding.node)

    async def _look_up(self, pod: Pod) -> Pod | None:
        """Return the pod as the API server has it, None if it is gone.

        Raises:
            ClusterError: the API server does not answer, or refuses.
        """
        try:
            found = self._read_pod(await self._api.get(pod_path(pod.namespace, pod.name)))
        except ClusterError as err:
            if err.status == _NOT_FOUND:
                return None
            raise
        return found if found.uid == pod.uid else None

    def update_gauges(self) -> None:
        """Update the gauges of promises and Nodes."""
        self._metrics.promises.set(len(self._promises))
        self._metrics.show_nodes(self._book.node_states())

    # -- for /explain ------------------------------------------------------------------------------

    def kept(self, uid: str) -> Kept | None:
        """Return the cards that are kept for a pod that is not bound; None if there are none."""
        if (promise := self._promises.get(uid)) is None:
            return None
        left = promise.until - asyncio.get_running_loop().time()
        return Kept(promise.holding, seconds=max(left, 0.0), binding=promise.binding)

    def name_of(self, uid: str) -> str:
        """Return ``namespace/name`` of a pod that holds cards; its UID where it is not known."""
        promise = self._promises.get(uid)
        if promise is not None:
            return promise.pod.full_name
        return self.records.name_of(uid) or f"UID {uid}"

    # -- filter ------------------------------------------------------------------------------------

    def filter(self, body: bytes) -> bytes:
        """Answer a filter call. Every failure is a sentence in the answer, as kube-scheduler
        expects.
        """
        with self._metrics.timed(FILTER):
            try:
                arguments = filter_arguments(body)
                result = self._filter(arguments)
                has_room = result.node_names or (result.nodes and result.nodes["items"])
                outcome = SUCCESS if has_room else REFUSED
            except AgentError as err:
                result, outcome = FilterResult(error=str(err)), ERROR
            self._metrics.count(FILTER, outcome)
            return msgspec.json.encode(result)

    def _filter(self, arguments: FilterArguments) -> FilterResult:
        if not arguments.has_pod:
            raise RequestRefusedError("no Pod")
        pod = self._waiting_pod(arguments) or self._read_pod(arguments.pod)
        if pod.node:
            raise RequestRefusedError(f"pod {pod.full_name} is bound to {pod.node} already")
        try:
            wanted = self._family.read_demand(pod)
        except RequestRefusedError as err:
            if self._events is not None:
                self._events.invalid(pod, str(err))
            raise
        if wanted is None:  # the pod asks for no cards, so each Node suits it
            return FilterResult(
                nodes={"items": arguments.nodes.items or []} if arguments.nodes else None,
                node_names=arguments.node_names,
            )
        if self._events is not None and (wrong := self._family.misspelt(pod)):  # its policies
            self._events.policy_invalid(pod, wrong)
        # name → the Node as kube-scheduler sent it; None where it sent the names only
        candidates = arguments.candidates()
        if not candidates:
            raise RequestRefusedError("No schedulable nodes")
        held = self._book.holding(pod.uid)
        if held is not None and pod.uid not in self._promises:
            # kube-scheduler is behind; to place the pod again would free the cards that it has
            raise RequestRefusedError(f"pod {pod.full_name} is bound to {held.node} already")
        choice = self._kept(pod, wanted, candidates) or self._choose(pod, wanted, candidates)
        self.records.note_filter_call(pod, len(candidates), choice.node)
        failed = self._failed(pod, wanted, candidates, choice)
        if arguments.node_names is not None:
            return FilterResult(
                node_names=[choice.node] if choice.node else [], failed_nodes=failed
            )
        chosen = candidates.get(choice.node) if choice.node else None
        return FilterResult(
            nodes={"items": [] if chosen is None else [chosen]}, failed_nodes=failed
        )

    def _waiting_pod(self, arguments: FilterArguments) -> Pod | None:
        """Return the pod of a filter call as the watch has shown it, which saves a tenth of the
        call; None if the watch has not shown this version of it.
        """
        uid, version = arguments.pod_version()
        known = self._waiting.get(uid)
        if known is None or not version or known.resource_version != version:
            return None
        return known

    def _failed(
        self, pod: Pod, wanted: PodDemand, candidates: Mapping[str, object], choice: Choice
    ) -> dict[str, str]:
        """Return the reason of each candidate if the pod fits on none; empty if it fits on one.

        vgpu-manager also names the reasons of the other candidates where the pod fits
        (vgpu-manager §5.2). kube-scheduler shows those nowhere, and with 500 Nodes they cost a
        tenth of the throughput.
        """
        if choice.node:
            return {}
        # With a sample of the Nodes, the reasons vary from call to call; with all Nodes they do
        # not.
        if len(candidates) < len(self._book):
            text = self._refusal(pod, wanted.demand, choice, len(candidates))
            return dict.fromkeys(candidates, text)
        return {name: _TEXTS[reason] for name, reason in choice.reasons.items()}

    def _kept(self, pod: Pod, wanted: PodDemand, candidates: Mapping[str, object]) -> Choice | None:
        """Return the promise to the pod as a choice, and restart its time. None if there is no
        promise on one of the candidates, or its cards or the pod's demand have changed meanwhile.

        Raises:
            RequestRefusedError: the pod may be bound to another Node already.
        """
        promise = self._promises.get(pod.uid)
        if promise is None:
            return None
        node = promise.holding.node
        # `can_keep`: the Node still has the cards, fit for use and not overcommitted
        if node in candidates and promise.wanted == wanted and self._book.can_keep(pod.uid):
            promise.until = self._kept_until(pod)
            return Choice(node=node, holding=promise.holding, reasons={})
        if promise.binding:
            raise RequestRefusedError(
                f"the API server has not said whether pod {pod.full_name} was bound to {node}; "
                "until the watch shows it, the pod can only go there"
            )
        return None

    def _choose(self, pod: Pod, wanted: PodDemand, candidates: Mapping[str, object]) -> Choice:
        """Choose a Node and cards, and keep them for the pod; an earlier promise ends."""
        self._end_promise(pod.uid)
        # Counts the searches for well linked cards: those that compare all sets of cards, and those
        # that add one card after the other.
        with searches_seen_by(self._metrics.count_search):
            choice = self.alignment.choose(pod, wanted.demand, candidates)
        self._metrics.count_refused_nodes(FILTER, collections.Counter(choice.reasons.values()))
        if choice.holding is not None:
            # The topology mode: the pod asks for linked cards, or for cards of one NUMA node. The
            # fallback says what they have where that was not possible.
            self._metrics.count_placed(wanted.demand, choice.fallback)
            if choice.fallback and self._events is not None:
                mode = wanted.demand.topology_mode
                self._events.fell_back(pod, choice.node, mode, choice.fallback)
            self._promise(pod, choice.holding, wanted)
            self._known_pods.promise(pod)  # the watch may not have shown it yet
            # The bind logs the Node, too, and without a bind, `expire_promises` does. So at the
            # default level a pod costs one line.
            _logger.debug("scheduler.placed", pod=pod.full_name, node=choice.node)
            if self._events is not None:
                self._events.matched(pod, choice.node)
        else:
            self._metrics.count_strict_refusal(wanted.demand, choice.reasons.values())
            if self._events is not None:
                self._events.fits_nowhere(pod, choice.reasons)
        return choice

    def _refusal(self, pod: Pod, demand: Demand, choice: Choice, candidates: int) -> str:
        """Return why a pod fits on none of the candidates: the same text for each of them.

        In a large cluster kube-scheduler names a sample of the Nodes, a different one each time,
        and writes the number of Nodes with each reason into the pod's status. When that status
        changes, it tries the pod again. So the text has the reasons of all Nodes, which do not
        change with the sample. If a Node outside the sample may have room, the text gets a counter,
        so that kube-scheduler tries again. It may leave a Node out of several samples: they are
        collected by parallel workers, and other pods are tried in between. So the number of tries
        does not depend on the size of the sample. It is small, because a selector or a taint may
        exclude the others. With fewer candidates than any sample has, the others are excluded for
        sure, and the text has the reasons of the candidates.
        """
        survey, uid = self.alignment.survey(pod, demand, choice.reasons.values()), pod.uid
        if not survey.may_fit:
            self._refused.pop(uid, None)
            return _joined(survey.reasons)
        if candidates < _LEAST_SAMPLE:
            self._refused.pop(uid, None)
            return _joined(choice.reasons.values())
        now = asyncio.get_running_loop().time()
        since, tries, reasons = self._refused.pop(uid, (now, 0, frozenset()))
        if now - since >= _TRIES_SECONDS:
            since, tries, reasons = now, 0, frozenset()
        # For a demand that names cards by UUID, only the reasons of the sample are known. Those of
        # earlier samples are added, so that the text stops changing in the end.
        reasons = (reasons if demand.names_cards else frozenset()) | set(survey.reasons)
        tries = min(tries + 1, _MAX_TRIES)
        self._refused[uid] = since, tries, reasons
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        return f"{_joined(reasons)}, and other nodes may have room (try {tries})"

    def _promise(self, pod: Pod, holding: Holding, wanted: PodDemand) -> None:
        self._promises[pod.uid] = _Promise(pod, holding, wanted, self._kept_until(pod))
        self._book.hold(pod.uid, holding)

    def _kept_until(self, pod: Pod) -> float:
        """Return when a promise to the pod ends that is made or renewed now. A pod may ask for
        more time than the operator allows others, but not for hours: the cards serve no other pod
        meanwhile, and it may never be bound.
        """
        asked = self._family.grace_seconds(pod) or self._grace_seconds
        seconds = min(asked, max(self._grace_seconds, _MOST_GRACE_SECONDS))
        return asyncio.get_running_loop().time() + seconds

    def _end_promise(self, uid: str) -> None:
        if self._promises.pop(uid, None) is not None:
            self._book.release(uid)
            self._known_pods.end_promise(uid)

    # -- bind --------------------------------------------------------------------------------------

    async def bind(self, body: bytes) -> bytes:
        """Bind a pod; every failure is a sentence in the answer."""
        with self._metrics.timed(BIND):
            try:
                arguments = binding_arguments(body)
                await self._bind(arguments)
                result, outcome = BindingResult(), SUCCESS
            except AgentError as err:
                result, outcome = BindingResult(error=str(err)), ERROR
            self._metrics.count(BIND, outcome)
            return msgspec.json.encode(result)

    async def _bind(self, arguments: BindingArguments) -> None:
        promise = self._promises.get(arguments.pod_uid)
        if promise is None:
            await self._bind_without_cards(arguments)
            return
        self._check(arguments, promise)
        numbers = self._book.numbers(arguments.node)  # UUID → number of the card on that Node
        # Distinct and in order, because plugins tell pods apart by it (vgpu-manager §7.1).
        self._last_bind_ns = max(int(self._clock() * 1e9), self._last_bind_ns + 1)
        state = self._family.when_bound(
            promise.wanted, promise.holding, numbers, now_ns=self._last_bind_ns
        )
        may_be_bound, promise.binding, promise.under_way = promise.binding, True, True
        promise.state = state
        try:
            await self._bindings.bind(
                promise.pod, arguments.node, state, check=lambda: self._check_again(promise)
            )
        except AgentError as err:
            if not await self._is_bound(promise, err, may_be_bound=may_be_bound):
                if self._events is not None:
                    self._events.not_bound(promise.pod, str(err))
                raise
        finally:
            promise.under_way = False
            promise.until = asyncio.get_running_loop().time() + self._grace_seconds
        self._journal.record("scheduler.bound", pod=promise.pod.full_name, node=arguments.node)
        if self._events is not None:
            self._events.bound(promise.pod, promise.holding, numbers)

    def _check(self, arguments: BindingArguments, promise: _Promise) -> None:
        """Raise `RequestRefusedError` if the pod cannot be bound with the cards of its promise."""
        name, node = f"{arguments.pod_namespace}/{arguments.pod_name}", promise.holding.node
        if promise.pod.full_name != name:
            raise RequestRefusedError(
                f"UID {arguments.pod_uid} is that of pod {promise.pod.full_name}, not of {name}"
            )
        if promise.under_way:
            raise RequestRefusedError(f"pod {name} is being bound to {node} already")
        if node != arguments.node:
            raise RequestRefusedError(
                f"pod {name} has its cards on {node}, and not on {arguments.node}; {_AGAIN}"
            )
        if not self._book.can_keep(arguments.pod_uid):
            if not promise.binding:
                self._end_promise(arguments.pod_uid)
            raise _lost(promise)

    def _check_again(self, promise: _Promise) -> None:
        """Raise `RequestRefusedError` if a pod must not be bound any more, though its labels have
        been written: this extender leads no longer, or its cards have changed since.
        """
        name = promise.pod.full_name
        if not self._leads():
            raise RequestRefusedError(f"this extender leads no longer; pod {name} is not bound")
        # where the watch has ended the promise meanwhile, the API server knows what became of it
        if self._promises.get(promise.pod.uid) is promise and not self._book.can_keep(
            promise.pod.uid
        ):
            raise _lost(promise)

    async def _is_bound(self, promise: _Promise, err: AgentError, *, may_be_bound: bool) -> bool:
        """Tell whether a pod is bound as promised although a bind has failed: an earlier bind may
        have succeeded without an answer. End the promise if the pod is certainly not bound.
        """
        if isinstance(err, ClusterError) and err.status not in _REFUSED:
            return False  # it may be bound, and its cards stay until the watch shows it
        uid, found = promise.pod.uid, None
        if may_be_bound or getattr(err, "status", 0) == _CONFLICT:
            try:
                found = await self._look_up(promise.pod)
            except ClusterError:
                return False
        if self._promises.get(uid) is not promise:  # the watch has shown its end meanwhile
            return found is not None and found.node == promise.holding.node
        if _is_as_promised(found, promise):
            return True
        if found is None or found.node or not may_be_bound:
            self._end_promise(uid)
        return found is not None and found.node == promise.holding.node

    async def _bind_without_cards(self, arguments: BindingArguments) -> None:
        """Bind a pod that asks for no cards. Refuse one that asks for cards and has no promise."""
        path = pod_path(arguments.pod_namespace, arguments.pod_name)
        pod = self._read_pod(await self._api.get(path))
        if pod.uid == arguments.pod_uid:
            with contextlib.suppress(RequestRefusedError):
                if self._family.read_demand(pod) is None:
                    await self._bindings.post(
                        pod.namespace,
                        pod.name,
                        pod.uid,
                        arguments.node,
                        annotations={},
                        labels={},
                    )
                    return
        raise RequestRefusedError(
            f"no cards are kept for pod {pod.full_name} with UID {arguments.pod_uid}; {_AGAIN}"
        )
