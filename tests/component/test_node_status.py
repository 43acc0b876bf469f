"""The health of GPUs in Kubernetes objects, with a real agent process: a GPU dies under a pod, and
comes back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.component.volcano import U0, U1, VolcanoStage, asks, volcano_stage
from tests.patience import eventually

LABEL, TAINT = "vgpu-agent.internal/gpu-health", "vgpu-agent.internal/no-usable-gpu"
AFTER = "vgpu_agent.cluster.gpu_status:TAINT_AFTER_SECONDS"
MORE = """\
families: {{nvidia: true, volcanoVgpu: true}}
nodeStatus: {{condition: true, taint: NoSchedule, podLabel: true, featureLabels: true{more}}}
audit: {{file: {folder}/audit/grants.jsonl}}
"""


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        stage.constants[AFTER] = 0.5
        yield stage


def condition(stage: VolcanoStage) -> tuple[str, str]:
    """Status and reason of the Node's condition; empty without one."""
    for one in stage.cluster.node_object()["status"].get("conditions") or ():
        if one["type"] == "GPUHealthy":
            return one["status"], one["reason"]
    return "", ""


def reasons(stage: VolcanoStage, kind: str) -> set[str]:
    """The reasons of the events about objects of that kind."""
    return {
        event["reason"]
        for event in stage.cluster.objects.list("events", "default")
        if event["involvedObject"]["kind"] == kind
    }


def taints(stage: VolcanoStage) -> list[str]:
    """The keys of the Node's taints."""
    return [taint["key"] for taint in stage.cluster.node_object().get("spec", {}).get("taints", ())]


def labels(stage: VolcanoStage, pod: str = "") -> dict[str, str]:
    """The labels of the Node or of a pod."""
    found = stage.cluster.pod(pod) if pod else stage.cluster.node_object()
    return dict(found["metadata"].get("labels") or {})


async def test_a_gpu_dies_under_a_pod_and_comes_back(stage: VolcanoStage) -> None:
    """Node and pod say so, and take it back; meanwhile nothing is written that does not change.
    The sums for chargeback and the audit log go on over a restart.
    """
    await stage.start_agent(MORE.format(folder=stage.folder, more=""))
    await stage.serve("train", asks(1, 100), annotations={"volcano.sh/vgpu-use-gpuuuid": U0})
    await stage.settled("train")
    await stage.cluster.until(lambda: condition(stage) == ("True", "AllGpusHealthy"), "True")
    assert labels(stage)["nvidia.com/gpu.product"] == "NVIDIA-A10"
    assert labels(stage)["nvidia.com/gpu.count"] == "2"

    stage.gpus.lose(0)
    await stage.cluster.until(lambda: condition(stage) == ("False", "GpuLost"), "False")
    await stage.cluster.until(lambda: labels(stage, "train").get(LABEL) == "lost", "the label")
    await stage.cluster.until(lambda: "GpuLost" in reasons(stage, "Pod"), "an event of the pod")
    await stage.cluster.until(lambda: "GpuLost" in reasons(stage, "Node"), "one of the Node")
    assert taints(stage) == []
    stage.gpus.lose(1)
    await stage.cluster.until(lambda: taints(stage) == [TAINT], "the taint")

    stage.gpus.restore(0)
    stage.gpus.restore(1)
    await stage.cluster.until(lambda: condition(stage)[0] == "True", "True again")
    await stage.cluster.until(lambda: LABEL not in labels(stage, "train"), "the label to go")
    await stage.cluster.until(lambda: taints(stage) == [], "the taint to go")
    await stage.cluster.until(lambda: "GpuRecovered" in reasons(stage, "Pod"), "the recovery")
    assert (
        await stage.agent.metric(
            f'vgpu_agent_gpu_health_transitions_total{{gpu="{U0}",state="lost"}}'
        )
        == 1
    )
    assert await stage.agent.metric("vgpu_agent_gpu_recovery_seconds_count") == 2

    series = (
        'vgpu_agent_share_seconds_total{namespace="default",pod="train",'
        'resource="volcano.sh/vgpu-number"}'
    )
    before = await stage.agent.metric(series)
    assert before > 0
    await stage.quiet()
    await stage.agent.terminate()
    await stage.restart_agent()
    assert await stage.agent.metric(series) >= before
    await stage.agent.terminate()
    lines = await asyncio.to_thread(_lines, stage.folder / "audit" / "grants.jsonl")
    assert [line["event"] for line in lines if line["event"] != "changed"] == [
        "started",
        "granted",
        "stopped",
        "started",
        "found",
        "stopped",
    ]
    assert lines[1]["pod"] == "train"
    assert lines[1]["devices"][0]["gpu"] == U0
    assert lines[1]["decidedBy"].startswith("the scheduler")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_pod_on_a_dead_gpu_is_evicted_after_the_time(stage: VolcanoStage) -> None:
    """Its neighbour on the other GPU stays."""
    await stage.start_agent(MORE.format(folder=stage.folder, more=", evictSeconds: 1"))
    for name, uuid in (("train", U0), ("serve", U1)):
        await stage.serve(name, asks(1, 100), annotations={"volcano.sh/vgpu-use-gpuuuid": uuid})
    await stage.settled("train", "serve")
    stage.gpus.lose(0)
    await stage.cluster.until(lambda: not stage.cluster.exists("train"), "the eviction")
    await stage.agent.until_logged("gpu_evictions.evicted")
    await eventually(lambda: "GpuPodEvicted" in reasons(stage, "Pod"))
    assert stage.cluster.exists("serve")
    assert await stage.agent.metric('vgpu_agent_dead_gpu_evictions_total{result="evicted"}') == 1
