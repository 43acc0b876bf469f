"""A stage with everything that Volcano's story needs:
simulated GPUs, the simulated cluster, and the agent's real process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tests import constants
from tests.patience import PATIENCE_SECONDS
from tests.replacing import replace_text
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.cdi_reader import Received
from vgpu_agent.sim.cluster import SimulatedCluster
from vgpu_agent.sim.stand_in_library import deliver_stand_in_library
from vgpu_agent.sim.state import SimulatedNode

NODE = "node-a"
U0, U1 = "GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002"
NUMBER, MEMORY, CORES = "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores"
IDS = "volcano.sh/vgpu-ids-new"
REGISTER = "volcano.sh/node-vgpu-register"

# Memory in units of 64 MiB keeps kubelet's lists short; only the golden vectors want every MiB as
# an id.
FACTOR = 64

# Short pauses everywhere, so that a test sees in a second what a node sees in minutes.
QUICK = """\
version: v1
nodeName: {node}
kubeconfig: {folder}/cluster/kubeconfig
stateDirectory: {folder}/state
gpu:
  {{usageSeconds: 1, recovery: {{quietSeconds: 0.5}}}}
binding: {{cdiDirectory: {folder}/cluster/cdi}}
hamiCore: {{hostDirectory: {folder}/vgpu}}
"""
QUICK_CONSTANTS = {
    constants.RELOAD: 0.1,
    constants.GPU_POLL: 0.2,
    constants.GPU_INIT_RETRY: 0.2,
    constants.MAX_QUIET: 5,
    constants.STARTS_FIRST: 2,
    constants.SPEC_LOOK: 0.2,
    constants.SHUTDOWN: 3,
    constants.WEB_SHUTDOWN: 3,
    constants.VERIFY: 1,
    constants.RESERVATION: 5,
    constants.REGISTER_RETRY_MAX: 1,
    constants.SOCKET_POLL: 1,
    constants.DRAIN: 0.5,
    constants.API_BACKOFF_MIN: 0.1,
    constants.API_BACKOFF_MAX: 0.5,
    constants.API_REQUEST_TIMEOUT: 10,
    constants.HANDSHAKE: 0.2,
    constants.POD_WAIT: 0.5,
    constants.REFUSED_EVENT: 1,
}
VGPU = "families: {nvidia: false, volcanoVgpu: true}\n"
GPUSHARE = "families: {nvidia: false, volcanoGpushare: true}\n"


def asks(number: int = 1, memory: int | None = None, cores: int | None = None) -> dict[str, int]:
    """The limits of a container; what is None is not mentioned."""
    named = {NUMBER: number, MEMORY: memory, CORES: cores}
    return {name: value for name, value in named.items() if value is not None}


async def recover_after(agent: AgentProcess, config: Path, seconds: float) -> None:
    """From now on, let a GPU that was ill come back once it has been quiet for so long."""
    text = await asyncio.to_thread(config.read_text)
    changed, number = re.subn(r"quietSeconds: [0-9.]+", f"quietSeconds: {seconds:g}", text)
    assert number == 1, text
    await asyncio.to_thread(replace_text, config, changed)
    await agent.until(
        "/debug/config",
        lambda found: found["values"]["gpu.recovery.quietSeconds"]["value"] == seconds,
    )


class VolcanoStage:
    """One node in one cluster.

    Attributes:
        cluster: API server, kubelet, runtime, schedulers.
        gpus: the simulated GPUs.
        agent: the agent's process; `start_agent` makes the first.
        constants: the agent's constants that have other values; see `AgentProcess`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "A10",
        uuids: Sequence[str] = (U0, U1),
        **cluster: Any,
    ) -> None:
        self.folder = folder
        self.gpus = SimulatedNode.create(
            folder / "gpus",
            model=model,
            gpus=len(uuids),
            numa=[2 * place // len(uuids) for place in range(len(uuids))],
            uuids=uuids,
        )
        self.cluster = SimulatedCluster(folder / "cluster", node=NODE, **cluster)
        self.config = folder / "config.yaml"
        self.log = folder / "agent.log"
        self.agent: AgentProcess
        self.constants: dict[str, float | str] = dict(QUICK_CONSTANTS)
        self.factor = FACTOR

    def configure(self, more: str = VGPU, *, factor: int = FACTOR) -> None:
        """Write the agent's configuration."""
        self.factor = factor
        text = QUICK.format(node=NODE, folder=self.folder)
        text += more
        replace_text(
            self.config, text + f"volcanoVgpu: {{gpuMemoryFactor: {factor}, nodeConfigFile: ''}}\n"
        )

    def deliver_library(self) -> None:
        """Put libvgpu.so where the operator would."""
        deliver_stand_in_library(self.folder / "vgpu")

    def new_agent(self) -> AgentProcess:
        """The agent of this node, not started."""
        self.agent = AgentProcess(
            self.log,
            kubelet=self.cluster.kubelet_directory,
            simulate=self.gpus.directory,
            config=self.config,
            constants=self.constants,
        )
        return self.agent

    async def start_agent(
        self, more: str = VGPU, *, factor: int = FACTOR, offers: Sequence[str] = ()
    ) -> AgentProcess:
        """Configure, deliver the library, start, and wait until the Node shows what is offered."""
        self.configure(more, factor=factor)
        self.deliver_library()
        await self.new_agent().start()
        await self.offered(*offers)
        return self.agent

    async def restart_agent(self) -> None:
        """Start the agent anew, after it has ended, and wait until it is ready."""
        await self.agent.start()
        await self.agent.until_ready()

    async def offered(self, *names: str) -> None:
        """Wait until the agent is ready, the Node shows these resources (all of vGPU's, if none is
        named), and the scheduler knows.
        """
        await self.agent.until_ready()
        wanted = names or (NUMBER, MEMORY, CORES)
        await self.cluster.until(
            lambda: all(int(self.allocatable.get(name, 0)) > 0 for name in wanted),
            "the Node to show GPUs",
        )

    @property
    def allocatable(self) -> dict[str, str]:
        """Return the allocatable resources in the Node's status."""
        return dict(self.cluster.node_object()["status"].get("allocatable") or {})

    async def serve(self, name: str, *args: Any, **kwargs: Any) -> Received:
        """Create a pod, wait until it runs, and return what its container ``main`` came with."""
        self.cluster.create_pod(name, *args, **kwargs)
        await self.cluster.running(name)
        return self.cluster.starts(name)[-1]

    async def settled(self, *names: str) -> None:
        """Wait until the annotations of these pods say
        that they have been served (volcano-vgpu:G5).
        """
        await self.cluster.until(
            lambda: all(
                self.cluster.annotations(name).get("volcano.sh/bind-phase") == "success"
                for name in names
            ),
            f"{', '.join(names)} to be marked as served",
        )

    async def watched(self, *names: str) -> None:
        """Wait until the agent's watch has shown it these pods, bound;
        in the order in which they were bound.
        """
        wanted = {f"default/{name}" for name in names}
        await self.agent.until(
            "/debug/pods", lambda answer: wanted <= {pod["pod"] for pod in answer["watched_pods"]}
        )

    async def looked_for_failed_pods(self) -> None:
        """Wait until the agent has asked, once after its start, for pods that failed before it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            tasks = {
                task["name"]: task["state"]
                for task in (await self.agent.get("/debug/tasks"))["tasks"]
            }
            if tasks.get("pods failed while the agent was down") == "ended":
                return
            assert time.monotonic() < deadline, tasks
            await asyncio.sleep(0.1)

    async def quiet(self, seconds: float = 1.0) -> None:
        """Wait until the API server has had no request for so long. What was begun is done then."""
        deadline, before = time.monotonic() + PATIENCE_SECONDS, -1
        while (now := len(self.cluster.api.requests)) != before:
            assert time.monotonic() < deadline, [
                f"{one.verb} {one.path}" for one in self.cluster.api.requests[-5:]
            ]
            before = now
            await asyncio.sleep(seconds)

    def check(self) -> None:
        """Check that each running container has exactly the scheduler's share,
        and that no GPU is full beyond its size.
        """
        for item in self.cluster.objects.list("pods"):
            if item["status"].get("phase") != "Running":
                continue
            name = item["metadata"]["name"]
            if IDS not in item["metadata"].get("annotations", {}):
                continue
            segments = item["metadata"]["annotations"][IDS].split(";")
            asking = [
                one["name"]
                for one in item["spec"]["containers"]
                if NUMBER in one["resources"]["limits"]
            ]
            for container, segment in zip(asking, [part for part in segments if part], strict=True):
                entries = [entry.split(",") for entry in segment.split(":") if entry]
                for came in self.cluster.starts(name, container):
                    self.check_container(came, entries, item["metadata"]["uid"], container)

    def check_container(
        self, came: Received, entries: list[list[str]], uid: str, container: str
    ) -> None:
        """One container against the entries of its segment: cards, limits, and its own region."""
        environment = came.environment
        assert environment["NVIDIA_VISIBLE_DEVICES"] == ",".join(entry[0] for entry in entries)
        limits = {
            key: value
            for key, value in environment.items()
            if key.startswith("CUDA_DEVICE_MEMORY_LIMIT_")
        }
        assert len(limits) == len(entries)
        assert sorted(limits.values()) == sorted(
            f"{int(entry[2]) * self.factor}m" for entry in entries
        )
        region, _ = came.mounts["/tmp/cudevshr.cache"]
        assert os.path.dirname(region) == f"{self.folder}/vgpu/vgpu/regions/{uid}_{container}"


@contextlib.asynccontextmanager
async def volcano_stage(
    folder: Path, *, of: type[VolcanoStage] = VolcanoStage, **options: Any
) -> AsyncIterator[VolcanoStage]:
    """A stage, and Volcano's scheduler on it; the agent is ended with it, however the test ends."""
    stage = await asyncio.to_thread(lambda: of(folder, **options))
    async with stage.cluster:
        await stage.cluster.start_volcano()
        try:
            yield stage
        finally:
            if hasattr(stage, "agent"):
                with contextlib.suppress(SimulationError):
                    await stage.agent.terminate()
