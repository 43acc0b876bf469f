"""The health of MIG slices beside their GPU's:
which slices an error hits, which recover, and what survives.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests import constants
from tests.gpu.watched import Watched, found, settings, watching
from vgpu_agent.gpu import xid
from vgpu_agent.gpu.health import Healths, Probe, RecoveryPolicy
from vgpu_agent.gpu.nvml import DeviceEvent
from vgpu_agent.model import Gpu, MigInstance
from vgpu_agent.sim.state import SimulatedNode

GOOD, LOST, RESET = Probe(), Probe(trouble="GPU is lost"), Probe(remap_pending=True)
POLICY = RecoveryPolicy(quiet_seconds=10)
# Two slices alone in their GPU instances, and a GPU instance that two compute instances share.
IDS = {"A": (7, 0), "B": (8, 0), "C": (3, 0), "D": (3, 1)}
GPU = Gpu(
    "GPU-1",
    0,
    0,
    "A100",
    81920,
    mig_enabled=True,
    mig_instances=tuple(
        MigInstance(uuid, number, *ids, "1g.10gb", 9728)
        for number, (uuid, ids) in enumerate(IDS.items())
    ),
)
OTHER = Gpu("GPU-2", 1, 1, "A100", 81920)


class Machines:
    """The machines of both GPUs, and the Unhealthy devices."""

    def __init__(self, policy: RecoveryPolicy = POLICY) -> None:
        self.healths = Healths(policy, wall=lambda: 1234.5)

    def hit(self, gpu_instance: int | None, compute_instance: int | None, at: float = 0.0) -> None:
        """An XID that counts, on GPU-1."""
        self.healths.reported(GPU, gpu_instance, compute_instance, xid.trouble_of(48), at)

    def unhealthy(self, gpu: Gpu = GPU) -> str:
        """Names of what is Unhealthy; the GPUs are 1 and 2."""
        gpus = self.healths.applied([gpu, OTHER])
        ill = [one.uuid[-1] for one in gpus if not one.health.ok]
        return "".join(ill + [one.uuid for one in gpus[0].mig_instances if not one.health.ok])


@pytest.mark.parametrize(
    ("gpu_instance", "compute_instance", "hit"),
    [
        (7, 0, "A"),
        (3, 1, "D"),
        (3, None, "CD"),
        (None, None, "1ABCD"),
        (None, 0, "1ABCD"),
        (9, 0, "1ABCD"),
        (7, 3, "1ABCD"),
    ],
)
def test_an_error_hits_the_right_slices(
    gpu_instance: int | None, compute_instance: int | None, hit: str
) -> None:
    """nvidia:D1: by both ids. 0xFFFFFFFF for one or both is all below,
    and ids of no known slice are the whole GPU's.
    """
    machines = Machines()

    machines.hit(gpu_instance, compute_instance)

    assert machines.unhealthy() == hit


def test_a_gpu_without_slices_is_hit_as_a_whole() -> None:
    """Ids in the event of a GPU that is not cut, or was cut a moment ago, change nothing."""
    machines = Machines()

    machines.healths.reported(OTHER, 1, 0, xid.trouble_of(48), 0.0)

    assert machines.unhealthy() == "2"


def test_a_slice_recovers_by_its_gpus_answers() -> None:
    """nvidia:D2: after the quiet time, by a good probe of the GPU.
    A slice that was hit later comes later.
    """
    machines = Machines()
    machines.hit(7, 0, at=0.0)
    machines.hit(8, 0, at=5.0)

    machines.healths.probed(GPU, GOOD, 9.9)
    assert machines.unhealthy() == "AB"
    assert machines.healths.recoveries == [10.0, 15.0]
    machines.healths.probed(GPU, GOOD, 10.0)
    assert machines.unhealthy() == "B"
    machines.healths.probed(GPU, GOOD, 15.0)
    assert machines.unhealthy() == ""


def test_what_was_hit_as_a_whole_recovers_as_a_whole() -> None:
    """GPU and slices come back in one step."""
    machines = Machines()
    machines.hit(None, None)

    machines.healths.probed(GPU, GOOD, 10.0)

    assert machines.unhealthy() == ""


def test_a_bad_answer_of_the_gpu_is_its_slices_too() -> None:
    """Lost, in need of a reset, or silent: no part of it may be given away."""
    machines = Machines()

    machines.healths.probed(GPU, LOST, 0.0)

    assert machines.unhealthy() == "1ABCD"


def test_a_slice_that_the_driver_cannot_describe_is_ill_alone() -> None:
    """Its GPU answers and it does not."""
    machines = Machines()

    machines.healths.probed(GPU, GOOD, 0.0, {"B": Probe(trouble="Unknown Error")})

    assert machines.unhealthy() == "B"
    assert machines.healths.applied([GPU])[0].mig_instances[1].health.reason == "Unknown Error"


def test_a_pending_reset_of_the_gpu_keeps_an_ill_slice_away() -> None:
    """A row of memory that waits for a reset is an obstacle for Unhealthy slices only."""
    machines = Machines()
    machines.hit(7, 0)

    machines.healths.probed(GPU, RESET, 50.0)

    assert machines.unhealthy() == "A"
    assert "replaces a row" in machines.healths.applied([GPU])[0].mig_instances[0].health.reason


def test_a_slice_that_was_away_for_a_moment_is_as_ill_as_before() -> None:
    """nvidia:D11: an instance that is destroyed and made anew, or missed in one reading,
    is not well for that.
    """
    machines = Machines()
    machines.hit(7, 0)
    without = msgspec.structs.replace(GPU, mig_instances=GPU.mig_instances[1:])
    machines.healths.probed(without, GOOD, 5.0)
    machines.healths.probed(GPU, GOOD, 6.0)

    assert machines.unhealthy() == "A"


def test_a_slice_that_stays_away_is_forgotten_once_it_would_have_recovered() -> None:
    """Nothing is kept for ever: layouts may change every hour for a year."""
    machines = Machines()
    machines.hit(7, 0)
    without = msgspec.structs.replace(GPU, mig_instances=GPU.mig_instances[1:])
    machines.healths.probed(without, GOOD, 10.0)

    assert machines.healths.recoveries == []
    assert set(machines.healths._instances["GPU-1"]) == {"B", "C", "D"}


def test_a_hang_takes_the_slices_along() -> None:
    """A driver call about the GPU does not return:
    neither it nor a slice recovers until it does.
    """
    machines = Machines()
    assert machines.healths.hung(GPU, "nvmlX", 0.0)
    assert not machines.healths.hung(GPU, "nvmlX", 1.0)
    machines.healths.probed(GPU, GOOD, 100.0)
    assert machines.unhealthy() == "1ABCD"

    machines.healths.answering(100.0, 100.0)
    machines.healths.probed(GPU, GOOD, 110.0)

    assert machines.unhealthy() == ""


def test_another_policy_is_every_machines() -> None:
    """nvidia:D11: a reload changes how things recover and not how they are;
    slices that come later follow it too.
    """
    machines = Machines(msgspec.structs.replace(POLICY, automatic=False))
    machines.hit(None, None)
    machines.healths.probed(GPU, GOOD, 1000.0)
    assert machines.unhealthy() == "1ABCD"

    machines.healths.follow(POLICY)
    assert machines.unhealthy() == "1ABCD"
    machines.healths.probed(GPU, GOOD, 1001.0)
    assert machines.unhealthy() == ""


async def _seven(node: SimulatedNode) -> None:
    await asyncio.to_thread(node.set_mig, 0, ["1g.10gb"] * 7)


def _slices(watched: Watched, node: SimulatedNode) -> list[bool]:
    return [instance.health.ok for instance in watched.gpu(node.uuids[0]).mig_instances]


async def test_an_xid_of_a_slice_is_published_for_that_slice(node: SimulatedNode) -> None:
    """nvidia:D1: from the driver's event to the inventory, at once.
    The GPU and the other six stay, and the journal has the ids.
    """
    await _seven(node)
    async with watching(node, quiet=60, others={constants.GPU_POLL: 30.0}) as watched:
        node.xid(0, 48, gpu_instance=10, compute_instance=0)
        await watched.until(
            lambda inventory: not found(inventory, node.uuids[0]).mig_instances[3].health.ok
        )
        entry = await watched.recorded("gpu.mig_instance_unhealthy")

        assert _slices(watched, node) == [True, True, True, False, True, True, True]
        assert watched.gpu(node.uuids[0]).health.ok
        assert entry.facts["instance"] == node.mig_uuids(0)[3]
        assert entry.facts["reason"] == "XID 48: GPU memory lost bits beyond what ECC corrects"
        assert (await watched.recorded("gpu.xid")).facts["gpu_instance"] == 10
        assert watched.count("gpu.unhealthy") == 0


async def test_an_xid_without_ids_is_published_for_gpu_and_slices(node: SimulatedNode) -> None:
    """nvidia:D1: 0xFFFFFFFF for both ids; logged once in the journal, for the GPU,
    and all come back together.
    """
    await _seven(node)
    async with watching(node, quiet=0.3) as watched:
        node.xid(0, 79)
        await watched.unhealthy(node.uuids[0])
        assert _slices(watched, node) == [False] * 7
        await watched.healthy(node.uuids[0])

        assert _slices(watched, node) == [True] * 7
        assert watched.count("gpu.unhealthy") == watched.count("gpu.recovered") == 1
        assert (
            watched.count("gpu.mig_instance_unhealthy")
            == watched.count("gpu.mig_instance_recovered")
            == 0
        )


async def test_a_slice_recovers_and_says_so(node: SimulatedNode) -> None:
    """nvidia:D2: by the polls, without a restart."""
    await _seven(node)
    async with watching(node, quiet=0.2) as watched:
        node.xid(0, 48, gpu_instance=7, compute_instance=0)
        entry = await watched.recorded("gpu.mig_instance_recovered")

        assert entry.facts["was"].startswith("XID 48")
        assert _slices(watched, node) == [True] * 7


async def test_an_event_that_names_a_slice_instead_of_its_gpu_is_placed_too(
    node: SimulatedNode,
) -> None:
    """NVML says GPU and ids; should a driver hand out the slice's own handle,
    the error is not lost.
    """
    await _seven(node)
    async with watching(node, quiet=60) as watched:
        watched.watch._on_event(
            DeviceEvent(gpu=node.mig_uuids(0)[2], xid=48, gpu_instance=9, compute_instance=0)
        )

        assert _slices(watched, node) == [True, True, False, True, True, True, True]


async def test_an_ignored_xid_of_a_slice_hits_nobody(node: SimulatedNode) -> None:
    """XID 31 is the program's fault, in a slice as anywhere."""
    await _seven(node)
    async with watching(node) as watched:
        node.xid(0, 31, gpu_instance=7, compute_instance=0)
        await watched.recorded("gpu.xid")

        assert _slices(watched, node) == [True] * 7


async def test_a_reload_forgets_no_illness(node: SimulatedNode) -> None:
    """nvidia:D11: the original forgets what is Unhealthy at each SIGHUP. Here settings change and
    the GPU and slice stay as they are.
    """
    await _seven(node)
    async with watching(node, quiet=60) as watched:
        node.xid(0, 48, gpu_instance=7, compute_instance=0)
        node.xid(1, 79)
        await watched.unhealthy(node.uuids[1])
        watched.watch.apply(settings(node, quiet=60, disable_health_checks="all"))
        await watched.polls(2)

        assert _slices(watched, node) == [False] + [True] * 6
        assert not watched.gpu(node.uuids[1]).health.ok


async def test_an_instance_whose_nodes_are_not_known_is_told(node: SimulatedNode) -> None:
    """Garbage in the driver's file: an event with instance and reason,
    and one when it is mended is not needed: the trouble goes.
    """
    path = node.directory / "proc" / "driver" / "nvidia-caps" / "mig-minors"
    whole = await asyncio.to_thread(path.read_text)
    await _seven(node)
    await asyncio.to_thread(
        path.write_text, whole.replace("gpu0/gi8/access 75", "gpu0/gi8/access ??")
    )
    async with watching(node) as watched:
        entry = await watched.recorded("gpu.mig_instance_withheld")
        assert entry.facts["instance"] == node.mig_uuids(0)[1]
        assert "mig-minors line" in entry.facts["reason"]
        assert [
            bool(instance.trouble) for instance in watched.gpu(node.uuids[0]).mig_instances
        ] == [False, True] + [False] * 5

        await asyncio.to_thread(path.write_text, whole)
        await watched.until(
            lambda inventory: (
                not any(one.trouble for one in found(inventory, node.uuids[0]).mig_instances)
            )
        )
        assert watched.count("gpu.mig_instance_withheld") == 1


def test_health_of_a_slice_is_part_of_the_value() -> None:
    """Streams are woken by a different inventory, so health must make one."""
    machines = Machines()
    before = machines.healths.applied([GPU])
    machines.hit(7, 0)

    assert machines.healths.applied([GPU]) != before
    health = machines.healths.applied([GPU])[0].mig_instances[0].health
    assert (health.ok, health.reason, health.since) == (False, xid.describe(48), 1234.5)
