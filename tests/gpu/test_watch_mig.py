"""MIG geometry that changes while the watch runs:
seen soon, reported whole, and never at the price of a GPU.
"""

from __future__ import annotations

import asyncio

import pytest

from tests import constants
from tests.gpu.watched import SOON_HUNG, found, watching
from tests.patience import FOR_EVER_SECONDS, eventually
from vgpu_agent.errors import NvmlHungError
from vgpu_agent.model import Inventory, Remedy
from vgpu_agent.sim.state import ProcessUse, SimulatedNode

MIG_EVENT = 0x100
UNKNOWN = 999


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks every tenth of a second, for tests in which it does not matter how often."""
    monkeypatch.setattr("vgpu_agent.gpu.watch._MIG_LOOK_SECONDS", 0.1)


def _profiles(inventory: Inventory, uuid: str) -> list[str]:
    return [instance.profile for instance in found(inventory, uuid).mig_instances]


async def test_a_new_layout_is_published_between_polls(node: SimulatedNode) -> None:
    """nvidia:D9: mode and instances, however rare the polls are.
    The journal says what went and what came.
    """
    await asyncio.to_thread(node.set_mig, 3, ["7g.80gb"])
    before = node.mig_uuids(3)
    async with watching(node, others={constants.GPU_POLL: FOR_EVER_SECONDS}) as watched:
        polled_at = watched.watch._polled_at
        await asyncio.to_thread(node.set_mig, 3, ["2g.20gb", "3g.40gb"])
        await watched.until(
            lambda inventory: _profiles(inventory, node.uuids[3]) == ["2g.20gb", "3g.40gb"]
        )

        assert watched.watch._polled_at == polled_at
        entries = [
            entry.facts for entry in watched.journal.entries if entry.event == "gpu.mig_changed"
        ]
        assert {uuid: profile for facts in entries for uuid, profile in facts["removed"].items()}[
            before[0]
        ] == "7g.80gb"
        assert set(node.mig_uuids(3)) <= {uuid for facts in entries for uuid in facts["added"]}


@pytest.mark.usefixtures("often")
async def test_mode_on_and_off_is_a_change(node: SimulatedNode) -> None:
    """nvidia:D9: from a whole GPU to slices and back."""
    async with watching(node, others={constants.GPU_POLL: FOR_EVER_SECONDS}) as watched:
        await asyncio.to_thread(node.set_mig, 0, ["7g.80gb"])
        await watched.until(lambda inventory: found(inventory, node.uuids[0]).mig_enabled)
        await asyncio.to_thread(node.set_mig, 0, [])
        await watched.until(lambda inventory: not found(inventory, node.uuids[0]).mig_enabled)

        assert [
            entry.facts["mig"]
            for entry in watched.journal.entries
            if entry.event == "gpu.mig_changed"
        ][-1] == "off"
        assert watched.count("gpu.lost") == watched.count("gpu.unhealthy") == 0


async def test_an_event_of_the_driver_brings_the_look_forward(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers that report a change of MIG instances are believed at once,
    whenever the next regular look would be.
    """
    monkeypatch.setattr("vgpu_agent.gpu.watch._MIG_LOOK_SECONDS", FOR_EVER_SECONDS)
    async with watching(node, others={constants.GPU_POLL: FOR_EVER_SECONDS}) as watched:
        await asyncio.to_thread(node.set_mig, 1, ["1g.10gb"])
        node.event(1, MIG_EVENT)
        await watched.until(lambda inventory: found(inventory, node.uuids[1]).mig_enabled)

        assert watched.count("gpu.xid") == 0


@pytest.mark.usefixtures("often")
async def test_a_quiet_node_is_looked_at_and_told_nothing(node: SimulatedNode) -> None:
    """Looks that find the same publish nothing, and do not turn into readings."""
    await asyncio.to_thread(node.set_mig, 0, ["1g.10gb"] * 7)
    async with watching(node, others={constants.GPU_POLL: FOR_EVER_SECONDS}) as watched:
        read_at = watched.watch.read_at
        for _ in range(3):
            looked_at = watched.watch._looked_at
            # see `Watched.polls`
            await eventually(lambda looked_at=looked_at: watched.watch._looked_at != looked_at)  # type: ignore[misc]  # mypy does not infer a lambda with a default

        assert watched.watch.inventory.version == 1
        assert watched.watch.read_at == read_at


async def test_a_layout_that_changes_without_pause_costs_no_gpu(node: SimulatedNode) -> None:
    """Handles die between two calls over and over:
    no GPU is lost or Unhealthy, and the last layout is the published one.
    """
    async with watching(node) as watched:
        for _ in range(40):
            await asyncio.to_thread(node.set_mig, 2, ["1g.10gb"] * 7)
            await asyncio.to_thread(node.set_mig, 2, ["3g.40gb", "2g.20gb"])
        await watched.until(
            lambda inventory: _profiles(inventory, node.uuids[2]) == ["3g.40gb", "2g.20gb"]
        )

        assert (
            watched.count("gpu.lost")
            == watched.count("gpu.unhealthy")
            == watched.count("gpu.not_answering")
            == 0
        )
        assert watched.count("gpu.mig_instance_unhealthy") == 0


async def test_a_slice_that_does_not_answer_is_unhealthy_until_it_does(node: SimulatedNode) -> None:
    """The driver can list it and not describe it:
    it stays in the inventory, ill, and its GPU stays well.
    """
    await asyncio.to_thread(node.set_mig, 0, ["3g.40gb", "2g.20gb"])
    async with watching(node) as watched:
        node.fault("nvmlDeviceGetGpuInstanceId", gpu=0, code=UNKNOWN)
        await watched.until(
            lambda inventory: (
                not any(one.health.ok for one in found(inventory, node.uuids[0]).mig_instances)
            )
        )
        assert watched.gpu(node.uuids[0]).health.ok
        assert _profiles(watched.watch.inventory.value, node.uuids[0]) == ["3g.40gb", "2g.20gb"]

        node.clear_faults()
        await watched.until(
            lambda inventory: all(
                one.health.ok for one in found(inventory, node.uuids[0]).mig_instances
            )
        )


async def test_a_lost_gpu_keeps_its_slices(node: SimulatedNode) -> None:
    """nvidia §10.8 is not copied: a GPU that falls off the bus takes its slices along, Unhealthy,
    and they come back with it.
    """
    await asyncio.to_thread(node.set_mig, 1, ["3g.40gb", "2g.20gb"])
    async with watching(node) as watched:
        node.lose(1)
        gpu = await watched.unhealthy(node.uuids[1])
        assert [instance.health.ok for instance in gpu.mig_instances] == [False, False]

        node.restore(1)
        gpu = await watched.healthy(node.uuids[1])
        assert [instance.health.ok for instance in gpu.mig_instances] == [True, True]


async def test_the_memory_of_each_slice_is_measured(node: SimulatedNode) -> None:
    """A process counts where it runs, and not for the slice beside it."""
    await asyncio.to_thread(node.set_mig, 0, ["3g.40gb", "2g.20gb"])
    async with watching(node) as watched:
        inventory = await watched.until(lambda inventory: bool(inventory.version))
        assert inventory.nvml_version
        first, second = found(inventory, node.uuids[0]).mig_instances
        used = ProcessUse(
            memory_mib=512,
            gpu_instance=second.gpu_instance_id,
            compute_instance=second.compute_instance_id,
        )
        node.add_process(0, 4321, used)

        def measured() -> dict[str, int]:
            usage = watched.watch.usage.value
            return dict(usage[0].instances_used_mib) if usage else {}

        await eventually(lambda: measured() == {first.uuid: 0, second.uuid: 512})


@pytest.mark.usefixtures("often")
async def test_a_slow_driver_is_looked_at_less_often(node: SimulatedNode) -> None:
    """The one thread that talks to the driver has four times as long for everything else."""
    async with watching(
        node, others={constants.GPU_POLL: FOR_EVER_SECONDS}, usage_seconds=FOR_EVER_SECONDS
    ) as watched:
        node.fault("nvmlDeviceGetMigMode", delay_ms=40)
        await eventually(
            lambda: watched.watch._next_look - watched.watch._looked_at >= 5 * 4 * 0.04
        )


async def test_errors_in_two_slices_are_two_lines_of_the_journal(node: SimulatedNode) -> None:
    """One line of a storm is kept for each place,
    so that the second slice is not taken for the first.
    """
    await asyncio.to_thread(node.set_mig, 0, ["3g.40gb", "2g.20gb"])
    async with watching(node) as watched:
        for gpu_instance in (1, 5, 1, 5):
            node.xid(0, 31, gpu_instance=gpu_instance, compute_instance=0)
        await eventually(lambda: watched.count("gpu.xid") == 2)

        assert [
            entry.facts["gpu_instance"]
            for entry in watched.journal.entries
            if entry.event == "gpu.xid"
        ] == [1, 5]


@pytest.mark.usefixtures("often")
async def test_a_look_that_hangs_is_a_hang_like_any_other(node: SimulatedNode) -> None:
    """The call is named, the loop goes on, and the GPU becomes Unhealthy after its time."""
    async with watching(
        node,
        others={constants.GPU_POLL: FOR_EVER_SECONDS, **SOON_HUNG},
        usage_seconds=FOR_EVER_SECONDS,
    ) as watched:
        node.fault(
            "nvmlDeviceGetMigMode",
            gpu=2,
            delay_ms=int(FOR_EVER_SECONDS * 1000),
            code=UNKNOWN,
            times=1,
        )
        entry = await watched.recorded("nvml.hung")
        remedy = Remedy.CHECK_DRIVER.sentence("")
        assert entry.facts == {
            "call": "nvmlDeviceGetMigMode",
            "gpu": node.uuids[2],
            "remedy": remedy,
        }
        with pytest.raises(NvmlHungError):
            await watched.watch._look()

        node.clear_faults()
        await watched.recorded("nvml.answering")
