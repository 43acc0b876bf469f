"""The cgroups of a rig: made before its kubelets start, removed after its last process is gone.

The kubelet wants its `cgroupRoot` to exist in every hierarchy. cgroup v1 and the hybrid of both are
what the rig was measured on; on a pure v2 host the controllers are delegated downwards instead,
which has not been tried.

Called by keeper.py, and by leftovers.py for rigs whose keeper was killed.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path

from tests.real_node.rig.errors import RigError

ROOT = Path("/sys/fs/cgroup")


def _is_v2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """The root of each hierarchy: one on a v2 host,
    one per controller (and ``unified``) on the others.
    """
    if _is_v2():
        return [ROOT]
    return sorted(
        path
        for path in ROOT.iterdir()
        if path.is_dir() and not path.is_symlink() and (path / "cgroup.procs").exists()
    )


def create(names: list[str]) -> None:
    """Make the cgroups ``names`` (parents first) in every hierarchy.

    Raises:
        RigError: the kernel refuses; the message names the file.
    """
    for hierarchy in hierarchies():
        for name in names:
            _create_one(hierarchy / name)


def _create_one(path: Path) -> None:
    try:
        if _is_v2():
            # Untested on a real v2 host: a child gets only those controllers that its parent hands
            # down.
            controllers = (path.parent / "cgroup.controllers").read_text().split()
            (path.parent / "cgroup.subtree_control").write_text(
                " ".join(f"+{controller}" for controller in controllers)
            )
        path.mkdir(exist_ok=True)
        if not _is_v2():
            # empty in a new v1 cgroup, and empty means that no task may enter
            for inherited in ("cpuset.cpus", "cpuset.mems"):
                if (path / inherited).exists():
                    (path / inherited).write_text((path.parent / inherited).read_text())
    except OSError as err:
        raise RigError(
            f"cannot make cgroup {path}: {err.strerror}; root may lack the right to delegate "
            "controllers here"
        ) from err


def existing(name: str) -> list[Path]:
    """The cgroups called ``name``, at most one per hierarchy."""
    return [hierarchy / name for hierarchy in hierarchies() if (hierarchy / name).is_dir()]


def remove(name: str, *, patience_seconds: float) -> None:
    """Remove the cgroup ``name`` and all below it from every hierarchy.

    Killed processes leave their cgroup a moment after they die, so a busy one is tried again.

    Raises:
        RigError: one is still busy after ``patience_seconds``.
    """
    deadline = time.monotonic() + patience_seconds
    while busy := [path for path in existing(name) if not _remove_tree(path)]:
        if time.monotonic() > deadline:
            raise RigError(
                f"cgroup {busy[0]} is still in use after {patience_seconds:g} s: processes "
                f"{_processes(busy[0])}"
            )
        time.sleep(0.05)


def _remove_tree(path: Path) -> bool:
    """Remove what can be removed; true when nothing is left."""
    gone = True
    try:
        children = [child for child in path.iterdir() if child.is_dir()]
    except FileNotFoundError:
        return True
    for child in children:
        gone = _remove_tree(child) and gone
    if not gone:
        return False
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as err:
        if err.errno == errno.EBUSY:
            return False
        raise
    return True


def _processes(path: Path) -> str:
    found = [procs.read_text().split() for procs in path.rglob("cgroup.procs")]
    return " ".join(process for group in found for process in group) or "(none)"
