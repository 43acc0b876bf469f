"""Which processes belong to a daemon, found out from what its clients could have written: nothing of it is believed.

The directory of a pipe is mounted into containers, whose root may write there: a process id in it can be anybody's, and the file can be a
link or a pipe that nobody writes to. An agent that went by it would kill for one tenant what belongs to another. Called by `control` and
`daemon`, in threads, because every call looks at the file system.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_agent.isolation.mps import PIPE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

_PID_FILE = "nvidia-cuda-mps-control.pid"
_LONGEST_NUMBER = 20  # bytes


def pid_path(pipe: str) -> str:
    """Where the daemon at ``pipe`` writes down which process it is."""
    return os.path.join(pipe, _PID_FILE)


def written_pid(pipe: str) -> int | None:
    """The process that the file names, if that is one of the daemon at ``pipe``."""
    try:
        descriptor = os.open(pid_path(pipe), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        pid = int(os.read(descriptor, _LONGEST_NUMBER)) if regular else 0
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return pid if belongs(pid, pipe) else None


def any_of(pipe: str) -> bool:
    """Whether any process of MPS lives that was started for ``pipe``, whatever the file says."""
    with os.scandir("/proc") as entries:
        return any(belongs(int(entry.name), pipe) for entry in entries if entry.name.isdecimal())


def living(pids: Iterable[int]) -> list[int]:
    """Those of ``pids`` that are processes of MPS now: the kernel may have given an old number to another one."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if pid > 0 and b"mps-" in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"_", b"-"):
                found.append(pid)
    return found


def belongs(pid: int, pipe: str) -> bool:
    """Whether it is a process of MPS that was started for ``pipe``, which its environment says; so nobody else's daemon is ever ended."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if living([pid]) else []
    except OSError:
        return False
    return os.fsencode(f"{PIPE_VARIABLE}={pipe}") in environment


def end(pids: Iterable[int], pipe: str) -> list[int]:
    """Kill those of ``pids`` that belong to the daemon at ``pipe``; returns the others."""
    others = []
    for pid in pids:
        if not belongs(pid, pipe):
            others.append(pid)
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return others
