"""Records of single pods for people: names, and kube-scheduler's last question
about each. No decision depends on it.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.pods import Pod

# The pods whose last question is remembered; a waiting pod is asked about again and again.
_MAX_ASKED = 5000
_MAX_SCHEDULERS = 16


class Asked(msgspec.Struct, frozen=True):
    """kube-scheduler's questions about a pod.

    Attributes:
        times: how often it has asked.
        at: unix seconds of the last time.
        nodes: the number of Nodes that it offered then.
        node: the Node that the answer named; empty if the pod fitted on none of them.
    """

    times: int
    at: float
    nodes: int
    node: str


class PodRecords:
    """The records; see the module.

    State: in memory only, lost at a restart. Names by UID, of pods that hold cards. The last
    questions by UID, the latest at the end, `_MAX_ASKED` at most.

    Attributes:
        started_at: unix seconds since which questions are remembered.
        schedulers: ``spec.schedulerName`` of the pods that were asked about.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.started_at = clock()
        self.schedulers: dict[str, None] = {}
        self._names: dict[str, str] = {}
        self._asked: collections.OrderedDict[str, Asked] = collections.OrderedDict()

    def holds(self, pod: Pod) -> None:
        """Remember the name of a pod that holds cards."""
        self._names[pod.uid] = pod.full_name

    def forget(self, uid: str) -> None:
        """Forget a pod that has gone."""
        self._names.pop(uid, None)
        self._asked.pop(uid, None)

    def asked(self, pod: Pod, nodes: int, node: str) -> None:
        """Remember a question about a pod: the number of offered Nodes, and the chosen one."""
        before = self._asked.pop(pod.uid, None)
        times = before.times + 1 if before else 1
        self._asked[pod.uid] = Asked(times, self._clock(), nodes, node)
        if len(self._asked) > _MAX_ASKED:
            self._asked.popitem(last=False)
        if len(self.schedulers) < _MAX_SCHEDULERS:
            self.schedulers[pod.scheduler] = None

    def name_of(self, uid: str) -> str:
        """Return ``namespace/name`` of a pod that holds cards; empty where it is not known."""
        return self._names.get(uid, "")

    def last_asked(self, uid: str) -> Asked | None:
        """Return kube-scheduler's questions about a pod; None if there was none."""
        return self._asked.get(uid)
