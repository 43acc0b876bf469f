"""Pods of Volcano, from the scheduler's annotation to what the container got,
with the agent's real process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.volcano import (
    GPUSHARE,
    IDS,
    NODE,
    REGISTER,
    U0,
    U1,
    VolcanoStage,
    asks,
    recover_after,
    volcano_stage,
)
from vgpu_agent.sim.volcano.scheduler import VolcanoSettings

GPU_MEMORY, GPU_INDEX = "volcano.sh/gpu-memory", "volcano.sh/gpu-index"


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        yield stage


async def test_from_annotation_to_container_and_back(stage: VolcanoStage) -> None:
    """volcano-vgpu:G3 is what the scheduler writes, volcano-vgpu:G4 what the container gets,
    volcano-vgpu:G5 how the pod ends.
    """
    await stage.start_agent(factor=1)
    came = await stage.serve("p", asks(1, 3000, 50))
    await stage.settled("p")
    uid = stage.cluster.pod("p")["metadata"]["uid"]
    cache = came.environment["CUDA_DEVICE_MEMORY_SHARED_CACHE"]
    assert came.environment == {
        "NVIDIA_VISIBLE_DEVICES": U1,
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "50",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": cache,
        "CUDA_REDIRECT": "/usr/local/vgpu/libvgpu.so",
        "GPU_CORE_UTILIZATION_POLICY": "force",
    }
    own = f"{stage.folder}/vgpu/vgpu/regions/{uid}_main"
    region = Path(own, os.path.basename(cache))
    assert {came.mounts[path] for path in (cache, "/tmp/cudevshr.cache")} == {(str(region), False)}
    # no container can write to a directory of the host
    assert not came.mounts.keys() & {"/tmp/vgpu", "/tmp/vgpulock"}
    assert came.mounts["/etc/ld.so.preload"] == (f"{stage.folder}/vgpu/ld.so.preload", True)
    library, read_only = came.mounts["/usr/local/vgpu/libvgpu.so"]
    assert (os.path.dirname(library), read_only) == (f"{stage.folder}/vgpu", True)
    # there before the first process
    assert len(await asyncio.to_thread(region.read_bytes)) == 2_008_953
    after = stage.cluster.annotations("p")
    assert after == {
        "volcano.sh/vgpu-node": NODE,
        "volcano.sh/vgpu-time": "18446744073709551615",
        "volcano.sh/bind-time": after["volcano.sh/bind-time"],
        "volcano.sh/bind-phase": "success",
        IDS: f"{U1},NVIDIA,3000,50:",
        "volcano.sh/devices-to-allocate": "",
    }
    (grant,) = (await stage.agent.get("/debug/allocations?pod=default/p"))["allocations"]
    assert [
        (share["gpu"], share["memory_mib"], share["cores_percent"]) for share in grant["shares"]
    ] == [(U1, 3000, 50)]


async def test_the_node_is_described_before_kubelet_hears_of_it(stage: VolcanoStage) -> None:
    """volcano-vgpu:D11: a scheduler never sees quantities
    of a node whose cards it does not know.
    """
    shown: list[bool] = []
    objects = stage.cluster.objects

    def look() -> bool:
        registered = bool(stage.cluster.kubelet.called("Register"))
        if registered and not shown:
            shown.append(REGISTER in objects.get("nodes", NODE)["metadata"].get("annotations", {}))
        return registered

    watching = asyncio.ensure_future(stage.cluster.kubelet.until(look))
    await stage.start_agent()
    await watching
    assert shown == [True]


async def test_every_shape_of_a_pod(stage: VolcanoStage) -> None:
    """volcano-vgpu:D1, volcano-vgpu:D3 and volcano-vgpu:D14: several GPU containers, a sidecar
    first, init containers of any size.
    """
    await stage.start_agent()
    cluster = stage.cluster
    cluster.create_pod("two", [asks(1, 10), asks(1, 20, 30)])
    cluster.create_pod("sidecar-first", [{}, asks(1, 30)])
    cluster.create_pod("sidecar-init", asks(1, 40), init=[({}, True)])
    cluster.create_pod("init-same", asks(1, 50), init=[(asks(1, 50), False)])
    cluster.create_pod("init-other", asks(1, 60), init=[(asks(1, 20), False), (asks(1, 60), False)])
    names = ("two", "sidecar-first", "sidecar-init", "init-same", "init-other")
    await cluster.running(*names)
    await stage.settled(*names)
    stage.check()
    assert [
        list(cluster.starts("two", name)[0].environment.values()).count("1280m")
        for name in ("c0", "c1")
    ] == [0, 1]
    assert cluster.starts("sidecar-first", "c0")[0].environment == {}
    for name, size in (("init-same", 50), ("init-other", 60)):
        last = "init0" if name == "init-same" else "init1"
        came = cluster.starts(name, last)[0].environment
        assert came["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{size * 64}m"
        assert (
            came["NVIDIA_VISIBLE_DEVICES"]
            == cluster.starts(name)[0].environment["NVIDIA_VISIBLE_DEVICES"]
        )
        assert len(cluster.starts(name)) == 1
    assert cluster.refusals == []


async def test_twenty_unequal_pods_in_one_second(stage: VolcanoStage) -> None:
    """volcano-vgpu:D2: all bound in the same second, all different.
    Each container has exactly what the scheduler wrote for it.
    """
    await stage.start_agent()
    names = [f"burst-{number:02}" for number in range(20)]
    for number, name in enumerate(names):
        stage.cluster.create_pod(name, asks(1, 10 + number, number // 2))
    await stage.cluster.running(*names)
    await stage.settled(*names)
    stage.check()
    sizes = [
        stage.cluster.starts(name)[0].environment["CUDA_DEVICE_MEMORY_LIMIT_0"] for name in names
    ]
    assert sizes == [f"{(10 + number) * 64}m" for number in range(20)]
    listed = [
        request
        for request in stage.cluster.api.requests
        if request.verb == "list" and request.resource == "pods"
    ]
    assert len(listed) <= 2  # volcano-vgpu:D12: the agent's, and the scheduler's


async def test_a_gang_and_spread_and_binpack(stage: VolcanoStage) -> None:
    """Four of a gang start together where the scheduler put them; then packed, then spread."""
    await stage.start_agent()
    gang = {"scheduling.k8s.io/group-name": "gang", "scheduling.volcano.sh/group-min-member": "4"}
    names = [f"gang-{number}" for number in range(4)]
    for name in names:
        stage.cluster.create_pod(name, asks(1, 100), annotations=gang)
    await stage.cluster.running(*names)
    await stage.cluster.start_volcano(VolcanoSettings(policy="binpack", retry_seconds=0.2))
    packed = [
        (await stage.serve(f"pack-{number}", asks(1, 10))).environment["NVIDIA_VISIBLE_DEVICES"]
        for number in range(2)
    ]
    assert len(set(packed)) == 1
    await stage.cluster.start_volcano(VolcanoSettings(policy="spread", retry_seconds=0.2))
    stage.cluster.create_pod("spread", asks(2, 10))
    await stage.cluster.running("spread")
    assert set(
        stage.cluster.starts("spread")[0].environment["NVIDIA_VISIBLE_DEVICES"].split(",")
    ) == {U0, U1}
    stage.check()


async def test_type_and_uuid_and_an_unhealthy_card(stage: VolcanoStage) -> None:
    """volcano-vgpu:D6: the scheduler reads of the broken card,
    so no pod lands on it until it is back.
    """
    await stage.start_agent()
    await recover_after(stage.agent, stage.config, 600)  # not while pods are placed
    came = await stage.serve("uuid", asks(1, 10), annotations={"volcano.sh/vgpu-use-gpuuuid": U0})
    assert came.environment["NVIDIA_VISIBLE_DEVICES"] == U0
    came = await stage.serve("type", asks(1, 10), annotations={"nvidia.com/use-gputype": "A10"})
    stage.cluster.create_pod("no-type", asks(1, 10), annotations={"nvidia.com/use-gputype": "H100"})
    stage.gpus.xid(1, 79)

    def registered(uuid: str) -> bool:
        text = stage.cluster.node_object()["metadata"]["annotations"][REGISTER]
        return any(
            entry.startswith(f"{uuid},") and not entry.startswith(f"{uuid},0,")
            for entry in text.split(":")
        )

    await stage.cluster.until(lambda: not registered(U1), "the broken card to be withdrawn")
    assert (await stage.serve("healthy", asks(1, 10))).environment["NVIDIA_VISIBLE_DEVICES"] == U0
    await recover_after(stage.agent, stage.config, 0.5)
    await stage.cluster.until(lambda: registered(U1), "the card to come back")
    assert "nodeName" not in stage.cluster.pod("no-type")["spec"]
    stage.check()


async def test_pods_that_no_gpu_scheduler_placed(stage: VolcanoStage) -> None:
    """Under the plain kube-scheduler, or bound by hand, the agent places the pod itself,
    binpack by default, and says so.
    """
    await stage.start_agent()
    first = await stage.serve("plain-0", asks(1, 100, 10), scheduler="default-scheduler")
    second = await stage.serve("plain-1", asks(1, 100, 10), scheduler="default-scheduler")
    third = await stage.serve("by-hand", asks(1, 50), scheduler="nobody", node=NODE)
    cards = {came.environment["NVIDIA_VISIBLE_DEVICES"] for came in (first, second, third)}
    assert len(cards) == 1
    assert first.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "6400m"
    events = (await stage.agent.get("/debug/events?since=5m"))["events"]
    bound = [event for event in events if event["event"] == "start.bound"]
    assert all("the agent, binpack" in event["facts"]["evidence"][-1] for event in bound)


async def test_enough_in_sum_and_not_on_one_card(stage: VolcanoStage) -> None:
    """The plain scheduler cannot see this. The start is refused with the reason,
    and succeeds once there is room.
    """
    await stage.start_agent()
    for number in range(2):
        await stage.serve(
            f"half-{number}",
            asks(1, 200),
            annotations={"volcano.sh/vgpu-use-gpuuuid": (U0, U1)[number]},
        )
    stage.cluster.create_pod("large", asks(1, 300), scheduler="default-scheduler")
    await stage.cluster.until(
        lambda: any(name == "large" for name, _, _ in stage.cluster.refusals), "a refusal"
    )
    assert "300" in next(text for name, _, text in stage.cluster.refusals if name == "large")
    stage.cluster.delete_pod("half-0")
    await stage.cluster.running("large")
    assert stage.cluster.starts("large")[0].environment["NVIDIA_VISIBLE_DEVICES"] == U0


async def test_gpu_share_through_the_process(stage: VolcanoStage) -> None:
    """volcano-gpushare:S2 is what the scheduler writes,
    volcano-gpushare:S3 what the container gets. The Node has the count.
    """
    await stage.cluster.start_volcano(VolcanoSettings(gpushare="share", retry_seconds=0.2))
    await stage.start_agent(
        GPUSHARE + "volcanoGpushare: {gpuMemoryFactor: 64}\n", offers=[GPU_MEMORY]
    )
    await stage.cluster.until(
        lambda: stage.allocatable.get("volcano.sh/gpu-number") == "2", "the count of cards"
    )
    came = await stage.serve("share", {GPU_MEMORY: 100})
    written = stage.cluster.annotations("share")
    assert came.environment["NVIDIA_VISIBLE_DEVICES"] == written[GPU_INDEX] == "0"
    assert came.environment["VOLCANO_GPU_ALLOCATED"] == "6400"
    assert came.environment["VOLCANO_GPU_MEMORY_TOTAL"] == "23028"
    await stage.cluster.until(
        lambda: "volcano.sh/predicate-time" in stage.cluster.annotations("share")
    )
    stage.cluster.create_pod("two", [{GPU_MEMORY: 10}, {GPU_MEMORY: 20}])
    await stage.cluster.running("two")
    sizes = [
        stage.cluster.starts("two", name)[0].environment["VOLCANO_GPU_ALLOCATED"]
        for name in ("c0", "c1")
    ]
    assert sizes == ["640", "1280"]
