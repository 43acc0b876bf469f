"""Overbooking by a GPU scheduler, through the agent's real process:
started, reported, shown, and kept over a kill.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.volcano import NODE, U0, VolcanoStage, asks, volcano_stage


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        yield stage


def _decided(*shares: tuple[int, int]) -> dict[str, str]:
    """The annotations of a scheduler that gives each container so many units and so much percent
    of the first GPU.
    """
    text = ";".join(f"{U0},NVIDIA,{units},{cores}:" for units, cores in shares)
    return {
        "volcano.sh/vgpu-node": NODE,
        "volcano.sh/vgpu-ids-new": text,
        "volcano.sh/devices-to-allocate": text,
    }


async def test_what_a_scheduler_overcommitted_runs_and_shows(stage: VolcanoStage) -> None:
    """Pods of two containers on one GPU, of which the scheduler has counted one:
    all run, and it is visible why they are slow.

    A killed agent finds them again; memory that is not there is refused all the same.
    """
    await stage.start_agent()
    for name in ("first", "second"):
        stage.cluster.create_pod(
            name,
            [asks(1, 20, 37)] * 2,
            scheduler="volcano",
            annotations=_decided((20, 37), (20, 37)),
            node=NODE,
        )
        await stage.cluster.running(name)
    for container in ("c0", "c1"):
        assert (
            stage.cluster.starts("second", container)[0].environment["CUDA_DEVICE_SM_LIMIT"] == "37"
        )

    def told() -> dict[str, str]:
        events = stage.cluster.objects.list("events")
        return {
            event["involvedObject"]["name"]: event["message"]
            for event in events
            if event["reason"] == "VgpuOvercommitted"
        }

    await stage.cluster.until(lambda: "second" in told(), "the event")
    assert told().keys() == {"second"}
    assert "of the compute of 100, " in told()["second"]
    await stage.agent.kill()
    await stage.restart_agent()
    shown = (await stage.agent.get("/debug/ledger"))["scheduler_overcommitted"]
    assert [(each["device"], each["cores_percent"], each["holders"]) for each in shown] == [
        (U0, 148, 4)
    ]
    await stage.cluster.crash("second", "c1")
    assert stage.cluster.starts("second", "c1")[-1].environment["CUDA_DEVICE_SM_LIMIT"] == "37"

    stage.cluster.create_pod(
        "greedy", asks(1, 300, 10), scheduler="volcano", annotations=_decided((300, 10)), node=NODE
    )
    await stage.cluster.until(
        lambda: any(name == "greedy" for name, _, _ in stage.cluster.refusals), "a refusal"
    )
    text = next(text for name, _, text in stage.cluster.refusals if name == "greedy")
    assert "memory is never overcommitted" in text
    assert "binding.refusedEvictSeconds" in text
    assert not [line for line in stage.agent.log_lines() if line["msg"] == "ledger.unsound"]
    (answer, *_) = (await stage.agent.get("/debug/explain?pod=default/greedy"))["answer"]
    assert "Container main may not start" in answer
    assert "MiB booked + 19200 wanted, of " in answer
