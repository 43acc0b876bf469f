"""Pods that hold a dead GPU, one that is lost or unhealthy: a label on them, and their eviction
after a time.

A container keeps its devices until it ends, so work on a dead GPU never continues there. An
eviction lets its controller make another pod, which gets another GPU. Evictions go through the API,
so PodDisruptionBudgets hold.

Built and run by `agent`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent.cluster.api import pod_path
from vgpu_agent.cluster.dead_gpus import dead_devices, pod_of, pods_on
from vgpu_agent.cluster.reschedule import PERMISSION, eviction
from vgpu_agent.cluster.retrying import Backoff, FailureLog
from vgpu_agent.concurrency import Versions
from vgpu_agent.errors import ClusterError
from vgpu_agent.pods import GPU_HEALTH_LABEL, MIRROR_POD, DesiredPod

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.cluster.dead_gpus import DeadDevice, GpuFacts
    from vgpu_agent.cluster.events import Events
    from vgpu_agent.journal import Journal
    from vgpu_agent.pods import Pod, PodCache

EVICTED = "GpuPodEvicted"  # the reason of the event about an evicted pod
LOST, UNHEALTHY = "lost", "unhealthy"  # the values of the label
_SHORTEST_WAIT_SECONDS = 0.01


def desired_labels(facts: GpuFacts, pods: PodCache) -> dict[str, DesiredPod]:
    """Return the label of each pod that holds a dead GPU, and its removal (None) from pods that
    hold only others, by the kubelet's UID (the API server's, except for static pods).
    """
    desired: dict[str, DesiredPod] = {}
    for grant in facts.grants():
        pod = pod_of(grant, pods)
        if pod is not None and GPU_HEALTH_LABEL in pod.labels:
            desired[pod.kubelet_uid] = DesiredPod(labels={GPU_HEALTH_LABEL: None})
    dead = dead_devices(facts.inventory.value)
    for pod, held in pods_on(dead, facts.grants(), pods).values():
        state = LOST if any(device.lost for device in held.values()) else UNHEALTHY
        desired[pod.kubelet_uid] = DesiredPod(labels={GPU_HEALTH_LABEL: state})
    return desired


class GpuEvictions:
    """The eviction of pods that have held a dead GPU for long enough.

    State: in memory only. After a restart the time of each pod begins anew.

    Attributes:
        counts: evictions by result, for metrics.
    """

    def __init__(
        self,
        api: Api,
        events: Events,
        facts: GpuFacts,
        pods: PodCache,
        after_seconds: float,
        journal: Journal,
        *,
        look_seconds: float = 5.0,
    ) -> None:
        """Build it.

        Args:
            api: the API server.
            events: writes an event for the owner of each evicted pod.
            facts: the GPUs and their holders.
            pods: the pods of this node.
            after_seconds: how long a pod must have held a dead GPU, without a break, before it is
                evicted.
            journal: evictions and failures are recorded there.
            look_seconds: the longest time between two checks of the pods, and between heartbeats.
        """
        self._api, self._events, self._facts, self._pods = api, events, facts, pods
        self._after_seconds, self._journal = after_seconds, journal
        self._look_seconds = look_seconds
        # the names of its events in the journal begin with `gpu_evictions.`
        self._failure_log = FailureLog(journal, "gpu_evictions")
        # The next three are by the API server's UID of a pod. `_since` is when a check first found
        # it on a dead GPU, by the event loop's clock: the node's clock may be set while it boots,
        # and a pod would then seem to have held the dead GPU for much longer than it has.
        self._since: dict[str, float] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._evicted: set[str] = set()
        self.counts = {"evicted": 0, "postponed": 0, "failed": 0}

    async def run(self, beat: Callable[[], None]) -> None:
        """Evict until cancelled; send a heartbeat before each request."""
        while True:
            beat()
            versions = Versions(self._facts.inventory)  # taken first, so that no change is missed
            pause = await self.look_once(beat)
            await versions.passed(timeout_seconds=pause)  # until there is a newer inventory

    async def look_once(self, beat: Callable[[], None] = lambda: None) -> float:
        """Evict the pods whose time has come; return the seconds until the next call."""
        now = asyncio.get_running_loop().time()
        # UID of a pod that holds a dead device → the pod, and its dead devices by UUID
        on_dead = pods_on(
            dead_devices(self._facts.inventory.value), self._facts.grants(), self._pods
        )
        self._forget_all_but(on_dead)
        pause = self._look_seconds
        for uid, (pod, held) in on_dead.items():
            # The eviction of a mirror pod ends nothing: the kubelet runs the pod from a file.
            if pod.deleting or MIRROR_POD in pod.annotations or uid in self._evicted:
                continue
            since = self._since.setdefault(uid, now)
            backoff = self._backoffs.setdefault(uid, Backoff())
            left = max(since + self._after_seconds - now, backoff.seconds_left)
            if left <= 0:
                # the GPU may have recovered during the requests for other pods
                if held.keys().isdisjoint(dead_devices(self._facts.inventory.value)):
                    continue
                beat()
                await self._evict(pod, held, backoff)
                left = backoff.seconds_left
            pause = min(pause, left or self._look_seconds)
        return max(pause, _SHORTEST_WAIT_SECONDS)

    async def _evict(self, pod: Pod, held: Mapping[str, DeadDevice], backoff: Backoff) -> None:
        """Request the eviction; ``held`` are the dead devices that the pod holds, by UUID."""
        try:
            await self._api.post(pod_path(pod.namespace, pod.name) + "/eviction", eviction(pod))
        except ClusterError as err:
            self._failed(pod, err, backoff)
            return
        self._evicted.add(pod.uid)
        self.counts["evicted"] += 1
        self._failure_log.recovered("eviction")
        device = next(iter(held.values()))
        text = (
            f"evicted because it has held {device.name} for {self._after_seconds:.0f} s since that "
            f"{'was lost' if device.lost else 'failed'}: {device.why}"
        )
        self._journal.record(
            "gpu_evictions.evicted", level="warning", pod=pod.full_name, uid=pod.uid, reason=text
        )
        self._events.raise_event(pod, EVICTED, text)

    def _failed(self, pod: Pod, err: ClusterError, backoff: Backoff) -> None:
        backoff.failed(err)
        if err.status == 429:  # a PodDisruptionBudget
            self.counts["postponed"] += 1
            self._failure_log.record(
                f"budget {pod.uid}",
                "gpu_evictions.postponed",
                "429",  # recorded once for each pod while this stays the same
                level="info",
                pod=pod.full_name,
                error=str(err),
            )
        elif err.status not in {404, 409}:
            # 404 and 409: the pod is gone or another one has its name, and the watch will show that
            self.counts["failed"] += 1
            # `PERMISSION`: the RBAC right for evictions, which the log names if it is missing
            self._failure_log.failed("eviction", err, PERMISSION, pod=pod.full_name)

    def _forget_all_but(self, uids: Mapping[str, object]) -> None:
        """Forget the pods that hold no dead GPU any more, also because the GPU has recovered."""
        for uid in self._since.keys() - uids.keys():
            del self._since[uid]
            self._backoffs.pop(uid, None)
            self._failure_log.forget(uid)  # the keys that contain it: `budget <uid>`
        self._evicted &= uids.keys()
