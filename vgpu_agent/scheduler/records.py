"""Records of single pods for the extender's answers to ``/explain``, which say why a pod waits:
names, and kube-scheduler's filter calls about each. No scheduling decision depends on them.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.pods import Pod

# The pods whose filter calls are remembered; a waiting pod is filtered again and again.
_MAX_CALLED_PODS = 5000
_MAX_SCHEDULERS = 16


class FilterCalls(msgspec.Struct, frozen=True):
    """kube-scheduler's filter calls about one pod.

    Attributes:
        times: the number of calls.
        at: unix seconds of the last call.
        nodes: the number of Nodes in it.
        node: the Node in the answer, which has one at most, because the extender chooses it itself;
            empty if the pod fitted on none of them.
    """

    times: int
    at: float
    nodes: int
    node: str


class PodRecords:
    """The records; see the module.

    State: in memory only, lost at a restart. The names of pods that hold cards, by UID. The filter
    calls by UID, the latest at the end, of `_MAX_CALLED_PODS` pods at most.

    Attributes:
        started_at: unix seconds since which filter calls are remembered.
        schedulers: ``spec.schedulerName`` of the pods in filter calls, as keys, at most
            `_MAX_SCHEDULERS`. A pod of another scheduler never comes to the extender.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.started_at = clock()
        self.schedulers: dict[str, None] = {}
        self._names: dict[str, str] = {}
        self._filter_calls: collections.OrderedDict[str, FilterCalls] = collections.OrderedDict()

    def note_holder(self, pod: Pod) -> None:
        """Remember the name of a pod that holds cards."""
        self._names[pod.uid] = pod.full_name

    def forget(self, uid: str) -> None:
        """Forget a pod that has gone."""
        self._names.pop(uid, None)
        self._filter_calls.pop(uid, None)

    def note_filter_call(self, pod: Pod, nodes: int, node: str) -> None:
        """Remember a filter call: the number of Nodes in it, and the one in the answer; empty if
        the pod fitted on none.
        """
        before = self._filter_calls.pop(pod.uid, None)
        times = before.times + 1 if before else 1
        self._filter_calls[pod.uid] = FilterCalls(times, self._clock(), nodes, node)
        if len(self._filter_calls) > _MAX_CALLED_PODS:
            self._filter_calls.popitem(last=False)
        if len(self.schedulers) < _MAX_SCHEDULERS:
            self.schedulers[pod.scheduler] = None

    def name_of(self, uid: str) -> str:
        """Return ``namespace/name`` of a pod that holds cards; empty where it is not known."""
        return self._names.get(uid, "")

    def filter_calls(self, uid: str) -> FilterCalls | None:
        """Return kube-scheduler's filter calls about a pod; None if there was none."""
        return self._filter_calls.get(uid)
