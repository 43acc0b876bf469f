"""Events about the health of GPUs, on the Node and on pods; on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import msgspec
import pytest

from tests.cluster.fake_api import running
from tests.cluster.gpu_world import M0, U0, U1, XID, World, gpu, grant, ignore
from vgpu_agent.cluster.gpu_events import GpuEvents
from vgpu_agent.model import Health, Inventory, MigInstance, Remedy
from vgpu_agent.status import NvmlState, Problem, ProblemKind, XidSeen

pytestmark = pytest.mark.looptime


def gpu_events(world: World) -> GpuEvents:
    """The part under test."""
    return GpuEvents(world.events, world.facts, world.pods, lambda: world.node)


def run(world: World) -> contextlib.AbstractAsyncContextManager[None]:
    """Run the loop and that of the events."""
    return running(gpu_events(world).run(ignore), world.events.run(ignore))


async def test_a_lost_gpu_is_reported_on_the_node_and_on_the_pod_that_holds_it() -> None:
    """The owner of pod a has no access to the node; pod b has nothing to do with it."""
    world = World()
    async with run(world):
        await asyncio.sleep(1)
        assert world.told("Node") == world.told("Pod") == []
        world.fail(U0, lost=True)
        await asyncio.sleep(1)
        world.recover(U0)
        await asyncio.sleep(1)
    assert world.told("Node") == [
        ("n1", "GpuLost", f"GPU 0 ({U0}): {XID}"),
        ("n1", "GpuRecovered", f"GPU 0 ({U0}): new containers may use it again"),
    ]
    assert world.told("Pod") == [
        (
            "a",
            "GpuLost",
            (
                f"this pod holds GPU 0 ({U0}), which is lost: {XID}. It keeps it until it ends; "
                "delete the pod if its work has failed"
            ),
        ),
        ("a", "GpuRecovered", f"GPU 0 ({U0}), which this pod holds, works again"),
    ]


async def test_an_unhealthy_gpu_that_is_lost_afterwards_is_reported_twice() -> None:
    """First the XID, then the card is gone: the second needs another remedy."""
    world = World()
    async with run(world):
        world.fail(U0)
        await asyncio.sleep(1)
        world.fail(U0, "the driver no longer lists this GPU", lost=True)
        await asyncio.sleep(1)
        world.fail(U0)  # it is back, and waits to recover
        await asyncio.sleep(1)
    assert [reason for _, reason, _ in world.told("Node")] == ["GpuUnhealthy", "GpuLost"]
    assert [reason for _, reason, _ in world.told("Pod")] == ["GpuUnhealthy", "GpuLost"]


async def test_gpus_that_fail_together_share_one_event() -> None:
    """A driver that stops takes all sixteen; sixteen events would say the same."""
    world = World(tuple(gpu(number, f"GPU-{number}") for number in range(16)))
    world.grants = []
    async with run(world):
        gpus = tuple(
            msgspec.structs.replace(one, present=False, health=Health(ok=False, reason="no driver"))
            for one in world.inventory.value.gpus
        )
        world.inventory.publish(Inventory(2, gpus))
        await asyncio.sleep(1)
    ((_, reason, text),) = world.told("Node")
    assert reason == "GpuLost"
    assert text.startswith("16 devices: GPU 0, GPU 1, ")
    assert text.endswith(": no driver")


async def test_a_gpu_that_fails_a_third_time_within_an_hour_flaps() -> None:
    """Its failures are one event whose count grows, and so are its recoveries."""
    world = World()
    async with run(world):
        for _ in range(5):
            world.fail(U0)
            await asyncio.sleep(300)
            world.recover(U0)
            await asyncio.sleep(300)
    found = {
        event["reason"]: event["count"]
        for event in world.api.below("/api/v1/namespaces/default/events")
        if event["involvedObject"]["kind"] == "Node"
    }
    assert found == {"GpuUnhealthy": 2, "GpuRecovered": 5, "GpuFlapping": 3}
    assert len(world.api.requests) <= 20


async def test_a_hung_driver_is_reported_once_and_when_it_answers() -> None:
    """A hang makes no GPU unhealthy while the call concerns none."""
    world = World()
    async with run(world):
        world.driver.state, world.driver.call, world.driver.gpu = NvmlState.HUNG, "measure", U1
        await asyncio.sleep(60)
        world.driver.state, world.driver.call = NvmlState.ANSWERING, ""
        await asyncio.sleep(10)
    assert world.told("Node") == [
        (
            "n1",
            "GpuDriverHung",
            (
                f"the NVIDIA driver does not return from measure of GPU 1 ({U1}); see dmesg; if "
                "the driver does not answer within minutes, drain the node and reboot it"
            ),
        ),
        ("n1", "GpuDriverAnswering", "the NVIDIA driver answers again"),
    ]


async def test_a_missing_library_is_reported_until_it_is_there() -> None:
    """Missing again later is news."""
    world = World()
    async with run(world):
        world.libraries["hami-core"] = "there is no libvgpu.so"
        await asyncio.sleep(60)
        del world.libraries["hami-core"]
        await asyncio.sleep(10)
        world.libraries["hami-core"] = "there is no libvgpu.so"
        await asyncio.sleep(100)
    (event,) = world.api.below("/api/v1/namespaces/default/events")
    assert (event["reason"], event["count"]) == ("GpuLibraryMissing", 2)
    assert event["message"] == ("containers cannot be limited by hami-core: there is no libvgpu.so")


async def test_a_pod_whose_name_is_learned_later_is_told_then() -> None:
    """The kubelet's records name the owner of a grant a second after Allocate."""
    world = World()
    named = world.grants.pop(0)
    world.grants.append(msgspec.structs.replace(named, owner=None))
    async with run(world):
        world.fail(U0)
        await asyncio.sleep(10)
        assert world.told("Pod") == []
        world.grants[-1] = named
        await asyncio.sleep(10)
    assert [(name, reason) for name, reason, _ in world.told("Pod")] == [("a", "GpuUnhealthy")]


async def test_an_instance_fails_alone_and_with_its_gpu() -> None:
    """Alone it is named itself. With its GPU the Node reads of the GPU, and the pod of its
    instance.
    """
    instance = MigInstance(M0, 0, 1, 0, "1g.5gb", 4864)
    world = World((gpu(0, U0, mig=(instance,)),))
    world.grants = [grant(1, "a", M0)]
    dead = Health(ok=False, reason="XID 94")
    named = f"MIG instance {M0} (1g.5gb) of GPU 0"

    def publish(**changes: Any) -> None:
        (card,) = world.inventory.value.gpus
        card = msgspec.structs.replace(card, **changes)
        world.inventory.publish(msgspec.structs.replace(world.inventory.value, gpus=(card,)))

    async with run(world):
        publish(mig_instances=(msgspec.structs.replace(instance, health=dead),))
        await asyncio.sleep(1)
        assert world.told("Node") == [("n1", "GpuUnhealthy", f"{named}: XID 94")]
        publish(mig_instances=(instance,))
        await asyncio.sleep(1)
        publish(health=Health(ok=False, reason=XID))
        await asyncio.sleep(1)
    assert world.told("Node")[-1] == ("n1", "GpuUnhealthy", f"GPU 0 ({U0}): {XID}")
    assert [(reason, named in text) for _, reason, text in world.told("Pod")] == [
        ("GpuUnhealthy", True),
        ("GpuRecovered", True),
        ("GpuUnhealthy", True),
    ]


async def test_nothing_is_kept_of_pods_that_are_gone() -> None:
    """A thousand pods may come and go beside a dead card."""
    world = World()
    events = gpu_events(world)
    async with running(events.run(ignore), world.events.run(ignore)):
        world.fail(U0)
        await asyncio.sleep(10)
        world.grants.clear()
        await asyncio.sleep(10)
    assert not events._on_pods
    assert [reason for _, reason, _ in world.told("Pod")] == ["GpuUnhealthy"]


async def test_an_event_of_the_node_ends_with_the_remedy() -> None:
    """A remedy of several GPUs is told once, with their numbers as nvidia-smi takes them."""
    gpus = tuple(gpu(number, f"GPU-{number}") for number in range(3))
    world = World(gpus)
    world.grants = []
    ill = Health(ok=False, reason="XID 48", remedy=Remedy.RESET)
    async with run(world):
        for number in (1, 3):
            changed = tuple(
                msgspec.structs.replace(one, health=ill) if one.index < number else one
                for one in gpus
            )
            world.inventory.publish(Inventory(number + 1, changed))
            await asyncio.sleep(1)
            world.inventory.publish(Inventory(number + 2, gpus))
            await asyncio.sleep(1)
    assert [text for _, reason, text in world.told("Node") if reason == "GpuUnhealthy"] == [
        f"GPU 0 (GPU-0): XID 48; {Remedy.RESET.sentence('GPU-0')}",
        f"3 devices: GPU 0, GPU 1, GPU 2: XID 48; {Remedy.RESET.sentence('0,1,2')}",
    ]


async def test_a_driver_that_is_not_there_is_reported_once() -> None:
    """The message has three lines for a terminal. GPUs that were there before are lost instead."""
    world = World()
    gpus = world.inventory.value
    world.inventory.publish(Inventory(2, ()))
    world.driver.state, world.driver.last_error = NvmlState.MISSING, "no driver.\nInstall it"
    async with run(world):
        await asyncio.sleep(60)
        world.driver.state = NvmlState.ANSWERING
        world.inventory.publish(gpus)
        await asyncio.sleep(10)
        world.driver.state = NvmlState.MISSING
        await asyncio.sleep(10)
    assert world.told("Node") == [
        ("n1", "GpuDriverMissing", "no driver. Install it"),
        ("n1", "GpuDriverAnswering", "the NVIDIA driver answers again"),
    ]


async def test_a_problem_that_lasts_is_an_event_and_so_is_its_end() -> None:
    """A second is a restart of the kubelet. The number of seconds in a text makes no new event, and
    some kinds have events of their own or none.
    """
    world = World()
    world.libraries["hami-core"] = "there is no libvgpu.so"

    def waits(seconds: int) -> list[Problem]:
        return [
            Problem(ProblemKind.RESOURCE, "a/b", f"waits for {seconds} s", "start it"),
            Problem(ProblemKind.RESOURCE, "c/d", "no library: there is no libvgpu.so"),
            Problem(ProblemKind.GPU, "0", "is ill"),
            Problem(ProblemKind.NVML, "", "hangs"),
            Problem(ProblemKind.API_SERVER, "", "is away"),
            Problem(ProblemKind.AGENT, "", "starts"),
        ]

    async with run(world):
        await asyncio.sleep(1)
        world.problems = waits(1)
        await asyncio.sleep(6)
        world.problems = []
        await asyncio.sleep(10)
        assert [reason for _, reason, _ in world.told("Node")] == ["GpuLibraryMissing"]
        for second in range(30):
            world.problems = waits(second)
            await asyncio.sleep(1)
        world.problems = []
        await asyncio.sleep(10)
    (first, over) = world.told("Node")[1:]
    assert first[1] == "VgpuProblem"
    assert re.fullmatch(r"resource a/b: waits for \d+ s; start it", first[2])
    assert over[1] == "VgpuProblemOver"
    assert re.fullmatch(r"over: resource a/b: waits for \d+ s", over[2])


async def test_the_error_of_a_program_is_told_to_the_pods_on_its_gpu_once() -> None:
    """Pod b is on the other GPU. A storm of the same error is one entry of the history."""
    world = World()
    seen = XidSeen(31, "XID 31: unmapped", Remedy.APPLICATION, ignored=True, first_at=1, last_at=1)
    counts = msgspec.structs.replace(seen, ignored=False, first_at=2)
    async with run(world):
        world.driver.xids = {U0: (seen,), U1: (counts,)}
        await asyncio.sleep(10)
        world.driver.xids = {U0: (msgspec.structs.replace(seen, last_at=9, count=1000),)}
        await asyncio.sleep(10)
        shared = msgspec.structs.replace(world.grants[1], shares=world.grants[0].shares)
        world.grants[1] = shared
        world.driver.xids = {U0: (msgspec.structs.replace(seen, first_at=15),)}
        await asyncio.sleep(10)
    alone = f"XID 31: unmapped. That was reported on GPU 0 ({U0}), which this pod holds"
    remedy = Remedy.APPLICATION.sentence(U0)
    assert world.told("Node") == []
    assert sorted(world.told("Pod")) == [
        ("a", "GpuProgramError", f"{alone} with other pods; {remedy}"),
        ("a", "GpuProgramError", f"{alone}; {remedy}"),
        ("b", "GpuProgramError", f"{alone} with other pods; {remedy}"),
    ]


async def test_the_error_of_a_program_in_an_instance_concerns_its_pod_alone() -> None:
    """The driver names the instance. Without a name it may be any of them."""
    first = MigInstance(M0, 0, 1, 0, "1g.5gb", 4864)
    second = msgspec.structs.replace(first, uuid=M0.replace("0", "1"), gpu_instance_id=2)
    world = World((gpu(0, U0, mig=(first, second)),))
    world.grants = [grant(1, "a", first.uuid), grant(2, "b", second.uuid)]
    seen = XidSeen(31, "XID 31", Remedy.APPLICATION, ignored=True, first_at=1, last_at=1)
    async with run(world):
        world.driver.xids = {U0: (msgspec.structs.replace(seen, gpu_instance=2),)}
        await asyncio.sleep(10)
        assert [name for name, _, _ in world.told("Pod")] == ["b"]
        world.driver.xids = {U0: (msgspec.structs.replace(seen, first_at=5),)}
        await asyncio.sleep(10)
    assert sorted(name for name, _, _ in world.told("Pod")) == ["a", "b", "b"]
