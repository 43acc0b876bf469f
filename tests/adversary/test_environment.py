"""Variables with which a pod would take another GPU, leave its limit, or choose one of its own.

Which value a container sees is decided by the carrier. kubelet puts the pod's variables behind
those of an Allocate answer, so the pod's win (GenerateRunContainerOptions); a runtime applies CDI
edits to the finished specification, so the agent's win (ContainerEdits.Apply). The simulated
kubelet and runtime do the same.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.component.volcano import VolcanoStage, asks, volcano_stage
from vgpu_agent.isolation.backend import Target
from vgpu_agent.isolation.hami_core import DISABLED_BY, HamiCore
from vgpu_agent.model import Gpu, Share
from vgpu_agent.sim.cluster import SimulatedCluster

# What a hostile pod would like its library, and the container toolkit, to believe.
WANTED = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "CUDA_DEVICE_MEMORY_LIMIT_0": "80000m",
    "CUDA_DEVICE_MEMORY_LIMIT": "80000m",
    "CUDA_DEVICE_SM_LIMIT": "100",
    "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/home/me/own.cache",
    "GPU_CORE_UTILIZATION_POLICY": "disable",
    "CUDA_REDIRECT": "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
}
GPU = Gpu("GPU-11111111-aaaa-bbbb-cccc-000000000001", 0, 0, "NVIDIA A10", 24576, "0000:07:00.0")
PRELOAD = "/etc/ld.so.preload"


@pytest.fixture
async def late(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node whose runtime resolves CDI names."""
    async with volcano_stage(folder) as stage:
        yield stage


@pytest.fixture
async def early(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node whose containerd knows no CDI."""
    async with volcano_stage(folder, runtime_version="containerd://1.6.8") as stage:
        yield stage


@pytest.mark.component
async def test_no_pod_chooses_its_gpu_or_limits_where_a_spec_tells_them(late: VolcanoStage) -> None:
    """With late binding each of the agent's values beats the pod's,
    and all that a limit depends on is among them.
    """
    await late.start_agent()
    came = await late.serve("greedy", asks(1, 16, 10), environment=WANTED)
    late.check()  # the card and the limits are the scheduler's
    environment = came.environment
    assert environment["CUDA_DEVICE_SM_LIMIT"] == "10"
    assert environment["CUDA_DEVICE_MEMORY_SHARED_CACHE"].startswith("/tmp/vgpu/")
    assert environment["GPU_CORE_UTILIZATION_POLICY"] == "force"
    assert environment["CUDA_REDIRECT"] == "/usr/local/vgpu/libvgpu.so"
    # The one that stays is read where there is no region only, and there is one.
    assert {name for name in WANTED if environment[name] == WANTED[name]} == {
        "CUDA_DEVICE_MEMORY_LIMIT"
    }


@pytest.mark.component
async def test_no_pod_switches_its_limit_off_on_a_shared_gpu(late: VolcanoStage) -> None:
    """CUDA_DISABLE_CONTROL was enough to take the memory of every neighbour.
    A holder of a whole GPU has none, and may.
    """
    await late.start_agent()
    switched_off = {DISABLED_BY: "true"}
    shared = await late.serve("shared", asks(1, 16, 10), environment=switched_off)
    whole = await late.serve("whole", asks(1), environment=switched_off)
    assert PRELOAD in shared.mounts
    assert PRELOAD not in whole.mounts


@pytest.mark.component
async def test_no_pod_takes_another_gpu_where_its_value_wins(early: VolcanoStage) -> None:
    """With early binding the pod's value beats the agent's, so a pod that sets one that decides
    does not start; the reason names it. One that sets only limits starts, because those are in the
    region.
    """
    await early.start_agent()
    cluster = early.cluster
    for name in (
        "NVIDIA_VISIBLE_DEVICES",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE",
        "CUDA_REDIRECT",
        "GPU_CORE_UTILIZATION_POLICY",
    ):
        pod = f"sets-{name.lower().replace('_', '-')}"
        cluster.create_pod(pod, asks(1, 16, 10), environment={name: WANTED[name]})
        why = f"the pod sets {name} for container main itself"
        await cluster.until(
            functools.partial(_is_refused, cluster, pod, why), f"{pod} to be refused"
        )
        assert cluster.starts(pod) == []
        cluster.objects.delete("pods", pod, "default", grace_seconds=0)
    limits = {name: value for name, value in WANTED.items() if "LIMIT" in name}
    came = await early.serve("limits", asks(1, 16, 10), environment=limits)
    # and the library reads the region
    assert came.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "80000m"
    assert came.environment["CUDA_DEVICE_MEMORY_SHARED_CACHE"].startswith("/tmp/vgpu/")


@pytest.mark.component
async def test_an_operator_can_have_the_replaced_plugins_way(early: VolcanoStage) -> None:
    """Both settings are there for clusters whose pods rely on it."""
    early.configure()
    text = await asyncio.to_thread(early.config.read_text)
    text = text.replace("hamiCore: {", "hamiCore: {disableVariable: honor, ").replace(
        "binding: {", "binding: {podVariables: allow, "
    )
    await asyncio.to_thread(early.config.write_text, text)
    early.deliver_library()
    await early.new_agent().start()
    await early.offered()
    came = await early.serve(
        "old", asks(1, 16, 10), environment={DISABLED_BY: "", "NVIDIA_VISIBLE_DEVICES": "all"}
    )
    assert came.environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert PRELOAD not in came.mounts


def _is_refused(cluster: SimulatedCluster, pod: str, why: str) -> bool:
    return any(refused == pod and why in text for refused, _, text in cluster.refusals)


def _preloaded(setting: str, *shares: Share, oversubscribed: bool = False, gpu: Gpu = GPU) -> bool:
    backend = HamiCore("/usr/local/vgpu", "/usr/local/vgpu/libvgpu.so.0", disable_variable=setting)
    pairs = tuple((gpu, share) for share in shares)
    target = Target(
        "uid", "main", "grant", frozenset({DISABLED_BY}), pairs, oversubscribed=oversubscribed
    )
    return PRELOAD in [mount.container_path for mount in backend.provision(target).edits.mounts]


@pytest.mark.parametrize(
    ("share", "oversubscribed", "limited"),
    [
        (Share(GPU.uuid, 24576), False, False),
        (Share(GPU.uuid, 0), False, False),
        (Share(GPU.uuid, 1000, 0, exclusive=True), False, False),
        (Share(GPU.uuid, 24575), False, True),
        (Share(GPU.uuid, 24576), True, True),  # the memory is offered more than once
        (Share(GPU.uuid, 1), False, True),
    ],
)
def test_no_share_that_others_lie_beside_goes_without_a_limit(
    share: Share, oversubscribed: bool, limited: bool
) -> None:
    """The default: only a container with all memory of each
    of its GPUs may switch the library off.
    """
    assert _preloaded("whole-gpus", share, oversubscribed=oversubscribed) is limited


def test_no_second_share_is_overlooked() -> None:
    """One whole GPU and a part of another: the part has neighbours."""
    assert _preloaded("whole-gpus", Share(GPU.uuid, 0), Share(GPU.uuid, 1000))


@pytest.mark.parametrize(("setting", "limited"), [("ignore", True), ("honor", False)])
def test_the_operator_decides_about_the_disabling_variable(setting: str, limited: bool) -> None:
    """For whole GPUs and shares alike."""
    assert _preloaded(setting, Share(GPU.uuid, 0)) is limited
    assert _preloaded(setting, Share(GPU.uuid, 1000)) is limited


def test_no_unknown_memory_counts_as_whole() -> None:
    """A card whose memory the driver has not reported yet: any share looks as large as it."""
    assert _preloaded(
        "whole-gpus", Share(GPU.uuid, 1000), gpu=msgspec.structs.replace(GPU, memory_mib=0)
    )
