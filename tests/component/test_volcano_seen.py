"""A person's view of Volcano's pods: over HTTP, in the log, and during an API server outage,
with a real agent process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.volcano import NUMBER, U0, U1, VolcanoStage, asks, volcano_stage


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        yield stage


async def test_one_token_leads_from_allocate_to_the_last_annotation(stage: VolcanoStage) -> None:
    """It is shown beside the grant's evidence, and in the log at every step."""
    await stage.start_agent()
    await stage.serve("p", asks(1, 100, 10))
    await stage.settled("p")
    (grant,) = (await stage.agent.get("/debug/allocations?pod=default/p"))["allocations"]
    assert grant["evidence"][-1] == "decided by the scheduler, in volcano.sh/vgpu-ids-new"
    await stage.agent.until_logged("pods.written")
    lines = await asyncio.to_thread(stage.agent.log_lines)
    found = [
        line["msg"]
        for line in lines
        if grant["token"] in (line.get("token"), *line.get("tokens", ()))
    ]
    assert found == ["allocate.reserved", "start.bound", "pods.written"]


async def test_a_pod_is_explained_whether_it_runs_or_is_refused_or_was_never_here(
    stage: VolcanoStage,
) -> None:
    """In sentences, from what the process itself knows."""
    await stage.start_agent()
    for number in range(2):
        await stage.serve(
            f"half-{number}",
            asks(1, 200),
            annotations={"volcano.sh/vgpu-use-gpuuuid": (U0, U1)[number]},
        )
    stage.cluster.create_pod("large", asks(1, 300), scheduler="default-scheduler")
    await stage.agent.until("/debug/allocations", lambda found: bool(found["refusals"]))
    runs = (await stage.agent.get("/debug/explain?pod=default/half-0"))["answer"]
    assert runs[0].startswith(f"Container main has 12800 MiB of GPU 0 ({U0}) through {NUMBER}.")
    refused = await stage.agent.get("/debug/explain?pod=default/large")
    assert refused["answer"][0].startswith(
        "Container main may not start: 1 × volcano.sh/vgpu-number"
    )
    assert "start.refused" in [event["event"] for event in refused["events"]]
    assert (await stage.agent.get("/debug/explain?pod=default/never"))["answer"][0].startswith(
        "Nothing is known of a pod default/never"
    )
    assert await stage.agent.metric('vgpu_agent_refused_starts{final="false"}') == 1
    config = await stage.agent.get("/debug/config")
    assert (config["binding"]["mode"], config["binding"]["families"][0]["offered"]) == (
        "late",
        True,
    )


async def test_an_outage_is_seen_with_its_length_and_leaves_the_agent_ready(
    stage: VolcanoStage,
) -> None:
    """Part of the problems, not of the readiness. It is over when the API server is back."""
    await stage.start_agent()
    await stage.serve("p", asks(1, 100))
    await stage.settled("p")
    await stage.cluster.api.down()
    found = await stage.agent.until(
        "/debug/cluster", lambda cluster: cluster["watches"][0]["failing"]["at"] is not None
    )
    assert found["watches"][0]["synced"]
    status = await stage.agent.get("/debug/status")
    assert status["ready"]
    (outage,) = [
        problem["reason"] for problem in status["problems"] if problem["part"] == "API server"
    ]
    assert "has been failing for" in outage
    await stage.cluster.api.up()
    await stage.agent.until(
        "/debug/status",
        lambda status: not [one for one in status["problems"] if one["part"] == "API server"],
    )
