"""A person's view of vgpu-manager's pods: over HTTP, on the page, in events, and by the metrics of
the monitor that is replaced, with a real agent process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.component.vgpu_manager import NUMBER, ON, U0, U1, ManagerStage, asks, manager_stage
from tests.component.volcano import NODE
from vgpu_agent.errors import SimulationError

EXPORTER = "vgpuManager: {exporter: {address: '127.0.0.1:0', minScrapeIntervalSeconds: 0}}\n"


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[ManagerStage]:
    """A node with two A10 in a cluster with vgpu-manager's extender."""
    async with manager_stage(folder) as stage:
        yield stage


def told(stage: ManagerStage, name: str) -> dict[str, str]:
    """Reason → message of the events of a pod."""
    return {
        event["reason"]: event["message"]
        for event in stage.cluster.objects.list("events", "default")
        if event["involvedObject"]["name"] == name
    }


async def test_a_pod_is_explained_whether_it_runs_or_is_refused_or_was_never_here(
    stage: ManagerStage,
) -> None:
    """In sentences, from what the process itself knows; its owner reads the reason in an event."""
    await stage.start_agent()
    await stage.serve("runs", asks(1, 1024, 10), f"main[1_{U1}_10_1024]")
    runs = (await stage.agent.get("/debug/explain?pod=default/runs"))["answer"]
    assert runs[0].startswith(
        f"Container main has 1024 MiB and 10 % of the cores of GPU 1 ({U1}) through {NUMBER}. "
        "Its limit is configured, and not seen in force: "
    ), runs
    stage.create("large", asks(1, 900_000, 10), f"main[1_{U1}_10_900000]")
    await stage.agent.until("/debug/allocations", lambda found: bool(found["refusals"]))
    refused = await stage.agent.get("/debug/explain?pod=default/large")
    assert refused["answer"][0].startswith("Container main may not start: "), refused
    assert "start.refused" in [event["event"] for event in refused["events"]]
    await stage.cluster.until(lambda: "VgpuStartRefused" in told(stage, "large"), "an event")
    assert told(stage, "large")["VgpuStartRefused"].startswith(
        f"container main may not start with its {NUMBER}: "
    )
    assert (await stage.agent.get("/debug/explain?pod=default/never"))["answer"][0].startswith(
        "Nothing is known of a pod default/never"
    )


async def _text(stage: ManagerStage, path: str) -> str:
    """Return what the public address has at ``path``."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{stage.agent.public_address}{path}") as answer,
    ):
        return await answer.text()


async def test_one_token_leads_from_allocate_to_the_last_annotation(stage: ManagerStage) -> None:
    """It is shown beside the grant's evidence, and in the log at every step."""
    await stage.start_agent()
    await stage.serve("p", asks(1, 1024, 10), f"main[1_{U1}_10_1024]")
    await stage.phase("p", "succeed")
    (grant,) = (await stage.agent.get("/debug/allocations?pod=default/p"))["allocations"]
    assert grant["evidence"][-1] == "decided by the scheduler, in nvidia.com/pre-allocated"
    await stage.agent.until_logged("pods.written")
    lines = await asyncio.to_thread(stage.agent.log_lines)
    found = [
        line["msg"]
        for line in lines
        if grant["token"] in (line.get("token"), *line.get("tokens", ()))
    ]
    assert found[:2] == ["allocate.reserved", "start.bound"]
    assert set(found[2:]) == {"pods.written"}


async def test_the_status_and_the_page_speak_of_the_family(stage: ManagerStage) -> None:
    """Its offer, its settings, and who has what."""
    await stage.start_agent()
    await stage.serve("p", asks(1, 1024, 10), f"main[1_{U1}_10_1024]")
    config = await stage.agent.get("/debug/config")
    offered = {one["family"]: one["offered"] for one in config["binding"]["families"]}
    assert offered == {"vgpu-manager": True, "vgpu-manager-mig": False}
    reasons = {one["family"]: one["trouble"] for one in config["binding"]["families"]}
    assert reasons["vgpu-manager-mig"] == (
        "this node has no device for it: of its 2 GPUs, none is in MIG mode"
    )
    page = await _text(stage, "/")
    assert NUMBER in page
    assert "default/p" in page
    status = await stage.agent.get("/debug/status")
    assert status["ready"]


async def test_the_dashboards_of_the_replaced_monitor_go_on(stage: ManagerStage) -> None:
    """At an address of their own, with probes; ours stay as they are."""
    await stage.start_agent(ON + EXPORTER)
    await stage.serve("p", asks(1, 1024, 10), f"main[1_{U1}_10_1024]")
    await stage.agent.until_logged("web.listening")
    (address,) = next(
        line["exporters"]
        for line in await asyncio.to_thread(stage.agent.log_lines)
        if line["msg"] == "web.listening"
    )

    async def scraped() -> str:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/readyz") as answer:
                assert answer.status == 200
            async with session.get(f"http://{address}/metrics") as answer:
                return await answer.text()

    text = await scraped()
    card = f'device_idx="1",device_type="NVIDIA A10",device_uuid="{U1}",node="node-a"'
    assert f'vgpu_device_assigned_memory_in_bytes{{{card},service="vGPU"}} 1.073741824e+09' in text
    assert f'vgpu_device_assigned_cores_number{{{card},service="vGPU"}} 10.0' in text
    (limit,) = [
        line
        for line in text.splitlines()
        if line.startswith("container_vgpu_device_memory_limit_in_bytes{")
    ]
    assert 'pod_name="p",pod_namespace="default"' in limit
    assert f'device_uuid="{U0}"' in text
    assert "physical_gpu_device_health_status" not in await _text(stage, "/metrics")


async def test_a_containers_directory_goes_with_its_pod_and_not_by_age_or_labels(
    stage: ManagerStage,
) -> None:
    """device-monitor deletes that of a living container once it is two minutes old and a label is
    lost, or while an image is pulled slowly; vgpu-manager:D27. Here the kubelet's records decide.
    """
    await stage.start_agent()
    for name in ("stays", "goes"):
        await stage.serve(name, asks(1, 1024, 10), f"main[1_{U1}_10_1024]")
    kept, gone = (_directory(stage, name) for name in ("stays", "goes"))
    for directory in (kept, gone):
        assert list(directory.iterdir())
        os.utime(directory, (0, 0))
    lost = {"nvidia.com/metrics-node": None, "nvidia.com/assigned-phase": "failed"}
    metadata = {"labels": lost, "annotations": {"nvidia.com/real-allocated": None}}
    stage.cluster.objects.patch("pods", "stays", {"metadata": metadata}, "default")
    stage.cluster.delete_pod("goes")
    await stage.cluster.until(lambda: not gone.exists(), "a collection")
    assert list(kept.iterdir())
    await stage.cluster.crash("stays")  # a restart needs it
    assert list(kept.iterdir())


def _directory(stage: ManagerStage, name: str) -> Path:
    """Return the directory on the host of the container ``main`` of a pod."""
    uid = stage.cluster.pod(name)["metadata"]["uid"]
    (found,) = stage.folder.rglob(f"{uid}_main")
    return found


async def test_a_pod_that_the_kubelet_has_failed_is_made_anew(stage: ManagerStage) -> None:
    """By the gate, with the real process, the real client and a file on the disk; its stale claim
    is gone, so a scheduler may send it elsewhere; vgpu-manager:D24.
    """
    gates = "vgpuManager: {featureGates: [AllocationFailureReschedule=true]}\n"
    await stage.start_agent(ON + gates)
    objects = stage.cluster.objects
    failed: dict[str, Any] = {
        "phase": "Failed",
        "reason": "UnexpectedAdmissionError",
        "message": "Pod was rejected: Allocate failed",
    }
    stage.create("bare", asks(1, 900_000, 10), f"main[1_{U1}_10_900000]")
    await stage.agent.until("/debug/allocations", lambda found: bool(found["refusals"]))
    before = objects.set_status("pods", "bare", failed, "default")["metadata"]["uid"]

    def made() -> bool:
        try:
            found = objects.get("pods", "bare", "default")
        except SimulationError:
            return False
        if "deletionTimestamp" in found["metadata"]:  # as the kubelet ends a deleted pod
            objects.delete("pods", "bare", "default", grace_seconds=0)
            return False
        return bool(found["metadata"]["uid"] != before)

    await stage.cluster.until(made, "another pod")
    found = objects.get("pods", "bare", "default")
    assert "nvidia.com/pre-allocated" not in found["metadata"]["annotations"]
    assert "nodeName" not in found["spec"]
    await stage.agent.until(
        "/debug/cluster", lambda cluster: cluster["rescued"].get("recreated") == 1
    )
    assert set(told(stage, "bare")) >= {"VgpuDeleted"}


async def test_the_owner_is_told_which_wish_was_not_followed(stage: ManagerStage) -> None:
    """vgpu-manager §4.1, §5.6: the extender gives these events where it places the pod. Without one
    the agent does, once a container has started, and not again for its next start.
    """
    await stage.start_agent()
    wishes = {
        "nvidia.com/device-scheduler-policy": "packed",
        "nvidia.com/device-topology-mode": "numa",
    }
    stage.cluster.create_pod("wishes", asks(2, 1024, 10), annotations=wishes, node=NODE)
    await stage.cluster.running("wishes")
    reasons = {"PolicyInvalid", "TopologyFallback"}
    await stage.cluster.until(lambda: reasons <= told(stage, "wishes").keys(), "both events")
    assert told(stage, "wishes")["PolicyInvalid"].startswith(
        "container main: annotation nvidia.com/device-scheduler-policy='packed' means nothing"
    )
    assert told(stage, "wishes")["TopologyFallback"].endswith(
        "it got GPU 0, 1: not on one NUMA node"
    )
    await stage.cluster.crash("wishes")
    await stage.serve("claimed", asks(1, 1024, 10), f"main[1_{U1}_10_1024]")
    assert reasons.isdisjoint(told(stage, "claimed"))
    events = stage.cluster.objects.list("events", "default")
    assert sorted(one["reason"] for one in events if one["reason"] in reasons) == sorted(reasons)
