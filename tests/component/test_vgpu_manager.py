"""Pods of vgpu-manager's extender, from its claim to what the container got and back,
with the agent's real process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.vgpu_manager import (
    NODE,
    PHASE,
    PRE,
    REAL,
    TIME,
    U0,
    U1,
    ManagerStage,
    asks,
    manager_stage,
)

FINISHED = "9223372036854775807"


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[ManagerStage]:
    """A node with two A10 in a cluster with vgpu-manager's extender."""
    async with manager_stage(folder) as stage:
        yield stage


async def test_from_claim_to_container_and_back(stage: ManagerStage) -> None:
    """vgpu-manager §13.3: the pod ends as after the replaced plugin's Allocate, and what its
    scheduler has written stays.
    """
    await stage.start_agent()
    claim = f"main[1_{U1}_10_1024]"
    came = await stage.serve("gpu-pod", asks(1, 1024, 10), claim)
    assert came.environment["NVIDIA_VISIBLE_DEVICES"] == U1
    assert await stage.shares("gpu-pod") == {"main": [(U1, 1024, 10)]}
    await stage.phase("gpu-pod", "succeed")
    assert stage.cluster.annotations("gpu-pod") == {
        PRE: claim,
        REAL: claim,
        "nvidia.com/predicate-node": NODE,
        TIME: FINISHED,
    }
    assert stage.labels("gpu-pod") == {PHASE: "succeed", "nvidia.com/metrics-node": NODE}


async def test_a_pod_of_the_plain_scheduler_is_placed_and_counted(stage: ManagerStage) -> None:
    """Extenders count what the agent has placed, because it writes their keys too."""
    await stage.start_agent()
    stage.cluster.create_pod("plain", asks(1), scheduler="default-scheduler")
    await stage.cluster.running("plain")
    await stage.phase("plain", "succeed")
    written = stage.cluster.annotations("plain")
    assert written[PRE] == written[REAL] == f"main[0_{U0}_100_23028]"
    assert written["nvidia.com/predicate-node"] == NODE
