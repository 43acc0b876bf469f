"""Something else in the place of NVIDIA's control nodes,
in a driver's tree that a compromised driver container can write.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.offers.test_control_nodes import make_node, on_node
from vgpu_agent.agent.offers.control_nodes import find_control_nodes
from vgpu_agent.families.device_lists import CONTROL_NODES

DISK = (8, 0)


def _link(path: Path) -> None:
    make_node(path.parent, "sda", DISK)
    path.symlink_to("/dev/sda")


def _link_to_a_real_one(path: Path) -> None:
    path.symlink_to(make_node(path.parent, "other", (195, 0)))


def _disk(path: Path) -> None:
    make_node(path.parent, path.name, DISK)


FAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to a disk": (_link, "is a symbolic link"),
    # it can be turned between two looks
    "a link to a node of NVIDIA's": (_link_to_a_real_one, "is a symbolic link"),
    "a dangling link": (lambda path: path.symlink_to("/nonexistent"), "is a symbolic link"),
    "a FIFO": (os.mkfifo, "is not a device node"),
    "a directory": (Path.mkdir, "is not a device node"),
    "a file": (Path.touch, "is not a device node"),
    "a disk": (_disk, "has the major number 8, which is none of NVIDIA's"),
}


@pytest.mark.parametrize("path", CONTROL_NODES)
@pytest.mark.parametrize("fake", FAKES)
def test_a_driver_container_cannot_have_another_device_handed_to_every_pod(
    fake: str, path: str, tmp_path: Path
) -> None:
    """The runtime on the node follows a link:
    a pod would get the node's disk under the name of a control node.

    That the agent's own /dev has the real one proves nothing, because answers name the path below
    the driver's root.
    """
    root = tmp_path / "driver-root"
    for other in CONTROL_NODES:
        if other != path:
            make_node(root, other)
    place, said = FAKES[fake]
    place(root / path.removeprefix("/"))
    found = find_control_nodes(on_node(tmp_path, driver_root="/run/nvidia/driver"))
    assert path not in found.paths
    assert f"{root}{path} {said}" in found.trouble
