"""Faults: NVML calls that fail or are slow, as a test asks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pynvml
import pytest

from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.state import SimulatedNode

UNKNOWN = pynvml.NVML_ERROR_UNKNOWN


def _failures(call: Callable[[], object], times: int) -> list[bool]:
    results = []
    for _ in range(times):
        try:
            call()
            results.append(False)
        except pynvml.NVMLError:
            results.append(True)
    return results


def test_a_fault_is_used_up(node: SimulatedNode) -> None:
    """Two times, and then no more."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    node.fault("nvmlDeviceGetMemoryInfo", code=UNKNOWN, times=2)

    assert _failures(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle), 4) == [
        True,
        True,
        False,
        False,
    ]


def test_a_fault_for_ever_ends_when_it_is_cleared(node: SimulatedNode) -> None:
    """The row can be used again."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    node.fault("nvmlDeviceGetMemoryInfo", code=UNKNOWN)
    before = _failures(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle), 3)
    node.clear_faults()

    assert before == [True] * 3
    assert _failures(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle), 1) == [False]


def test_a_fault_of_one_gpu(node: SimulatedNode) -> None:
    """The others answer, look-ups included."""
    node.fault("nvmlDeviceGet*", gpu=1, code=UNKNOWN)

    assert _failures(lambda: pynvml.nvmlDeviceGetHandleByIndex(0), 1) == [False]
    assert _failures(lambda: pynvml.nvmlDeviceGetHandleByIndex(1), 1) == [True]
    assert _failures(lambda: pynvml.nvmlDeviceGetHandleByUUID(node.uuids[1]), 1) == [True]
    assert pynvml.nvmlDeviceGetCount() == 4


def test_a_look_up_uses_a_fault_up_once(node: SimulatedNode) -> None:
    """Although it is about no GPU at first and about one later."""
    node.fault("nvmlDeviceGetHandleByIndex", code=UNKNOWN, times=1)

    assert _failures(lambda: pynvml.nvmlDeviceGetHandleByIndex(0), 2) == [True, False]


def test_a_name_means_all_its_versions_and_nothing_else(node: SimulatedNode) -> None:
    """``nvmlDeviceGetMemoryInfo`` is also ``…_v2``,
    and is not ``nvmlDeviceGetMemoryErrorCounter``.
    """
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    node.fault("nvmlDeviceGetMemoryInfo", code=UNKNOWN)
    node.fault("nvmlDeviceGetName*", code=pynvml.NVML_ERROR_GPU_IS_LOST)

    assert _failures(
        lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2), 1
    ) == [True]
    assert _failures(lambda: pynvml.nvmlDeviceGetMemoryErrorCounter(handle, 0, 0, 2), 1) == [False]
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetName(handle)


def test_initialisation_can_fail(node: SimulatedNode) -> None:
    """Twice, then it works: what an agent sees that starts before its driver."""
    pynvml.nvmlShutdown()
    node.fault("nvmlInit", code=pynvml.NVML_ERROR_DRIVER_NOT_LOADED, times=2)

    assert _failures(pynvml.nvmlInit, 3) == [True, True, False]


def test_an_event_wait_can_fail(node: SimulatedNode) -> None:
    """With any code, and without waiting."""
    events = pynvml.nvmlEventSetCreate()
    node.fault("nvmlEventSetWait", code=UNKNOWN, times=1)
    before = time.monotonic()

    with pytest.raises(pynvml.NVMLError_Unknown):
        pynvml.nvmlEventSetWait_v2(events, int(FOR_EVER_SECONDS * 1000))

    assert time.monotonic() - before < PATIENCE_SECONDS


def test_a_slow_call_succeeds_in_the_end(node: SimulatedNode) -> None:
    """A delay alone changes no answer."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    node.fault("nvmlDeviceGetPowerUsage", delay_ms=100, times=1)
    before = time.monotonic()

    power = pynvml.nvmlDeviceGetPowerUsage(handle)

    assert power == 60_000
    assert time.monotonic() - before >= 0.1


def test_a_slow_call_goes_on_when_the_fault_is_cleared(node: SimulatedNode) -> None:
    """A hang of any length ends when a test, or a user, says so."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    node.fault("nvmlDeviceGetPowerUsage", delay_ms=int(FOR_EVER_SECONDS * 1000), times=1)
    asker = threading.Thread(target=pynvml.nvmlDeviceGetPowerUsage, args=(handle,), daemon=True)
    asker.start()
    row = node.state.faults[0]
    while row.times_left:  # the call has not met it yet
        time.sleep(0.01)
    assert asker.is_alive()
    node.clear_faults()
    asker.join(PATIENCE_SECONDS)
    assert not asker.is_alive()


def test_a_slow_call_does_not_hold_the_interpreter(node: SimulatedNode) -> None:
    """Other threads run meanwhile: the binding releases the interpreter's lock around each call."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    node.fault("nvmlDeviceGetPowerUsage", delay_ms=30_000, times=1)
    inside = threading.Event()

    def ask() -> None:
        inside.set()
        pynvml.nvmlDeviceGetPowerUsage(handle)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    inside.wait()
    before = time.monotonic()
    time.sleep(0.01)
    elapsed = time.monotonic() - before

    assert asker.is_alive()
    assert elapsed < PATIENCE_SECONDS
    node.clear_faults()
    asker.join()


def test_a_slow_and_a_failing_row_add_up(node: SimulatedNode) -> None:
    """Slow rows come first, then the code."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    node.fault("nvmlDeviceGetPowerUsage", delay_ms=50)
    node.fault("nvmlDeviceGetPower*", code=UNKNOWN)
    before = time.monotonic()

    assert _failures(lambda: pynvml.nvmlDeviceGetPowerUsage(handle), 1) == [True]
    assert time.monotonic() - before >= 0.05


def test_a_fault_is_counted_among_all_processes(node: SimulatedNode) -> None:
    """Five times are five times, whichever calls meet them."""
    node.fault("nvmlDeviceGetCount", code=UNKNOWN, times=5)
    program = (
        "import sys, pathlib; from vgpu_agent.sim.preload import preload; "
        "preload(pathlib.Path(sys.argv[1]))\nimport pynvml; pynvml.nvmlInit(); failed = 0\n"
        "for _ in range(3):\n    try: pynvml.nvmlDeviceGetCount()\n"
        "    except pynvml.NVMLError: failed += 1\nprint(failed)"
    )

    elsewhere = subprocess.run(
        [sys.executable, "-c", program, str(node.directory)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert elsewhere.strip() == "3"
    assert _failures(pynvml.nvmlDeviceGetCount, 4) == [True, True, False, False]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            {"function": "nvmlDeviceGetMemroyInfo", "code": 1},
            "NVML has no function 'nvmlDeviceGetMemroyInfo'",
        ),
        ({"function": "cuInit", "code": 1}, "NVML has no function 'cuInit'"),
        ({"function": "nvmlNo*", "code": 1}, "NVML has no function"),
        ({"function": "nvmlInit"}, "needs a code or a delay"),
        ({"function": "nvmlInit", "code": 1, "times": 0}, "times -1 or at least 1"),
        ({"function": "nvmlInit", "code": 1, "gpu": 7}, "has no GPU 7; it has 0 to 3"),
    ],
    ids=str,
)
def test_a_fault_that_could_never_happen_is_refused(
    node: SimulatedNode, arguments: dict[str, object], complaint: str
) -> None:
    """A misspelt fault would look like an agent that copes with it."""
    with pytest.raises(SimulationError, match=complaint):
        node.fault(**arguments)  # type: ignore[arg-type]  # parametrised


def test_rows_run_out_with_one_clear_error(node: SimulatedNode) -> None:
    """32 faults at once. A used-up one makes room."""
    for _ in range(32):
        node.fault("nvmlDeviceGetName", code=UNKNOWN, times=1)

    with pytest.raises(SimulationError, match="all 32 fault rows are in use; clear them first"):
        node.fault("nvmlDeviceGetName", code=UNKNOWN)

    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert _failures(lambda: pynvml.nvmlDeviceGetName(handle), 1) == [True]
    node.fault("nvmlDeviceGetName", code=UNKNOWN)
