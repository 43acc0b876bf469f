"""The pods that kubelet's records name, and the one that a start is probably about.

`witness` asks it. Reading kubelet's checkpoint takes as long as asking pod-resources about one pod, so both begin at the same time, and for
that somebody must say which pod before the checkpoint does. What is expected here decides nothing: what pod-resources says of a pod counts
only if the checkpoint, read in the same question, names that very pod (DESIGN §5).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from vgpu_agent.pods import PodBook


class StartingPods:
    """Looks into the book of pods.

    State: whose start is being asked about now, so that those who ask at the same time expect different ones.
    """

    def __init__(self, book: PodBook, *, served: Callable[[], Container[tuple[str, str, str]]]) -> None:
        """Use ``book``.

        Args:
            book: the pods of this node.
            served: UID, container and resource of what has been put in force already.
        """
        self._book = book
        self._served = served
        self._asked_about: set[tuple[str, str]] = set()

    def name(self, pod_uid: str) -> tuple[str, str] | None:
        """(namespace, name) of the pod that kubelet knows under a UID; None when we do not know it."""
        pod = self._book.get(pod_uid)
        return (pod.namespace, pod.name) if pod else None

    @contextlib.contextmanager
    def expected(self, resource: str, count: int) -> Iterator[tuple[str, str] | None]:
        """(namespace, name) of the pod to which a start with ``count`` ids probably belongs; None when none suits.

        It is the one bound first of those that wait for as many, since kubelet admits pods in about that order. Until the ``with`` is left,
        nobody else is told of it.
        """
        found = self._longest_waiting(resource, count)
        if found is None:
            yield None
            return
        self._asked_about.add(found)
        try:
            yield self.name(found[0])
        finally:
            self._asked_about.discard(found)

    def _longest_waiting(self, resource: str, count: int) -> tuple[str, str] | None:
        """UID and container."""
        served = self._served()
        for pod in self._book.pods:
            for container in pod.containers:
                if container.limits.get(resource) != count or container.started or pod.ended:
                    continue
                found = (pod.kubelet_uid, container.name)
                if found not in self._asked_about and (*found, resource) not in served:
                    return found
        return None
