"""Facts about processes from /proc: is it still the one that was written down,
and which namespaces does it hold.

A pid alone is no identity, since the kernel hands it out again; together with the start time it is.

Used by keeper.py to describe itself and by leftovers.py to judge such descriptions. Format:
proc_pid_stat(5).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, distinguished from a later one with the same pid by ``started``,
    in clock ticks since boot.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Raises: FileNotFoundError when there is no such process."""
        return cls(pid, _started(pid))

    @property
    def began_seconds(self) -> float:
        """Return when it started, in seconds since boot."""
        return self.started / os.sysconf("SC_CLK_TCK")

    def is_alive(self) -> bool:
        try:
            return _started(self.pid) == self.started
        except (FileNotFoundError, ProcessLookupError):
            return False


def _started(pid: int) -> int:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if after_name[0] in "ZX":
        raise ProcessLookupError(f"process {pid} is dead and waits to be reaped")
    return int(after_name[19])


def children(pid: int) -> list[int]:
    """Direct children of a single-threaded process; empty when it is gone."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def namespace(pid: int, kind: str) -> str:
    """The identity of a process's namespace, such as ``net:[4026532000]``."""
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def everyone() -> Iterator[int]:
    """The pids of all processes there are."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)
