"""Facts about pods beside the cards that they hold: priority, groups, labels.

They come from the watch of pods, and from filter calls about pods that the watch has not shown yet.
Used for preemption, and to place pods of one group near each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.pods import Pod, SchedulingFacts


class KnownPod(msgspec.Struct, frozen=True, gc=False):
    """One pod.

    Attributes:
        node: the Node that the watch has shown it bound to; empty before.
        facts: what only schedulers use, such as its priority, labels and group.
        is_watched: the watch has shown it, and will show its end.
    """

    node: str
    facts: SchedulingFacts
    is_watched: bool = True


class KnownPods:
    """The pods of the cluster that are bound or in a group, by UID.

    State: in memory, from the watch: each pod by its UID, and the UIDs of each group, which is a
    gang or the pods of a controller.
    """

    def __init__(self) -> None:
        self._pods: dict[str, KnownPod] = {}
        # group → the UIDs of its pods, in the order in which they were seen
        self._groups: dict[str, dict[str, None]] = {}

    def see(self, pod: Pod) -> None:
        """Record a pod that is new or has changed."""
        facts = pod.scheduling
        if pod.ended or facts is None or not (pod.node or facts.group):
            self.forget(pod.uid)
            return
        before = self._pods.get(pod.uid)
        if before is not None and before.facts.group != facts.group:
            self.forget(pod.uid)
        if not pod.node:
            # Labels matter to the budgets that protect a bound pod. Those of thousands of pods that
            # wait could fill the memory.
            facts = msgspec.structs.replace(facts, labels=())
        self._pods[pod.uid] = KnownPod(pod.node, facts)
        if facts.group:
            self._groups.setdefault(facts.group, {})[pod.uid] = None

    def promise(self, pod: Pod) -> None:
        """Record a pod for which cards are kept; the watch may not have shown it yet."""
        if pod.scheduling is not None and pod.scheduling.group and pod.uid not in self._pods:
            self.see(pod)
            self._pods[pod.uid] = KnownPod(pod.node, pod.scheduling, is_watched=False)

    def end_promise(self, uid: str) -> None:
        """Forget such a pod, unless the watch has shown it meanwhile."""
        if (known := self._pods.get(uid)) is not None and not known.is_watched:
            self.forget(uid)

    def forget(self, uid: str) -> None:
        """Forget a pod that was deleted or has ended."""
        if (known := self._pods.pop(uid, None)) is None or not known.facts.group:
            return
        group = self._groups[known.facts.group]
        del group[uid]
        if not group:
            del self._groups[known.facts.group]

    def get(self, uid: str) -> KnownPod | None:
        """Return the facts about a pod; None if there are none."""
        return self._pods.get(uid)

    def peers(self, uid: str, group: str) -> Sequence[str]:
        """Return the UIDs of the other pods of a group, in the order in which they were seen."""
        return [other for other in self._groups.get(group, ()) if other != uid]
