"""Find NVIDIA's control device nodes (``/dev/nvidiactl`` and others), which all GPUs share.

With ``plugin.passDeviceSpecs`` each answer to Allocate names device nodes by their path on the
node. The agent itself sees the node's file system under another path (``cdi.containerDriverRoot``),
or only the device nodes that NVIDIA's runtime puts into the agent's own ``/dev``. NVIDIA's plugin
looks into its own ``/dev`` alone, and leaves out what it does not find there (nvidia §7). But
without the nodes in `_NEEDED` no CUDA program starts. So where one is missing, the agent does not
offer the kubelet the resources whose containers would need it.

The container runtime follows symbolic links. So a path counts only when the file there is itself a
device node with one of NVIDIA's major numbers. No file is opened, because opening a FIFO could
block the agent. Called by `build`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.families.device_lists import CONTROL_NODES, WSL_NODE

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings

# CUDA opens these two. /dev/nvidia-uvm-tools is for debuggers and /dev/nvidia-modeset for displays.
_NEEDED = ("/dev/nvidiactl", "/dev/nvidia-uvm")
# The major number of nvidiactl and nvidia-modeset. That of nvidia-uvm may change at each boot.
_NVIDIA_MAJOR = 195


class ControlNodes(NamedTuple):
    """The control device nodes found on the node.

    Attributes:
        paths: the members of `CONTROL_NODES` that the node has.
        trouble: why containers that get device nodes by path could not use a GPU; empty when they
            can.
        wsl: the node runs under WSL: it has the one device node `WSL_NODE` for all GPUs.
    """

    paths: tuple[str, ...] = ()
    trouble: str = ""
    wsl: bool = False


NONE_FOUND = ControlNodes()


def find_control_nodes(settings: Settings) -> ControlNodes:
    """Search the file system: below the mounted driver root, then below the driver root's path on
    the node, then below ``/``. For a simulated node ``/`` is left out.
    """
    simulated = bool(settings.simulate)
    # the root of the node's /dev/nvidia*, by its path on the node; where the driver root is mounted
    on_node = str(settings.gpu.device_node_root).rstrip("/")
    mounted = settings.cdi.container_driver_root.rstrip("/")
    roots = (
        mounted if os.path.isdir(f"{mounted}/dev") else on_node,
        on_node,
        on_node if simulated else "",
    )
    places = tuple(dict.fromkeys(roots))
    majors = frozenset[int]() if simulated else _majors(settings.gpu.proc_root)
    found: list[str] = []
    faults: list[str] = []
    for path in CONTROL_NODES:
        there = next((place for place in places if os.path.lexists(place + path)), None)
        if there is None:
            fault = (
                f"there is no {path} below {' or '.join(place or '/' for place in places)}"
                if path in _NEEDED
                else ""
            )
        else:
            fault = "" if simulated else _fault(there + path, majors)
            found += [] if fault else [path]
        faults += [fault] if fault else []
    wsl = os.path.exists(on_node + WSL_NODE)
    if wsl or not faults:
        return ControlNodes(tuple(found), wsl=wsl)
    return ControlNodes(
        tuple(found),
        f"plugin.passDeviceSpecs names device nodes to containers, but {'; '.join(faults)}. Load "
        "the driver's modules (nvidia-modprobe -u -c=0), mount the node's gpu.driverRoot at "
        "cdi.containerDriverRoot, or set plugin.passDeviceSpecs: false",
    )


def _fault(path: str, majors: frozenset[int]) -> str:
    """Explain why the file at ``path`` is no device node of NVIDIA's; empty when it is one."""
    try:
        status = os.lstat(path)
    except OSError as err:
        return f"{path} cannot be read ({err.strerror or err})"
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link, and a container would get its target"
    if not stat.S_ISCHR(status.st_mode):
        return f"{path} is not a device node"
    if os.major(status.st_rdev) not in majors:
        return f"{path} has the major number {os.major(status.st_rdev)}, which is none of NVIDIA's"
    return ""


def _majors(proc_root: str) -> frozenset[int]:
    """The major numbers of NVIDIA's character devices, as the kernel lists them."""
    found = {_NVIDIA_MAJOR}
    with (
        contextlib.suppress(OSError),
        Path(proc_root, "devices").open(encoding="ascii", errors="replace") as devices,
    ):
        for line in devices:
            number, _, name = line.strip().partition(" ")
            if number.isdecimal() and name.startswith("nvidia"):
                found.add(int(number))
    return frozenset(found)
