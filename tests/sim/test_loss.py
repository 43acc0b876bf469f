"""GPUs that fall off the bus, are unplugged, and come back."""

from __future__ import annotations

from collections.abc import Callable

import pynvml
import pytest

from vgpu_agent.sim.state import SimulatedNode


def _uuids() -> list[str]:
    return [
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
        for index in range(pynvml.nvmlDeviceGetCount())
    ]


def test_a_lost_gpu_is_counted_and_cannot_be_looked_up(node: SimulatedNode) -> None:
    """By no way; the others are where they were."""
    node.lose(1)

    assert pynvml.nvmlDeviceGetCount() == 4
    look_up: Callable[[], object]
    for look_up in (
        lambda: pynvml.nvmlDeviceGetHandleByIndex(1),
        lambda: pynvml.nvmlDeviceGetHandleByUUID(node.uuids[1]),
        lambda: pynvml.nvmlDeviceGetHandleByPciBusId("0000:0F:00.0"),
    ):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            look_up()
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(2)) == node.uuids[2]


def test_a_lost_gpu_still_tells_old_handles_who_it_was(node: SimulatedNode) -> None:
    """An XID 79 can be attributed to its card; anything else is lost."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    node.lose(1)

    assert pynvml.nvmlDeviceGetUUID(handle) == node.uuids[1]
    assert pynvml.nvmlDeviceGetMinorNumber(handle) == 1
    assert pynvml.nvmlDeviceGetPciInfo(handle).bus == 0x0F
    for query in (
        pynvml.nvmlDeviceGetMemoryInfo,
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
        pynvml.nvmlDeviceGetMigMode,
    ):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            query(handle)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)


def test_an_entirely_lost_gpu_answers_nothing(node: SimulatedNode) -> None:
    """The stricter of the two ways in which drivers may behave."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    node.lose(1, entirely=True)

    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetUUID(handle)


def test_a_restored_gpu_answers_again(node: SimulatedNode) -> None:
    """The old handle is good again, without a new initialisation."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    node.lose(1)
    node.restore(1)

    assert pynvml.nvmlDeviceGetMemoryInfo(handle).total > 0


def test_an_unplugged_gpu_is_lost_to_those_who_held_it(node: SimulatedNode) -> None:
    """It is counted until the next initialisation."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    node.unplug(1)

    assert pynvml.nvmlDeviceGetCount() == 4
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetUUID(handle)


def test_after_initialisation_an_unplugged_gpu_is_gone(node: SimulatedNode) -> None:
    """Indices move up; minor numbers, which name the device nodes, do not."""
    node.unplug(1)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()

    minors = [
        pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetHandleByIndex(index))
        for index in range(3)
    ]

    assert pynvml.nvmlDeviceGetCount() == 3
    assert minors == [0, 2, 3]
    assert _uuids() == [node.uuids[0], node.uuids[2], node.uuids[3]]
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID(node.uuids[1])


def test_a_plugged_gpu_is_back_after_initialisation(node: SimulatedNode) -> None:
    """Not before: a running client has its list."""
    node.unplug(0)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    node.plug(0)
    before = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()

    assert (before, pynvml.nvmlDeviceGetCount()) == (3, 4)


def test_a_lost_gpu_can_still_raise_an_event(node: SimulatedNode) -> None:
    """A real one does so with its last XID."""
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(
        pynvml.nvmlDeviceGetHandleByIndex(1), pynvml.nvmlEventTypeXidCriticalError, events
    )
    node.lose(1)
    node.xid(1, 79)

    event = pynvml.nvmlEventSetWait_v2(events, 1000)

    assert pynvml.nvmlDeviceGetUUID(event.device) == node.uuids[1]
