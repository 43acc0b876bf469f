"""The pods that the kubelet is starting:
their names, the probable pod of a start, and whether there are any.

Used by `reader`. To read the kubelet's checkpoint takes as long as to ask pod-resources about one
pod, so `reader` does both at the same time. For that it needs the probable pod before the
checkpoint names it. A wrong guess does no harm: the answer about a pod counts only if the
checkpoint, read at the same time, names the same pod.

The publisher of pods' annotations in `cluster` waits while pods are being started: its writes take
the kubelet's and the API server's time, too.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from vgpu_agent.cluster import pod_publisher
from vgpu_agent.model import Decider

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Resource
    from vgpu_agent.pods import PodCache

_PENDING = "Pending"  # a pod's phase until its main containers run


class StartingPods:
    """The pods of the pod cache that are starting.

    State: the containers that callers of `expected` ask about now, so that simultaneous callers get
    different ones; and since when each pod has been pending. Lost with the process, without harm.
    """

    def __init__(
        self,
        pod_cache: PodCache,
        ledger: Ledger,
        *,
        started: Callable[[], Container[tuple[str, str, str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Observe the pods in ``pod_cache``.

        Args:
            pod_cache: the pods of this node.
            ledger: has the offered resources.
            started: returns (UID, container, resource) of the containers that have their shares.
            clock: monotonic seconds.
        """
        self._pod_cache = pod_cache
        self._ledger = ledger
        self._started = started
        self._clock = clock
        self._offered: tuple[Resource, ...] = ()
        # computed from `_offered`; the same object until the offer changes
        self._decided_by_pod = frozenset[str]()
        self._asked_about: set[tuple[str, str]] = set()  # (UID, container) inside an `expected` now
        self._pending_since: dict[str, float] = {}

    @property
    def decided_by_pod(self) -> frozenset[str]:
        """The resources whose ids get their meaning from the pod, e.g. from its annotations."""
        if self._offered is not self._ledger.resources:
            self._offered = self._ledger.resources
            self._decided_by_pod = frozenset(
                offer.name for offer in self._offered if offer.decided_by is Decider.POD
            )
        return self._decided_by_pod

    def any_starting(self) -> bool:
        """Tell whether the kubelet is starting pods that ask for one of `decided_by_pod`. Pods that
        have been pending for longer than `pod_publisher.STARTS_FIRST_SECONDS` do not count: they
        wait for something else, such as an image.
        """
        wanted, now = self.decided_by_pod, self._clock()
        pending = [
            pod.kubelet_uid
            for pod in self._pod_cache.pods
            if pod.phase == _PENDING
            and not pod.deleting
            and any(not wanted.isdisjoint(container.limits) for container in pod.containers)
        ]
        self._pending_since = {uid: self._pending_since.get(uid, now) for uid in pending}
        return any(
            now - since < pod_publisher.STARTS_FIRST_SECONDS
            for since in self._pending_since.values()
        )

    def name_of(self, pod_uid: str, *, live: bool = False) -> tuple[str, str] | None:
        """Return (namespace, name) of the pod that has this UID in the kubelet (that of a static
        pod differs in the API server); None when it is not in the cache, or with ``live`` when it
        has ended.
        """
        pod = self._pod_cache.get(pod_uid)
        return (pod.namespace, pod.name) if pod and not (live and pod.ended) else None

    @contextlib.contextmanager
    def expected(
        self, resource: str, count: int, *, excluding: Container[tuple[str, str]] = frozenset()
    ) -> Iterator[tuple[str, str] | None]:
        """Yield (namespace, name) of the pod to which a start with ``count`` ids probably belongs;
        None when no pod waits for that many ids.

        Of several pods it is the one that was bound first, since the kubelet admits pods in about
        that order. Inside the ``with`` block, no other caller expects the same container.

        Args:
            resource: the resource of the ids.
            count: the number of ids.
            excluding: (UID, container) of containers that hold other ids already.
        """
        found = self._longest_waiting(resource, count, excluding)
        if found is None:
            yield None
            return
        self._asked_about.add(found)
        try:
            yield self.name_of(found[0])
        finally:
            self._asked_about.discard(found)

    def _longest_waiting(
        self, resource: str, count: int, excluding: Container[tuple[str, str]]
    ) -> tuple[str, str] | None:
        """Return (UID, container) of the container that has waited longest for ``count`` ids of
        ``resource``; None without any.
        """
        started = self._started()  # have their shares; `container.started` (they run) comes later
        for pod in self._pod_cache.pods:  # in the order in which they were bound
            for container in pod.containers:
                if container.limits.get(resource) != count or container.started or pod.ended:
                    continue
                found = (pod.kubelet_uid, container.name)
                if (
                    found not in self._asked_about
                    and found not in excluding
                    and (*found, resource) not in started
                ):
                    return found
        return None
