"""Nodes recognized as Tegra processors by the files of a small tree,
and the questions put to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests import constants
from tests.gpu.watched import SOON_HUNG, sysfs_of
from tests.gpu.watched import settings as quick_settings
from tests.patience import FOR_EVER_SECONDS
from vgpu_agent.config.settings import Gpu as GpuSettings
from vgpu_agent.errors import DriverMissingError, NvmlHungError
from vgpu_agent.gpu.discovery import discover, names_by_nvml
from vgpu_agent.gpu.source import IntegratedGpu, source
from vgpu_agent.gpu.watch import GpuWatch
from vgpu_agent.journal import Journal
from vgpu_agent.model import INTEGRATED
from vgpu_agent.sim.state import SimulatedNode
from vgpu_agent.status import NvmlState

RELEASE = "etc/nv_tegra_release"
SOC = "sys/devices/soc0/family"
FOR_EVER_MS = int(FOR_EVER_SECONDS * 1000)

Names = Callable[[GpuSettings], Awaitable[tuple[str, ...] | None]]


def tree(root: Path, **files: str) -> GpuSettings:
    """A node with these files (``release``, ``soc``, ``dxg``),
    and where the agent looks for them.
    """
    for key, path in {"release": RELEASE, "soc": SOC, "dxg": "dev/dxg"}.items():
        if key in files:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(files[key])
    return GpuSettings(driver_root=str(root))


def lists(*names: str) -> Names:
    """An NVML with GPUs of these names."""

    async def answer(_: GpuSettings) -> tuple[str, ...] | None:
        return names

    return answer


async def no_library(_: GpuSettings) -> tuple[str, ...] | None:
    """No NVML at all."""
    return None


async def never_asked(_: GpuSettings) -> tuple[str, ...] | None:
    """An NVML that must be left alone."""
    raise AssertionError("NVML was asked")


@pytest.mark.parametrize(
    ("files", "names", "integrated"),
    [
        ({"release": "# R35"}, no_library, True),
        ({"soc": "Tegra\n"}, no_library, True),
        ({"soc": "TEGRA194\n"}, no_library, True),
        ({"release": "# R36"}, lists("Orin (nvgpu)"), True),
        ({"release": "# R36"}, lists("Orin (nvgpu)", "NVIDIA A2"), False),
        ({"soc": "Tegra\n"}, lists("NVIDIA A2"), False),
        ({"soc": "Tegra\n"}, lists(), False),
        ({"release": "", "dxg": ""}, never_asked, False),
        ({"soc": "i.MX8\n"}, never_asked, False),
        ({"soc": ""}, never_asked, False),
        ({}, never_asked, False),
    ],
)
async def test_auto_goes_by_the_files_of_the_node_and_then_by_nvml(
    tmp_path: Path, files: dict[str, str], names: Names, integrated: bool
) -> None:
    """nvidia §9: WSL through NVML. Tegra files without NVML, or integrated GPUs only, are Tegra.
    The rest is NVML's.
    """
    settings = await asyncio.to_thread(lambda: tree(tmp_path, **files))
    found = await discover(settings, sysfs_root=f"{tmp_path}/sys", simulated=False, names=names)
    assert (found.integrated, found.doubt) == (integrated, "")


async def test_a_directory_is_no_sign(tmp_path: Path) -> None:
    """nvidia §9: files are meant. What a failed mount leaves behind is a directory."""
    await asyncio.to_thread((tmp_path / RELEASE).mkdir, parents=True)
    await asyncio.to_thread((tmp_path / SOC).mkdir, parents=True)
    assert not (
        await discover(
            tree(tmp_path), sysfs_root=f"{tmp_path}/sys", simulated=False, names=never_asked
        )
    ).integrated


async def test_a_root_that_cannot_be_looked_into_is_no_sign(tmp_path: Path) -> None:
    """It is the first thing that is looked at: an agent on an ordinary node must not end over it. A
    name that is too long represents it.
    """
    odd = GpuSettings(driver_root=str(tmp_path / ("x" * 300)))
    assert not (
        await discover(odd, sysfs_root=str(tmp_path), simulated=False, names=never_asked)
    ).integrated


@pytest.mark.parametrize(
    "error", [DriverMissingError("NVML code 9"), NvmlHungError("the NVIDIA driver hangs")]
)
async def test_a_driver_that_does_not_answer_is_waited_for_and_named_with_the_way_out(
    tmp_path: Path, error: Exception
) -> None:
    """nvidia §9: there is NVML, so it is NVML's. A setting overrides this."""

    async def fails(_: GpuSettings) -> tuple[str, ...] | None:
        raise error

    found = await discover(
        tree(tmp_path, release="# R36"), sysfs_root=f"{tmp_path}/sys", simulated=False, names=fails
    )
    assert not found.integrated
    assert found.doubt == (
        f"there is {tmp_path}/{RELEASE}, but its NVML does not list GPUs: {error}; "
        "set gpu.discovery: tegra to offer the GPU of the processor all the same"
    )


@pytest.mark.parametrize(
    ("changes", "simulated"),
    [({"discovery": "nvml"}, False), ({"discovery": "tegra"}, True), ({}, True)],
)
async def test_nvml_that_was_asked_for_and_simulated_gpus_are_not_looked_into(
    tmp_path: Path, changes: dict[str, Any], simulated: bool
) -> None:
    """nvidia §1: ``nvml`` is what it says; simulated GPUs have an NVML,
    whatever the node of the simulation is.
    """
    tree(tmp_path, release="# R36")
    settings = GpuSettings(driver_root=str(tmp_path), **changes)
    assert not (
        await discover(
            settings, sysfs_root=f"{tmp_path}/sys", simulated=simulated, names=never_asked
        )
    ).integrated


async def test_tegra_that_was_asked_for_is_offered_and_doubted_where_nothing_shows_it(
    tmp_path: Path,
) -> None:
    """nvidia §1: ``tegra`` needs no files, as upstream;
    but a node without them is probably none, and the log should say so.
    """
    settings = GpuSettings(discovery="tegra", driver_root=str(tmp_path))
    doubtful = await discover(
        settings, sysfs_root=f"{tmp_path}/sys", simulated=False, names=never_asked
    )
    tree(tmp_path, soc="Tegra\n")
    certain = await discover(
        settings, sysfs_root=f"{tmp_path}/sys", simulated=False, names=never_asked
    )

    assert (doubtful.integrated, certain.integrated, certain.doubt) == (True, True, "")
    assert doubtful.doubt == (
        f"gpu.discovery is tegra, but there is no {tmp_path}/{RELEASE} and {tmp_path}/{SOC} does "
        "not say Tegra; containers would find no GPU here, so set gpu.discovery: auto, unless the "
        "node has a Tegra processor and the agent cannot see its files (gpu.driverRoot, /sys)"
    )


async def test_nvml_tells_the_names_and_is_let_go_of(node: SimulatedNode) -> None:
    """In a thread that ends; the watch that comes afterwards opens the driver for itself."""
    assert (
        await names_by_nvml(quick_settings(node), sysfs_root=sysfs_of(node))
        == ("NVIDIA A100-SXM4-80GB",) * 4
    )


async def test_an_nvml_that_hangs_is_given_up(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent starts all the same, and its watch says what hangs."""
    constants.use(monkeypatch, SOON_HUNG)
    node.fault("nvmlDeviceGetName", delay_ms=FOR_EVER_MS, times=1)
    with pytest.raises(NvmlHungError, match="hangs in nvmlDeviceGetName"):
        await names_by_nvml(quick_settings(node), sysfs_root=sysfs_of(node))


async def test_the_source_is_chosen_once_by_what_was_found(tmp_path: Path) -> None:
    """The rest of the agent does not ask which of them it has."""
    settings = tree(tmp_path, release="# R36")
    found = await discover(
        settings, sysfs_root=f"{tmp_path}/sys", simulated=False, names=no_library
    )
    other = await discover(settings, sysfs_root=f"{tmp_path}/sys", simulated=True)
    assert isinstance(
        source(found, settings, Journal(), sysfs_root="/sys", beat=lambda: None), IntegratedGpu
    )
    assert isinstance(
        source(other, settings, Journal(), sysfs_root="/sys", beat=lambda: None), GpuWatch
    )


async def test_there_is_one_gpu_of_which_nothing_is_known(tmp_path: Path) -> None:
    """nvidia §4 and §10: id ``tegra``, no memory, no device node, no NUMA node,
    no health but that it is there.
    """
    journal = Journal()
    gpus = IntegratedGpu(journal)
    await gpus.start()

    (gpu,) = gpus.inventory.value.gpus
    assert (gpu.uuid, gpu.index, gpu.name, gpu.memory_mib, gpu.numa_node, gpu.minor) == (
        INTEGRATED,
        0,
        "tegra",
        0,
        None,
        -1,
    )
    assert (gpu.health.ok, gpu.present, gpu.integrated, gpu.mig_enabled) == (
        True,
        True,
        True,
        False,
    )
    assert (gpus.status.state, gpus.usage.value, gpus.read_at) == (NvmlState.UNUSED, (), 0.0)
    assert [entry.event for entry in journal.entries] == ["gpu.appeared"]
    assert await gpus.stop(1)
