"""The node's control nodes, in the layouts in which charts mount the driver."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from tests.settings import settings as settings_of
from vgpu_agent.agent.offers.control_nodes import ControlNodes, find_control_nodes
from vgpu_agent.config.device_answers import Cdi
from vgpu_agent.config.settings import Gpu, Settings
from vgpu_agent.families.device_lists import CONTROL_NODES, WSL_NODE

UVM_MAJOR = 511
NUMBERS = dict(
    zip(CONTROL_NODES, [(195, 255), (UVM_MAJOR, 0), (UVM_MAJOR, 1), (195, 254)], strict=True)
)


def make_node(root: Path, path: str, number: tuple[int, int] | None = None) -> Path:
    """A device node below ``root``, by default with the number that the driver's has;
    skips the test where none may be made.
    """
    made = root / path.removeprefix("/")
    made.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mknod(made, stat.S_IFCHR | 0o666, os.makedev(*(number or NUMBERS[path])))
    except PermissionError:
        pytest.skip("this machine lets nobody make device nodes")
    return made


def on_node(tmp_path: Path, *, driver_root: str, dev_root: str = "") -> Settings:
    """Settings of an agent that has the node's driver root at ``driver-root``
    and the node's procfs at ``proc``.
    """
    (tmp_path / "proc").mkdir(exist_ok=True)
    devices = (
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n"
        f"{UVM_MAJOR} nvidia-uvm\n\nBlock devices:\n  7 loop\n"
    )
    (tmp_path / "proc" / "devices").write_text(devices)
    gpu = Gpu(driver_root=driver_root, dev_root=dev_root, proc_root=str(tmp_path / "proc"))
    return settings_of(gpu=gpu, cdi=Cdi(container_driver_root=str(tmp_path / "driver-root")))


@pytest.mark.parametrize("dev_root", ["", "/"])
def test_nodes_of_a_mounted_driver_root_are_found(dev_root: str, tmp_path: Path) -> None:
    """nvidia §9: the agent sees /run/nvidia/driver of the node at cdi.containerDriverRoot only."""
    for path in CONTROL_NODES:
        make_node(tmp_path / "driver-root", path)
    assert find_control_nodes(
        on_node(tmp_path, driver_root="/run/nvidia/driver", dev_root=dev_root)
    ) == ControlNodes(CONTROL_NODES)


def test_nodes_below_their_own_path_are_found(tmp_path: Path) -> None:
    """The node's tree is mounted at the path that it has on the node.
    A mounted driver root without a ``dev`` counts for nothing.
    """
    (tmp_path / "driver-root").mkdir()
    for path in CONTROL_NODES:
        make_node(tmp_path / "host", path)
    assert find_control_nodes(
        on_node(tmp_path, driver_root="/", dev_root=str(tmp_path / "host"))
    ) == ControlNodes(CONTROL_NODES)


def test_nodes_in_the_own_dev_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia §7: there NVIDIA's runtime puts them, whatever the paths on the node are,
    and NVIDIA's plugin looks nowhere else.
    """
    nodes = {
        path: os.stat_result((stat.S_IFCHR, *[0] * 9), {"st_rdev": os.makedev(*NUMBERS[path])})
        for path in CONTROL_NODES
    }
    lstat = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: nodes.get(path) or lstat(path))
    assert find_control_nodes(on_node(tmp_path, driver_root="/run/nvidia/driver")) == ControlNodes(
        CONTROL_NODES
    )


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("/dev/nvidiactl", "there is no /dev/nvidiactl below "),
        ("/dev/nvidia-uvm", "there is no /dev/nvidia-uvm below "),
        ("/dev/nvidia-uvm-tools", ""),
        ("/dev/nvidia-modeset", ""),
    ],
)
def test_only_nodes_that_cuda_needs_are_trouble(missing: str, said: str, tmp_path: Path) -> None:
    """Without nvidiactl or nvidia-uvm no CUDA program starts.
    A server's driver may have no nvidia-modeset at all.
    """
    paths = tuple(path for path in CONTROL_NODES if path != missing)
    for path in paths:
        make_node(tmp_path / "driver-root", path)
    found = find_control_nodes(on_node(tmp_path, driver_root="/run/nvidia/driver"))
    assert found.paths == paths
    assert said in found.trouble
    assert bool(said) == bool(found.trouble)


def test_a_windows_subsystem_has_none_of_them(tmp_path: Path) -> None:
    """nvidia §4: one node of the kernel's leads to all GPUs."""
    make_node(tmp_path / "host", WSL_NODE, (10, 127))
    assert find_control_nodes(
        on_node(tmp_path, driver_root=str(tmp_path / "host"))
    ) == ControlNodes(wsl=True)


def test_a_simulated_node_has_files_in_their_place(tmp_path: Path) -> None:
    """No device node of a driver is there that could be passed on, and none of this machine is."""
    settings = msgspec.structs.replace(
        on_node(tmp_path, driver_root=str(tmp_path / "gpus")), simulate=str(tmp_path / "gpus")
    )
    assert "there is no /dev/nvidiactl" in find_control_nodes(settings).trouble
    for path in CONTROL_NODES:
        (tmp_path / "gpus" / "dev").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"gpus{path}").touch()
    assert find_control_nodes(settings) == ControlNodes(CONTROL_NODES)
