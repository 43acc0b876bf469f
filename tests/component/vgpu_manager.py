"""A stage for the family `vgpu-manager`: simulated GPUs, the simulated cluster, a stand-in for
vgpu-manager's extender, and the agent's real process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import constants
from tests.component.volcano import NODE, QUICK, QUICK_CONSTANTS
from tests.replacing import replace_text
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.cdi_reader import Received
from vgpu_agent.sim.cluster import SimulatedCluster
from vgpu_agent.sim.stand_in_library import deliver_stand_in_control_library
from vgpu_agent.sim.state import SimulatedNode

U0, U1 = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28", "GPU-7f1c2a90-5b64-4d1e-9c3f-2f8e6d7b1a45"
NUMBER, CORES, MEMORY = "nvidia.com/vgpu-number", "nvidia.com/vgpu-cores", "nvidia.com/vgpu-memory"
PRE, REAL = "nvidia.com/pre-allocated", "nvidia.com/real-allocated"
PHASE, TIME = "nvidia.com/assigned-phase", "nvidia.com/predicate-time"
ON = "families: {nvidia: false, vgpuManager: true}\n"
EXTENDER = "vgpu-scheduler"


def asks(number: int = 1, memory: int | None = None, cores: int | None = None) -> dict[str, int]:
    """The limits of a container; what is None is not mentioned."""
    named = {NUMBER: number, MEMORY: memory, CORES: cores}
    return {name: value for name, value in named.items() if value is not None}


class ManagerStage:
    """One node with two A10 in one cluster.

    Attributes:
        cluster: API server, kubelet, runtime, and the plain scheduler.
        gpus: the simulated GPUs.
        agent: the agent's process.
    """

    def __init__(self, folder: Path, **cluster: Any) -> None:
        self.folder = folder
        self.gpus = SimulatedNode.create(
            folder / "gpus", model="A10", gpus=2, numa=[0, 1], uuids=[U0, U1]
        )
        self.cluster = SimulatedCluster(folder / "cluster", node=NODE, **cluster)
        # as an operator delivers the library
        deliver_stand_in_control_library(folder / "manager")
        self.config, self.log = folder / "config.yaml", folder / "agent.log"
        self.agent: AgentProcess

    async def start_agent(self, more: str = ON) -> AgentProcess:
        """Configure, start, and wait until the Node shows slots."""
        text = QUICK.format(node=NODE, folder=self.folder)
        control = f"vgpuControl: {{hostDirectory: {self.folder / 'manager'}}}\n"
        replace_text(self.config, text + control + more)
        self.agent = AgentProcess(
            self.log,
            kubelet=self.cluster.kubelet_directory,
            simulate=self.gpus.directory,
            config=self.config,
            constants={**QUICK_CONSTANTS, constants.STARTS_FIRST: 0.2},
        )
        await self.agent.start()
        await self.offered()
        return self.agent

    async def offered(self) -> None:
        """Wait until the agent is ready and the Node shows slots."""
        await self.agent.until_ready()
        await self.cluster.until(lambda: self.slots > 0, "the Node to show slots")

    @property
    def slots(self) -> int:
        """The slots that pods may ask for."""
        return int((self.cluster.node_object()["status"].get("allocatable") or {}).get(NUMBER, 0))

    def bind(self, name: str, claims: str, **annotations: str) -> None:
        """Do what the extender does with filter and bind (vgpu-manager §4.3, §13.3)."""
        objects = self.cluster.objects
        written = {
            PRE: claims,
            REAL: "",
            "nvidia.com/predicate-node": NODE,
            TIME: "1787331600123456789",
        }
        labels = {PHASE: "allocating", "nvidia.com/metrics-node": NODE}
        metadata = {"annotations": written | annotations, "labels": labels}
        objects.patch("pods", name, {"metadata": metadata}, "default")
        uid = self.cluster.pod(name)["metadata"]["uid"]
        objects.bind(name, "default", {"metadata": {"uid": uid}, "target": {"name": NODE}})

    def create(
        self,
        name: str,
        limits: Mapping[str, int] | Sequence[Mapping[str, int]],
        claims: str,
        **more: Any,
    ) -> None:
        """Create a pod and bind it with these claims."""
        self.cluster.create_pod(name, limits, scheduler=EXTENDER, **more)
        self.bind(name, claims)

    async def serve(self, name: str, *args: Any, **more: Any) -> Received:
        """Create and bind a pod, wait until it runs, and return what ``main`` came with."""
        self.create(name, *args, **more)
        await self.cluster.running(name)
        return self.cluster.starts(name)[-1]

    def labels(self, name: str) -> dict[str, str]:
        """The pod's labels."""
        return dict(self.cluster.pod(name)["metadata"].get("labels") or {})

    async def phase(self, name: str, phase: str) -> None:
        """Wait until the pod's label says so."""
        await self.cluster.until(lambda: self.labels(name).get(PHASE) == phase, f"{name} {phase}")

    async def shares(self, name: str) -> dict[str, list[tuple[str, int, int]]]:
        """Container → the shares that the agent has booked for it."""
        answer = await self.agent.get(f"/debug/allocations?pod=default/{name}")
        return {
            grant["container"]: [
                (share["gpu"], share["memory_mib"], share["cores_percent"])
                for share in grant["shares"]
            ]
            for grant in answer["allocations"]
        }


@contextlib.asynccontextmanager
async def manager_stage(folder: Path, **options: Any) -> AsyncIterator[ManagerStage]:
    """A stage; the agent is ended with it, however the test ends."""
    stage = await asyncio.to_thread(lambda: ManagerStage(folder, **options))
    async with stage.cluster:
        try:
            yield stage
        finally:
            if hasattr(stage, "agent"):
                with contextlib.suppress(SimulationError):
                    await stage.agent.terminate()
