"""Another chance for pods that cannot start here:
an event for the owner, and an eviction where the operator asks for it.

The plain kube-scheduler only counts, so it can send a pod to a node whose cards have room in sum
and not on one of them. The kubelet would try again for ever. If `allocation` has refused a
container for long enough, its pod gets an event, and is evicted after a longer time, so that its
controller can create it again elsewhere. Evictions go through the API, so PodDisruptionBudgets
hold.

Built and run by `agent`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent.cluster.api import pod_path
from vgpu_agent.cluster.retrying import Backoff, FailureLog
from vgpu_agent.concurrency import Versions
from vgpu_agent.errors import ClusterError
from vgpu_agent.pods import MIRROR_POD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vgpu_agent.allocation.notices import Notices
    from vgpu_agent.allocation.refusals import Refusal
    from vgpu_agent.cluster.api import Api
    from vgpu_agent.cluster.events import Events
    from vgpu_agent.concurrency import Revision
    from vgpu_agent.config.binding import Binding
    from vgpu_agent.journal import Journal
    from vgpu_agent.pods import Pod

REFUSED, EVICTED = "VgpuStartRefused", "VgpuEvicted"  # the reasons of the events
PERMISSION = "create pods/eviction"
# How long a start must have been refused before the pod gets an event that says why.
REFUSED_EVENT_SECONDS = 30.0
_SHORTEST_WAIT_SECONDS = 0.01
_HOUR_SECONDS = 3600.0  # after which the API server forgets an event


class Reschedule:
    """The check of the refusals whenever they change or one of them becomes old enough.

    State: the events and evictions so far, by pod. A restart repeats them once the refusals are old
    enough again.
    """

    def __init__(
        self,
        api: Api,
        events: Events,
        refusals: Callable[[], Iterable[Refusal]],
        wake: Revision,
        binding: Binding,
        journal: Journal,
        *,
        notices: Notices,
        look_seconds: float = 10.0,
        rescued: Callable[[str], bool] = lambda _resource: False,
    ) -> None:
        """Build it.

        Args:
            api: the API server.
            events: raises events of pods, which their owners read.
            refusals: returns the starts of containers that `allocation` refuses at present.
            wake: advances with each change of ``refusals``.
            binding: has the time after which a pod is evicted.
            journal: evictions and failures are recorded there.
            notices: messages about containers that were started, but not as they asked; their pods
                get an event for each.
            look_seconds: how often the loop sends a heartbeat, and how long such an event may
                wait.
            rescued: a resource → whether `rescue`, which evicts or recreates failed pods, deals
                with its final refusals: those of starts that can never succeed here.
        """
        self._rescued = rescued
        self._notices = notices
        self._api, self._events, self._refusals, self._wake = api, events, refusals, wake
        self._binding, self._journal = binding, journal
        self._look_seconds = look_seconds
        # the names of its events in the journal begin with this word
        self._failure_log = FailureLog(journal, "reschedule")
        # Both in seconds of the event loop: a clock that is set while the node boots makes no
        # refusal an hour old.
        # pod, container and time of the first refusal → when it was seen here
        self._seen: dict[tuple[str, str, float], float] = {}
        # pod and container → reason, whether it was final, and time of the last event
        self._last_events: dict[tuple[str, str], tuple[str, bool, float]] = {}
        self._evicted: set[str] = set()  # UIDs of pods
        self._backoffs: dict[str, Backoff] = {}  # UID → the pause before the next try to evict it
        self._beat: Callable[[], None] = lambda: None
        # requests by outcome; a PodDisruptionBudget postpones an eviction
        self.evictions = {"evicted": 0, "postponed": 0, "failed": 0}

    async def run(self, beat: Callable[[], None]) -> None:
        """Do the due work until cancelled; send a heartbeat at least every ``look_seconds`` and
        before each request.
        """
        self._beat = beat
        while True:
            beat()
            versions = Versions(self._wake)  # taken first, so that no change is missed
            pause = await self.check_once()
            await versions.passed(timeout_seconds=pause)  # until the refusals have changed

    async def check_once(self) -> float:
        """Do the due work; return the seconds after which to look again,
        if nothing happens before.
        """
        refusals, now = tuple(self._refusals()), asyncio.get_running_loop().time()
        self._forget_absent({refusal.pod.uid for refusal in refusals})
        self._seen = {key: self._seen.get(key, now) for key in map(_key, refusals)}
        for notice in self._notices.take():
            self._events.raise_event(notice.pod, notice.reason, notice.text)
        pause = self._look_seconds
        for refusal in refusals:
            pause = min(pause, self._raise_event(refusal))
        for refusal in refusals:
            pause = min(pause, await self._evict(refusal))
        return max(pause, _SHORTEST_WAIT_SECONDS)

    def _raise_event(self, refusal: Refusal) -> float:
        """Raise the event if it is time; return the seconds until then."""
        key, now = (refusal.pod.uid, refusal.container), asyncio.get_running_loop().time()
        reason, was_final, reported_at = self._last_events.get(key, ("", False, 0.0))
        if (refusal.reason, refusal.final) == (reason, was_final):
            left = reported_at + _HOUR_SECONDS - now
        elif refusal.final:
            left = 0.0
        else:  # a reason with numbers in it may change with each try
            left = max(self._seen[_key(refusal)], reported_at) + REFUSED_EVENT_SECONDS - now
        if left > 0:
            return left
        self._last_events[key] = (refusal.reason, refusal.final, now)
        self._events.raise_event(
            refusal.pod,
            REFUSED,
            f"container {refusal.container} may not start with its {refusal.resource}: "
            f"{refusal.text}",  # the reason with the remedies
        )
        return self._look_seconds

    async def _evict(self, refusal: Refusal) -> float:
        """Evict the pod if it is time and allowed; return the seconds until the next check."""
        pod, after = refusal.pod, self._binding.refused_evict_seconds
        # Evicting the mirror of a static pod ends nothing: the kubelet runs the pod from a file.
        if (
            after <= 0  # no pod is evicted
            or MIRROR_POD in pod.annotations
            or pod.deleting
            or pod.ended
            or pod.uid in self._evicted
        ):
            return self._look_seconds
        backoff = self._backoffs.setdefault(pod.uid, Backoff())
        if refusal.final:  # waiting would not help
            after = 0.0
            if self._rescued(refusal.resource):
                return self._look_seconds
        wait = max(after - self._seconds(refusal), backoff.seconds_left)
        if wait > 0:
            return wait
        self._beat()
        try:
            await self._api.post(pod_path(pod.namespace, pod.name) + "/eviction", eviction(pod))
        except ClusterError as err:
            self._failed(pod, err, backoff)
            return backoff.seconds_left
        self._evicted.add(pod.uid)
        self.evictions["evicted"] += 1
        self._failure_log.recovered("eviction")
        seconds = self._seconds(refusal)
        text = (
            f"evicted because container {refusal.container} was not allowed to start for "
            f"{seconds:.0f} s: {refusal.reason}"
        )
        self._journal.record(
            "reschedule.evicted", level="warning", pod=pod.full_name, uid=pod.uid, reason=text
        )
        self._events.raise_event(pod, EVICTED, text)
        return self._look_seconds

    def _seconds(self, refusal: Refusal) -> float:
        """Return how long the container has been refused."""
        return asyncio.get_running_loop().time() - self._seen[_key(refusal)]

    def _failed(self, pod: Pod, err: ClusterError, backoff: Backoff) -> None:
        backoff.failed(err)
        if err.status == 429:  # a PodDisruptionBudget
            self.evictions["postponed"] += 1
            self._failure_log.record(
                f"budget {pod.uid}",
                "reschedule.postponed",
                "429",  # recorded once for each pod while this stays the same
                level="info",
                pod=pod.full_name,
                error=str(err),
            )
        elif err.status not in {404, 409}:
            # 404 and 409: it is gone or another pod has its name, and the watch will show that
            self.evictions["failed"] += 1
            self._failure_log.failed("eviction", err, PERMISSION, pod=pod.full_name)

    def _forget_absent(self, uids: set[str]) -> None:
        self._last_events = {key: last for key, last in self._last_events.items() if key[0] in uids}
        self._evicted &= uids
        for uid in self._backoffs.keys() - uids:
            self._failure_log.forget(uid)  # of all keys that contain it
        self._backoffs = {uid: backoff for uid, backoff in self._backoffs.items() if uid in uids}


def _key(refusal: Refusal) -> tuple[str, str, float]:
    return refusal.pod.uid, refusal.container, refusal.since


def eviction(pod: Pod) -> dict[str, object]:
    """Return the Eviction (policy/v1) of this very pod and not of another that took its name."""
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid}},
    }
