"""Two GPUs whose health a test changes, a pod on each, and the simulated API server in memory."""

from __future__ import annotations

import asyncio

import msgspec

from tests.cluster.fake_api import FakeApi, WatchedPods, pod, pod_at, pod_of
from vgpu_agent.cluster.dead_gpus import GpuFacts
from vgpu_agent.cluster.events import Events
from vgpu_agent.concurrency import Latest
from vgpu_agent.journal import Journal
from vgpu_agent.model import Gpu, Grant, Health, Inventory, MigInstance, Owner, Share
from vgpu_agent.nodes import Node
from vgpu_agent.status import NvmlState, NvmlStatus, Problem

U0, U1 = "GPU-00000000-0000-0000-0000-000000000000", "GPU-11111111-1111-1111-1111-111111111111"
M0 = "MIG-00000000-0000-0000-0000-000000000000"
OF_NODE, OF_PODS = "/api/v1/namespaces/default/events", "/api/v1/namespaces/default/pods"
XID = "XID 79: the GPU has fallen off the bus"


def gpu(index: int, uuid: str, *, mig: tuple[MigInstance, ...] = ()) -> Gpu:
    """A healthy A100."""
    return Gpu(
        uuid,
        index,
        index,
        "NVIDIA A100-SXM4-40GB",
        40960,
        compute_capability=(8, 0),
        mig_enabled=bool(mig),
        mig_instances=mig,
    )


def grant(number: int, name: str, device: str) -> Grant:
    """The grant of container ``main`` of a pod of `World`."""
    owner = Owner("main", f"uid-{name}", "default", name)
    ids = (f"{device}::0",)
    return Grant(number, "nvidia", "nvidia.com/gpu", ids, (Share(device),), owner=owner)


class World:
    """A node with two GPUs; pod ``a`` holds the first, pod ``b`` the second."""

    def __init__(self, gpus: tuple[Gpu, ...] = ()) -> None:
        self.api, self.journal = FakeApi(), Journal()
        self.pods = WatchedPods(self.api, delay_seconds=0.0).book
        self.events = Events(self.api, "vgpu-agent", "n1", self.journal, self.now)
        self.inventory = Latest(Inventory(1, gpus or (gpu(0, U0), gpu(1, U1))))
        self.driver = NvmlStatus(state=NvmlState.ANSWERING)
        self.libraries: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.node = Node("n1", "node-uid")
        self.grants = [grant(1, "a", U0), grant(2, "b", U1)]
        for name in "ab":
            self.api.put(pod_at(name), pod(name))
            self.pods.put(pod_of(self.api.objects[pod_at(name)]))

    @property
    def facts(self) -> GpuFacts:
        """The facts with which the parts under test are built."""
        return GpuFacts(
            self.inventory,
            lambda: self.driver,
            lambda: self.grants,
            lambda: self.libraries,
            problems=lambda: self.problems,
        )

    @staticmethod
    def now() -> float:
        """Return unix seconds."""
        return 1000 + asyncio.get_running_loop().time()

    def fail(self, uuid: str = U0, reason: str = XID, *, lost: bool = False) -> None:
        """Make a GPU unhealthy, or have it lost."""
        self.change(uuid, Health(ok=False, reason=reason, since=self.now()), present=not lost)

    def recover(self, uuid: str = U0) -> None:
        """Make a GPU healthy."""
        self.change(uuid, Health(since=self.now()), present=True)

    def change(self, uuid: str, health: Health, *, present: bool) -> None:
        """Publish an inventory in which one GPU differs."""
        old = self.inventory.value
        gpus = tuple(
            msgspec.structs.replace(gpu, health=health, present=present)
            if gpu.uuid == uuid
            else gpu
            for gpu in old.gpus
        )
        self.inventory.publish(msgspec.structs.replace(old, gpus=gpus, version=old.version + 1))

    def told(self, kind: str) -> list[tuple[str, str, str]]:
        """Name, reason and message of each event about objects of that kind, oldest first."""
        return [
            (event["involvedObject"]["name"], event["reason"], event["message"])
            for event in self.api.below(OF_NODE)
            if event["involvedObject"]["kind"] == kind
        ]


def ignore() -> None:
    """A heartbeat without a listener."""
