"""Events reach all that registered, each once, in order; waits keep their timeout."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pynvml
import pytest

from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from tests.simulated import nvml_on, simulated_node
from vgpu_agent.sim.layout import NONE
from vgpu_agent.sim.state import SimulatedNode

XID = pynvml.nvmlEventTypeXidCriticalError


def _event_set(types: int = XID, gpus: int = 4) -> pynvml.c_nvmlEventSet_t:
    events = pynvml.nvmlEventSetCreate()
    for index in range(gpus):
        pynvml.nvmlDeviceRegisterEvents(pynvml.nvmlDeviceGetHandleByIndex(index), types, events)
    return events


def _codes(events: pynvml.c_nvmlEventSet_t) -> list[int]:
    """Everything that is there now."""
    codes = []
    while True:
        try:
            codes.append(pynvml.nvmlEventSetWait_v2(events, 0).eventData)
        except pynvml.NVMLError_Timeout:
            return codes


def test_an_xid_comes_with_its_gpu(node: SimulatedNode) -> None:
    """To a client that only waits, without asking anything else first."""
    events = _event_set()
    node.xid(2, 79)

    event = pynvml.nvmlEventSetWait_v2(events, 1000)

    assert (event.eventType, event.eventData) == (XID, 79)
    assert pynvml.nvmlDeviceGetUUID(event.device) == node.uuids[2]
    assert (event.gpuInstanceId, event.computeInstanceId) == (NONE, NONE)


def test_an_xid_of_one_mig_instance(node: SimulatedNode) -> None:
    """The parent's handle, and the instance's ids."""
    events = _event_set()
    node.xid(0, 43, gpu_instance=7, compute_instance=0)

    event = pynvml.nvmlEventSetWait_v2(events, 1000)

    assert (event.gpuInstanceId, event.computeInstanceId) == (7, 0)


def test_two_sets_each_get_each_event_in_order(node: SimulatedNode) -> None:
    """No set takes an event away from another."""
    first, second = _event_set(), _event_set()
    for code in range(100):
        node.xid(code % 4, code)

    assert _codes(first) == list(range(100))
    assert _codes(second) == list(range(100))


def test_a_set_hears_only_what_it_registered_for(node: SimulatedNode) -> None:
    """By GPU and by type."""
    only_first = _event_set(gpus=1)
    only_ecc = _event_set(pynvml.nvmlEventTypeDoubleBitEccError)
    node.xid(0, 1)
    node.xid(1, 2)
    node.event(0, pynvml.nvmlEventTypeDoubleBitEccError, 3)

    assert _codes(only_first) == [1]
    assert _codes(only_ecc) == [3]


def test_a_set_does_not_hear_the_past(node: SimulatedNode) -> None:
    """Events before the set's creation are gone."""
    node.xid(0, 31)

    assert _codes(_event_set()) == []


def test_a_flood_drops_the_oldest(node: SimulatedNode) -> None:
    """The queue holds 256, as a driver's is not endless either."""
    events = _event_set()
    for code in range(300):
        node.xid(0, code)

    assert _codes(events) == list(range(44, 300))


def test_a_wait_keeps_its_timeout(node: SimulatedNode) -> None:
    """Not shorter, and not for ever."""
    events = _event_set()
    before = time.monotonic()

    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait_v2(events, 120)

    assert 0.12 <= time.monotonic() - before < PATIENCE_SECONDS


def test_an_event_ends_a_wait(node: SimulatedNode) -> None:
    """Long before its timeout."""
    events = _event_set()
    author = threading.Timer(0.05, node.xid, (1, 48))
    author.start()
    before = time.monotonic()

    event = pynvml.nvmlEventSetWait_v2(events, int(FOR_EVER_SECONDS * 1000))

    assert event.eventData == 48
    assert time.monotonic() - before < PATIENCE_SECONDS
    author.join()


def test_a_shutdown_ends_a_wait(node: SimulatedNode) -> None:
    """A watcher thread does not hang on a library that is gone."""
    events = _event_set()
    stopper = threading.Timer(0.05, pynvml.nvmlShutdown)
    stopper.start()

    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlEventSetWait_v2(events, 10_000)

    stopper.join()


def test_unsupported_types_cannot_be_registered(node: SimulatedNode) -> None:
    """The mask of supported ones says beforehand which."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    events = pynvml.nvmlEventSetCreate()

    assert pynvml.nvmlDeviceGetSupportedEventTypes(handle) & XID
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceRegisterEvents(handle, 1 << 40, events)


def test_a_freed_set_is_refused(node: SimulatedNode) -> None:
    """Instead of followed into freed memory; a pointer to nothing likewise."""
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlEventSetWait_v2(pynvml.c_nvmlEventSet_t(), 0)


def test_events_of_another_process_come_too(tmp_path: Path) -> None:
    """The command line is another process than the agent."""
    node = simulated_node(tmp_path, gpus=1)
    program = (
        "import sys, pathlib; from vgpu_agent.sim.state import SimulatedNode as N; "
        "N.open(pathlib.Path(sys.argv[1])).xid(0, 62)"
    )
    with nvml_on(node):
        events = _event_set(gpus=1)
        subprocess.run([sys.executable, "-c", program, str(node.directory)], check=True)

        assert _codes(events) == [62]
