"""Finding GPUs and reading their identity."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from tests.sim.conftest import NodeFactory
from tests.simulated import nvml_on, simulated_node
from vgpu_agent.sim.models import Model, models
from vgpu_agent.sim.preload import STATE_VARIABLE
from vgpu_agent.sim.state import SimulatedNode


def test_without_a_state_file_there_is_no_driver(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real library says so where no driver is loaded,
    so the agent's "no GPU" path is tested for real.
    """
    pynvml.nvmlShutdown()
    monkeypatch.delenv(STATE_VARIABLE)

    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()


def test_a_file_that_is_no_state_is_no_driver(
    node: SimulatedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library maps only what has its own magic and layout."""
    pynvml.nvmlShutdown()
    (tmp_path / "junk").write_bytes(os.urandom(1_000_000))
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "junk"))

    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()


def test_calls_before_init_and_after_shutdown_say_uninitialised(node: SimulatedNode) -> None:
    """Initialisation is counted: the last shutdown ends it."""
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 4
    pynvml.nvmlShutdown()

    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_another_node_after_a_full_shutdown(tmp_path: Path) -> None:
    """The library looks for its file at each first nvmlInit,
    so one process can see several nodes one after another.
    """
    first = simulated_node(tmp_path / "first", gpus=1)
    second = simulated_node(tmp_path / "second", gpus=3)

    counts = []
    for each in (first, second, first):
        with nvml_on(each):
            counts.append(pynvml.nvmlDeviceGetCount())

    assert counts == [1, 3, 1]


def test_versions(node: SimulatedNode) -> None:
    """Driver, NVML and CUDA versions belong together."""
    assert pynvml.nvmlSystemGetDriverVersion() == "580.95.05"
    assert pynvml.nvmlSystemGetNVMLVersion() == "13.580.95.05"
    assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13000


@pytest.mark.parametrize("model", models().values(), ids=lambda model: model.key)
def test_a_model_shows_what_its_table_says(nvml_node: NodeFactory, model: Model) -> None:
    """Name, capability, memory and codes come through the real binding unchanged."""
    nvml_node(model.key, 1)

    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    assert pynvml.nvmlDeviceGetName(handle) == model.name
    assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == model.compute_capability
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).total == model.memory_mib << 20
    assert pynvml.nvmlDeviceGetArchitecture(handle) == model.architecture
    assert pynvml.nvmlDeviceGetBrand(handle) == model.brand
    assert (
        pynvml.nvmlDeviceGetNumGpuCores(handle)
        == model.multiprocessors * model.cores_per_multiprocessor
    )
    assert pynvml.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Total == model.bar1_mib << 20
    assert pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle) == model.pcie_generation


def test_a_gpu_is_found_by_index_uuid_serial_and_pci_address(node: SimulatedNode) -> None:
    """All four ways lead to the same handle."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(2)
    uuid, serial = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetSerial(handle)
    pci = pynvml.nvmlDeviceGetPciInfo(handle)

    ways = [
        pynvml.nvmlDeviceGetHandleByUUID(uuid),
        pynvml.nvmlDeviceGetHandleBySerial(serial),
        pynvml.nvmlDeviceGetHandleByPciBusId(pci.busId),
        pynvml.nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy),
        pynvml.nvmlDeviceGetHandleByPciBusId("17:00.0"),
    ]

    assert [pynvml.nvmlDeviceGetIndex(way) for way in ways] == [2] * 5
    assert pynvml.nvmlDeviceGetMinorNumber(handle) == 2


def test_pci_addresses_are_written_as_nvml_writes_them(node: SimulatedNode) -> None:
    """Eight and four digits of domain, upper case."""
    pci = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(1))

    assert (pci.busId, pci.busIdLegacy) == ("00000000:0F:00.0", "0000:0F:00.0")
    assert (pci.domain, pci.bus, pci.device) == (0, 0x0F, 0)
    assert pci.pciDeviceId == 0x20B210DE


def test_given_uuids_are_the_gpus_uuids(nvml_node: NodeFactory) -> None:
    """Golden vectors name exact UUIDs (nvidia §17)."""
    uuids = ["GPU-aaaaaaaa-0000-4000-8000-000000000000", "GPU-bbbbbbbb-0000-4000-8000-000000000001"]
    nvml_node("A100-SXM4-40GB", 2, uuids=uuids)

    assert [
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(2)
    ] == uuids


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: pynvml.nvmlDeviceGetHandleByIndex(4), pynvml.NVMLError_InvalidArgument),
        (lambda: pynvml.nvmlDeviceGetHandleByUUID("GPU-none"), pynvml.NVMLError_NotFound),
        (lambda: pynvml.nvmlDeviceGetHandleBySerial("0"), pynvml.NVMLError_NotFound),
        (lambda: pynvml.nvmlDeviceGetHandleByPciBusId("0000:FE:00.0"), pynvml.NVMLError_NotFound),
        (lambda: pynvml.nvmlDeviceGetHandleByPciBusId("junk"), pynvml.NVMLError_InvalidArgument),
        (
            lambda: pynvml.nvmlDeviceGetName(pynvml.c_nvmlDevice_t()),
            pynvml.NVMLError_InvalidArgument,
        ),
    ],
)
def test_what_is_not_there(
    node: SimulatedNode, call: Callable[[], object], error: type[Exception]
) -> None:
    """Wrong arguments and absent GPUs are different errors."""
    with pytest.raises(error):
        call()


def test_the_process_name_is_its_command_line(node: SimulatedNode) -> None:
    """The name is as complete as this process may see the other."""
    assert "python" in pynvml.nvmlSystemGetProcessName(os.getpid())
