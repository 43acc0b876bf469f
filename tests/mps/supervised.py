"""A node with simulated GPUs, the stand-in tools and a supervision of MPS daemons,
for the tests of this room.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from tests import constants
from tests.patience import PATIENCE_SECONDS
from tests.simulated import simulated_node
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.config.mps import Mps
from vgpu_agent.isolation.mps import DaemonPlan, DeviceLimit, MpsView
from vgpu_agent.journal import Journal
from vgpu_agent.mps.supervision import Supervision
from vgpu_agent.sim.mps_tools import MpsTools, end_daemon
from vgpu_agent.sim.state import SimulatedNode
from vgpu_agent.status import MpsState, MpsStatus

RESOURCE = "nvidia.com/gpu"

_MAY_BLOCK = {
    "vgpu_agent/sim/mps_tools.py": {"calls", "misbehave", "client", "daemon_pid", "end_daemon"},
    "vgpu_agent/sim/state.py": {"open"},
}


@contextlib.contextmanager
def no_blocked_loop() -> Iterator[None]:
    """Fail a test in which the agent blocks its event loop, as in all unit tests.
    The simulator may block.
    """
    with blockbuster_ctx("vgpu_agent") as detector:
        for function in detector.functions.values():
            for file, names in _MAY_BLOCK.items():
                function.can_block_in(file, names)
        yield


class Node:
    """One node. ``pods`` are those that hold a share;
    ``changes`` counts how often the offer had to be looked at again.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.gpus = simulated_node(tmp_path)
        self.tools = MpsTools.install(tmp_path / "tools", self.gpus.directory)
        self.root = tmp_path / "mps"
        self.pods: tuple[str, ...] = ()
        self.changes = 0
        self.journal = Journal()
        self.use_programs()

    def use_programs(self, *, control: str = "", smi: str = "") -> None:
        """Let the agent run other programs than the stand-ins; without arguments those again."""
        programs = {
            constants.MPS_CONTROL_BINARY: control or str(self.tools.control),
            constants.MPS_SMI_BINARY: smi or str(self.tools.smi),
        }
        constants.use(self._monkeypatch, programs)

    @property
    def pipe(self) -> Path:
        """Return the path of the pipe of `RESOURCE`'s daemon."""
        return self.root / RESOURCE / "pipe"

    def plan(self, replicas: int = 4, resource: str = RESOURCE) -> DaemonPlan:
        """The plan of that many replicas of both GPUs."""
        limits = tuple(
            DeviceLimit(uuid, index, 81920 // replicas)
            for index, uuid in enumerate(self.gpus.uuids)
        )
        directory = f"{self.root}/{resource}"
        return DaemonPlan(resource, directory, f"{directory}/pipe", limits, 100 // replicas)

    @property
    def compute_modes(self) -> list[int]:
        """Return the compute modes that NVML would show: 0 default, 3 exclusive process."""
        state = SimulatedNode.open(self.gpus.directory).state
        return [state.gpus[number].compute_mode for number in range(2)]

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[Supervision]:
        """A supervision as one run of the agent has it; it stops in order."""
        async with Supervisor(backoff_min_seconds=0.1, backoff_max_seconds=1.0) as supervisor:
            supervision = Supervision(
                Mps(),
                supervisor,
                self.journal,
                holders=lambda _: self.pods,
                on_change=self._changed,
                gpus=lambda: self.gpus.uuids,
                view=MpsView(str(self.root), simulated=True),
                share_memory=_no_memory,
            )
            yield supervision
            await supervision.stop()

    def end(self) -> None:
        """Leave no process behind."""
        end_daemon(self.pipe)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The facts of each such event."""
        return [entry.facts for entry in self.journal.entries if entry.event == name]

    def _changed(self) -> None:
        self.changes += 1


def _no_memory(root: str, **_: object) -> None:
    Path(root).mkdir(exist_ok=True)


def why_not(supervision: Supervision, plan: DaemonPlan) -> str:
    """Return the reason why the plan's resource is withheld; empty when it is not."""
    found = supervision.withheld(plan)
    return found.reason if found else ""


async def until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for something that other processes do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not come true in time"
        await asyncio.sleep(0.01)


async def until_running(supervision: Supervision) -> MpsStatus:
    """Wait for the one daemon to be up with proven limits."""
    await until(lambda: supervision.statuses and supervision.statuses[0].state is MpsState.RUNNING)
    return supervision.statuses[0]
