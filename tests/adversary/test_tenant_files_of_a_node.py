"""The same attacks against the agent's real process:
it goes on serving, says what it saw, and nothing stays.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.adversary.test_collecting import fill_deep
from tests.component.volcano import VolcanoStage, asks, volcano_stage

pytestmark = pytest.mark.component


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with a runtime that knows CDI."""
    async with volcano_stage(folder) as stage:
        yield stage


def attack(containers: Path) -> Path:
    """The directory that a container of an earlier version could write to, after its attack."""
    made = containers / "11111111-dead-dead-dead-000000000001_main"
    made.mkdir(parents=True)
    made.chmod(0o777)
    os.mkfifo(made / "a.cache")
    (made / "link").symlink_to("/")
    fill_deep(made, 3000, "d")
    return made


async def test_no_container_keeps_a_real_agent_from_serving_others(stage: VolcanoStage) -> None:
    """A region that grows, and a tree of 3,000 levels with a FIFO in the place of a region,
    while pods start and end.
    """
    await stage.start_agent()
    left = await asyncio.to_thread(attack, stage.folder / "vgpu" / "vgpu" / "containers")
    came = await stage.serve("hostile", asks(1, 10))
    region = Path(came.mounts["/tmp/cudevshr.cache"][0])
    await asyncio.to_thread(os.truncate, region, 64 << 20)
    await stage.serve("neighbour", asks(1, 10))
    await stage.cluster.until(
        lambda: region.stat().st_size == 2_008_953, "the region to be cut back"
    )
    await stage.agent.until(
        "/debug/events?event=region.cut", lambda cut: region.parent.name in str(cut)
    )
    for name in ("hostile", "neighbour"):
        stage.cluster.delete_pod(name)
    await stage.cluster.until(
        lambda: not left.exists() and not region.exists(), "everything to be collected"
    )
    await stage.cluster.until(
        lambda: not os.listdir(left.parent), "nothing to stay under another name"
    )
    await stage.serve("after", asks(1, 10))
    stage.check()
