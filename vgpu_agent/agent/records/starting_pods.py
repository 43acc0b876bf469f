"""The pods that the kubelet is starting:
their names, the probable pod of a start, and whether there are any.

`reader` asks for names. Reading the kubelet's checkpoint takes as long as asking pod-resources
about one pod, so both begin at the same time, and the pod must be known before the checkpoint names
it. The expectation decides nothing: pod-resources' answer about a pod counts only if the
checkpoint, read in the same question, names that very pod.

`cluster`'s writer of annotations waits while pods are being started.
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

_PENDING = "Pending"  # a pod's phase until its first container runs


class StartingPods:
    """The view of the pod cache on pods that are starting.

    State: the containers that callers expect now, so that simultaneous callers expect different
    ones; since when pods have been seen pending.
    """

    def __init__(
        self,
        book: PodCache,
        ledger: Ledger,
        *,
        served: Callable[[], Container[tuple[str, str, str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use ``book``.

        Args:
            book: the pods of this node.
            ledger: knows which resources are of interest.
            served: UID, container and resource of what has been put in force already.
            clock: seconds that only grow.
        """
        self._book = book
        self._ledger = ledger
        self._served = served
        self._clock = clock
        self._offered: tuple[Resource, ...] = ()
        # those of `_offered`, and the same object until others are offered
        self._resources = frozenset[str]()
        self._asked_about: set[tuple[str, str]] = set()
        self._pending_since: dict[str, float] = {}

    @property
    def resources(self) -> frozenset[str]:
        """The resources of which the pod decides what an id stands for."""
        if self._offered is not self._ledger.resources:
            self._offered = self._ledger.resources
            self._resources = frozenset(
                offer.name for offer in self._offered if offer.decided_by is Decider.POD
            )
        return self._resources

    def any(self) -> bool:
        """Tell whether the kubelet is starting pods that ask for one of `resources`.
        Those that take too long do not count.
        """
        wanted, now = self.resources, self._clock()
        pending = [
            pod.kubelet_uid
            for pod in self._book.pods
            if pod.phase == _PENDING
            and not pod.deleting
            and any(not wanted.isdisjoint(container.limits) for container in pod.containers)
        ]
        self._pending_since = {uid: self._pending_since.get(uid, now) for uid in pending}
        return any(
            now - since < pod_publisher.STARTS_FIRST_SECONDS
            for since in self._pending_since.values()
        )

    def name(self, pod_uid: str, *, live: bool = False) -> tuple[str, str] | None:
        """(namespace, name) of the pod that the kubelet knows under a UID; None when we do not know
        it, or with ``live`` when it has ended.
        """
        pod = self._book.get(pod_uid)
        return (pod.namespace, pod.name) if pod and not (live and pod.ended) else None

    @contextlib.contextmanager
    def expected(
        self, resource: str, count: int, *, besides: Container[tuple[str, str]] = frozenset()
    ) -> Iterator[tuple[str, str] | None]:
        """Yield (namespace, name) of the pod to which a start with ``count`` ids probably belongs;
        None when none suits.

        It is the one bound first of those that wait for as many, since the kubelet admits pods in
        about that order. Until the ``with`` is left, no other caller expects that container.

        Args:
            resource: of which the ids are.
            count: of the ids.
            besides: UID and container of those that have other ids already.
        """
        found = self._longest_waiting(resource, count, besides)
        if found is None:
            yield None
            return
        self._asked_about.add(found)
        try:
            yield self.name(found[0])
        finally:
            self._asked_about.discard(found)

    def _longest_waiting(
        self, resource: str, count: int, besides: Container[tuple[str, str]]
    ) -> tuple[str, str] | None:
        """UID and container."""
        served = self._served()
        for pod in self._book.pods:
            for container in pod.containers:
                if container.limits.get(resource) != count or container.started or pod.ended:
                    continue
                found = (pod.kubelet_uid, container.name)
                if (
                    found not in self._asked_about
                    and found not in besides
                    and (*found, resource) not in served
                ):
                    return found
        return None
