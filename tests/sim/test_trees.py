"""The files outside NVML: sysfs, procfs, device nodes."""

from __future__ import annotations

import concurrent.futures
import os
import stat
import threading
from pathlib import Path

import pytest

from tests.simulated import simulated_node
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import mig
from vgpu_agent.sim.layout import Gpu
from vgpu_agent.sim.state import SimulatedNode


def test_numa_nodes_in_sysfs(tmp_path: Path) -> None:
    """Below the PCI address with four digits of domain, in lower case, as the kernel writes it."""
    node = simulated_node(tmp_path, gpus=2, numa=[1, -1])

    devices = node.directory / "sys" / "bus" / "pci" / "devices"

    assert (devices / "0000:07:00.0" / "numa_node").read_text() == "1\n"
    assert (devices / "0000:0f:00.0" / "numa_node").read_text() == "-1\n"


def test_device_nodes(tmp_path: Path) -> None:
    """One for each GPU, and those of the driver."""
    node = simulated_node(tmp_path, gpus=2)

    names = sorted(
        path.name for path in (node.directory / "dev").iterdir() if path.name != "nvidia-caps"
    )

    assert names == [
        "nvidia-modeset",
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidia0",
        "nvidia1",
        "nvidiactl",
    ]


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="only root can make device nodes; others get plain files, which the next test covers",
)
def test_device_nodes_are_real_ones_for_root(tmp_path: Path) -> None:
    """A container can then be given them. They lead to the null device."""
    node = simulated_node(tmp_path, gpus=1)

    status = (node.directory / "dev" / "nvidia0").stat()

    assert stat.S_ISCHR(status.st_mode)
    assert (os.major(status.st_rdev), os.minor(status.st_rdev)) == (1, 3)


def test_device_nodes_are_plain_files_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is something to find, at least."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "mknod", refuse)

    node = simulated_node(tmp_path, gpus=1)

    assert (node.directory / "dev" / "nvidia0").is_file()


def test_capability_numbers_are_the_drivers_usual_ones(tmp_path: Path) -> None:
    """GPU instance 10 of GPU 1 is nvidia-cap228,
    its compute instance 0 is nvidia-cap229 (nvidia A18).
    """
    node = simulated_node(tmp_path, gpus=2)

    minors = (
        (node.directory / "proc" / "driver" / "nvidia-caps" / "mig-minors").read_text().splitlines()
    )

    assert minors[:4] == ["config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4"]
    assert "gpu1/gi10/access 228" in minors
    assert "gpu1/gi10/ci0/access 229" in minors


def test_capabilities_follow_the_mig_instances(tmp_path: Path) -> None:
    """Files and nodes come with an instance and go with it."""
    node = simulated_node(tmp_path, "A100-SXM4-40GB", 2)
    capabilities = node.directory / "proc" / "driver" / "nvidia" / "capabilities"
    node.set_mig(1, ["1g.5gb"] * 7)
    with_instances = (capabilities / "gpu1" / "mig" / "gi10" / "ci0" / "access").read_text()
    nodes = {path.name for path in (node.directory / "dev" / "nvidia-caps").iterdir()}
    node.set_mig(1, [])

    assert with_instances == "DeviceFileMinor: 229\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    assert {"nvidia-cap1", "nvidia-cap2", "nvidia-cap228", "nvidia-cap229"} <= nodes
    assert not (capabilities / "gpu1").exists()
    assert sorted(path.name for path in (node.directory / "dev" / "nvidia-caps").iterdir()) == [
        "nvidia-cap1",
        "nvidia-cap2",
    ]


def test_files_of_an_instance_are_there_before_it_and_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that finds an instance in NVML can open it, also at the moment of a change."""
    node = simulated_node(tmp_path, "A100-SXM4-40GB", 1)
    node.set_mig(0, ["3g.20gb"])
    capabilities = node.directory / "dev" / "nvidia-caps"
    at_the_change: list[set[str]] = []
    copy = mig.copy

    def look_and_copy(source: Gpu, target: Gpu) -> None:
        at_the_change.append({path.name for path in capabilities.iterdir()})
        copy(source, target)

    monkeypatch.setattr(mig, "copy", look_and_copy)
    node.set_mig(0, ["1g.5gb"])

    always = {"nvidia-cap1", "nvidia-cap2"}
    assert at_the_change == [
        always | {"nvidia-cap12", "nvidia-cap13", "nvidia-cap66", "nvidia-cap67"}
    ]
    assert {path.name for path in capabilities.iterdir()} == always | {
        "nvidia-cap66",
        "nvidia-cap67",
    }


def test_gpus_in_procfs(tmp_path: Path) -> None:
    """Model, UUID and minor, as the driver writes them."""
    node = simulated_node(tmp_path, gpus=1)

    text = (
        node.directory / "proc" / "driver" / "nvidia" / "gpus" / "0000:07:00.0" / "information"
    ).read_text()

    assert f"GPU UUID: \t {node.uuids[0]}\n" in text
    assert "Device Minor: \t 0\n" in text


def test_a_tree_that_cannot_be_written(tmp_path: Path) -> None:
    """The path in the way is named."""
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "sys").touch()

    with pytest.raises(SimulationError, match=r"cannot write .*/gpus/sys"):
        simulated_node(tmp_path)


def test_a_replaced_node_leaves_no_gpu_behind(tmp_path: Path) -> None:
    """Neither a device node nor a PCI device of the larger node before."""
    SimulatedNode.create(tmp_path, gpus=4)

    SimulatedNode.create(tmp_path, gpus=1, force=True)

    assert [path.name for path in (tmp_path / "sys" / "bus" / "pci" / "devices").iterdir()] == [
        "0000:07:00.0"
    ]
    assert not (tmp_path / "dev" / "nvidia1").exists()


def test_who_reads_while_instances_change_finds_whole_files(tmp_path: Path) -> None:
    """Every look at the table of capability numbers and at the file of an instance
    that stays finds all of it.
    """
    node = simulated_node(tmp_path, "A100-SXM4-40GB", 1)
    node.set_mig(0, ["3g.20gb", "1g.5gb"])
    driver = node.directory / "proc" / "driver"
    minors = driver / "nvidia-caps" / "mig-minors"
    stays = driver / "nvidia" / "capabilities" / "gpu0" / "mig" / "gi1" / "access"
    stays_in_dev = node.directory / "dev" / "nvidia-caps" / "nvidia-cap12"
    whole = minors.read_bytes(), stays.read_bytes()
    found: set[tuple[bytes, bytes]] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            stays_in_dev.stat()
            found.add((minors.read_bytes(), stays.read_bytes()))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reader = pool.submit(look)
        try:
            for _ in range(50):
                node.set_mig(0, ["3g.20gb", "2g.10gb"])
                node.set_mig(0, ["3g.20gb", "1g.5gb"])
        finally:
            stop.set()
        reader.result()

    assert found == {whole}


def test_a_file_that_changes_is_replaced_and_not_rewritten(tmp_path: Path) -> None:
    """A reader that opened the file before reads the old one to its end.
    Later readers get the new one.
    """
    node = simulated_node(tmp_path, gpus=1)
    minors = node.directory / "proc" / "driver" / "nvidia-caps" / "mig-minors"
    minors.write_text("config 1\n")
    with minors.open() as opened:
        node.set_mig(0, ["1g.10gb"])

        assert opened.read() == "config 1\n"
    assert "gpu0/gi7/access" in minors.read_text()
