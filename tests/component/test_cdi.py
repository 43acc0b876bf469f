"""Devices by CDI names with the agent's real process:
what kubelet is answered is resolved as a container runtime does it.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from tests import constants
from tests.component.conftest import QUICK, Stage
from tests.golden import U0, U1
from tests.patience import FOR_EVER_SECONDS
from tests.replacing import replace_text
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.cdi_reader import Received, received
from vgpu_agent.sim.kubelet.kubelet import Pod
from vgpu_agent.sim.nvidia_ctk import COMMAND, StandInCtk
from vgpu_agent.sim.trees import capability_number

VENDOR = "k8s.device-plugin.nvidia.com"
GPU_FILE = f"{VENDOR}-gpu.json"
FIVE, TEN = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb"
CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}


def config(stage: Stage, strategy: str = "cdi-cri", *, plugin: str = "", more: str = "") -> str:
    """A configuration with that list strategy, whose specs lie in a folder of the test."""
    return (
        f"{QUICK}binding: {{cdiDirectory: {stage.folder}/cdi}}\n"
        f"plugin: {{deviceListStrategy: [{strategy}]{plugin}}}\n"
        f"{more}"
    )


async def came(stage: Stage, pod: Pod) -> Received:
    """Return what the container starts with."""
    return await asyncio.to_thread(received, pod.answers["main"], stage.folder / "cdi")


async def withheld(stage: Stage, agent: AgentProcess) -> str:
    """Return why the resource is not offered, and check that the kubelet has not received it."""
    await agent.start()
    await agent.until_logged("agent.started")
    status, text = await agent.get_text("/readyz")
    assert status == 503
    assert stage.kubelet.called("Register") == []
    return text


@pytest.mark.parametrize(("strategy", "by_field"), [("cdi-cri", True), ("cdi-annotations", False)])
async def test_a_container_gets_its_gpu_by_name(
    stage: Stage, strategy: str, *, by_field: bool
) -> None:
    """nvidia:A7, nvidia:A9: the names in kubelet's answer are in a spec, which adds the device and
    voids the old runtime's request.
    """
    agent = await stage.ready_agent(config(stage, strategy))
    pod = await stage.admit("train", 1)
    (uuid,) = stage.ids(pod)

    answer = pod.answers["main"]
    assert [device.name for device in answer.cdi_devices] == [f"{VENDOR}/gpu={uuid}"] * by_field
    assert list(answer.annotations.values()) == [f"{VENDOR}/gpu={uuid}"] * (not by_field)
    assert not answer.envs
    found = await came(stage, pod)
    assert found.device_nodes == CONTROL | {"/dev/nvidia0" if uuid == U0 else "/dev/nvidia1"}
    assert found.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    told = (await agent.get("/debug/config"))["cdi"]
    assert (told["source"], told["strategies"]) == ("generated", [strategy])
    assert told["specs"][0]["devices"] == [U0, U1, "all"]
    assert told["specs"][0]["path"] == f"{stage.folder}/cdi/{GPU_FILE}"


async def test_everything_at_once(stage: Stage) -> None:
    """nvidia:A11: two GPUs, the IMEX channel, and GDS, which this node has;
    GDRCopy it has not, so no container gets it by name.
    """
    await asyncio.to_thread(_devices, stage, "nvidia-caps-imex-channels/channel0", "nvidia-fs0")
    await stage.ready_agent(
        config(stage, plugin=", gdsEnabled: true, gdrcopyEnabled: true, imexChannelIds: [0]")
    )
    pod = await stage.admit("train", 2)

    answer = pod.answers["main"]
    names = [f"{VENDOR}/gpu={uuid}" for uuid in stage.ids(pod)]
    assert [device.name for device in answer.cdi_devices] == [
        *names,
        f"{VENDOR}/imex-channel=0",
        f"{VENDOR}/gds=all",
    ]
    assert dict(answer.envs) == {"NVIDIA_GDS": "enabled", "NVIDIA_GDRCOPY": "enabled"}
    more = {
        "/dev/nvidia0",
        "/dev/nvidia1",
        "/dev/nvidia-caps-imex-channels/channel0",
        "/dev/nvidia-fs0",
    }
    assert (await came(stage, pod)).device_nodes == CONTROL | more


async def test_slices_have_names_as_soon_as_they_are_given_out(stage: Stage) -> None:
    """nvidia:A10: a GPU is cut anew while the agent runs. The pod admitted first can start, by
    index, with the slice's capabilities.
    """
    await asyncio.to_thread(stage.node.set_mig, 1, ["1g.5gb"] * 7)
    await stage.ready_agent(config(stage, plugin=", migStrategy: mixed, deviceIdStrategy: index"))
    await stage.allocatable(7, resource=FIVE)
    pod = await stage.admit("five", 1, FIVE)
    number = stage.node.mig_uuids(1).index(stage.ids(pod, FIVE)[0])
    assert [device.name for device in pod.answers["main"].cdi_devices] == [
        f"{VENDOR}/gpu=1:{number}"
    ]
    assert len((await came(stage, pod)).device_nodes - CONTROL) == 3

    await asyncio.to_thread(stage.node.set_mig, 1, ["2g.10gb", "2g.10gb"])
    await stage.allocatable(2, resource=TEN)
    pod = await stage.admit("ten", 2, TEN)
    slices = [
        (mig.gpu_instance, mig.compute_instance)
        for mig in stage.node.state.gpus[1].mig_devices
        if mig.used
    ]
    numbers = [
        number
        for of, within in slices
        for number in (capability_number(1, of), capability_number(1, of, within))
    ]
    assert (await came(stage, pod)).device_nodes - CONTROL == {
        "/dev/nvidia1",
        *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in numbers),
    }


async def test_a_tool_that_is_missing_withholds_the_resource_until_it_is_there(
    stage: Stage,
) -> None:
    """One clear reason in ``/readyz``, nothing registered.
    The agent serves, and tries again by itself.
    """
    tool = stage.folder / "nvidia-ctk"
    stage.constants[constants.SPEC_RETRY_MAX] = 0.5
    agent = stage.agent(config(stage, more=f"cdi: {{nvidiaCtk: {tool}}}\n"))
    text = await withheld(stage, agent)
    assert f"cannot run {tool}: No such file or directory" in text
    assert "cdi.nvidiaCtk" in text

    await asyncio.to_thread(_install_tool, tool)
    await agent.until_ready()
    await stage.allocatable(2)


async def test_a_tool_that_hangs_or_prints_nonsense_stops_nothing_else(stage: Stage) -> None:
    """The agent starts and answers. The resource waits for a tool that works."""
    faulty = StandInCtk(stage.node.directory)
    await asyncio.to_thread(faulty.misbehave, hang_seconds=FOR_EVER_SECONDS)
    stage.constants |= {constants.SPEC_RETRY_MAX: 0.5, constants.CTK_TIMEOUT: 3}
    agent = stage.agent(config(stage))
    assert "did not end within 3 s" in await withheld(stage, agent)
    await asyncio.to_thread(faulty.misbehave, print_text="GPU 0: A100")
    await agent.until(
        "/debug/config", lambda answer: "is not a CDI spec" in answer["cdi"]["specs"][0]["error"]
    )
    await asyncio.to_thread(faulty.behave)
    await agent.until_ready()
    await stage.allocatable(2)


async def test_a_directory_that_cannot_be_written_withholds_the_resource(stage: Stage) -> None:
    """Reason with the path and what to do, and all is well once it can be written."""
    await asyncio.to_thread((stage.folder / "cdi").write_text, "in the way")
    stage.constants[constants.SPEC_RETRY_MAX] = 0.5
    agent = stage.agent(config(stage))
    assert f"cannot write {stage.folder}/cdi/{GPU_FILE}" in await withheld(stage, agent)
    await asyncio.to_thread(os.unlink, stage.folder / "cdi")
    await agent.until_ready()


async def test_the_spec_stays_at_an_ordinary_stop_and_goes_with_the_agent(stage: Stage) -> None:
    """Containers start again by it while the agent is away;
    ``withdrawAtStop`` is for the removal of the agent.
    """
    path = stage.folder / "cdi" / GPU_FILE
    agent = await stage.ready_agent(config(stage))
    await agent.terminate()
    assert await asyncio.to_thread(path.exists)
    agent = await stage.ready_agent(config(stage, more="cluster: {withdrawAtStop: true}\n"))
    await agent.terminate()
    assert not await asyncio.to_thread(path.exists)


async def test_the_toolkits_own_spec_can_be_referred_to(stage: Stage) -> None:
    """``nvidia.com/gpu=<uuid>``: withheld while no spec has the names,
    offered once the toolkit has made one; we write none.
    """
    agent = stage.agent(config(stage, more="cdi: {source: toolkit}\n"))
    assert "there is no CDI spec of kind nvidia.com/gpu" in await withheld(stage, agent)

    await asyncio.to_thread(_toolkits_spec, stage)
    await agent.until_ready()
    await stage.allocatable(2)
    pod = await stage.admit("train", 1)
    assert pod.answers["main"].cdi_devices[0].name == f"nvidia.com/gpu={stage.ids(pod)[0]}"
    assert len((await came(stage, pod)).device_nodes) == 1
    assert sorted(os.listdir(stage.folder / "cdi")) == ["nvidia.json"]


async def test_a_required_channel_that_is_missing_withholds_the_resource(stage: Stage) -> None:
    """Upstream does not start. Here the reason is to be read,
    and the device is noticed when it comes.
    """
    options = ", imexChannelIds: [0], imexRequired: true"
    agent = stage.agent(config(stage, "envvar", plugin=options))
    assert "/dev/nvidia-caps-imex-channels/channel0 is no character device" in await withheld(
        stage, agent
    )


async def test_an_optional_channel_that_is_missing_is_one_warning(stage: Stage) -> None:
    """The GPUs are offered, and no container gets a channel (nvidia §9)."""
    agent = await stage.ready_agent(config(stage, "envvar", plugin=", imexChannelIds: [0]"))
    pod = await stage.admit("train", 1)
    assert "NVIDIA_IMEX_CHANNELS" not in pod.answers["main"].envs
    lines = [line for line in agent.log_lines() if line["msg"] == "imex.missing"]
    assert [line["level"] for line in lines] == ["warning"]


async def test_a_channel_that_is_there_is_told_by_variable_and_mount(stage: Stage) -> None:
    """nvidia:A12, nvidia:A13: found below the node's device root."""
    await asyncio.to_thread(_devices, stage, "nvidia-caps-imex-channels/channel0")
    await stage.ready_agent(config(stage, "envvar, volume-mounts", plugin=", imexChannelIds: [0]"))
    pod = await stage.admit("train", 1)
    directory = "/var/run/nvidia-container-devices"
    assert dict(pod.answers["main"].envs) == {
        "NVIDIA_VISIBLE_DEVICES": directory,
        "NVIDIA_IMEX_CHANNELS": "0",
    }
    assert [mount.container_path for mount in pod.answers["main"].mounts] == [
        f"{directory}/{stage.ids(pod)[0]}",
        f"{directory}/imex/0",
    ]


def _devices(stage: Stage, *names: str) -> None:
    for name in names:
        path = stage.node.directory / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def _install_tool(path: Path) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    unfinished.chmod(0o755)
    unfinished.rename(path)


def _toolkits_spec(stage: Stage) -> None:
    devices = [
        {"name": uuid, "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{number}"}]}}
        for number, uuid in enumerate((U0, U1))
    ]
    text = json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices})
    (stage.folder / "cdi").mkdir(exist_ok=True)
    replace_text(stage.folder / "cdi" / "nvidia.json", text)
