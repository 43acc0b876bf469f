"""The attacks on identity against the agent's own process, with an API server,
Volcano's scheduler and a kubelet beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.volcano import VolcanoStage, asks, volcano_stage
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH


@pytest.fixture
async def volcano(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        yield stage


@pytest.mark.component
async def test_a_tenant_cannot_raise_its_limit_by_a_pod_that_imitates_a_mirror_pod(
    volcano: VolcanoStage,
) -> None:
    """It asks for a share. A second pod of the same owner, which never runs, names the first's UID
    and asks for three times as much.
    """
    stage, cluster = volcano, volcano.cluster
    await stage.start_agent()
    cluster.hold_admission = True
    # pod-resources lists no plain init container
    cluster.create_pod("victim", {}, init=[(asks(1, 100), False)])
    await cluster.until(lambda: "nodeName" in cluster.pod("victim")["spec"], "victim to be bound")
    uid = cluster.pod("victim")["metadata"]["uid"]
    claims = {MIRROR_POD: uid, STATIC_POD_HASH: uid}
    cluster.create_pod(
        "liar", {}, init=[(asks(1, 300), False)], annotations=claims, node=cluster.node
    )
    await stage.agent.until(
        "/debug/pods",
        lambda found: any(pod["pod"] == "default/liar" for pod in found["watched_pods"]),
    )
    await cluster.admit_in_order(["victim"])
    await cluster.running("victim")
    (start,) = cluster.starts("victim", "init0")
    assert start.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{100 * stage.factor}m"
    lines = await asyncio.to_thread(stage.agent.log_lines)
    assert [line["pod"] for line in lines if line["msg"] == "start.bound"] == ["default/victim"]
