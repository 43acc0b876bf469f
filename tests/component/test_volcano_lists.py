"""Volcano's families with the other list strategies: the same grants, passed by mounts or by CDI,
also without an NVIDIA runtime.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import constants
from tests.component.conftest import until_not_ready
from tests.component.volcano import GPUSHARE, IDS, U0, U1, VGPU, VolcanoStage, asks, volcano_stage
from tests.replacing import replace_text
from vgpu_agent.sim.cdi_reader import Received
from vgpu_agent.sim.nvidia_ctk import StandInCtk

CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
INLINE = "cdi: {inline: true}\n"
GPU_MEMORY = "volcano.sh/gpu-memory"


def by(strategy: str) -> str:
    """A configuration with that list strategy."""
    return f"{VGPU}plugin: {{deviceListStrategy: {strategy}}}\n"


def devices_of(stage: VolcanoStage, name: str) -> set[str]:
    """The device nodes of the cards that the scheduler wrote down for a pod."""
    text = stage.cluster.annotations(name)[IDS]
    return {f"/dev/nvidia{number}" for number, uuid in enumerate((U0, U1)) if uuid in text}


def check(stage: VolcanoStage, name: str, came: Received) -> None:
    """All that the container needs of its card, its limit,
    and nothing for an older runtime to act upon.
    """
    assert came.device_nodes == CONTROL | devices_of(stage, name)
    assert came.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert came.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{20 * stage.factor}m"
    assert "/usr/local/vgpu/libvgpu.so" in came.mounts


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with a runtime that knows CDI."""
    async with volcano_stage(folder) as stage:
        yield stage


@pytest.mark.parametrize(
    "config",
    [VGPU + INLINE, by("[cdi-cri]"), by("[cdi-annotations]")],
    ids=["inline", "cdi-cri", "cdi-annotations"],
)
async def test_a_late_bound_container_needs_no_nvidia_runtime(
    stage: VolcanoStage, config: str
) -> None:
    """volcano-vgpu:G10: the grant's own spec has the content of the card's name,
    beside its limits.
    """
    await stage.start_agent(config)
    for number in range(3):
        check(stage, f"p{number}", await stage.serve(f"p{number}", asks(1, 20)))
    two = await stage.serve("two", asks(2, 20))
    assert {"/dev/nvidia0", "/dev/nvidia1"} <= two.device_nodes


async def test_a_container_bound_early_is_told_by_name(stage: VolcanoStage) -> None:
    """Decided in Allocate: the name itself is answered, and the runtime resolves it.
    The kubelet's copy proves the answer's pod.
    """
    stage.configure(by("[cdi-annotations]"))
    text = await asyncio.to_thread(stage.config.read_text)
    await asyncio.to_thread(
        replace_text, stage.config, text.replace("binding: {", "binding: {mode: early, ")
    )
    stage.deliver_library()
    await stage.new_agent().start()
    await stage.offered()
    check(stage, "early", await stage.serve("early", asks(1, 20)))


async def test_a_card_told_by_mount(stage: VolcanoStage) -> None:
    """volcano-vgpu:G10: the variable names the directory, a mount the card."""
    await stage.start_agent(by("[volume-mounts]"))
    came = await stage.serve("p", asks(1, 20))
    directory = "/var/run/nvidia-container-devices"
    assert came.environment["NVIDIA_VISIBLE_DEVICES"] == directory
    assert came.mounts[
        f"{directory}/{U1 if U1 in stage.cluster.annotations('p')[IDS] else U0}"
    ] == ("/dev/null", False)


async def test_shared_cards_of_the_older_plugin_can_be_inlined_too(stage: VolcanoStage) -> None:
    """``volcano-gpushare`` needs no NVIDIA runtime either."""
    await stage.start_agent(GPUSHARE + INLINE, offers=[GPU_MEMORY])
    came = await stage.serve("p", {GPU_MEMORY: 100}, scheduler="default-scheduler")
    assert came.device_nodes > CONTROL
    assert came.environment["VOLCANO_GPU_ALLOCATED"] == "100"
    assert came.environment["NVIDIA_VISIBLE_DEVICES"] == "void"


async def test_everything_is_there_again_after_a_reboot(stage: VolcanoStage) -> None:
    """All specs are gone with /run: those of the node's devices are made again,
    and with them those of grants.
    """
    await stage.start_agent(VGPU + INLINE)
    check(stage, "p", await stage.serve("p", asks(1, 20)))
    await stage.agent.kill()
    await stage.cluster.reboot()
    await stage.restart_agent()
    await stage.cluster.until(
        lambda: len(stage.cluster.starts("p")) == 2, "the container to start again"
    )
    check(stage, "p", stage.cluster.starts("p")[-1])


async def test_without_the_tool_nothing_is_offered_and_nobody_is_started(
    stage: VolcanoStage,
) -> None:
    """``/readyz`` has the reason. A node that is only inlined for later needs no restart
    when the tool is there.
    """
    tool = StandInCtk(stage.gpus.directory)
    await asyncio.to_thread(tool.misbehave, fail="Driver Not Loaded")
    stage.configure(VGPU + INLINE)
    stage.constants[constants.SPEC_RETRY_MAX] = 0.5
    stage.deliver_library()
    await stage.new_agent().start()
    await until_not_ready(stage.agent, "Driver Not Loaded")
    await asyncio.to_thread(tool.behave)
    await stage.offered()
    check(stage, "p", await stage.serve("p", asks(1, 20)))
