"""Memory, processes and utilisation of simulated GPUs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from tests.simulated import simulated_node
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.processes import ProcessUse
from vgpu_agent.sim.state import SimulatedNode

MIB = 1 << 20


@pytest.fixture
def handle(node: SimulatedNode) -> pynvml.c_nvmlDevice_t:
    """The first GPU."""
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def test_version_one_counts_reserved_memory_as_used(handle: pynvml.c_nvmlDevice_t) -> None:
    """An idle GPU shows hundreds of MiB in use there, and none in version 2."""
    old = pynvml.nvmlDeviceGetMemoryInfo(handle)
    new = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)

    assert old.used == new.reserved == 619 * MIB
    assert new.used == 0
    assert old.free == new.free == old.total - old.used


def test_a_wrong_struct_version_is_refused(handle: pynvml.c_nvmlDevice_t) -> None:
    """The driver refuses it too."""
    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        pynvml.nvmlDeviceGetMemoryInfo(handle, version=0x01000028)


def test_memory_of_processes_adds_up(node: SimulatedNode, handle: pynvml.c_nvmlDevice_t) -> None:
    """It is never beyond what the card has."""
    node.add_process(0, 100, ProcessUse(memory_mib=1000))
    node.add_process(0, 101, ProcessUse(memory_mib=500, type="graphics"))
    two = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    node.add_process(0, 102, ProcessUse(memory_mib=1_000_000))
    full = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)

    assert two.used == 1500 * MIB
    assert (full.used, full.free) == (full.total - full.reserved, 0)


def test_processes_are_listed_by_kind(node: SimulatedNode, handle: pynvml.c_nvmlDevice_t) -> None:
    """Compute and graphics have a list each. A removed one is in neither."""
    slot = node.add_process(0, 100, ProcessUse(memory_mib=1))
    node.add_process(0, 101, ProcessUse(memory_mib=2))
    node.add_process(0, 102, ProcessUse(memory_mib=3, type="graphics"))
    node.add_process(0, 103, ProcessUse(memory_mib=4, type="mps"))
    node.remove_process(0, slot)

    lists = [
        [(row.pid, row.usedGpuMemory // MIB) for row in call(handle)]
        for call in (
            pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
            pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3,
        )
    ]

    assert lists == [[(101, 2)], [(102, 3)], [(103, 4)]]


def test_the_unversioned_list_has_narrow_rows(
    node: SimulatedNode, handle: pynvml.c_nvmlDevice_t
) -> None:
    """16 bytes each; limiters in containers use this call, and wider rows garble what they read."""
    node.add_process(0, 100, ProcessUse(memory_mib=1))
    node.add_process(0, 101, ProcessUse(memory_mib=2))

    class Row(ctypes.Structure):
        _fields_ = (("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong))

    rows, count = (Row * 8)(), ctypes.c_uint(8)
    result = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses")(
        handle, ctypes.byref(count), rows
    )

    assert result == 0
    assert sorted((row.pid, row.memory // MIB) for row in rows[: count.value]) == [
        (100, 1),
        (101, 2),
    ]


def test_the_detail_list(node: SimulatedNode, handle: pynvml.c_nvmlDevice_t) -> None:
    """The newest form of the same."""
    node.add_process(0, 100, ProcessUse(memory_mib=7))

    rows = pynvml.nvmlDeviceGetRunningProcessDetailList(handle, pynvml.nvmlProcessDetailList_v1, 0)

    assert [(row.pid, row.usedGpuMemory) for row in rows] == [(100, 7 * MIB)]


def test_utilisation_follows_the_processes_unless_it_is_fixed(
    node: SimulatedNode, handle: pynvml.c_nvmlDevice_t
) -> None:
    """Two processes add up, capped at 100. A fixed value wins until it is taken back."""
    node.add_process(0, 100, ProcessUse(memory_mib=1, sm_percent=30, memory_percent=10))
    node.add_process(0, 101, ProcessUse(memory_mib=1, sm_percent=90, memory_percent=20))
    measured = pynvml.nvmlDeviceGetUtilizationRates(handle)
    node.utilisation(0, 42)
    fixed = pynvml.nvmlDeviceGetUtilizationRates(handle)
    node.utilisation(0, None)
    again = pynvml.nvmlDeviceGetUtilizationRates(handle)

    assert (measured.gpu, measured.memory) == (100, 30)
    assert (fixed.gpu, fixed.memory) == (42, 21)
    assert again.gpu == 100


def test_process_utilisation_of_a_busy_and_an_idle_process(
    node: SimulatedNode, handle: pynvml.c_nvmlDevice_t
) -> None:
    """An idle one has no sample at all, in both forms of the call."""
    node.add_process(0, 100, ProcessUse(memory_mib=1, sm_percent=30, memory_percent=10))
    node.add_process(0, 101, ProcessUse(memory_mib=1))

    old = pynvml.nvmlDeviceGetProcessUtilization(handle, 0)
    new = pynvml.nvmlDeviceGetProcessesUtilizationInfo(handle, 0)

    assert [(row.pid, row.smUtil, row.memUtil) for row in old] == [(100, 30, 10)]
    assert [(row.pid, row.smUtil, row.memUtil) for row in new] == [(100, 30, 10)]


def test_process_utilisation_of_an_idle_gpu(handle: pynvml.c_nvmlDevice_t) -> None:
    """Not an empty list but "not found"."""
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetProcessUtilization(handle, 0)


def test_encoder_and_decoder(handle: pynvml.c_nvmlDevice_t) -> None:
    """Percent and sampling period in microseconds."""
    assert pynvml.nvmlDeviceGetEncoderUtilization(handle) == [0, 167000]
    assert pynvml.nvmlDeviceGetDecoderUtilization(handle) == [0, 167000]


def test_slots_run_out_with_one_clear_error(node: SimulatedNode) -> None:
    """64 processes a GPU. The next is refused and nothing is lost."""
    for pid in range(64):
        node.add_process(0, 1000 + pid, ProcessUse(memory_mib=1))

    with pytest.raises(SimulationError, match="all 64 process slots of GPU 0 are taken"):
        node.add_process(0, 9999, ProcessUse(memory_mib=1))

    assert (
        len(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(pynvml.nvmlDeviceGetHandleByIndex(0)))
        == 64
    )


def test_a_killed_process_does_not_keep_its_slot(node: SimulatedNode) -> None:
    """A fixed process takes the place of a live one that is dead."""
    for pid in range(63):
        node.add_process(0, 1000 + pid, ProcessUse(memory_mib=1))
    with node.start_process(0, ProcessUse(memory_mib=1)) as process:
        process.kill()
        process.wait()

    slot = node.add_process(0, 9999, ProcessUse(memory_mib=1))

    assert slot == 0


@pytest.mark.parametrize(
    "values",
    [{"memory_mib": -1}, {"memory_mib": 1, "sm_percent": 101}, {"memory_mib": 1, "type": "vulkan"}],
    ids=str,
)
def test_impossible_use_is_refused(values: dict[str, object]) -> None:
    """Before it reaches the state file."""
    with pytest.raises(SimulationError):
        ProcessUse(**values)  # type: ignore[arg-type]  # wrong on purpose


def test_the_trace_shows_what_a_client_asks(tmp_path: Path) -> None:
    """One line a call shows what a foreign binary wants from NVML."""
    node = simulated_node(tmp_path, gpus=1)
    trace = tmp_path / "trace"
    program = (
        "import sys, pathlib; from vgpu_agent.sim.preload import preload; "
        "preload(pathlib.Path(sys.argv[1]))\nimport pynvml; pynvml.nvmlInit(); "
        "pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(node.directory)],
        check=True,
        env={**os.environ, "VGPU_AGENT_SIM_TRACE": str(trace)},
    )

    calls = [line.split(" ", 1)[1] for line in trace.read_text().splitlines()]

    assert calls == [
        "nvmlInit_v2 gpu=-1 -> 0",
        "nvmlDeviceGetHandleByIndex_v2 gpu=0 -> 0",
        "nvmlDeviceGetName gpu=0 -> 0",
    ]
