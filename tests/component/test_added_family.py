"""A family that is a package of its own, added to the agent's real process:
its pods, its labels, its metric, its settings.

`tests/families/slot` is all that there is of it. The agent's own code has not a line about it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.component.volcano import NODE, U0, U1, VolcanoStage, volcano_stage
from tests.families.slot.family import GPU, LEFT, SERVED, STATE, TOTAL
from tests.families.slot.ids import Packed
from tests.families.slot.settings import RESOURCE
from vgpu_agent.sim.agent_process import AgentProcess

ON = "families: {nvidia: true, exampleSlot: true}\nexampleSlot: {perGpu: 3}\n"


def configure(stage: VolcanoStage, more: str) -> None:
    """Write the configuration; containers have their directories in the test's folder."""
    stage.configure(more.replace("perGpu:", f"directory: {stage.folder}/slots, perGpu:"))


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10, whose agent has one more family."""
    async with volcano_stage(folder) as stage:
        yield stage


def new_agent(stage: VolcanoStage) -> AgentProcess:
    """The agent with the family added to it, not started."""
    stage.agent = AgentProcess(
        stage.log,
        kubelet=stage.cluster.kubelet_directory,
        simulate=stage.gpus.directory,
        config=stage.config,
        constants=stage.constants,
        launcher="tests.families.slot",
    )
    return stage.agent


async def start(stage: VolcanoStage, more: str = ON) -> None:
    """Start the agent with the family added to it."""
    configure(stage, more)
    await new_agent(stage).start()


def place(stage: VolcanoStage, name: str, gpu: str) -> None:
    """Create a pod with one slot on a GPU, bound to the node."""
    stage.cluster.create_pod(
        name, {RESOURCE: 1}, scheduler="default-scheduler", annotations={GPU: gpu}, node=NODE
    )


def files(directory: Path) -> dict[str, str]:
    """The files in a container's directory, name → text."""
    return {path.name: path.read_text() for path in directory.iterdir()}


async def test_pods_of_an_added_family_get_what_their_annotation_names(stage: VolcanoStage) -> None:
    """The agent books it, tells the pod by annotation and label, and counts it."""
    await start(stage)
    await stage.offered(RESOURCE, "nvidia.com/gpu")
    assert (stage.allocatable[RESOURCE], stage.allocatable["nvidia.com/gpu"]) == ("6", "2")
    assert stage.cluster.node_object()["metadata"]["annotations"][TOTAL] == "6"
    place(stage, "one", U1)
    await stage.cluster.running("one")
    assert stage.cluster.starts("one")[-1].environment["SLOT_GPU"] == U1
    await stage.cluster.until(
        lambda: stage.cluster.annotations("one").get(SERVED) == "main", "the annotation"
    )
    await stage.cluster.until(
        lambda: (stage.cluster.pod("one")["metadata"].get("labels") or {}).get(STATE) == "running",
        "the label",
    )
    assert await stage.agent.metric(f'example_slots_in_use{{gpu="{U1}"}}') == 1
    assert await stage.agent.metric(f'example_slots_in_use{{gpu="{U0}"}}') == 0


async def test_a_gpu_of_an_added_family_is_kept_from_the_others_over_a_restart(
    stage: VolcanoStage,
) -> None:
    """One ledger serves all families, also those that it knows nothing about."""
    await start(stage)
    await stage.offered(RESOURCE)
    place(stage, "one", U0)
    await stage.cluster.running("one")
    await stage.cluster.until(
        lambda: stage.allocatable["nvidia.com/gpu"] == "1", "the GPU to be kept from nvidia"
    )
    await stage.agent.kill()
    await start(stage)
    await stage.agent.until_ready()
    ledger = await stage.agent.get("/debug/ledger")
    assert [(grant["family"], grant["shares"][0]["device"]) for grant in ledger["grants"]] == [
        ("example-slot", U0)
    ]
    # Ready means registered; the kubelet reads the list a moment later.
    await stage.cluster.until(
        lambda: stage.allocatable["nvidia.com/gpu"] == "1", "the GPU to be kept from nvidia again"
    )


async def test_the_kubelet_gives_ids_of_the_gpu_that_is_named(stage: VolcanoStage) -> None:
    """It asks which ones the family prefers, and its records then say what is so. The family can
    only prefer for a pod that the agent knows.
    """
    await start(stage)
    await stage.offered(RESOURCE)
    for name, gpu in (("one", U1), ("two", U0), ("three", U1)):
        stage.cluster.hold_admission = True
        place(stage, name, gpu)
        await stage.watched(name)
        await stage.cluster.admit_in_order([name])
        await stage.cluster.running(name)
    ledger = await stage.agent.get("/debug/ledger")
    assert [(grant["shares"][0]["device"], grant["ids"]) for grant in ledger["grants"]] == [
        (U1, [Packed(1).text(0)]),
        (U0, [Packed(0).text(0)]),
        (U1, [Packed(1).text(1)]),
    ]


async def test_a_container_that_starts_again_does_not_find_a_file_of_its_life_before(
    stage: VolcanoStage,
) -> None:
    """A provision names files to be removed, and the directory goes with the pod."""
    await start(stage)
    await stage.offered(RESOURCE)
    place(stage, "one", U1)
    await stage.cluster.running("one")
    own = stage.folder / "slots" / f"{stage.cluster.pod('one')['metadata']['uid']}_main"
    assert files(own) == {"gpu": U1}
    (own / LEFT).write_text("1")
    (own / "log").write_text("kept")
    await stage.cluster.crash("one")
    assert files(own) == {"gpu": U1, "log": "kept"}
    stage.cluster.delete_pod("one")
    await stage.cluster.until(lambda: not own.exists(), "the directory to be removed")


async def test_a_pod_that_names_no_gpu_is_refused_with_the_familys_words(
    stage: VolcanoStage,
) -> None:
    """Nobody's pod starts with what was not meant for it."""
    await start(stage)
    await stage.offered(RESOURCE)
    place(stage, "lost", "GPU-nowhere")
    await stage.agent.until(
        "/debug/allocations",
        lambda found: any("is no GPU of this node" in each["reason"] for each in found["refusals"]),
    )
    assert stage.cluster.starts("lost") == []


@pytest.mark.parametrize(
    ("text", "complaint"), [("{perGpu: 0}", "exampleSlot.perGpu"), ("{per: 1}", "exampleSlot.per")]
)
async def test_settings_of_an_added_family_are_checked_like_all_others(
    stage: VolcanoStage, text: str, complaint: str
) -> None:
    """One clear error names the key."""
    stage.configure(f"families: {{exampleSlot: true}}\nexampleSlot: {text}\n")
    await new_agent(stage).spawn()
    assert await stage.agent.wait() == 2
    assert complaint in stage.log.read_text()


async def test_without_its_switch_an_added_family_offers_nothing(stage: VolcanoStage) -> None:
    """It is off by default, like every family but NVIDIA's."""
    await start(stage, "families: {nvidia: true}\n")
    await stage.agent.until_ready()
    assert [
        each["resource"] for each in (await stage.agent.get("/debug/resources"))["resources"]
    ] == ["nvidia.com/gpu"]
    _, text = await stage.agent.get_text("/metrics")
    assert "example_slots_in_use{" not in text


async def test_a_name_that_two_families_would_have_is_found_for_an_added_one(
    stage: VolcanoStage,
) -> None:
    """`config check` refuses it, with the setting that can be changed most freely. Without the
    conflict it has nothing to say.
    """

    async def check(more: str) -> tuple[int | None, str]:
        stage.config.write_text(f"version: v1\n{more}")
        words = (
            "-m",
            "tests.families.slot",
            "{}",
            "vgpu_agent",
            "config",
            "check",
            str(stage.config),
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        return process.returncode, said.decode()

    assert await check(ON) == (0, "")
    status, said = await check(
        "families: {aws: true, exampleSlot: true}\naws: {resourceName: example.com/slot}\n"
    )
    assert status == 1
    assert ':3: aws.resourceName: "example.com/slot" is offered by aws and by example-slot' in said


async def test_a_live_key_of_an_added_family_is_followed(stage: VolcanoStage) -> None:
    """The family is built anew, and the list at the kubelet changes."""
    await start(stage)
    await stage.offered(RESOURCE)
    configure(stage, ON.replace("perGpu: 3", "perGpu: 2"))
    await stage.cluster.until(lambda: stage.allocatable[RESOURCE] == "4", "two slots a GPU")
