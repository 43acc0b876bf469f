"""Rigs on this machine: running ones, and remains of those whose keeper was killed.

Every start and every `scripts/cluster down` collects the remains first, so a machine does not fill
up with what crashes left.

Called by lifecycle.py and __main__.py; `traces` is how tests prove that nothing was left.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from math import inf
from pathlib import Path

from tests.real_node.rig import cgroups
from tests.real_node.rig.errors import RigError
from tests.real_node.rig.layout import PREFIX, RUNS, Layout
from tests.real_node.rig.processes import ProcessId, everyone, namespace
from tests.real_node.rig.record import KeeperRecord

_BIRTH_SECONDS = 30.0
"""A folder may be this old before its keeper has written its record.
A younger one belongs to a rig that is just starting.
"""
_PATIENCE_SECONDS = 10.0


def rigs() -> list[Layout]:
    """Every rig of which there is a folder or a cgroup."""
    found = {path.name for path in RUNS.glob(f"{PREFIX}*") if path.is_dir()}
    for hierarchy in cgroups.hierarchies():
        found |= {path.name for path in hierarchy.glob(f"{PREFIX}*")}
    layouts = []
    for name in sorted(found):
        try:
            layouts.append(Layout(name.removeprefix(PREFIX)))
        except RigError:  # a foreign folder that begins like ours
            continue
    return layouts


def is_running(layout: Layout) -> bool:
    """Tell whether the rig's keeper lives, or is just starting."""
    record = KeeperRecord.load(layout)
    if record is not None:
        return record.keeper.is_alive()
    try:
        return time.time() - layout.run.stat().st_mtime < _BIRTH_SECONDS
    except FileNotFoundError:
        return False


def collect() -> list[str]:
    """Remove the remains of every rig that no longer runs; returns their names."""
    dead = [layout for layout in rigs() if not is_running(layout)]
    for layout in dead:
        remove(layout)
    return [layout.name for layout in dead]


def remove(layout: Layout) -> None:
    """Remove all that is left of one rig whose keeper is dead.

    Raises:
        RigError: something of it cannot be removed.
    """
    record = KeeperRecord.load(layout)
    if record is not None and record.first is not None and record.first.is_alive():
        os.kill(record.first.pid, signal.SIGKILL)
    cgroups.remove(layout.cgroup, patience_seconds=_PATIENCE_SECONDS)
    shutil.rmtree(layout.run, ignore_errors=True)  # another collector may be at it too
    if layout.run.exists():
        shutil.rmtree(layout.run)


def traces(layout: Layout, namespaces: tuple[str, ...], *, ended: float = inf) -> list[str]:
    """Everything on this machine that still belongs to the rig, one line each.

    ``namespaces`` are those of its `KeeperRecord`: a namespace lives as long as a process is in it
    or, for a network, a socket of it is open, and interfaces live as long as theirs. The kernel
    gives the number of a namespace that has ended to the next one, such as that of a rig which
    another test just starts. So processes that began after ``ended`` (`time.clock_gettime` of
    CLOCK_BOOTTIME), when the rig was to end, do not count because of a number.
    """
    sought = set(namespaces)
    found = [f"cgroup {path}" for path in cgroups.existing(layout.cgroup)]
    if layout.run.exists():
        found.append(f"folder {layout.run}")
    found += [
        f"mount {line}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if str(layout.run) in line
    ]
    for pid in everyone():
        try:
            command = (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
            held = {namespace(pid, kind) for kind in ("pid", "net", "mnt")}
            was_there = ProcessId.of(pid).began_seconds <= ended
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # gone meanwhile, or one whose namespaces even root may not see
            continue
        if f"{layout.run}/" in command or (held & sought and was_there):
            found.append(f"process {pid} {command.strip()}")
    return found
