"""The file with a container's processes: ``config/pids.config`` (vgpu-manager §7.7). By it the
library of `isolation.vgpu_control` knows which processes on a GPU are its container's, where it may
not look into the host's /proc (``vgpuControl.processes: client``).

The file has one process id of the host per line, in ascending order. The library can read it at any
moment, and ends its process if it finds no id. So the file is written in place and under a lock,
and is cut to the new length last. The container mounts the directory read-only, but it can lock a
file that it can only read. So this code never waits for the lock.
"""

from __future__ import annotations

import fcntl
import os
import stat

from vgpu_agent.errors import HostFileError
from vgpu_agent.runtime.host_files import file_error, replace_file

NAME = "pids.config"
# The most process ids that the library reads.
MAX_READ = 1024

_MODE = 0o644
_DIRECTORY_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LockedError(HostFileError):
    """A process of the container holds the lock of the file."""


def encode(processes: tuple[int, ...]) -> bytes:
    """Return the content of the file for process ids in ascending order."""
    return b"".join(b"%d\n" % pid for pid in processes)


def exists(directory: str) -> bool:
    """Tell whether ``directory`` has the file."""
    return os.path.lexists(f"{directory}/{NAME}")


def write(directory: str, new: bytes) -> None:
    """Write ``new`` as the content of the file, without waiting for its lock.

    Args:
        directory: the path of a directory that only the agent can change.
        new: the content, see `encode`.

    Raises:
        LockedError: the file is locked, and was not changed.
        HostFileError: the file cannot be written, or there is no such directory.
    """
    path = f"{directory}/{NAME}"
    try:
        folder = os.open(directory, _DIRECTORY_FLAGS)
        try:
            descriptor = os.open(NAME, _FILE_FLAGS, dir_fd=folder)
        finally:
            os.close(folder)
    except FileNotFoundError as err:
        if not os.path.isdir(directory):
            raise file_error("write", path, err) from err
        replace_file(path, new, _MODE)
        return
    except OSError as err:
        raise file_error("write", path, err) from err
    try:
        _write(descriptor, path, new)
    except OSError as err:
        raise file_error("write", path, err) from err
    finally:
        os.close(descriptor)  # this also releases the lock


def _write(descriptor: int, path: str, new: bytes) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise HostFileError(f"cannot write {path}: it is not a regular file; remove it")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        raise LockedError(f"cannot write {path}: a process of the container has locked it") from err
    written = 0
    while written < len(new):
        written += os.pwrite(descriptor, new[written:], written)
    os.ftruncate(descriptor, len(new))
    os.fchmod(descriptor, _MODE)
