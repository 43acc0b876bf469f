"""The watch on simulated GPUs: its findings at start, and its ways to notice trouble."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path

import pytest

from tests import constants
from tests.gpu.watched import found, settings, sysfs_of, watching
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS, eventually
from vgpu_agent.errors import DriverMissingError
from vgpu_agent.gpu.nvml import DeviceEvent
from vgpu_agent.gpu.watch import GpuWatch
from vgpu_agent.journal import Journal
from vgpu_agent.model import Remedy
from vgpu_agent.sim.state import ProcessUse, SimulatedNode
from vgpu_agent.status import NvmlState

RECOVERY_ACTION_EVENT = 0x8000
DRIVER_NOT_LOADED = 9
UNKNOWN = 999


async def test_start_reads_the_whole_inventory(node: SimulatedNode) -> None:
    """Four GPUs with their places, the driver's versions,
    and the plain statement that they are simulated.
    """
    async with watching(node) as watched:
        inventory = watched.watch.inventory.value

        assert [gpu.uuid for gpu in inventory.gpus] == list(node.uuids)
        assert [gpu.numa_node for gpu in inventory.gpus] == [0, 0, 1, 1]
        assert all(gpu.health.ok and gpu.present for gpu in inventory.gpus)
        assert (inventory.driver_version, inventory.cuda_version, inventory.simulated) == (
            "580.95.05",
            "13.0",
            True,
        )
        assert inventory.version == 1
        assert watched.count("gpu.simulated") == 1
        assert watched.watch.status.state is NvmlState.ANSWERING


async def test_a_quiet_node_publishes_nothing(node: SimulatedNode) -> None:
    """Polls that find the same things as before wake no reader."""
    async with watching(node) as watched:
        await watched.polls(3)

        assert watched.watch.inventory.version == 1


async def test_a_gpu_that_is_lost_before_the_start_costs_only_itself(node: SimulatedNode) -> None:
    """Three of four GPUs are offered. The fourth is a line among the failures."""
    node.lose(2)

    async with watching(node) as watched:
        inventory = watched.watch.inventory.value

        assert [gpu.uuid for gpu in inventory.gpus] == [node.uuids[0], node.uuids[1], node.uuids[3]]
        assert len(inventory.failures) == 1
        assert inventory.failures[0].startswith("2: ")
        assert "GPU is lost" in inventory.failures[0]
        assert (await watched.recorded("gpu.not_answering")).facts == {
            "failures": list(inventory.failures)
        }


async def test_a_gpu_that_was_lost_at_the_start_joins_when_it_answers(node: SimulatedNode) -> None:
    """It appears at its own place, without a restart."""
    node.lose(2)

    async with watching(node) as watched:
        node.restore(2)
        inventory = await watched.until(lambda inventory: len(inventory.gpus) == 4)

        assert [gpu.uuid for gpu in inventory.gpus] == list(node.uuids)
        assert inventory.failures == ()


async def test_an_xid_makes_the_gpu_unhealthy_at_once(node: SimulatedNode) -> None:
    """XID 79 is published long before the next poll, and hits only its GPU."""
    async with watching(node, others={constants.GPU_POLL: FOR_EVER_SECONDS}) as watched:
        node.xid(1, 79)
        gpu = await watched.unhealthy(node.uuids[1])

        assert gpu.health.reason == "XID 79: the GPU has fallen off the bus"
        assert [gpu.health.ok for gpu in watched.watch.inventory.value.gpus] == [
            True,
            False,
            True,
            True,
        ]
        assert watched.journal.entries[-2].facts == {
            "gpu": node.uuids[1],
            "xid": 79,
            "meaning": "XID 79: the GPU has fallen off the bus",
            "remedy": Remedy.REBOOT_OR_REPLACE.sentence(""),
            "ignored": False,
        }
        assert watched.journal.entries[-1].event == "gpu.unhealthy"


async def test_a_milder_xid_hides_no_worse_one(node: SimulatedNode) -> None:
    """The log and the inventory keep the XID that matters, with its remedy and the time at which
    the GPU is offered again.
    """
    async with watching(node, quiet=60) as watched:
        node.xid(1, 94)
        await watched.unhealthy(node.uuids[1])
        node.xid(1, 79)
        await watched.recorded("gpu.cause_changed")
        node.xid(1, 94)
        await watched.polls(2)
        gpu = watched.gpu(node.uuids[1])

        assert [cause.code for cause in gpu.health.causes] == ["XID 79", "XID 94"]
        assert gpu.health.reason == "XID 79: the GPU has fallen off the bus"
        assert gpu.health.answers
        assert gpu.health.remedy is Remedy.CHECK_SLOT
        assert 50 < gpu.health.offered_at - time.time() < 60.5
        entries = {entry.event: entry for entry in reversed(watched.journal.entries)}
        changed, unhealthy = entries["gpu.cause_changed"], entries["gpu.unhealthy"]
        assert changed.facts["reason"] == gpu.health.reason
        assert "reboot" in changed.facts["remedy"]
        assert "restart the pod that was hit" in unhealthy.facts["remedy"]
        assert unhealthy.facts["offered_again"].endswith("Z")


async def test_a_demanded_reset_and_the_xid_before_it_are_both_told(node: SimulatedNode) -> None:
    """The operator sees why the driver asks."""
    async with watching(node, quiet=60) as watched:
        node.xid(0, 48)
        await watched.unhealthy(node.uuids[0])
        node.recovery_action(0, "reset")
        inventory = await watched.until(
            lambda inventory: "asks for" in found(inventory, node.uuids[0]).health.reason
        )

        health = found(inventory, node.uuids[0]).health
        assert health.reason == (
            "XID 48: GPU memory lost bits beyond what ECC corrects; the driver asks for a GPU reset"
        )
        assert (health.remedy, health.offered_at) == (Remedy.RESET, 0)


async def test_an_ignored_xid_is_recorded_and_changes_nothing(node: SimulatedNode) -> None:
    """XID 31 is a program's fault: it is journalled, and the GPU stays."""
    async with watching(node) as watched:
        node.xid(0, 31)
        entry = await watched.recorded("gpu.xid")

        assert entry.facts["ignored"] is True
        assert entry.facts["remedy"] == Remedy.APPLICATION.sentence("")
        assert watched.gpu(node.uuids[0]).health.ok
        assert watched.watch.inventory.version == 1


async def test_a_storm_of_one_xid_is_one_entry_and_hides_no_other(node: SimulatedNode) -> None:
    """A thousand times the same line would push the rest of the night out of the journal.
    Another XID is news at once.
    """
    async with watching(node) as watched:
        for _ in range(100):
            node.xid(1, 31)
        node.xid(1, 79)
        await watched.unhealthy(node.uuids[1])

        assert [
            entry.facts["xid"] for entry in watched.journal.entries if entry.event == "gpu.xid"
        ] == [31, 79]


@pytest.mark.parametrize("entirely", [False, True])
async def test_a_gpu_that_vanishes_without_an_event_is_found_by_the_poll(
    node: SimulatedNode, *, entirely: bool
) -> None:
    """It stays in the inventory at its place, not present and Unhealthy.
    The others are untouched.
    """
    async with watching(node) as watched:
        node.lose(1, entirely=entirely)
        gpu = await watched.unhealthy(node.uuids[1])

        assert not gpu.present
        assert "GPU is lost" in gpu.health.reason
        assert [gpu.uuid for gpu in watched.watch.inventory.value.gpus] == list(node.uuids)
        assert [gpu.health.ok for gpu in watched.watch.inventory.value.gpus] == [
            True,
            False,
            True,
            True,
        ]
        assert watched.count("gpu.lost") == 1


async def test_a_lost_gpu_recovers_when_it_answers_and_is_quiet(node: SimulatedNode) -> None:
    """nvidia:D2: lost, back, and offered again after the quiet time, with each step in the journal.
    Its events are received again.
    """
    async with watching(node) as watched:
        node.lose(1)
        await watched.unhealthy(node.uuids[1])
        node.restore(1)
        await watched.healthy(node.uuids[1])

        assert [entry.event for entry in watched.journal.entries[-5:]] == [
            "gpu.lost",
            "gpu.unhealthy",
            "gpu.appeared",
            "gpu.cause_changed",
            "gpu.recovered",
        ]
        node.xid(1, 79)
        await watched.unhealthy(node.uuids[1])


async def test_failures_and_recoveries_are_counted(node: SimulatedNode) -> None:
    """Also XIDs that are ignored: a storm of a program's faults shows in the metrics."""
    lost, ill = node.uuids[1], node.uuids[2]
    async with watching(node) as watched:
        node.lose(1)
        node.xid(2, 79)
        node.xid(2, 31)
        node.xid(2, 31)
        await watched.unhealthy(lost)
        await watched.unhealthy(ill)
        node.restore(1)
        await watched.healthy(lost)
        await watched.healthy(ill)
        history = watched.watch.status.history
        await eventually(lambda: history.xids.get((ill, "31")) == 2)

        assert history.xids == {(ill, "79"): 1, (ill, "31"): 2}
        assert history.transitions[lost, "lost"] == history.transitions[lost, "healthy"] == 1
        assert history.transitions[ill, "unhealthy"] == history.transitions[ill, "healthy"] == 1
        assert sum(history.recovery_seconds.counts) == 2
        assert 0 < history.recovery_seconds.total < 2 * PATIENCE_SECONDS


async def test_recovery_comes_when_the_quiet_time_ends_and_not_at_the_next_regular_poll(
    node: SimulatedNode,
) -> None:
    """A long poll interval, a tenth of which is the shortest,
    does not prolong a short quiet time.
    """
    began = time.monotonic()
    async with watching(node, quiet=0.3, others={constants.GPU_POLL: 10.0}) as watched:
        node.xid(0, 79)
        await watched.unhealthy(node.uuids[0])
        await watched.healthy(node.uuids[0])

        assert 0.3 < time.monotonic() - began < 10


async def test_a_flapping_gpu_stays_away_longer(node: SimulatedNode) -> None:
    """The second quiet time within the flap window is twice the first."""
    async with watching(node, quiet=0.2) as watched:
        node.xid(0, 79)
        await watched.unhealthy(node.uuids[0])
        await watched.healthy(node.uuids[0])
        began = time.monotonic()
        node.xid(0, 79)
        await watched.unhealthy(node.uuids[0])
        await watched.healthy(node.uuids[0])

        assert time.monotonic() - began > 0.4


async def test_recovery_never_means_never(node: SimulatedNode) -> None:
    """Polls go by and the GPU stays Unhealthy; reloading the setting brings it back."""
    async with watching(node, quiet=0.05, mode="never") as watched:
        node.xid(0, 79)
        await watched.unhealthy(node.uuids[0])
        await watched.polls(3)
        assert not watched.gpu(node.uuids[0]).health.ok

        watched.watch.apply(settings(node, quiet=0.05))
        await watched.healthy(node.uuids[0])


async def test_a_wanted_reset_blocks_recovery(node: SimulatedNode) -> None:
    """The driver asks for a GPU reset: the GPU waits for it however quiet it is."""
    async with watching(node, quiet=0.05) as watched:
        node.recovery_action(0, "reset")
        node.xid(0, 79)
        await watched.unhealthy(node.uuids[0])
        await watched.until(
            lambda inventory: "GPU reset" in found(inventory, node.uuids[0]).health.reason
        )
        await watched.polls(3)
        assert not watched.gpu(node.uuids[0]).health.ok

        node.recovery_action(0, "none")
        await watched.healthy(node.uuids[0])


async def test_a_pending_row_remap_blocks_recovery(node: SimulatedNode) -> None:
    """A row of memory waits to be replaced: so does the GPU."""
    async with watching(node, quiet=0.05) as watched:
        node.remap(0, uncorrected=1, pending=True)
        node.xid(0, 63)
        await watched.unhealthy(node.uuids[0])
        await watched.until(
            lambda inventory: (
                "row of memory" in found(inventory, node.uuids[0]).health.reason.partition(";")[2]
            )
        )
        await watched.polls(3)
        assert not watched.gpu(node.uuids[0]).health.ok

        node.remap(0, uncorrected=1)
        await watched.healthy(node.uuids[0])


async def test_an_unplugged_gpu_keeps_its_place_and_comes_back(node: SimulatedNode) -> None:
    """NVML renumbers the others. The inventory keeps the order of the bus,
    and after plugging in all is as before.
    """
    async with watching(node) as watched:
        node.unplug(1)
        inventory = await watched.until(
            lambda inventory: not found(inventory, node.uuids[1]).present
        )
        inventory = await watched.until(lambda inventory: inventory.gpus[2].index == 1)
        assert [gpu.uuid for gpu in inventory.gpus] == list(node.uuids)
        assert [gpu.minor for gpu in inventory.gpus] == [0, 1, 2, 3]
        assert (
            found(inventory, node.uuids[1]).health.reason == "the driver no longer lists this GPU"
        )

        node.plug(1)
        gpu = await watched.healthy(node.uuids[1])
        assert gpu.present
        assert [gpu.index for gpu in watched.watch.inventory.value.gpus] == [0, 1, 2, 3]
        assert (node.uuids[0], node.uuids[1]) in watched.watch.inventory.value.links


async def test_events_are_heard_after_the_driver_was_opened_anew(node: SimulatedNode) -> None:
    """Unplugging one GPU makes all handles void.
    The XIDs of the others still arrive, and mark the right one.
    """
    async with watching(node) as watched:
        node.unplug(0)
        await watched.until(lambda inventory: inventory.gpus[3].index == 2)
        node.xid(3, 79)
        await watched.unhealthy(node.uuids[3])

        assert [gpu.health.ok for gpu in watched.watch.inventory.value.gpus] == [
            False,
            True,
            True,
            False,
        ]


async def test_a_card_without_events_is_polled_all_the_same(node: SimulatedNode) -> None:
    """nvidia §10.5: NOT_SUPPORTED at registration is a warning, and the GPU is Healthy."""
    node.fault("nvmlDeviceRegisterEvents", gpu=0, code=3)

    async with watching(node) as watched:
        assert watched.gpu(node.uuids[0]).health.ok
        node.lose(0)
        await watched.unhealthy(node.uuids[0])


@pytest.mark.parametrize("function", ["nvmlDeviceRegisterEvents", "nvmlEventSetCreate"])
async def test_a_card_that_could_not_be_registered_once_is_registered_later(
    node: SimulatedNode, function: str
) -> None:
    """nvidia §10.5: an error other than NOT_SUPPORTED. A single one, such as of a driver that is
    short of memory, must not hide the GPU's XIDs until the agent starts again.
    """
    node.fault(function, code=UNKNOWN, times=1)

    async with watching(node) as watched:
        await watched.polls(2)
        for index in (0, 1):
            node.xid(index, 79)
            await watched.unhealthy(node.uuids[index])


async def test_a_card_that_cannot_be_registered_is_named_once(
    node: SimulatedNode, lines: io.StringIO
) -> None:
    """The registration is tried with each reading. The other GPU reports its XIDs."""
    node.fault("nvmlDeviceRegisterEvents", gpu=0, code=UNKNOWN)

    async with watching(node) as watched:
        await watched.polls(3)
        node.xid(1, 79)
        await watched.unhealthy(node.uuids[1])
    told = [line for line in lines.getvalue().splitlines() if "gpu.fact_missing" in line]
    assert len(told) == 1
    assert f"the XIDs of {node.uuids[0]} are not seen" in told[0]


async def test_an_event_that_nobody_can_place_may_have_hit_any_gpu(node: SimulatedNode) -> None:
    """nvidia §10.6: an error that counts is not lost because the driver does not name its GPU.
    All recover by good answers.
    """
    async with watching(node, quiet=0.3) as watched:
        watched.watch._on_event(DeviceEvent(gpu="", xid=48))
        assert not any(gpu.health.ok for gpu in watched.watch.inventory.value.gpus)
        assert "does not say on which GPU" in watched.gpu(node.uuids[0]).health.reason

        await watched.until(lambda inventory: all(gpu.health.ok for gpu in inventory.gpus))


async def test_an_event_of_a_card_that_is_not_for_work_hits_nobody(node: SimulatedNode) -> None:
    """The graphics card of a DGX Station has its own troubles."""
    async with watching(node) as watched:
        watched.watch._on_event(DeviceEvent(gpu="GPU-of-a-display", xid=48))

        assert all(gpu.health.ok for gpu in watched.watch.inventory.value.gpus)


async def test_a_broken_event_queue_makes_no_gpu_unhealthy(node: SimulatedNode) -> None:
    """nvidia §10.6, not copied: an error of the wait means one poll and a new queue,
    not a dead node.
    """
    async with watching(node) as watched:
        node.fault("nvmlEventSetWait", code=UNKNOWN, times=1)
        await watched.recorded("nvml.events_failed")
        # an XID between the two queues is lost
        await eventually(lambda: not watched.watch._reopening.driver_failed)
        node.xid(2, 79)
        await watched.unhealthy(node.uuids[2])

        assert watched.count("nvml.events_failed") == 1
        assert [gpu.health.ok for gpu in watched.watch.inventory.value.gpus] == [
            True,
            True,
            False,
            True,
        ]


async def test_the_driver_asks_for_a_look_without_an_xid(node: SimulatedNode) -> None:
    """Newer drivers report a wanted recovery action as an event of its own:
    it brings the poll forward and is no XID.
    """
    node.state.gpus[0].event_types |= RECOVERY_ACTION_EVENT
    began = time.monotonic()
    async with watching(node, others={constants.GPU_POLL: 10.0}) as watched:
        node.recovery_action(0, "reset")
        node.event(0, RECOVERY_ACTION_EVENT)
        gpu = await watched.unhealthy(node.uuids[0])

        assert time.monotonic() - began < 10
        assert gpu.health.reason == "the driver asks for a GPU reset"
        assert watched.count("gpu.xid") == 0


async def test_usage_is_measured_and_published_when_it_changes(node: SimulatedNode) -> None:
    """Memory, utilisation, temperature, power, errors and processes of each GPU."""
    async with watching(node) as watched:
        await watched.watch.usage.newer_than(0)
        node.add_process(1, 4321, ProcessUse(memory_mib=3072))
        node.utilisation(1, 40)
        node.temperature(1, 71)
        node.ecc_errors(1, uncorrected=2)
        await eventually(lambda: watched.watch.usage.value[1].ecc_uncorrected_total == 2)
        usage = watched.watch.usage.value[1]

        assert usage.processes == ((4321, 3072),)
        assert (usage.memory_used_mib, usage.memory_total_mib) == (3072, 81920)
        assert (usage.utilisation_percent, usage.temperature_celsius) == (40, 71)
        assert usage.power_watts is not None
        version = watched.watch.usage.version
        await watched.polls(3)
        assert watched.watch.usage.version == version


async def test_no_driver_is_an_error_where_the_operator_wants_one(node: SimulatedNode) -> None:
    """failOnInitError true: start raises, and the text has NVML's answer and a remedy."""
    node.fault("nvmlInit", code=DRIVER_NOT_LOADED)
    watch = GpuWatch(settings(node), Journal(), sysfs_root=sysfs_of(node))

    with pytest.raises(DriverMissingError, match="Driver Not Loaded") as caught:
        await watch.start()

    assert "nvidia kernel module" in str(caught.value)
    assert watch.status.state is NvmlState.MISSING
    assert await watch.stop(PATIENCE_SECONDS)


async def test_without_fail_on_init_error_the_watch_waits_for_the_driver(
    node: SimulatedNode,
) -> None:
    """NVML fails twice: the watch says so once, tries again, and then all GPUs are there."""
    node.fault("nvmlInit", code=DRIVER_NOT_LOADED, times=2)

    async with watching(node, fail_on_init_error=False) as watched:
        assert watched.watch.inventory.value.gpus == ()
        assert watched.watch.status.state.value == "driver missing"
        inventory = await watched.until(lambda inventory: len(inventory.gpus) == 4)

        assert all(gpu.health.ok for gpu in inventory.gpus)
        assert watched.count("nvml.missing") == 1
        assert watched.watch.status.state.value == "answering"


async def test_a_driver_that_goes_away_takes_all_gpus_out_of_use_until_it_is_back(
    node: SimulatedNode,
) -> None:
    """Nothing may be given away that cannot be checked.
    Afterwards each GPU recovers by the ordinary way.
    """
    async with watching(node) as watched:
        node.fault("nvmlInit", code=DRIVER_NOT_LOADED, times=3)
        node.fault("nvmlDeviceGetCount", code=UNKNOWN, times=1)
        inventory = await watched.until(
            lambda inventory: not any(gpu.health.ok for gpu in inventory.gpus)
        )
        assert len(inventory.gpus) == 4

        await watched.until(
            lambda inventory: all(gpu.health.ok and gpu.present for gpu in inventory.gpus)
        )


async def test_a_probe_that_fails_otherwise_is_the_gpus_reason(node: SimulatedNode) -> None:
    """A card that cannot be asked for its temperature is there and not fit for work."""
    async with watching(node) as watched:
        node.fault("nvmlDeviceGetTemperature", gpu=2, code=UNKNOWN)
        gpu = await watched.unhealthy(node.uuids[2])

        assert gpu.present
        assert gpu.health.reason == "nvmlDeviceGetTemperature: Unknown Error (NVML code 999)"
        node.clear_faults()
        await watched.healthy(node.uuids[2])


async def test_reloaded_xid_lists_apply_to_the_next_event(node: SimulatedNode) -> None:
    """The same XID 31 counts once the operator has enabled it; junk in the list stops nothing."""
    async with watching(node) as watched:
        node.xid(0, 31)
        await watched.recorded("gpu.xid")
        watched.watch.apply(settings(node, enable_health_checks="31, nonsense"))
        node.xid(0, 31)
        gpu = await watched.unhealthy(node.uuids[0])

        assert gpu.health.reason.startswith("XID 31")


async def test_unreadable_sysfs_costs_the_numa_nodes_and_nothing_else(
    node: SimulatedNode, tmp_path: Path
) -> None:
    """The GPUs are offered without a NUMA node."""
    async with watching(node, sysfs_root=str(tmp_path / "nowhere")) as watched:
        assert [gpu.numa_node for gpu in watched.watch.inventory.value.gpus] == [None] * 4
        assert all(gpu.health.ok for gpu in watched.watch.inventory.value.gpus)


async def test_a_card_that_the_kernel_binds_is_looked_for_at_once(node: SimulatedNode) -> None:
    """NVML alone would not show it: sysfs says that the kernel module drives one card more,
    and the driver is opened anew.
    """
    node.unplug(3)
    async with watching(node) as watched:
        assert len(watched.watch.inventory.value.gpus) == 3
        node.plug(3)
        await watched.polls(2)
        assert len(watched.watch.inventory.value.gpus) == 3
        bound = node.directory / "sys" / "bus" / "pci" / "drivers" / "nvidia" / "0000:1f:00.0"
        await asyncio.to_thread(bound.mkdir, parents=True)

        await watched.until(lambda inventory: len(inventory.gpus) == 4)
