"""Answers of any NVML, simulated or real: they keep the simulator true to the driver.

Runs against the simulator. On a machine with a GPU, run this file alone with TEST_HARDWARE=1: the
same assertions then meet the installed driver, and whatever fails is corrected in the simulator.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.patience import PATIENCE_SECONDS
from tests.simulated import nvml_on, simulated_node

HARDWARE = os.environ.get("TEST_HARDWARE") == "1"
BINDINGS = ["hardware"] if HARDWARE else ["A100-SXM4-80GB", "T4", "H200-141GB"]


@pytest.fixture(params=BINDINGS)
def handle(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[pynvml.c_nvmlDevice_t]:
    """The first GPU of a simulated node, or of this machine."""
    if request.param != "hardware":
        with nvml_on(simulated_node(tmp_path, request.param)):
            yield pynvml.nvmlDeviceGetHandleByIndex(0)
        return
    pynvml.nvmlInit()
    assert not hasattr(pynvml.nvmlLib, "vgpusim_layout"), (
        "the simulator is loaded in this process; run this file alone"
    )
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()


def _or_unsupported(call: Callable[..., Any], *arguments: object) -> object:
    """The answer, or None where the card does not know the question."""
    try:
        return call(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None


def test_identity_is_consistent(handle: pynvml.c_nvmlDevice_t) -> None:
    """UUID, bus address and index lead back to the same card; strings have their usual form."""
    gpu_uuid = pynvml.nvmlDeviceGetUUID(handle)
    pci = pynvml.nvmlDeviceGetPciInfo(handle)

    assert gpu_uuid == f"GPU-{uuid.UUID(gpu_uuid[4:])}"
    assert re.fullmatch(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.0", pci.busId)
    assert re.fullmatch(r"[0-9A-F]{4}:[0-9A-F]{2}:[0-9A-F]{2}\.0", pci.busIdLegacy)
    assert pci.pciDeviceId & 0xFFFF == 0x10DE
    for same in (
        pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid),
        pynvml.nvmlDeviceGetHandleByPciBusId(pci.busId),
    ):
        assert pynvml.nvmlDeviceGetIndex(same) == 0


def test_the_versions_have_their_form(handle: pynvml.c_nvmlDevice_t) -> None:
    """NVML's version is CUDA's major and the driver's version."""
    driver = pynvml.nvmlSystemGetDriverVersion()
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()

    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", driver)
    assert pynvml.nvmlSystemGetNVMLVersion() == f"{cuda // 1000}.{driver}"


def test_both_versions_of_memory_agree(handle: pynvml.c_nvmlDevice_t) -> None:
    """Total is the same, and version 1 counts what is reserved as used."""
    old = pynvml.nvmlDeviceGetMemoryInfo(handle)
    new = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)

    assert old.total == new.total == old.free + old.used
    assert new.total == new.free + new.used + new.reserved
    assert new.reserved > 0
    # something may run between the two calls
    assert abs(old.used - new.used - new.reserved) <= 64 << 20


def test_struct_versions_are_checked(handle: pynvml.c_nvmlDevice_t) -> None:
    """A version that does not exist is refused."""
    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        pynvml.nvmlDeviceGetMemoryInfo(handle, version=0x7F000028)


def test_an_index_beyond_the_count_is_an_argument_error(handle: pynvml.c_nvmlDevice_t) -> None:
    """Not "not found"."""
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(pynvml.nvmlDeviceGetCount())


def test_a_uuid_that_is_not_there_is_not_found(handle: pynvml.c_nvmlDevice_t) -> None:
    """It is not an argument error."""
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")


def test_waiting_for_events_times_out(handle: pynvml.c_nvmlDevice_t) -> None:
    """After the time asked for, with "timeout"."""
    events = pynvml.nvmlEventSetCreate()
    supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
    assert supported & pynvml.nvmlEventTypeXidCriticalError
    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    before = time.monotonic()

    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait_v2(events, 100)

    assert 0.09 <= time.monotonic() - before < PATIENCE_SECONDS
    pynvml.nvmlEventSetFree(events)


def test_rows_are_remapped_or_pages_retired(handle: pynvml.c_nvmlDevice_t) -> None:
    """A card with ECC knows one of the two, never both."""
    remapped = _or_unsupported(pynvml.nvmlDeviceGetRemappedRows, handle)
    retired = _or_unsupported(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)

    assert (remapped is None) != (retired is None)


def test_an_unknown_field_fails_alone(handle: pynvml.c_nvmlDevice_t) -> None:
    """The call succeeds; the good field beside it has its value."""
    unknown, energy = pynvml.nvmlDeviceGetFieldValues(
        handle, [9999, pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION]
    )

    assert unknown.nvmlReturn != pynvml.NVML_SUCCESS
    assert energy.nvmlReturn in {pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_SUPPORTED}


def test_the_recovery_action_is_known_or_unsupported(handle: pynvml.c_nvmlDevice_t) -> None:
    """A healthy card asks for nothing. An old driver does not know the field."""
    value = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]

    assert value.nvmlReturn in {
        pynvml.NVML_SUCCESS,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
    }
    assert (
        value.nvmlReturn != pynvml.NVML_SUCCESS
        or value.value.uiVal == pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    )


def test_mig_mode_and_count_agree(handle: pynvml.c_nvmlDevice_t) -> None:
    """A card that knows the mode can be cut into up to seven; one that does not, into none."""
    mode = _or_unsupported(pynvml.nvmlDeviceGetMigMode, handle)

    assert (mode is None) == (pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) == 0)


def test_a_full_gpu_is_no_mig_device(handle: pynvml.c_nvmlDevice_t) -> None:
    """It has no instance ids either."""
    assert not pynvml.nvmlDeviceIsMigDeviceHandle(handle)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetGpuInstanceId(handle)


def test_power_and_temperature_are_plausible(handle: pynvml.c_nvmlDevice_t) -> None:
    """Within the card's own limits."""
    limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
    low, high = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)

    assert low <= limit <= high
    assert 0 < pynvml.nvmlDeviceGetPowerUsage(handle) < 2 * limit
    assert 0 < pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) < 110


def test_the_distance_to_oneself(handle: pynvml.c_nvmlDevice_t) -> None:
    """Zero, or refused: drivers differ."""
    distance = None
    with contextlib.suppress(pynvml.NVMLError_InvalidArgument):
        distance = pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, handle)

    assert distance in {None, pynvml.NVML_TOPOLOGY_INTERNAL}
