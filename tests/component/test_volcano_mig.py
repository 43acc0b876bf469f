"""The operating mode mig with the agent's real process:
a scheduler names instances, GPUs are divided, containers get them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests import constants
from tests.component.volcano import IDS, NODE, REGISTER, U0, U1, VolcanoStage, asks, volcano_stage
from tests.families.volcano_vgpu.golden import decided
from tests.families.volcano_vgpu.mig.parts import DEVICE_CONFIG, GROUP2
from tests.replacing import replace_text
from vgpu_agent.sim.mig_parted import Misbehaviour, calls, deliver, misbehave
from vgpu_agent.sim.volcano.mig import Geometries
from vgpu_agent.sim.volcano.scheduler import VolcanoSettings

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
# 8000 MiB in units of 64, so that kubelet's lists stay short.
ASKED = asks(1, 125)


class MigStage(VolcanoStage):
    """A node in the operating mode mig, and the stand-in for nvidia-mig-parted."""

    async def begin(self, more: str = "", *, wait: bool = True, **settings: Any) -> None:
        """Start the agent, and wait until it offers something."""
        program = await asyncio.to_thread(
            deliver, self.gpus.directory, self.folder / "nvidia-mig-parted"
        )
        text = DEVICE_CONFIG.replace("gpuMemoryFactor: 1", "gpuMemoryFactor: 64")
        config_map = {
            "metadata": {"name": "volcano-vgpu-device-config"},
            "data": {"device-config.yaml": text},
        }
        self.cluster.objects.create("configmaps", config_map, "kube-system")
        keys = {
            "operatingMode": "mig",
            "migParted": program,
            "nodeConfigFile": "''",
        }
        keys |= settings
        listed = ", ".join(f"{key}: {value}" for key, value in keys.items())
        self.configure(f"families: {{nvidia: false, volcanoVgpu: true}}\n{more}", mig=listed)
        await self.new_agent().start()
        if wait:
            await self.offered()

    def configure(self, more: str = "", *, factor: int = 64, mig: str = "") -> None:
        """Write the agent's configuration."""
        super().configure(more, factor=factor)
        self.constants |= {constants.POD_WAIT: 10, constants.MIG_RETRY: 0.3}
        replace_text(self.config, self.config.read_text().replace("nodeConfigFile: ''", mig))

    @property
    def register(self) -> str:
        """Return the annotation in which schedulers read of the cards."""
        return str(self.cluster.node_object()["metadata"].get("annotations", {}).get(REGISTER))

    def create(self, name: str, place: str) -> None:
        """A pod for which a scheduler has written ``place``."""
        self.cluster.create_pod(
            name, ASKED, annotations=decided(f"{place},NVIDIA,125,0:"), node=NODE
        )

    def seen(self, name: str) -> str:
        """The devices that the pod's container was started with."""
        return self.cluster.starts(name)[-1].environment[VISIBLE]

    async def misbehave(self, what: Misbehaviour | None) -> None:
        """Let the tool go wrong."""
        await asyncio.to_thread(misbehave, self.gpus.directory, what)

    async def applied(self) -> int:
        """Return the number of times that the tool was asked to divide something."""
        return sum(
            arguments[0] == "apply"
            for arguments in await asyncio.to_thread(calls, self.gpus.directory)
        )

    async def refused(self, name: str, text: str) -> None:
        """Wait until the pod's start was refused with these words."""
        await self.cluster.until(
            lambda: any(
                pod == name and text in refusal for pod, _, refusal in self.cluster.refusals
            ),
            f"{name} to be refused: {text}",
        )


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[MigStage]:
    """Two undivided A100."""
    async with volcano_stage(folder, of=MigStage, model="A100-SXM4-40GB") as stage:
        assert isinstance(stage, MigStage)
        await stage.cluster.stop_volcano()
        yield stage


async def test_instances_are_cut_when_pods_come_and_each_pod_has_its_own(stage: MigStage) -> None:
    """volcano-vgpu:G12, volcano-vgpu:D15: two pods with the same instance of a card that is not
    divided yet; a third on another card.
    """
    await stage.begin()
    described = "".join(
        f"{uuid},10,640,NVIDIA-NVIDIA A100-SXM4-40GB,true,mig:" for uuid in (U0, U1)
    )
    # the kubelet and the agent write the Node independently
    await stage.cluster.until(lambda: stage.register == described, "the description of the cards")
    stage.create("a", f"{U1}[group2-0]")
    stage.create("b", f"{U1}[group2-0]")
    stage.create("c", f"{U0}[group3-1]")
    await stage.cluster.running("a", "b", "c")
    await stage.settled("a", "b", "c")
    of_u1 = dict(zip(stage.gpus.mig_uuids(U1), GROUP2, strict=True))
    assert stage.seen("a") != stage.seen("b")
    assert {of_u1[stage.seen("a")], of_u1[stage.seen("b")]} == {"2g.10gb"}
    assert stage.seen("c") in stage.gpus.mig_uuids(U0)
    assert await stage.applied() == 2
    places = {stage.cluster.annotations(name)[IDS].partition(",")[0] for name in ("a", "b")}
    assert places == {f"{U1}[group2-0]", f"{U1}[group2-1]"}  # a scheduler counts what is held
    received = stage.cluster.starts("a")[-1]
    assert [name for name in received.environment if name.startswith("CUDA_")] == []
    assert received.mounts == {}


async def test_d16_a_tool_that_fails_costs_one_pod(stage: MigStage) -> None:
    """volcano-vgpu:D16: the others start, the agent lives on,
    and the pod starts when the tool is repaired.
    """
    await asyncio.to_thread(stage.gpus.set_mig, U0, ["3g.20gb", "3g.20gb"])
    await stage.misbehave(Misbehaviour(command="apply", fails="Insufficient Resources"))
    await stage.begin()
    pid = stage.agent.pid
    stage.create("broken", f"{U1}[group2-0]")
    stage.create("whole", U0)
    stage.create("fine", f"{U0}[group3-0]")
    await stage.cluster.running("fine")
    await stage.refused("broken", "apply failed with status 1: Insufficient Resources")
    await stage.refused("whole", "is a whole GPU, and this node shares MIG instances")
    assert (await stage.agent.get_text("/livez"))[0] == 200
    await stage.misbehave(None)
    await stage.cluster.running("broken")
    assert stage.agent.pid == pid
    assert stage.seen("broken") in stage.gpus.mig_uuids(U1)


async def test_the_agent_is_killed_while_a_gpu_is_divided(stage: MigStage) -> None:
    """The next agent does not run a second tool beside the first one's, and the pod starts in the
    end, with an instance of its own.
    """
    await stage.begin()
    await stage.misbehave(Misbehaviour(command="apply", seconds=2))
    stage.create("p", f"{U1}[group2-0]")
    await stage.agent.until_logged("mig.applying")
    await stage.agent.kill()
    await stage.restart_agent()
    await stage.cluster.running("p")
    await stage.settled("p")
    assert stage.seen("p") in stage.gpus.mig_uuids(U1)


async def test_a_card_in_use_is_never_divided_anew(stage: MigStage) -> None:
    """Once a card has a group in use, only that group. When its last pod has ended, the card is
    divided for the one that waits.
    """
    await stage.begin()
    stage.create("first", f"{U1}[group2-0]")
    await stage.cluster.running("first")
    before = stage.gpus.mig_uuids(U1)
    stage.create("other", f"{U1}[group3-0]")
    await stage.refused("other", "default/first")
    assert stage.gpus.mig_uuids(U1) == before
    stage.cluster.delete_pod("first")
    await stage.cluster.running("other")
    assert stage.seen("other") in stage.gpus.mig_uuids(U1)
    assert len(stage.gpus.mig_uuids(U1)) == 2


async def test_the_node_config_switches_the_mode_while_the_agent_runs(stage: MigStage) -> None:
    """A pod keeps its whole card. Until it has ended,
    the card is announced as full and not divided.
    """
    stage.deliver_library()
    node_config = stage.folder / "config.json"
    await stage.begin(operatingMode="hami-core", nodeConfigFile=str(node_config))
    stage.create("whole", U1)
    await stage.cluster.running("whole")
    entry = {"name": NODE, "operatingmode": "mig"}
    await asyncio.to_thread(replace_text, node_config, json.dumps({"nodeconfig": [entry]}))
    full, free = (
        f"{U1},0,640,NVIDIA-NVIDIA A100-SXM4-40GB,false,mig:",
        f"{U1},10,640,NVIDIA-NVIDIA A100-SXM4-40GB,true,mig:",
    )
    await stage.cluster.until(
        lambda: stage.register.endswith(full), "the card to be announced as full"
    )
    stage.create("part", f"{U1}[group2-0]")
    await stage.refused("part", "not divided, and default/whole")
    stage.cluster.delete_pod("whole")
    await stage.cluster.running("part")
    await stage.cluster.until(
        lambda: stage.register.endswith(free), "the card to be announced as free"
    )


async def test_early_binding_cannot_serve_the_mode_and_says_so(folder: Path) -> None:
    """A runtime that resolves no CDI names:
    the resources are withheld with the remedy, and the agent runs.
    """
    async with volcano_stage(
        folder, of=MigStage, model="A100-SXM4-40GB", runtime_version="containerd://1.7.2"
    ) as stage:
        assert isinstance(stage, MigStage)
        await stage.begin(wait=False)
        await stage.agent.until(
            "/debug/resources", lambda answer: "takes late binding" in str(answer)
        )
        assert (await stage.agent.get_text("/readyz"))[0] == 503
        assert (await stage.agent.get_text("/livez"))[0] == 200


async def test_a_scheduler_and_the_agent_agree_about_the_instances(stage: MigStage) -> None:
    """volcano-vgpu:D15: the scheduler gives the pods of one round one instance; it counts what is
    held the next time, to the last one.
    """
    await stage.begin()
    text = DEVICE_CONFIG.replace("gpuMemoryFactor: 1", "gpuMemoryFactor: 64")
    settings = VolcanoSettings(retry_seconds=0.2, geometries=Geometries.of(text))
    stage.cluster.hold_admission = True
    names = ("a", "b", "c")
    for name in names[:2]:
        stage.cluster.create_pod(name, ASKED)
    await stage.cluster.start_volcano(settings)
    await stage.cluster.until(
        lambda: all(IDS in stage.cluster.annotations(name) for name in names[:2]),
        "both to be scheduled",
    )
    assert {stage.cluster.annotations(name)[IDS] for name in names[:2]} == {
        f"{U1}[group2-0],NVIDIA,125,0:"
    }
    await stage.cluster.admit_in_order(names[:2])
    await stage.cluster.running(*names[:2])
    await stage.settled(*names[:2])
    # the Node, too, says of the card that was divided meanwhile what it says from now on
    await stage.quiet()
    stage.cluster.create_pod("c", ASKED)
    await stage.cluster.running("c")
    await stage.settled("c")
    held = {name: stage.cluster.annotations(name)[IDS].partition(",")[0] for name in names}
    assert set(held.values()) == {f"{U1}[group2-{position}]" for position in range(3)}
    assert held["c"] == f"{U1}[group2-2]"
    assert len({stage.seen(name) for name in names}) == 3
    assert not any(pod == "c" for pod, _, _ in stage.cluster.refusals)


async def test_without_a_scheduler_the_agent_finds_instances(stage: MigStage) -> None:
    """Under the plain scheduler the agent divides a card by the first group that fits,
    and writes down where the pod is.
    """
    await stage.begin()
    for name in ("a", "b"):
        stage.cluster.create_pod(name, asks(1, 200), scheduler="default-scheduler")
    await stage.cluster.running("a", "b")
    await stage.settled("a", "b")
    assert {stage.cluster.annotations(name)[IDS] for name in ("a", "b")} == {
        f"{U0}[group3-{each}],NVIDIA,200,0:" for each in (0, 1)
    }
    assert {stage.seen("a"), stage.seen("b")} == set(stage.gpus.mig_uuids(U0))


async def test_instances_are_told_of_by_cdi_names(stage: MigStage) -> None:
    """volcano-vgpu:G10: a start waits until the new instance has a name,
    so the first try already finds the device behind it.
    """
    await stage.begin("plugin: {deviceListStrategy: [cdi-cri]}\n")
    stage.create("p", f"{U1}[group3-1]")
    await stage.cluster.running("p")
    received = stage.cluster.starts("p")[-1]
    # by the spec, so that NVIDIA's runtime adds nothing
    assert received.environment[VISIBLE] == "void"
    assert any(path.startswith("/dev/nvidia-caps/") for path in received.device_nodes)
    assert stage.cluster.refusals == []


async def test_d16_instances_that_somebody_has_made_are_given_by_their_names(
    stage: MigStage,
) -> None:
    """volcano-vgpu:D16: the count resource shares the whole card, and ``volcano.sh/mig-…`` gives
    the instances of the other one.
    """
    await asyncio.to_thread(stage.gpus.set_mig, U1, GROUP2)
    stage.deliver_library()
    await stage.begin("plugin: {migStrategy: mixed}\n", operatingMode="hami-core")
    await stage.cluster.until(
        lambda: stage.allocatable.get("volcano.sh/mig-2g.10gb") == "3",
        "the instances to be offered",
    )
    await stage.cluster.until(
        lambda: stage.register.startswith(f"{U0},10,640,"), "the description of the cards"
    )
    assert U1 not in stage.register
    stage.cluster.create_pod("p", {"volcano.sh/mig-2g.10gb": 2}, node=NODE)
    await stage.cluster.running("p")
    of_u1 = dict(zip(stage.gpus.mig_uuids(U1), GROUP2, strict=True))
    assert [of_u1[uuid] for uuid in stage.seen("p").split(",")] == ["2g.10gb", "2g.10gb"]
