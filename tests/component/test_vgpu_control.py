"""Containers that vgpu-control limits, with the agent's real process: the files of each, as the
library sees them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.vgpu_manager import ON, U1, ManagerStage, asks, manager_stage
from tests.runtime.control_client import build_client, client, lay_out
from vgpu_agent.isolation.edits import Edits, Mount, Provision
from vgpu_agent.sim.cdi_reader import Received

pytestmark = pytest.mark.component

GATES = ON + "vgpuManager: {featureGates: [VirtualMemoryTracking=true]}\n"


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[ManagerStage]:
    """A node with two A10 in a cluster with vgpu-manager's extender."""
    async with manager_stage(folder) as stage:
        yield stage


def seen_by_the_library(came: Received, folder: Path, *words: object) -> list[str]:
    """The output of our client inside the container."""
    root = folder / "container"
    if not root.exists():
        mounts = [Mount(at, source, ro) for at, (source, ro) in came.mounts.items()]
        lay_out(Provision(Edits(mounts=tuple(mounts))), root)
    return client(build_client(folder), root, *words)


async def test_a_container_finds_its_limits_before_its_first_process(
    stage: ManagerStage, folder: Path
) -> None:
    """vgpu-manager §7.3, §7.4, §7.7: library, limits and tables, and no /proc of the host."""
    await stage.start_agent(GATES)
    came = await stage.serve("gpu-pod", asks(1, 1024, 10), f"main[1_{U1}_10_1024]")
    assert came.environment["CUDA_MEM_LIMIT_1"] == "1024m"
    assert came.environment["MANAGER_COMPATIBILITY_MODE"] == "200"
    assert {source for source, _ in came.mounts.values()}.isdisjoint({"/proc"})
    installed, read_only = came.mounts["/etc/vgpu-manager/driver/libvgpu-control.so"]
    assert (Path(installed).parent, read_only) == (folder / "manager", True)
    seen = await asyncio.to_thread(seen_by_the_library, came, folder, "config")
    uid = stage.cluster.pod("gpu-pod")["metadata"]["uid"]
    assert seen[1:] == [
        f"pod {uid} default/gpu-pod container main register ''",
        "mode 200 watcher 0 vmem 1",
        f"card 1 {U1} total {1024 << 20} real {1024 << 20} hard 10 soft 10 limits 1 1 1 0",
    ]
    assert await asyncio.to_thread(seen_by_the_library, came, folder, "spill", 1, 7, 9) == [
        "rows 1"
    ]


async def test_nothing_is_given_out_without_the_library(stage: ManagerStage, folder: Path) -> None:
    """The reason is on /readyz, and the resource appears when it is delivered."""
    library = folder / "manager" / "libvgpu-control.so"
    content = library.read_bytes()
    library.write_bytes(content[:-10])
    starting = asyncio.create_task(stage.start_agent())
    try:
        await stage.cluster.until(
            lambda: stage.log.exists() and "still being copied" in stage.log.read_text(),
            "the reason",
        )
        assert stage.slots == 0
        library.write_bytes(content)
        await starting
    finally:
        starting.cancel()
    await stage.serve("gpu-pod", asks(1, 1024, 10), f"main[1_{U1}_10_1024]")
