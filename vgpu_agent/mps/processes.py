"""The processes of an MPS control daemon (itself and its servers), found without trusting anything
that its clients could have written.

The pipe of a daemon (its directory CUDA_MPS_PIPE_DIRECTORY) is mounted into containers, whose root
may write there. A process id in it can be any process's, and the file can be a link or a FIFO
without a writer. An agent that trusted it would kill one tenant's process for another. Called by
`control` and `daemon`, in threads, because every call looks at the file system.
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
    """Return the path at which the daemon at ``pipe`` writes its process id."""
    return os.path.join(pipe, _PID_FILE)


def written_pid(pipe: str) -> int | None:
    """Return the id of the process that the file at `pid_path` names, if it is one of the daemon at
    ``pipe``.
    """
    try:
        descriptor = os.open(
            pid_path(pipe), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
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
    """Tell whether any process of MPS lives that was started for ``pipe``,
    whatever the file at `pid_path` contains.
    """
    with os.scandir("/proc") as entries:
        return any(belongs(int(entry.name), pipe) for entry in entries if entry.name.isdecimal())


def living(pids: Iterable[int]) -> list[int]:
    """Return those of ``pids`` that are processes of MPS now:
    the kernel may have given the id of an ended one to another program.
    """
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            # the simulator's programs have an underscore in their names
            if pid > 0 and b"mps-" in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"_", b"-"):
                found.append(pid)
    return found


def belongs(pid: int, pipe: str) -> bool:
    """Tell by its environment whether ``pid`` is a process of MPS for ``pipe``,
    so that no other daemon is ever ended.
    """
    try:
        environment = (
            Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if living([pid]) else []
        )
    except OSError:
        return False
    return os.fsencode(f"{PIPE_VARIABLE}={pipe}") in environment


def end(pids: Iterable[int], pipe: str) -> list[int]:
    """Kill those of ``pids`` that belong to the daemon at ``pipe``; return the others."""
    others = []
    for pid in pids:
        if not belongs(pid, pipe):
            others.append(pid)
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return others
