"""A person's view of a node of two families, from a real process:
``vgpu-agent status``, one pod explained, and /metrics.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.volcano import NODE, NUMBER, U0, U1, VolcanoStage, asks, volcano_stage

GPU = "nvidia.com/gpu"
MIXED = "families: {nvidia: true, volcanoVgpu: true}\n"


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        yield stage


async def _status(stage: VolcanoStage, *flags: str) -> str:
    """The output of ``vgpu-agent status``."""
    command = (
        sys.executable,
        "-m",
        "vgpu_agent",
        "status",
        "-o",
        "wide",
        "--debug-listen",
        stage.agent.debug_address,
        *flags,
    )
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode in (0, 1)  # 1: with problems
    return out.decode()


def _table(text: str, title: str) -> list[list[str]]:
    """The cells of one table, without its header."""
    lines = text.partition(f"\n{title}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def _decided(gpu: str) -> dict[str, str]:
    """The annotations of a scheduler that has named ``gpu``."""
    text = f"{gpu},NVIDIA,100,10:"
    return {
        "volcano.sh/vgpu-node": NODE,
        "volcano.sh/vgpu-ids-new": text,
        "volcano.sh/devices-to-allocate": text,
    }


async def test_a_pod_whose_gpu_has_gone_to_another_family_is_explained_everywhere(
    stage: VolcanoStage,
) -> None:
    """It was sent to a GPU that a pod of NVIDIA's names got first: the pages name its holder, and
    the refusal where there is room.

    The other family's pod goes on over a restart of the agent, of which kubelet's records do not
    tell since when.
    """
    await stage.start_agent(MIXED, offers=(GPU, NUMBER))
    await stage.serve("train", {GPU: 1}, scheduler="default-scheduler")
    (grant,) = (
        await stage.agent.until(
            "/debug/allocations", lambda found: found["allocations"][0]["pod"] == "train"
        )
    )["allocations"]
    taken, idle = grant["shares"][0]["gpu"], U1 if grant["shares"][0]["gpu"] == U0 else U0
    index = (U0, U1).index(taken)
    stage.cluster.create_pod(
        "late", asks(1, 100, 10), scheduler="volcano", annotations=_decided(taken), node=NODE
    )
    await stage.agent.until("/debug/allocations", lambda found: bool(found["refusals"]))

    text = await _status(stage)
    rows = {row[0]: row for row in _table(text, "GPUs by family")}
    assert rows[str(index)][1] == "nvidia"
    assert rows[str(index)][-1] == "the end of 1 pod (default/train)"
    assert rows[str(1 - index)][1] == "-"
    held_back = {row[0]: row[1:] for row in _table(text, "Held back")}
    ids, why = held_back[NUMBER]
    assert ids == "10 of 20"
    assert why.startswith(f"GPU {index} has served nvidia (1 pod) since 2")
    assert why.endswith("; it is free again when its last pod ends")
    refused = " ".join(_table(text, "Refused starts")[0])
    assert refused.count(taken) == 1
    assert "The pod's scheduler has named this GPU, so the pod waits for it." in refused
    assert "or set binding.refusedEvictSeconds (now 0: never)." in refused
    assert refused.endswith(f"Room for it now: GPU {1 - index}.")
    shown = next(text for name, _, text in stage.cluster.refusals if name == "late")
    assert "default/train" not in shown
    assert "Room for it now: GPU" in shown
    explained = await _status(stage, "--pod", "default/late")
    assert (
        f"{taken} is not available: the GPU serves nvidia until its last share is returned"
        in explained
    )

    _, metrics = await stage.agent.get_text("/metrics")
    assert (
        f'vgpu_agent_gpu_serves_since_timestamp_seconds{{family="nvidia",gpu="{taken}"}}' in metrics
    )
    assert (
        f'vgpu_agent_gpu_serves_since_timestamp_seconds{{family="nvidia",gpu="{idle}"}}'
        not in metrics
    )

    await stage.agent.kill()
    await stage.restart_agent()
    assert {row[0]: row for row in _table(await _status(stage), "GPUs by family")}[str(index)][
        2
    ].endswith(" or longer")


async def test_the_time_since_a_gpu_serves_pods_bound_late_outlives_the_agent(
    stage: VolcanoStage,
) -> None:
    """The specs of late grants have the time of their decision, which outlives the agent."""
    await stage.start_agent(MIXED, offers=(GPU, NUMBER))
    await stage.serve("p", asks(1, 100, 10))
    (before,) = (
        use for use in (await stage.agent.get("/debug/ledger"))["uses"].values() if use["family"]
    )
    await stage.agent.kill()
    await stage.restart_agent()
    (after,) = (
        use for use in (await stage.agent.get("/debug/ledger"))["uses"].values() if use["family"]
    )
    assert (after["family"], after["pods"], after["or_earlier"]) == (
        "volcano-vgpu",
        ["default/p"],
        False,
    )
    # from the reservation of the ids, and from the decision a moment later
    moments = [dt.datetime.fromisoformat(use["since"]["at"]) for use in (before, after)]
    assert abs(moments[1] - moments[0]) < dt.timedelta(minutes=1)
    assert after["since"]["seconds_ago"] > before["since"]["seconds_ago"]


async def test_a_pod_that_waits_for_its_image_claims_its_gpu_for_everybody_to_see(
    stage: VolcanoStage,
) -> None:
    """From its binding to its start: which pod waits and for how long, on the page, for the pod and
    as a number; also for a new agent.
    """
    await stage.start_agent(MIXED, offers=(GPU, NUMBER))
    pulled = stage.cluster.pull("main")
    stage.cluster.create_pod(
        "waits", asks(1, 100, 10), annotations={"volcano.sh/vgpu-use-gpuuuid": U0}
    )
    await stage.agent.until("/debug/ledger", lambda found: bool(found["uses"][U0]["waiting"]))
    for _ in range(2):
        rows = {row[0]: row for row in _table(await _status(stage), "GPUs by family")}
        assert rows["0"][4].startswith("default/waits (volcano-vgpu, ")
        assert rows["0"][5] == "the start or the end of default/waits, for which it is kept"
        assert (
            f"Its scheduler has named GPU 0 ({U0}); the pod has waited for it since "
            in await _status(stage, "--pod", "default/waits")
        )
        assert await stage.agent.metric("vgpu_agent_gpu_claims") == 1
        assert await stage.agent.metric("vgpu_agent_gpu_claims_oldest_seconds") >= 0
        await stage.agent.kill()
        await stage.restart_agent()
        await stage.agent.until("/debug/ledger", lambda found: bool(found["uses"][U0]["waiting"]))
    pulled()
    await stage.cluster.running("waits")
    await stage.agent.until("/debug/ledger", lambda found: not found["uses"][U0]["waiting"])
    assert await stage.agent.metric("vgpu_agent_gpu_claims") == 0
