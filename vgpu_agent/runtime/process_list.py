"""The list of a container's processes, as the library of `isolation.vgpu_control` reads it:
``config/pids.config`` (vgpu-manager §7.7).

Ascending numbers, one a line. It is written in place, under a lock, because the library reads it at
any moment and ends its process when it finds no number: first the new content, then the end. The
container has the directory mounted read-only, but it may take a lock on a file that it can only
read. So this code never waits for the lock.
"""

from __future__ import annotations

import fcntl
import os
import stat

from vgpu_agent.errors import CarrierError
from vgpu_agent.runtime.host_files import replace_file, trouble

NAME = "pids.config"
# The library reads so many and no more.
MAX_READ = 1024

_MODE = 0o644
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ONCE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LockedError(CarrierError):
    """Another process holds the lock of the list at this moment."""


def content(processes: tuple[int, ...]) -> bytes:
    """The file's bytes for these processes, which are in ascending order."""
    return b"".join(b"%d\n" % pid for pid in processes)


def exists(directory: str) -> bool:
    """Tell whether ``directory`` has a list."""
    return os.path.lexists(f"{directory}/{NAME}")


def write(directory: str, new: bytes) -> None:
    """Put the list into ``directory``, which only the agent can change; blocks for no lock.

    Raises:
        LockedError: it is locked now, and unchanged.
        CarrierError: it cannot be written, or there is no such directory.
    """
    path = f"{directory}/{NAME}"
    try:
        folder = os.open(directory, _DIRECTORY)
        try:
            descriptor = os.open(NAME, _ONCE, dir_fd=folder)
        finally:
            os.close(folder)
    except FileNotFoundError as err:
        if not os.path.isdir(directory):
            raise trouble("write", path, err) from err
        replace_file(path, new, _MODE)
        return
    except OSError as err:
        raise trouble("write", path, err) from err
    try:
        _write(descriptor, path, new)
    except OSError as err:
        raise trouble("write", path, err) from err
    finally:
        os.close(descriptor)  # and with it the lock


def _write(descriptor: int, path: str, new: bytes) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise CarrierError(f"cannot write {path}: it is no file; remove it")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        raise LockedError(f"cannot write {path}: a process of the container has locked it") from err
    written = 0
    while written < len(new):
        written += os.pwrite(descriptor, new[written:], written)
    os.ftruncate(descriptor, len(new))
    os.fchmod(descriptor, _MODE)
