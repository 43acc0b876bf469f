"""Names and shares of the `nvidia` family with the agent's real process: iktos's words, replicas by
device, what changes leave behind.
"""

from __future__ import annotations

import pytest

from tests.component.conftest import GPU, QUICK, SHARED, Stage
from tests.golden import U0, U1
from vgpu_agent.sim.kubelet.faults import AdmissionError

MEMORY, VGPU = "nvidia.com/gpu-mem-gb", "k8s.amazonaws.com/vgpu"


async def test_units_of_memory_lie_on_one_gpu(stage: Stage) -> None:
    """iktos:K2 and iktos:D12 on the wire: 8 of 40 on the first GPU, 36 on the other, and 33 that
    are free on two only are refused.
    """
    await stage.ready_agent(QUICK, NVIDIA_DRIVER_RESOURCE_CONFIG="gpu:gpu-mem-gb:-1")
    await stage.allocatable(80, resource=MEMORY)
    told = {}
    for name, number in (("small", 8), ("large", 36)):
        pod = await stage.admit(name, number, MEMORY)
        told[name] = pod.answers["main"].envs["NVIDIA_VISIBLE_DEVICES"]
    assert told == {"small": U0, "large": U1}
    with pytest.raises(
        AdmissionError, match=r"33 of nvidia\.com/gpu-mem-gb are not free on one device"
    ):
        await stage.admit("torn", 33, MEMORY)
    fits = await stage.admit("fits", 32, MEMORY)
    assert fits.answers["main"].envs["NVIDIA_VISIBLE_DEVICES"] == U0


async def test_gpus_are_shared_and_named_one_by_one(stage: Stage) -> None:
    """nvidia:D15 on the wire: GPU 0 three times under a name of its own, GPU 1 whole.
    Each pod gets the GPU of its resource.
    """
    entry = "{name: gpu, replicas: 3, rename: nvidia.com/third, devices: [0]}"
    await stage.ready_agent(QUICK + f"sharing: {{timeSlicing: {{resources: [{entry}]}}}}\n")
    await stage.allocatable(3, resource="nvidia.com/third")
    await stage.allocatable(1)
    third, whole = await stage.admit("third", 1, "nvidia.com/third"), await stage.admit("whole")
    assert [pod.answers["main"].envs["NVIDIA_VISIBLE_DEVICES"] for pod in (third, whole)] == [
        U0,
        U1,
    ]


async def test_a_pod_keeps_its_gpu_over_a_restart_with_other_names(stage: Stage) -> None:
    """The whole GPU that it has is not shared under the new name before it ends.
    Its grant has its owner in the new process.
    """
    before = await stage.ready_agent(QUICK)
    await stage.allocatable(2)
    pod = await stage.admit("train")
    await before.terminate()
    after = await stage.ready_agent(QUICK + "iktos: {resourceConfig: 'gpu:sharedgpu:4'}\n")
    await stage.allocatable(4, resource="nvidia.com/sharedgpu")
    assert {
        id_.partition("-replica-")[0]
        for id_ in stage.kubelet.resource("nvidia.com/sharedgpu").healthy
    } == {U1}
    (grant,) = (await after.get("/debug/ledger"))["grants"]
    assert (grant["resource"], grant["ids"], grant["pod"]) == (GPU, [U0], "train")
    await stage.kubelet.delete(pod)
    await stage.allocatable(8, resource="nvidia.com/sharedgpu")


async def test_a_replica_of_before_does_not_hold_up_replicas_of_now(stage: Stage) -> None:
    """Shared before and shared now: the new names are offered at once,
    beside what the old ones left.
    """
    before = await stage.ready_agent(QUICK + SHARED)
    await stage.allocatable(8)
    await stage.admit("train")
    await before.terminate()
    after = await stage.ready_agent(QUICK + "iktos: {resourceConfig: 'gpu:sharedgpu:2'}\n")
    await stage.allocatable(4, resource="nvidia.com/sharedgpu")
    (grant,) = (await after.get("/debug/ledger"))["grants"]
    assert (grant["ids"], grant["pod"]) == ([f"{U0}::0"], "train")


async def test_what_single_cannot_offer_is_said_in_the_readiness(stage: Stage) -> None:
    """nvidia:G3 and iktos:K6 on the wire: the process lives and says which GPUs differ.
    Once they are alike, it serves.
    """
    stage.node.set_mig(1, ["3g.20gb", "3g.20gb"])
    agent = stage.agent(QUICK + "plugin: {migStrategy: single}\n")
    await agent.start()
    problem = "must be configured with the same migEnabled value"
    await agent.until("/debug/resources", lambda answer: problem in str(answer))
    status, text = await agent.get_text("/readyz")
    assert (status, problem in text, U0 in text, U1 in text) == (503, True, True, True)
    stage.node.set_mig(1, [])
    await agent.until_ready()
    await stage.allocatable(2)


async def test_a_family_that_is_switched_off_keeps_its_gpus_from_others_until_its_pods_end(
    stage: Stage,
) -> None:
    """A node goes from NVIDIA's names to those of AWS while a pod runs:
    kubelet's records still say which GPU it has to itself.
    """
    before = await stage.ready_agent(QUICK)
    await stage.allocatable(2)
    pod = await stage.admit("train")
    await before.terminate()
    after = await stage.ready_agent(
        QUICK + "families: {nvidia: false, aws: true}\naws: {vgpus: 3}\n"
    )
    await stage.allocatable(3, resource=VGPU)
    assert set(stage.kubelet.resource(VGPU).healthy) == {f"{U1}-{number}" for number in range(3)}
    (grant,) = (await after.get("/debug/ledger"))["grants"]
    assert (grant["family"], grant["ids"], grant["pod"]) == ("nvidia", [U0], "train")
    await stage.kubelet.delete(pod)
    await stage.allocatable(6, resource=VGPU)


async def test_the_same_the_other_way_round(stage: Stage) -> None:
    """Two of three virtual GPUs of a card are held: no container gets the card whole."""
    before = await stage.ready_agent(
        QUICK + "families: {nvidia: false, aws: true}\naws: {vgpus: 3}\n"
    )
    await stage.allocatable(6, resource=VGPU)
    pod = await stage.admit("old", 2, VGPU)
    await before.terminate()
    await stage.ready_agent(QUICK)
    await stage.allocatable(1)
    assert list(stage.kubelet.resource(GPU).healthy) == [U1]
    await stage.kubelet.delete(pod)
    await stage.allocatable(2)
