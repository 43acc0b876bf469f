"""Pods as this agent needs them: plain facts from the API server, and the one book of the pods on this node.

`cluster` fills the book from its watch, `allocation` looks up whose container is about to start, families read annotations and limits, and
the pod publisher compares what is written with what should be. Kept as small as possible: a node has some hundred pods, and this is what
remains of each.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import operator
from typing import TYPE_CHECKING

from vgpu_agent.concurrency import Latest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# kubelet keeps a static pod under the hash of its file; the API server's mirror of it has a UID of its own and names the hash here.
STATIC_POD_HASH = "kubernetes.io/config.hash"
MIRROR_POD = "kubernetes.io/config.mirror"

_MOST_NAMES = 10_000  # that a book remembers; a node has some hundred pods at a time

_ENDED = ("Succeeded", "Failed")


class ContainerKind(enum.StrEnum):
    """Which life a container has inside its pod."""

    INIT = "init"  # ends before the next one starts; kubelet gives its device ids to later containers
    SIDECAR = "sidecar"  # an init container with restartPolicy Always: keeps its ids
    MAIN = "main"


@dataclasses.dataclass(frozen=True, slots=True)
class PodContainer:
    """One container of a pod's specification.

    Attributes:
        limits: resource → whole number, for extended resources only (those with a slash in their name); what is no whole number is in
            ``unreadable`` instead.
        unreadable: resource → the text that could not be read as a whole number.
        environment: names of the variables that the specification sets (not their values).
        started: the pod's status says that it runs now or ran before.
    """

    name: str
    kind: ContainerKind = ContainerKind.MAIN
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unreadable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: frozenset[str] = frozenset()
    started: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """One pod that is bound to this node.

    Attributes:
        uid: as the API server has it; see `kubelet_uid`.
        containers: in the order in which kubelet admits them: init containers and sidecars as they stand, then the main ones.
        deleting: it has a deletion timestamp.
        created_at: unix seconds of its creation.
        bound: its place in the order in which our watch saw pods bound to this node; smaller is earlier.
        scheduler: ``spec.schedulerName``.
    """

    uid: str
    namespace: str
    name: str
    node: str = ""
    phase: str = "Pending"
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    containers: tuple[PodContainer, ...] = ()
    deleting: bool = False
    created_at: float = 0.0
    bound: int = 0
    scheduler: str = ""
    resource_version: str = ""

    @property
    def full_name(self) -> str:
        """``namespace/name``, for logs."""
        return f"{self.namespace}/{self.name}"

    @property
    def kubelet_uid(self) -> str:
        """The UID under which kubelet keeps the pod: for a mirror of a static pod, the hash of its file."""
        return self.annotations.get(STATIC_POD_HASH, self.uid) if MIRROR_POD in self.annotations else self.uid

    @property
    def ended(self) -> bool:
        """All containers have ended and none will start again."""
        return self.phase in _ENDED

    def container(self, name: str) -> PodContainer | None:
        """The container of that name, or None."""
        return next((container for container in self.containers if container.name == name), None)


class PodBook:
    """The pods of this node as far as our watch has come.

    State: replaced by `replace` after each list, changed by `put` and `remove` with each event. `revision` moves on with every change.
    Only the event loop's thread may change it.
    """

    def __init__(self) -> None:
        self.revision: Latest[int] = Latest(0)
        self.synced = asyncio.Event()
        self._pods: dict[str, Pod] = {}  # by kubelet's UID
        self._in_order: tuple[Pod, ...] | None = None  # `pods`, asked for many times between two changes
        self._bound: dict[str, int] = {}
        self._last_bound = 0
        self._uids: collections.OrderedDict[tuple[str, str], set[str]] = collections.OrderedDict()  # by name, the last used at the end

    @property
    def pods(self) -> tuple[Pod, ...]:
        """All of them, in the order in which they were seen bound."""
        if self._in_order is None:
            self._in_order = tuple(sorted(self._pods.values(), key=operator.attrgetter("bound")))
        return self._in_order

    def get(self, kubelet_uid: str) -> Pod | None:
        """The pod that kubelet knows under that UID."""
        return self._pods.get(kubelet_uid)

    def named(self, namespace: str, name: str) -> Pod | None:
        """The pod of that name; when one was replaced by another, the one that was bound last."""
        found = [pod for pod in self._pods.values() if (pod.namespace, pod.name) == (namespace, name)]
        return max(found, key=lambda pod: pod.bound, default=None)

    def one_of_its_name(self, pod: Pod) -> bool:
        """Whether no other pod has been seen under this one's name; kubelet may still have a predecessor that was deleted by force."""
        return self._uids.get((pod.namespace, pod.name), set()) <= {pod.kubelet_uid}

    def replace(self, pods: Iterable[Pod]) -> None:
        """Take over a complete list: whoever is not in it is gone.

        Pods that a list shows for the first time are ordered by creation, because nobody saw them being bound.
        """
        listed = {pod.kubelet_uid: pod for pod in sorted(pods, key=lambda pod: (pod.created_at, pod.namespace, pod.name))}
        self._bound = {uid: place for uid, place in self._bound.items() if uid in listed}
        before = self._pods
        self._pods, self._in_order = {uid: self._placed(pod) for uid, pod in listed.items()}, None
        if self._pods != before or not self.synced.is_set():
            self._changed()
        self.synced.set()

    def put(self, pod: Pod) -> None:
        """Take over one pod that was added or changed."""
        placed = self._placed(pod)
        if self._pods.get(pod.kubelet_uid) != placed:
            self._pods[pod.kubelet_uid] = placed
            self._changed()

    def remove(self, pod: Pod) -> None:
        """Forget a pod that the API server has deleted."""
        known = self._pods.get(pod.kubelet_uid)
        if known is not None and known.uid == pod.uid:
            del self._pods[pod.kubelet_uid]
            self._bound.pop(pod.kubelet_uid, None)
            self._changed()

    def _placed(self, pod: Pod) -> Pod:
        name = (pod.namespace, pod.name)
        self._uids.setdefault(name, set()).add(pod.kubelet_uid)
        self._uids.move_to_end(name)
        if len(self._uids) > _MOST_NAMES:
            self._uids.popitem(last=False)
        if pod.kubelet_uid not in self._bound:
            self._last_bound += 1
            self._bound[pod.kubelet_uid] = self._last_bound
        return dataclasses.replace(pod, bound=self._bound[pod.kubelet_uid])

    def _changed(self) -> None:
        self._in_order = None
        self.revision.publish(self.revision.value + 1)
