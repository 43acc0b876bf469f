"""Two families on one node with the agent's real process: the GPU that Volcano has given to a pod
is that pod's until it starts or ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import constants
from tests.component.volcano import (
    CORES,
    IDS,
    MEMORY,
    NODE,
    NUMBER,
    REGISTER,
    U0,
    U1,
    VolcanoStage,
    asks,
    volcano_stage,
)
from tests.families.volcano_vgpu.golden import decided

GPU = "nvidia.com/gpu"
MIXED = "families: {nvidia: true, volcanoVgpu: true}\n"
SHARED = MIXED + "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
# called c0 and c1, so that only they can be made to wait for their image
TWO_CONTAINERS = [asks(1, 10), {}]


class MixedStage(VolcanoStage):
    """A node that whole GPUs of nvidia and shares of volcano-vgpu come from."""

    async def start_mixed(self, more: str = MIXED) -> None:
        """Start the agent, and wait until both families are offered."""
        await self.start_agent(more, offers=[GPU, NUMBER, MEMORY, CORES])

    @property
    def offered_whole(self) -> set[str]:
        """The GPUs of which kubelet has healthy ids of nvidia.com/gpu."""
        return {id_.partition("::")[0] for id_ in self.cluster.kubelet.resource(GPU).healthy}

    async def until_whole(self, *gpus: str) -> None:
        """Wait until exactly these GPUs are offered as nvidia.com/gpu,
        and the Node says how many that are.
        """
        await self.cluster.until(
            lambda: self.offered_whole == set(gpus), f"nvidia.com/gpu to be offered of {gpus}"
        )
        count = len(self.cluster.kubelet.resource(GPU).healthy)
        await self.cluster.until(
            lambda: self.allocatable.get(GPU) == str(count), "the Node to show that"
        )

    async def bound_while_pulling(self, name: str) -> str:
        """Volcano binds a pod whose image takes long; the GPU that it was given."""
        self.done = self.cluster.pull("c0")
        self.cluster.create_pod(name, TWO_CONTAINERS)
        await self.cluster.until(
            lambda: bool(self.cluster.annotations(name).get(IDS)), "Volcano to bind it"
        )
        return self.cluster.annotations(name)[IDS].partition(",")[0]

    def gpu_of(self, name: str) -> str:
        """The GPU in the answer to a running pod of nvidia.com/gpu."""
        return self.cluster.starts(name)[-1].environment["NVIDIA_VISIBLE_DEVICES"]


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[MixedStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder, of=MixedStage) as stage:
        assert isinstance(stage, MixedStage)
        # the simulated kubelet shares its process with the test, and may be late with a list
        stage.constants[constants.ALLOCATABLE_PROCESSING] = 1
        yield stage


def other(gpu: str) -> str:
    """The other one of the two."""
    return U1 if gpu == U0 else U0


async def test_a_gpu_is_kept_from_bind_to_start_and_returned_at_the_end(stage: MixedStage) -> None:
    """The other scheduler's pods go elsewhere or wait.
    Before, one of them took the GPU while the image was being pulled.
    """
    await stage.start_mixed()
    gpu = await stage.bound_while_pulling("p")
    await stage.until_whole(other(gpu))
    for name in ("first", "second"):
        stage.cluster.create_pod(name, {GPU: 1}, scheduler="default-scheduler")
    await stage.cluster.until(
        lambda: "Running" in {stage.cluster.phase(name) for name in ("first", "second")},
        "one to run",
    )
    (waiting,) = [name for name in ("first", "second") if stage.cluster.phase(name) != "Running"]
    (running,) = {"first", "second"} - {waiting}
    assert stage.gpu_of(running) == other(gpu)
    stage.done()
    await stage.cluster.running("p")
    assert stage.cluster.starts("p", "c0")[0].environment["NVIDIA_VISIBLE_DEVICES"] == gpu
    assert stage.cluster.refusals == []
    stage.cluster.delete_pod("p")
    await stage.cluster.running(waiting)
    assert stage.gpu_of(waiting) == gpu


async def test_a_pod_that_is_deleted_before_it_started_keeps_nothing(stage: MixedStage) -> None:
    """Its image may never come; deleting it returns the GPU at once,
    one family a moment before the other.
    """
    await stage.start_mixed()
    gpu = await stage.bound_while_pulling("p")
    await stage.until_whole(other(gpu))
    stage.cluster.delete_pod("p")
    await stage.until_whole(U0, U1)

    def lists() -> list[int]:
        return [call.facts["healthy"] for call in stage.cluster.kubelet.called("list", GPU)]

    await stage.cluster.until(
        lambda: lists()[-1] == 2, "kubelet to note the last list, which it follows before"
    )
    assert lists()[-3:] == [2, 1, 2], "one list for the pod that came, and one for its end"


async def test_a_gpu_in_use_takes_no_new_pods_while_one_of_another_family_waits(
    stage: MixedStage,
) -> None:
    """Otherwise others of the first family keep coming, and the pod waits for ever."""
    await stage.start_mixed(SHARED)
    stage.cluster.create_pod("first", {GPU: 1}, scheduler="default-scheduler")
    await stage.cluster.running("first")
    gpu = stage.gpu_of("first")
    annotations = decided(f"{gpu},NVIDIA,10,0:", vgpu_node=NODE)
    stage.cluster.create_pod(
        "claims", asks(1, 10), scheduler="default-scheduler", annotations=annotations
    )
    await stage.until_whole(other(gpu))
    for name in ("second", "third"):
        stage.cluster.create_pod(name, {GPU: 1}, scheduler="default-scheduler")
    await stage.cluster.until(
        lambda: "Running" in {stage.cluster.phase(name) for name in ("second", "third")},
        "one to run",
    )
    assert {
        stage.gpu_of(name) for name in ("second", "third") if stage.cluster.phase(name) == "Running"
    } == {other(gpu)}
    stage.cluster.finish("first")
    await stage.cluster.running("claims")
    assert stage.cluster.starts("claims")[0].environment["NVIDIA_VISIBLE_DEVICES"] == gpu
    assert gpu not in stage.offered_whole


async def test_a_restarted_agent_offers_nothing_before_it_knows_the_claims(
    stage: MixedStage,
) -> None:
    """The pods are read before the kubelet receives anything."""
    await stage.start_mixed()
    gpu = await stage.bound_while_pulling("p")
    await stage.until_whole(other(gpu))
    await stage.agent.kill()
    before = len(stage.cluster.kubelet.called("list", GPU))
    await stage.restart_agent()
    await stage.until_whole(other(gpu))

    def lists() -> list[int]:
        return [call.facts["healthy"] for call in stage.cluster.kubelet.called("list", GPU)]

    await stage.cluster.until(
        lambda: len(lists()) > before, "kubelet to note the list, which it follows before"
    )
    assert set(lists()[before:]) == {1}
    assert f"{gpu}," in stage.cluster.node_object()["metadata"]["annotations"][REGISTER]
    stage.done()
    await stage.cluster.running("p")
    assert stage.cluster.refusals == []
