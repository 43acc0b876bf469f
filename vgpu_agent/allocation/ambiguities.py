"""Starts that are refused because the kubelet's records name several pods for the same ids, and the
pod that gives way.

The kubelet may give ids to two pods, and takes them from neither (kubelet §7). Its calls for the
two are the same, so no start with these ids can be allowed while both pods are there, and both
would wait for ever. So one of them gives way: it is refused for good. `cluster` then writes an
event that tells the pod's user so, and recreates or evicts the pod where the operator wants that.
It is never a pod of which a container with such devices has started, nor a static pod, which the
API server cannot end. If there is no other, a person has to decide.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent.allocation.holdings import is_over
from vgpu_agent.pods import MIRROR_POD

if TYPE_CHECKING:
    from collections.abc import Collection

    from vgpu_agent.allocation.context import Context
    from vgpu_agent.allocation.identification import NotProvenError, Start
    from vgpu_agent.pods import Pod

# How long the records must name two pods before one of them gives way. A single reading may fall
# between the end of a pod and the admission of the next one. The kubelet asks again about every
# quarter of a minute.
AMBIGUITY_SECONDS = 5.0
# An ambiguity that was not seen for that long is over; the next one is another.
_FORGET_SECONDS = 60.0
_GIVE_WAY = "the other pod keeps them: delete this one, so that the next one gets other ids"

# the kubelet's UID of a pod (a static pod's own, not that of its mirror), and a container
_Key = tuple[str, str]


class Ambiguities:
    """The ambiguities of late, and the containers that give way.

    State: the first and the last refusal of each ambiguity, by token and the pods' UIDs, in the
    loop's time; and the containers that give way, which were refused for good.

    Attributes:
        total: how many starts were refused because the records named several holders.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: dict[tuple[str, frozenset[str]], tuple[float, float]] = {}
        self._giving_way: set[_Key] = set()
        self.total = 0

    def refuse(
        self,
        resource: str,
        token: str,
        err: NotProvenError,
        started: Collection[tuple[str, str, str]],
    ) -> None:
        """Record a refusal for each container that may be the one that starts.

        Args:
            resource: of the ids.
            token: of the ids.
            err: why the start is refused, whether because the records name several holders
                (``ambiguous``), and the suspects: the containers that may be meant.
            started: (pod's UID, container, resource) of the containers that were allowed to start.
        """
        gives_way = None
        if err.ambiguous:
            self.total += 1
            gives_way = self._which_gives_way(resource, token, err, started)
        else:
            self._forget(token)
        for pod, container in err.suspects:
            if _cannot_be_starting(pod, container):
                continue
            key = (pod.kubelet_uid, container)
            if key == gives_way:
                self._giving_way.add(key)
            self._context.refusals.refuse(
                pod,
                container,
                resource,
                str(err),
                advice=_GIVE_WAY if key == gives_way else "",
                final=key == gives_way,
            )

    def note_identified(self, token: str, start: Start | None) -> None:
        """Forget the ambiguity of ids that have one holder now, and the refusals of a pod that was
        to give way and starts after all. ``start`` is the start of the holder, None where a
        container starts again from the spec of its earlier start, while the watch does not show
        its pod.
        """
        self._forget(token)
        if start is not None:
            for key in [key for key in self._giving_way if key[0] == start.owner.pod_uid]:
                self._giving_way.discard(key)
                self._context.refusals.clear(*key)

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget the pods that are not among ``uids``."""
        self._giving_way = {key for key in self._giving_way if key[0] in uids}

    def _forget(self, token: str) -> None:
        self._seen = {key: times for key, times in self._seen.items() if key[0] != token}

    def _which_gives_way(
        self,
        resource: str,
        token: str,
        err: NotProvenError,
        started: Collection[tuple[str, str, str]],
    ) -> _Key | None:
        """Return the container whose pod gives way: of pods of which no container with such devices
        has started, the one that was bound last. None while the ambiguity is new or a pod of it is
        being deleted, and where there is no such pod, or only one pod is known.
        """
        now = asyncio.get_running_loop().time()
        self._seen = {
            each: (first, last)
            for each, (first, last) in self._seen.items()
            if now - last <= _FORGET_SECONDS
        }
        pods = {pod.kubelet_uid: pod for pod, _ in err.suspects}
        ambiguity = token, frozenset(pods)
        first, _ = self._seen.get(ambiguity, (now, now))
        self._seen[ambiguity] = (first, now)
        if (
            now - first < AMBIGUITY_SECONDS
            or len(pods) < 2
            or any(pod.deleting for pod in pods.values())
        ):
            return None
        begun = {uid for uid, _, _ in started}
        waiting = [
            (pod, container)
            for pod, container in err.suspects
            if pod.kubelet_uid not in begun
            and not any(each.started and resource in each.limits for each in pod.containers)
            and MIRROR_POD not in pod.annotations  # the annotation of a static pod's mirror
        ]
        if not waiting:
            return None
        # `bound`: the pod's position in the order of binds
        pod, container = max(waiting, key=lambda each: each[0].bound)
        return pod.kubelet_uid, container


def _cannot_be_starting(pod: Pod, name: str) -> bool:
    """Tell whether the container runs or is an init container that is over, by its pod's status."""
    container = pod.container(name)
    return container is not None and (container.running or is_over(pod, name))
