"""``cdi.source: toolkit``: names out of another program's spec are looked for, followed,
and never written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cdi.controller_parts import GPUS, Side, write_toolkits_spec
from tests.golden import U0, U1
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.config.binding import Cluster
from vgpu_agent.config.device_answers import Cdi
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.model import Resource

pytestmark = pytest.mark.component  # it starts programs


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    """Loops that are restarted at once."""
    async with Supervisor(backoff_min_seconds=0.01, backoff_max_seconds=0.01) as supervisor:
        yield supervisor


async def test_the_toolkits_names_are_looked_for_and_never_written(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """``cdi.source: toolkit``: offered when its spec has the names, by what it says now;
    withdrawn without touching it.
    """
    sections: dict[str, Any] = {
        "cdi": Cdi(source="toolkit"),
        "cluster": Cluster(withdraw_at_stop=True),
    }
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, **sections))
    await side.begin()
    assert "no CDI spec of kind nvidia.com/gpu" in side.withheld()
    await asyncio.to_thread(write_toolkits_spec, side.cdi, U0, U1)
    await side.until_offered()
    await side.side.withdraw()
    assert await asyncio.to_thread((side.cdi / "nvidia.json").exists)
    assert not await asyncio.to_thread(lambda: side.tool.calls)


async def test_a_gpu_that_the_toolkits_spec_does_not_have_is_kept_back(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """Made before the card was plugged in. The reason says what has to be done,
    and by which program.
    """
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, cdi=Cdi(source="toolkit")))
    await asyncio.to_thread(write_toolkits_spec, side.cdi, U0)
    await side.begin()
    assert side.healthy == [U0]
    (room,) = [room for room in side.ledger.rooms(GPUS.name) if room.device == U1]
    assert (
        "let the container toolkit write its spec again (service nvidia-cdi-refresh" in room.trouble
    )


async def test_offers_are_looked_at_again_only_when_names_have_changed(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """Not at a start that knew them all; and again, when a look has failed."""
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, cdi=Cdi(source="toolkit")))
    await asyncio.to_thread(write_toolkits_spec, side.cdi, U0, U1)
    await side.begin()
    looks: list[int] = []

    async def look_again() -> None:
        looks.append(len(looks))
        if len(looks) == 1:
            raise ConnectionError("not now")

    supervisor.start("names", lambda: side.side.follow(look_again))
    await asyncio.sleep(0.15)
    assert looks == []
    await asyncio.to_thread(write_toolkits_spec, side.cdi, U0)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if len(looks) == 2:
                break
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.15)
    assert looks == [0, 1]
    await supervisor.stop("names")


async def test_one_name_for_all_gpus_keeps_none_of_them_back(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """nvidia:A26 with CDI: under a Windows subsystem the spec has the device ``all``
    and no other.
    """
    side = await asyncio.to_thread(lambda: Side(tmp_path, supervisor, cdi=Cdi(source="toolkit")))
    await asyncio.to_thread(write_toolkits_spec, side.cdi, "all")
    await side.begin()
    assert side.healthy == [U0, U1]
    assert side.withheld(Resource("nvidia.com/gpu", "nvidia", (DeviceId("all", U0, None),))) == ""
