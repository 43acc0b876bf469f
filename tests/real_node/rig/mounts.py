"""Differences between a rig and its host:
bind mounts in namespaces of its own, gone with its last process.

Called by inside.py once per rig (what all nodes share) and by node.py once per Kubernetes node.
Both run in fresh mount namespaces; nothing here may ever run outside of one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.real_node.rig.config import CDI_DIR, RESOLV_CONF
from tests.real_node.rig.errors import RigError

if TYPE_CHECKING:
    from tests.real_node.rig.layout import Layout, NodeLayout

_HOST_SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
_NUMA_DISTANCES = ("10 20", "20 10")


def cover_host_settings(layout: Layout) -> None:
    """Put plain files over the host-wide sysctls that a kubelet writes at its start."""
    folder = layout.run / "sysctl"
    folder.mkdir()
    for name in _HOST_SYSCTLS:
        original = Path("/proc/sys") / name
        if original.exists():
            cover = folder / name.replace("/", ".")
            cover.write_text(original.read_text())
            _bind(cover, original)


def pretend_numa_nodes(layout: Layout) -> None:
    """Show two NUMA nodes, each with half of the CPUs and half of the memory,
    where the kubelet's cadvisor looks for them.

    Raises:
        RigError: there is but one CPU.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise RigError("numa_nodes: 2 needs at least two CPUs, this machine has one")
    halves = (cpus[: len(cpus) // 2], cpus[len(cpus) // 2 :])
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1]) // 2
    nodes = layout.run / "numa"
    for index, (half, distance) in enumerate(zip(halves, _NUMA_DISTANCES, strict=True)):
        node = nodes / f"node{index}"
        node.mkdir(parents=True)
        for cpu in half:
            (node / f"cpu{cpu}").symlink_to(f"/sys/devices/system/cpu/cpu{cpu}")
        (node / "cpulist").write_text(",".join(map(str, half)) + "\n")
        (node / "distance").write_text(distance + "\n")
        (node / "meminfo").write_text(f"Node {index} MemTotal: {memory_kib} kB\n")
    for listing in ("online", "possible"):
        (nodes / listing).write_text("0-1\n")
    _bind(nodes, Path("/sys/devices/system/node"))


def make_node_view(node: NodeLayout) -> None:
    """Give one Kubernetes node its own /run, /var/lib and /var/log,
    the first with the CDI folder that the host reaches too.
    """
    for folder in (
        node.kubelet_dir,
        node.var_log,
        node.cdi_dir,
        node.static_pods,
        node.containerd_root,
    ):
        folder.mkdir(parents=True, exist_ok=True)
    # the kubelet's and containers' mounts propagate among each other; beyond this namespace nothing
    # does
    _mount("--make-rshared", "/")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    for name in ("containerd", "netns", "lock", Path(CDI_DIR).name):
        Path("/run", name).mkdir()
    Path(RESOLV_CONF).touch()  # empty: no name leaves the rig
    _bind(node.cdi_dir, Path(CDI_DIR))
    _bind(node.var_lib, Path("/var/lib"))
    _bind(node.var_log, Path("/var/log"))


def _bind(source: Path, target: Path) -> None:
    _mount("--bind", str(source), str(target))


def _mount(*arguments: str) -> None:
    result = subprocess.run(["mount", *arguments], text=True, capture_output=True, check=False)
    if result.returncode:
        raise RigError(f"mount {' '.join(arguments)}: {result.stderr.strip()}")
