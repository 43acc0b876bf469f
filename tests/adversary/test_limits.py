"""Limits that are shown and do not hold:
what a tenant can change in its own region, and what an operator then reads.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.component.volcano import VolcanoStage, asks, volcano_stage

# hami-core §2.2, §2.3
_MEMORY_LIMIT, _SLOT, _STATUS, _SLOTS_IN_USE = 1_600, 1_856, 1_928, 2_008_896


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        yield stage


def _open_region(region: Path) -> None:
    """Do what the library does when a process opens the region: take a slot."""
    with region.open("r+b") as file:
        file.seek(_SLOT)
        file.write(struct.pack("<ii", 1, 0))
        file.seek(_SLOT + _STATUS)
        file.write(struct.pack("<i", 1))
        file.seek(_SLOTS_IN_USE)
        file.write(struct.pack("<i", 1))


def _raise_limit(region: Path, limit_bytes: int) -> None:
    with region.open("r+b") as file:
        file.seek(_MEMORY_LIMIT)
        file.write(struct.pack("<Q", limit_bytes))


async def _limit(stage: VolcanoStage, wanted: str, reason: str = "") -> Any:
    answer = await stage.agent.until(
        "/debug/allocations?pod=default/p",
        lambda answer: (
            [one["limit"] for one in answer["allocations"] if reason in one["limit_reason"]]
            == [wanted]
        ),
    )
    return answer["allocations"][0]


@pytest.mark.component
async def test_no_limit_is_called_in_force_that_was_not_seen(stage: VolcanoStage) -> None:
    """A container whose programs never load the library was shown as proven, and taken for limited.
    Only a slot in its region shows that the library is there; a region whose limit the tenant has
    raised is named, once, and everywhere a person looks.
    """
    await stage.start_agent()
    came = await stage.serve("p", asks(1, 16, 10))
    region = Path(came.mounts["/tmp/cudevshr.cache"][0])
    grant = await _limit(
        stage, "configured", "no process in the container has the library and its region open"
    )
    assert grant["state"] == "identified"
    explained = str(await stage.agent.get("/debug/explain?pod=default/p"))
    assert "Its limit is configured, and not seen in force" in explained
    assert "proven" not in explained
    assert "proven" not in (await stage.agent.get_text("/"))[1]
    await asyncio.to_thread(_open_region, region)
    await _limit(stage, "in force")
    await asyncio.to_thread(_raise_limit, region, 80 << 30)
    grant = await _limit(stage, "not in force")
    assert "the region allows 81920 MiB of" in grant["limit_reason"]
    told = await stage.agent.until("/debug/events?event=limit", lambda answer: answer["events"])
    assert [(entry["event"], entry["facts"]["pod"]) for entry in told["events"]] == [
        ("limit.not_in_force", "default/p")
    ]
    _, metrics = await stage.agent.get_text("/metrics")
    assert 'vgpu_agent_limits{family="volcano-vgpu",limit="not in force"} 1.0' in metrics
    await asyncio.to_thread(_raise_limit, region, 0)  # the tenant's next attempt: no limit at all
    await stage.agent.until(
        "/debug/allocations", lambda answer: "allows all memory of" in str(answer["allocations"])
    )
    told = await stage.agent.get("/debug/events?event=limit")
    assert len(told["events"]) == 1
