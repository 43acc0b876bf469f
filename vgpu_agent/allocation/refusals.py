"""The containers that may not start now, with the reasons:
the one list for all code that reports such a pod, evicts it or creates it again.

`allocation` adds an entry each time PreStartContainer refuses, and removes it when the container
starts after all. `cluster` reads the list: a pod that stays refused gets an event and, if
configured, is evicted. `web` shows the list.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.concurrency import Revision
from vgpu_agent.errors import shortened, with_advice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vgpu_agent.pods import Pod

# Far more than a node has containers at a time.
MAX_REFUSALS = 1000
# Characters, of up to four bytes: more than any text of ours has, apart from the values that it
# quotes. So all reasons take 8 MiB at most, and all advice as much.
LONGEST_REASON = 2048


class Refusal(msgspec.Struct, frozen=True):
    """One container whose start was refused and that has not started since.

    Attributes:
        pod: as the watch of the API server's pods showed it last.
        resource: the resource of the ids in question.
        reason: the text of the last refusal; the kubelet shows the same in the pod's status.
        advice: the remedies, and the state at the last refusal, in sentences; the kubelet shows it
            after the reason.
        since: unix seconds of the first of the consecutive refusals.
        count: the number of consecutive refusals.
        final: trying again cannot help. With early binding, a wrong guess has given the container
            the devices of another one; or the kubelet has given its ids to another pod as well,
            which keeps them (`ambiguities`).
    """

    pod: Pod
    container: str
    resource: str
    reason: str
    since: float
    count: int
    final: bool
    advice: str = ""

    @property
    def text(self) -> str:
        """The reason with the advice."""
        return with_advice(self.reason, self.advice)


class Refusals:
    """The refusals of this node that still hold, one for each container.

    State: memory only. The kubelet tries a refused start again about every 15 seconds. So after a
    restart the list fills by itself, with later times. `revision` advances with every change. Only
    the event loop's thread may change it. At most `MAX_REFUSALS` are kept, those refused last, each
    with a reason and an advice of `LONGEST_REASON` characters.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.revision = Revision()
        self._clock = clock
        # by container: (UID of its pod, name). The UID is the one that the kubelet uses; the API
        # server has another one for static pods only.
        self._refusals: dict[tuple[str, str], Refusal] = {}

    @property
    def current(self) -> tuple[Refusal, ...]:
        """The refusals, the oldest first."""
        return tuple(sorted(self._refusals.values(), key=lambda refusal: refusal.since))

    def refuse(
        self,
        pod: Pod,
        container: str,
        resource: str,
        reason: str,
        *,
        advice: str = "",
        final: bool = False,
    ) -> None:
        """Record that ``container`` was refused now. A refusal that was final stays final."""
        key = (pod.kubelet_uid, container)
        before, reason, advice = (
            self._refusals.pop(key, None),
            shortened(reason, LONGEST_REASON),
            shortened(advice, LONGEST_REASON),
        )
        if before is None:
            self._refusals[key] = Refusal(
                pod,
                container,
                resource,
                reason,
                since=self._clock(),
                count=1,
                final=final,
                advice=advice,
            )
        else:
            final = final or before.final
            self._refusals[key] = Refusal(
                pod,
                container,
                resource,
                reason,
                since=before.since,
                count=before.count + 1,
                final=final,
                advice=advice,
            )
        if len(self._refusals) > MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
        self._changed()

    def clear(self, pod_uid: str, container: str) -> None:
        """Remove the refusal of ``container`` because it may start; do nothing if there is none.

        ``pod_uid`` is the kubelet's UID of the pod.
        """
        if self._refusals.pop((pod_uid, container), None) is not None:
            self._changed()

    def forget_absent(self, pods: Iterable[Pod]) -> None:
        """Remove every container whose pod has ended or is not among ``pods``, all pods of the
        node; update the pods of the others.
        """
        present = {pod.kubelet_uid: pod for pod in pods if not pod.ended}
        kept = {
            key: msgspec.structs.replace(refusal, pod=present[key[0]])
            for key, refusal in self._refusals.items()
            if key[0] in present
        }
        if kept != self._refusals:
            self._refusals = kept
            self._changed()

    def _changed(self) -> None:
        self.revision.advance()
