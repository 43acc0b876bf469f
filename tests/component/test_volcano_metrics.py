"""A container on a dashboard of the replaced plugin,
from the region file to the scrape of the agent's real process.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.component.volcano import FACTOR, U0, U1, VolcanoStage, asks, volcano_stage
from tests.patience import PATIENCE_SECONDS
from tests.regions import Device, Slot, v1
from vgpu_agent.sim.cdi_reader import Received

MIB = 1 << 20
USED, LIMIT = "vGPU_device_memory_usage_in_bytes", "vGPU_device_memory_limit_in_bytes"


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        yield stage


async def scrape(stage: VolcanoStage) -> dict[tuple[str, ...], float]:
    """(name, each label's value) → value."""
    _, text = await stage.agent.get_text("/metrics")
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for sample in samples
    }


async def until_used(stage: VolcanoStage, wanted: dict[str, float]) -> dict[tuple[str, ...], float]:
    """Wait until the containers in use are exactly these (pod → bytes), and return the scrape."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = await scrape(stage)
        if {key[3]: value for key, value in found.items() if key[0] == USED} == wanted:
            return found
        assert time.monotonic() < deadline, {
            key: value for key, value in found.items() if key[0] == USED
        }
        await asyncio.sleep(0.05)


async def test_memory_of_a_container_from_its_region_to_the_scrape(stage: VolcanoStage) -> None:
    """volcano-vgpu:D7: the limit is there before the first process, use as soon as one runs,
    and all of it goes with the pod.
    """
    await stage.start_agent()
    came = await stage.serve("p", asks(1, 10, 30))
    found = await until_used(stage, {"p": 0})
    labels = ("main", came.environment["NVIDIA_VISIBLE_DEVICES"], "p", "default", "0", "vGPU")
    assert found[LIMIT, *labels] == 10 * FACTOR * MIB
    assert {key[1:] for key in found if key[0] == "HostGPUMemoryUsage"} == {
        ("0", U0, "vGPU"),
        ("1", U1, "vGPU"),
    }
    await asyncio.to_thread(run_a_process, region_of(came), 300 * MIB)
    found = await until_used(stage, {"p": 300 * MIB})
    assert 0 <= found["Device_last_kernel_of_container", *labels] < 60
    stage.cluster.delete_pod("p")
    await until_used(stage, {})


async def test_a_region_that_is_cut_short_takes_nobody_with_it(stage: VolcanoStage) -> None:
    """volcano-vgpu:D20: a container empties its region between two scrapes.
    The agent runs on and shows the others.
    """
    await stage.start_agent()
    came = [await stage.serve(name, asks(1, 10)) for name in ("p", "q")]
    await until_used(stage, {"p": 0, "q": 0})
    await asyncio.to_thread(run_a_process, region_of(came[1]), 5)
    for size in (4096, 3, 0):
        await asyncio.to_thread(os.truncate, region_of(came[0]), size)
        await asyncio.sleep(1.2)  # gpu.usageSeconds, so that it has been looked at
        await until_used(stage, {"q": 5})
    lines = [
        line
        for line in await asyncio.to_thread(stage.agent.log_lines)
        if line["msg"] == "region.unreadable"
    ]
    assert [line["pod"] for line in lines] == ["default/p"]
    tasks = (await stage.agent.get("/debug/tasks"))["tasks"]
    assert [task["restarts"] for task in tasks if task["name"] == "container usage"] == [0]


def region_of(came: Received) -> Path:
    """The host's file behind the path that a library without its environment opens."""
    return Path(came.mounts["/tmp/cudevshr.cache"][0])


def run_a_process(region: Path, used: int) -> None:
    """Enter one process into the region, as the library does it:
    in place, and the file stays the same.
    """
    content = v1([Device(U0)], [Slot({0: used})])
    with region.open("r+b") as file:
        for offset, length in ((1_856, 1_960), (2_008_896, 4)):
            file.seek(offset)
            file.write(content[offset : offset + length])
        file.seek(2_008_912)
        file.write(struct.pack("<Q", int(os.stat(region).st_mtime)))
