"""A simulated node, and the stand-in for NVIDIA's tool that describes it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.golden import U0, U1
from tests.patience import PATIENCE_SECONDS
from tests.runtime.conftest import grant
from vgpu_agent.cdi.nvidia_ctk import CtkOptions
from vgpu_agent.cdi.roots import Roots
from vgpu_agent.sim.nvidia_ctk import COMMAND, StandInCtk
from vgpu_agent.sim.state import SimulatedNode

__all__ = ["Tool", "grant", "tool"]


@dataclasses.dataclass(frozen=True)
class Tool:
    """A node of two A100 and the tool for it."""

    node: SimulatedNode
    stand_in: StandInCtk
    options: CtkOptions

    async def misbehave(self, **faults: Any) -> None:
        """See `StandInCtk.misbehave`; not on the event loop, which no file may hold up."""
        await asyncio.to_thread(self.stand_in.misbehave, **faults)

    async def behave(self) -> None:
        """Be as the real tool again."""
        await asyncio.to_thread(self.stand_in.behave)

    async def calls(self) -> list[list[str]]:
        """Return the calls of the tool."""
        return await asyncio.to_thread(lambda: self.stand_in.calls)

    async def set_mig(self, gpu: int, profiles: list[str]) -> None:
        """Cut a GPU into slices."""
        await asyncio.to_thread(self.node.set_mig, gpu, profiles)

    def device(self, name: str) -> None:
        """Make a character device below the node's ``/dev``."""
        path = self.node.directory / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    """Two GPUs and the tool, not slow and not faulty."""
    node = SimulatedNode.create(
        tmp_path / "gpus", model="A100-SXM4-40GB", gpus=2, numa=[0, 1], uuids=[U0, U1]
    )
    root = str(node.directory)
    return Tool(
        node,
        StandInCtk(node.directory),
        CtkOptions(COMMAND, timeout_seconds=PATIENCE_SECONDS, roots=Roots(root, root, root, root)),
    )
