"""A node with a Tegra processor, by the agent's real process:
no NVML, a small tree of files, the simulated kubelet.
"""

from __future__ import annotations

import asyncio
import re

from tests import constants
from tests.component.conftest import GPU, QUICK, SHARED, Stage
from vgpu_agent.sim.agent_process import AgentProcess


def on_tegra(stage: Stage, config: str = "", **environment: str) -> AgentProcess:
    """An agent on a node that has the file by which a Tegra processor is known, and no driver."""
    release = stage.folder / "host" / "etc" / "nv_tegra_release"
    release.parent.mkdir(parents=True)
    release.write_text("# R35 (release), REVISION: 4.1\n")
    root = f"gpu: {{driverRoot: {stage.folder / 'host'}, "
    stage.constants[constants.SYSFS_ROOT] = str(stage.folder / "sys")
    return stage.agent(
        QUICK.replace("gpu: {", root) + config, simulate=False, environment=environment
    )


async def test_the_gpu_of_a_tegra_processor_is_found_shared_and_given_out(stage: Stage) -> None:
    """nvidia §4, §7, §9: without NVML it is one GPU of id ``tegra``.
    Two pods share it, and each receives ``tegra``.
    """
    agent = on_tegra(stage, SHARED)
    await agent.start()
    await agent.until_ready()
    await stage.allocatable(4)
    pods = [await stage.admit(name) for name in ("one", "other")]

    assert sorted(id_ for pod in pods for id_ in stage.ids(pod)) == ["tegra::0", "tegra::1"]
    assert [pod.answers["main"].envs for pod in pods] == [{"NVIDIA_VISIBLE_DEVICES": "tegra"}] * 2
    assert not any(pod.answers["main"].devices for pod in pods)
    found = await agent.until_logged("gpu.discovery")
    assert (found["integrated"], "libnvidia-ml.so.1" in found["reason"]) == (True, True)


async def test_what_is_shown_of_it_makes_sense(stage: Stage) -> None:
    """nvidia §10: no health is watched, so nothing says that a driver is missing,
    or that the GPU has no memory at all.
    """
    agent = on_tegra(stage)
    await agent.start()
    await agent.until_ready()
    shown = await agent.get("/debug/devices")
    (gpu,) = shown["gpus"]
    _, metrics = await agent.get_text("/metrics")
    _, checks = await agent.get_text("/readyz?verbose")

    assert (gpu["uuid"], gpu["health"], shown["nvml"]["state"]) == ("tegra", "Healthy", "not used")
    assert 'vgpu_agent_gpu_healthy{gpu="tegra"} 1' in metrics
    assert not re.search(
        r"^vgpu_agent_(nvml_up|gpu_memory_total_bytes|inventory_age_seconds)\b",
        metrics,
        re.MULTILINE,
    )
    assert "[+] nvml: not used" in checks


async def test_what_needs_memory_or_nvml_offers_nothing_and_says_why(stage: Stage) -> None:
    """nvidia §1: CDI names are made through NVML, and Volcano's and AWS's shares of its memory.
    Each says one reason.
    """
    agent = on_tegra(
        stage,
        "families: {volcanoVgpu: true, volcanoGpushare: true, aws: true}\n",
        DEVICE_LIST_STRATEGY="cdi-cri",
    )
    await agent.start()
    named = (GPU, "volcano-vgpu", "volcano-gpushare", "k8s.amazonaws.com/vgpu")
    shown = await agent.until(
        "/debug/resources", lambda answer: all(name in answer["withheld"] for name in named)
    )
    status, _ = await agent.get_text("/readyz")

    assert (status, shown["resources"]) == (503, [])
    assert (
        "part of its processor, and CDI names of GPUs are made through NVML"
        in shown["withheld"][GPU]
    )
    for name in named[1:3]:
        assert (
            "offer it by families.nvidia, and switch this family off here"
            in shown["withheld"][name]
        )
    assert "has no UUID to name it by" in shown["withheld"][named[3]]


async def test_a_pod_keeps_the_gpu_over_a_restart(stage: Stage) -> None:
    """The ids in kubelet's records mean the same to the next process:
    the one whole GPU stays taken.
    """
    before = on_tegra(stage)
    config = await asyncio.to_thread(stage.config.read_text)
    await before.start()
    await before.until_ready()
    await stage.allocatable(1)
    await stage.admit("train")
    await before.terminate()
    after = stage.agent(config, simulate=False)
    await after.start()
    await after.until_ready()
    (grant,) = (await after.get("/debug/ledger"))["grants"]
    assert (grant["resource"], grant["ids"], grant["pod"]) == (GPU, ["tegra"], "train")
