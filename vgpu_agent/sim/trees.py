"""The files outside NVML that belong to GPUs:
NUMA nodes in sysfs, MIG capabilities in procfs, device nodes.

An agent that is pointed at a simulated node reads them below ``DIR/sys``, ``DIR/proc`` and
``DIR/dev`` as it reads /sys, /proc and /dev of a real one. `SimulatedNode` writes them when it is
created and when MIG instances change, while agents read. Each file is renamed into place, and
unchanged files are not touched. So no reader finds a partial file, or misses the file of an
instance that stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.layout import NONE, Gpu, Node

if TYPE_CHECKING:
    from collections.abc import Iterator

# device nodes that no single GPU has
_CONTROL_NODES: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_NULL_DEVICE: Final = os.makedev(1, 3)

# The driver numbers the capabilities in a fixed order: two for the machine, then for each GPU 15
# GPU instances with up to 8 compute instances each.
_GPU_INSTANCES: Final = 15
_COMPUTE_INSTANCES: Final = 8
_FIRST_CAPABILITY: Final = 3


def write(directory: Path, node: Node, *, tidy: bool = True) -> None:
    """Bring ``sys``, ``proc`` and ``dev`` below ``directory`` in line with ``node``.

    Args:
        directory: the directory of the simulated node.
        node: its description, with the GPUs and MIG instances that the files are to show.
        tidy: remove the files of MIG instances that ``node`` does not have. False only adds files,
            while the simulated driver still has those instances.

    Raises:
        SimulationError: a file cannot be written.
    """
    try:
        _write_sys(directory / "sys", node)
        capabilities = _write_proc(directory / "proc", node)
        devices = _write_dev(directory / "dev", node)
        if tidy:
            _remove_others(directory / "proc" / "driver" / "nvidia" / "capabilities", capabilities)
            _remove_others(directory / "dev" / "nvidia-caps", devices)
    except OSError as err:
        raise SimulationError(f"cannot write {err.filename or directory}: {err.strerror}") from err


def clear(directory: Path) -> None:
    """Remove what `write` wrote for a node that is being replaced,
    so that no GPU of the old one is left.

    Raises:
        OSError: a file cannot be removed.
    """
    for tree in ("sys", "proc", "dev"):
        if (directory / tree).is_dir():
            shutil.rmtree(directory / tree)


def pci_address(gpu: Gpu) -> str:
    """The GPU's name below ``/sys/bus/pci/devices``: lower case, a domain of four digits."""
    return f"{gpu.domain & 0xFFFF:04x}:{gpu.bus:02x}:{gpu.device:02x}.0"


def capability_number(minor: int, gpu_instance: int, compute_instance: int | None = None) -> int:
    """The ``N`` of the device node ``/dev/nvidia-caps/nvidia-cap<N>`` that opens a GPU instance, or
    one of its compute instances; ``minor`` is that of the GPU.
    """
    per_instance = 1 + _COMPUTE_INSTANCES
    number = _FIRST_CAPABILITY + (minor * _GPU_INSTANCES + gpu_instance) * per_instance
    return number if compute_instance is None else number + 1 + compute_instance


def _gpus(node: Node) -> Iterator[Gpu]:
    return (node.gpus[number] for number in range(node.gpu_count))


def _write_sys(root: Path, node: Node) -> None:
    for gpu in _gpus(node):
        device = root / "bus" / "pci" / "devices" / pci_address(gpu)
        device.mkdir(parents=True, exist_ok=True)
        # `NONE` is the simulator's number for no NUMA node, -1 that of sysfs
        numa_node = -1 if gpu.numa_node == NONE else gpu.numa_node
        (device / "numa_node").write_text(f"{numa_node}\n", encoding="ascii")


def _write_proc(root: Path, node: Node) -> set[Path]:
    """Write the driver's files; return the paths of those that describe a capability."""
    driver = root / "driver"
    minors = ["config 1", "monitor 2"]
    for gpu in _gpus(node):
        for instance in range(_GPU_INSTANCES):
            path = f"gpu{gpu.minor}/gi{instance}"
            minors.append(f"{path}/access {capability_number(gpu.minor, instance)}")
            minors += [
                f"{path}/ci{compute}/access {capability_number(gpu.minor, instance, compute)}"
                for compute in range(_COMPUTE_INSTANCES)
            ]
    _write_text(driver / "nvidia-caps" / "mig-minors", "\n".join(minors) + "\n")
    capabilities = driver / "nvidia" / "capabilities"
    wanted = {"mig/config": 1, "mig/monitor": 2} | {
        f"{path}/access": number for path, number in _mig_capabilities(node)
    }
    for path, number in wanted.items():
        # mode 292 is 0444, as the driver writes it
        _write_text(
            capabilities / path,
            f"DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
        )
    for gpu in _gpus(node):
        lines = {
            "Model": gpu.name.decode(),
            "GPU UUID": gpu.uuid.decode(),
            "Bus Location": pci_address(gpu),
            "Device Minor": gpu.minor,
        }
        information = driver / "nvidia" / "gpus" / pci_address(gpu) / "information"
        _write_text(information, "".join(f"{key}: \t {value}\n" for key, value in lines.items()))
    return {capabilities / path for path in wanted}


def _mig_capabilities(node: Node) -> Iterator[tuple[str, int]]:
    for gpu in _gpus(node):
        for mig in gpu.mig_devices:
            if not mig.used:  # a place in the table without an instance
                continue
            path = f"gpu{gpu.minor}/mig/gi{mig.gpu_instance}"
            yield path, capability_number(gpu.minor, mig.gpu_instance)
            yield (
                f"{path}/ci{mig.compute_instance}",
                capability_number(gpu.minor, mig.gpu_instance, mig.compute_instance),
            )


def _write_dev(root: Path, node: Node) -> set[Path]:
    """Make the device nodes, and return their paths."""
    names = [*_CONTROL_NODES, *(f"nvidia{gpu.minor}" for gpu in _gpus(node))]
    capabilities = [1, 2, *(number for _, number in _mig_capabilities(node))]
    names += [f"nvidia-caps/nvidia-cap{number}" for number in capabilities]
    for name in names:
        _write_device(root / name)
    return {root / name for name in names}


def _write_text(path: Path, text: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.read_text(encoding="ascii") == text:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="ascii")
    unfinished.replace(path)


def _remove_others(root: Path, wanted: set[Path]) -> None:
    """Remove the files below ``root`` that are not wanted, and directories that are then empty."""
    for directory, _, files in os.walk(root, topdown=False):
        folder = Path(directory)
        for path in {folder / name for name in files} - wanted:
            path.unlink()
        if folder != root and not any(folder.iterdir()):
            folder.rmdir()


def _write_device(path: Path) -> None:
    """Make a character device (with the numbers of /dev/null) where that is allowed, so that a
    container really gets a device; else an empty file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, _NULL_DEVICE)
        path.chmod(0o666)
    except PermissionError:
        path.touch()
