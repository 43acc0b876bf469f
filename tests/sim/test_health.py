"""ECC, row remapping, retired pages, recovery action, temperature, power, clocks."""

from __future__ import annotations

import pynvml
import pytest

from tests.sim.conftest import NodeFactory
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.state import RECOVERY_ACTIONS, SimulatedNode


@pytest.fixture
def handle(node: SimulatedNode) -> pynvml.c_nvmlDevice_t:
    """The first GPU."""
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def _field(handle: pynvml.c_nvmlDevice_t, field: int) -> tuple[int, int]:
    value = pynvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    return value.nvmlReturn, value.value.uiVal


def test_ecc_counts(node: SimulatedNode, handle: pynvml.c_nvmlDevice_t) -> None:
    """Volatile ones are set, aggregate ones grow."""
    node.ecc_errors(0, corrected=3, uncorrected=1)
    node.ecc_errors(0, corrected=2)

    counts = [
        pynvml.nvmlDeviceGetTotalEccErrors(handle, error, counter)
        for error in (
            pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        )
        for counter in (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC)
    ]

    assert pynvml.nvmlDeviceGetEccMode(handle) == [1, 1]
    assert counts == [2, 5, 0, 1]


def test_row_remapping_of_ampere(node: SimulatedNode, handle: pynvml.c_nvmlDevice_t) -> None:
    """Counts, pending, failed; retired pages are "not supported" there."""
    node.remap(0, corrected=1, uncorrected=2, pending=True)

    assert pynvml.nvmlDeviceGetRemappedRows(handle) == (1, 2, 1, 0)
    assert pynvml.nvmlDeviceGetRowRemapperHistogram(handle).max == 640
    assert _field(handle, pynvml.NVML_FI_DEV_REMAPPED_PENDING) == (0, 1)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)


def test_retired_pages_of_volta(nvml_node: NodeFactory) -> None:
    """Before Ampere pages were retired, and rows never remapped."""
    node = nvml_node("V100-SXM2-32GB", 1)
    gpu = node.state.gpus[0]
    gpu.retired_address[1][0], gpu.retired_count[1], gpu.retired_pending = 0xABC, 1, 1
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    assert pynvml.nvmlDeviceGetRetiredPages_v2(handle, 1) == [{"address": 0xABC, "timestamp": 0}]
    assert pynvml.nvmlDeviceGetRetiredPages(handle, 0) == []
    assert pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle) == 1
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetRemappedRows(handle)


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("none", pynvml.NVML_GPU_RECOVERY_ACTION_NONE),
        ("reset", pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET),
        ("reboot", pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT),
        ("drain-p2p", pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P),
        ("drain-and-reset", pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET),
    ],
)
def test_the_recovery_action_is_a_field_value(
    node: SimulatedNode, handle: pynvml.c_nvmlDevice_t, action: str, code: int
) -> None:
    """The field says what the driver asks for before the card can be used again."""
    node.recovery_action(0, action)

    assert _field(handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) == (0, code)


def test_a_driver_that_does_not_know_the_recovery_action(
    node: SimulatedNode, handle: pynvml.c_nvmlDevice_t
) -> None:
    """The call succeeds, the field does not."""
    node.recovery_action(0, "unsupported")

    assert (
        _field(handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)[0]
        == pynvml.NVML_ERROR_NOT_SUPPORTED
    )
    assert _field(handle, 9999)[0] == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_an_unknown_recovery_action_is_refused(node: SimulatedNode) -> None:
    """With those there are."""
    with pytest.raises(
        SimulationError,
        match=f"unknown recovery action 'pray'; there are {', '.join(RECOVERY_ACTIONS)}",
    ):
        node.recovery_action(0, "pray")


def test_temperature_and_its_limits(node: SimulatedNode, handle: pynvml.c_nvmlDevice_t) -> None:
    """Both forms of the call, and the thresholds that the model has."""
    node.temperature(0, 71)

    assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 71
    assert pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU) == 71
    limits = [pynvml.nvmlDeviceGetTemperatureThreshold(handle, threshold) for threshold in range(4)]
    assert limits == [92, 89, 95, 85]
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetTemperatureThreshold(
            handle, pynvml.NVML_TEMPERATURE_THRESHOLD_ACOUSTIC_CURR
        )


def test_power_and_clocks_follow_the_utilisation(
    node: SimulatedNode, handle: pynvml.c_nvmlDevice_t
) -> None:
    """Idle draws little at low clocks, full load draws the limit at high ones."""
    idle = (
        pynvml.nvmlDeviceGetPowerUsage(handle),
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    )
    node.utilisation(0, 100)
    busy = (
        pynvml.nvmlDeviceGetPowerUsage(handle),
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    )

    assert (idle, busy) == ((60_000, 210), (400_000, 1410))
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) == 400_000
    assert pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle) == [100_000, 400_000]
    assert pynvml.nvmlDeviceGetPerformanceState(handle) == 0


def test_why_clocks_are_low(node: SimulatedNode, handle: pynvml.c_nvmlDevice_t) -> None:
    """Idle, nothing, too warm."""
    reasons = [pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)]
    node.utilisation(0, 50)
    reasons.append(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    node.temperature(0, 90)
    reasons.append(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))

    assert reasons == [
        pynvml.nvmlClocksEventReasonGpuIdle,
        pynvml.nvmlClocksEventReasonNone,
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    ]
