"""A stage for the agent's real process: simulated GPUs and the simulated kubelet, each in its own
corner of a short temporary folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from tests import constants
from tests.component.preloaded import Preloaded
from tests.golden import U0, U1
from tests.grpc.conftest import grpcio_stays_initialised
from tests.patience import PATIENCE_SECONDS
from tests.replacing import replace_text
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.agent_process import AgentProcess, CommandProcess
from vgpu_agent.sim.kubelet.kubelet import Container, Pod, SimulatedKubelet
from vgpu_agent.sim.state import SimulatedNode

__all__ = ["grpcio_stays_initialised"]

GPU = "nvidia.com/gpu"

# Short pauses everywhere, so that a test sees in a second what a node sees in minutes.
QUICK = """\
version: v1
gpu: {usageSeconds: 0.5, recovery: {quietSeconds: 0.5}}
"""
QUICK_CONSTANTS = {
    constants.RELOAD: 0.1,
    constants.GPU_POLL: 0.2,
    constants.GPU_INIT_RETRY: 0.2,
    constants.MAX_QUIET: 5,
    constants.SPEC_LOOK: 0.2,
    constants.VERIFY: 1,
    constants.RESERVATION: 3,
    constants.REGISTER_RETRY_MAX: 1,
    constants.SOCKET_POLL: 1,
}
SHARED = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a component test."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.component)


class Stage:
    """One node of a test: its folder, GPUs, kubelet and agents.

    Attributes:
        constants: the agent's constants that have other values; see `AgentProcess`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = SimulatedNode.create(
            folder / "gpus", model="A100-SXM4-40GB", gpus=2, numa=[0, 1], uuids=[U0, U1]
        )
        self.kubelet = SimulatedKubelet(folder / "kubelet")
        self.config = folder / "config.yaml"
        self.agents: list[AgentProcess] = []
        self.constants: dict[str, float | str] = dict(QUICK_CONSTANTS)

    def agent(
        self,
        config: str = QUICK + SHARED,
        *,
        simulate: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> AgentProcess:
        """An agent for this node, not started yet."""
        replace_text(self.config, config)  # an agent that runs may be reading it
        agent = AgentProcess(
            self.folder / f"agent-{len(self.agents)}.log",
            kubelet=self.folder / "kubelet",
            simulate=self.node.directory if simulate else None,
            config=self.config,
            environment=environment,
            constants=self.constants,
        )
        self.agents.append(agent)
        return agent

    async def ready_agent(self, config: str = QUICK + SHARED, **environment: str) -> AgentProcess:
        """An agent that has registered everything with this node's kubelet."""
        agent = self.agent(config, environment=environment)
        await agent.start()
        await agent.until_ready()
        # Ready means that the stream is open; a moment later kubelet has the list as well.
        await self.kubelet.until(
            lambda: any(call.facts["ids"] for call in self.kubelet.called("list"))
        )
        return agent

    async def admit(self, name: str, number: int = 1, resource: str = GPU) -> Pod:
        """A pod of one container, admitted."""
        return await self.kubelet.admit(name, [Container("main", {resource: number})])

    def ids(self, pod: Pod, resource: str = GPU) -> list[str]:
        """The ids that the pod's container holds, as kubelet has it."""
        return self.kubelet.ids_of(pod, "main", resource)

    async def allocatable(
        self, number: int, *, resource: str = GPU, timeout_seconds: float = 30
    ) -> None:
        """Wait until kubelet would publish this number."""
        await self.kubelet.until(
            lambda: self.kubelet.resource(resource).allocatable == number,
            timeout_seconds=timeout_seconds,
        )


async def until_not_ready(agent: AgentProcess, *reasons: str) -> str:
    """Wait until ``/readyz`` says no, and gives these reasons; its text."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        status, text = await agent.get_text("/readyz")
        if status == 503 and all(reason in text for reason in reasons):
            return text
        assert time.monotonic() < deadline, (status, text)
        await asyncio.sleep(0.05)


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """The process that agents are forked from."""
    with Preloaded() as preloaded:
        yield preloaded


@pytest.fixture(autouse=True)
def starts_are_forks(preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of `sim.agent_process`; `preloaded` says why and which."""
    monkeypatch.setattr(CommandProcess, "start_module", preloaded.start)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: socket names are limited to 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="vgc", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[Stage]:
    """A node whose kubelet is up."""
    stage = await asyncio.to_thread(Stage, folder)
    await stage.kubelet.start()
    yield stage
    for agent in stage.agents:
        with contextlib.suppress(SimulationError):
            await agent.terminate()
    await stage.kubelet.stop()


@contextlib.contextmanager
def full(directory: Path) -> Iterator[None]:
    """A file system at ``directory`` in which no file can be made; only root can mount it."""
    directory.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", str(directory)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
