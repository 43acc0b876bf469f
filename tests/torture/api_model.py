"""The API server as far as the torture test needs one: pods, their annotations, and a watch that is
late, unordered and sometimes gone.

`episode` binds pods here, `kubelet_model` reports their status here, and an agent's life subscribes
its `PodCache`. Events about one pod keep their order, as those of a real watch do; between pods any
order may come about, because what the agent sees of two pods that were bound at the same moment
must not matter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable

from tests.torture.plan import Ending, Kind, Origin, PlannedContainer, PlannedPod
from tests.torture.scheduler_model import Slice
from tests.torture.story import Story
from vgpu_agent.errors import ClusterError
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH, ContainerKind, Pod, PodCache, PodContainer

_KINDS = {
    Kind.INIT: ContainerKind.INIT,
    Kind.SIDECAR: ContainerKind.SIDECAR,
    Kind.MAIN: ContainerKind.MAIN,
}


EPOCH = 1_800_000_000.0
"""The unix time at which an episode begins."""


@dataclasses.dataclass(eq=False)
class LivePod:
    """One pod with a UID: what the API server shows of it, and what kubelet has done with it.

    Attributes:
        uid: kubelet's; of a static pod the hash of its file.
        slices: what the scheduler decided, by container; empty when it did not.
        gone: kubelet holds nothing of it any more.
        active: kubelet counts it among its pods, so its ids are in use.
        running: containers that run now.
        finished: plain init containers that have ended well.
        ended: when each container ended last.
        in_new_sandbox: no container has started since the node was started.
        pulled: containers whose image is there.
        starts: how often each container has started.
        started_at: when each container started last.
    """

    plan: PlannedPod
    uid: str
    namespace: str
    created_at: float
    slices: dict[str, tuple[Slice, ...]] = dataclasses.field(default_factory=dict)
    annotations: dict[str, str] = dataclasses.field(default_factory=dict)
    phase: str = "Pending"
    deleting: bool = False
    listed: bool = False
    active: bool = False
    gone: bool = False
    admitted: bool = False
    running: set[str] = dataclasses.field(default_factory=set)
    finished: set[str] = dataclasses.field(default_factory=set)
    ended: dict[str, float] = dataclasses.field(default_factory=dict)
    in_new_sandbox: bool = False
    pulled: set[str] = dataclasses.field(default_factory=set)
    starts: dict[str, int] = dataclasses.field(default_factory=dict)
    started_at: dict[str, float] = dataclasses.field(default_factory=dict)
    refusal: str = ""
    stuck_since: float = 0.0
    ends_at: float | None = None
    heard_at: float = 0.0
    version: int = 0

    @property
    def name(self) -> str:
        """The pod's name."""
        return self.plan.name

    @property
    def complete(self) -> bool:
        """All its main containers have started at least once."""
        return all(
            self.starts.get(each.name) for each in self.plan.containers if each.kind is Kind.MAIN
        )

    @property
    def short_lived(self) -> bool:
        """Meant to be deleted before it starts."""
        return self.plan.ending is Ending.EARLY

    def container(self, name: str) -> PlannedContainer:
        """The container of that name."""
        return next(each for each in self.plan.containers if each.name == name)

    def shown(self) -> Pod:
        """Return the pod as the agent's watch would show it now."""
        static = self.plan.origin is Origin.STATIC
        return Pod(
            uid=f"mirror-of-{self.uid}" if static else self.uid,
            namespace=self.namespace,
            name=self.name,
            node=NODE,
            phase=self.phase,
            annotations=(
                {**self.annotations, STATIC_POD_HASH: self.uid, MIRROR_POD: self.uid}
                if static
                else dict(self.annotations)
            ),
            containers=tuple(
                PodContainer(
                    each.name,
                    _KINDS[each.kind],
                    each.request.limits if each.request else {},
                    started=each.name in self.starts,
                    started_at=float(int(EPOCH + self.started_at[each.name]))
                    if each.name in self.started_at
                    else 0.0,
                    completed=each.name in self.finished,
                    ended_at=float(int(EPOCH + self.ended[each.name]))
                    if each.name in self.ended
                    else 0.0,
                )
                for each in self.plan.containers
            ),
            deleting=self.deleting,
            created_at=float(int(self.created_at)),
            scheduler="volcano" if self.plan.origin is Origin.VOLCANO else "default-scheduler",
            resource_version=str(self.version),
            reported=self.admitted or bool(self.starts),
            in_new_sandbox=self.in_new_sandbox,
            scheduled=not static or self.admitted,
        )


NODE = "node-a"


class ApiModel:
    """The pods that are bound to the node, and the agent's watch of them."""

    def __init__(self, rng: random.Random, story: Story) -> None:
        self._rng, self._story = rng, story
        self._book: PodCache | None = None
        self._connection = 0
        self._version = 0
        self.pods: dict[str, LivePod] = {}
        self._names: dict[str, str] = {}
        self.away = False
        self.longest_delays_seconds = (0.03, 1.0, 8.0)  # of most events, of some, and of few

    # -- the cluster's side ------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Tell whether there is a pod of that name."""
        return name in self._names

    def show(self, pod: LivePod) -> None:
        """The pod is bound to the node, or its status has changed."""
        self._version += 1
        pod.version = self._version
        pod.listed = True
        self.pods[pod.uid] = pod
        self._names[pod.name] = pod.uid
        self._emit(pod, PodCache.put)

    def remove(self, pod: LivePod) -> None:
        """The object is deleted."""
        if self.pods.pop(pod.uid, None) is not None:
            pod.listed = False
            if self._names.get(pod.name) == pod.uid:
                del self._names[pod.name]
            self._emit(pod, PodCache.remove)

    # -- the agent's side --------------------------------------------------------------------------

    def connect(self, book: PodCache) -> None:
        """An agent starts its watch: a complete list after a while, events from then on."""
        self._book = book
        self._reconnect()

    def disconnect(self) -> None:
        """The agent is gone, and its events are dropped."""
        self._book = None
        self._connection += 1

    def leave(self) -> None:
        """The API server is unreachable from now on."""
        self.away = True
        self._connection += 1
        self._story.tell("API away")

    def come_back(self) -> None:
        """It answers again."""
        self.away = False
        self._story.tell("API back")
        self._reconnect()

    async def fetch(self, namespace: str, name: str) -> Pod | None:
        """Return the answer to a GET of the pod."""
        await asyncio.sleep(self._rng.random() * 0.05)
        if self.away:
            raise ClusterError("the API server does not answer")
        pod = next(
            (pod for pod in self.pods.values() if (pod.namespace, pod.name) == (namespace, name)),
            None,
        )
        return pod.shown() if pod else None

    def _reconnect(self) -> None:
        self._connection += 1
        if self._book is not None and not self.away:
            asyncio.get_running_loop().call_later(
                self._rng.random() * 0.3, self._list, self._connection
            )

    def _list(self, connection: int) -> None:
        if self._book is not None and connection == self._connection:
            self._book.replace([pod.shown() for pod in self.pods.values()])
            # earlier events are in the list, and must not arrive after later ones
            self._connection += 1
            for pod in self.pods.values():
                pod.heard_at = 0.0

    def _emit(self, pod: LivePod, change: Callable[[PodCache, Pod], None]) -> None:
        if self._book is None or self.away:
            return
        loop = asyncio.get_running_loop()
        longest = self._rng.choices(self.longest_delays_seconds, (85, 12, 3))[0]
        pod.heard_at = max(pod.heard_at, loop.time() + self._rng.random() * longest) + 1e-6
        loop.call_at(pod.heard_at, self._hear, self._connection, pod.shown(), change)

    def _hear(self, connection: int, shown: Pod, change: Callable[[PodCache, Pod], None]) -> None:
        if self._book is not None and connection == self._connection:
            change(self._book, shown)
