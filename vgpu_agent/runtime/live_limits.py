"""The change of a limit of a running container, by the protocol of ``vgpu.config``, the file
in which vgpu-manager's libvgpu-control.so finds the container's limits.

The library has the file mapped and reads a card's slot, its part of the file, without a lock: it
takes what it has read when the slot's sequence number was even and the same before and after, and
tries again otherwise. A writer locks the slot's bytes, makes the number odd, writes, and makes it
even (vgpu-manager §7.7). So a reader never acts on one half of the old limits and one half of the
new.

The agent writes to the file and does not map it. During each write the kernel locks the file
internally, so the three become visible in their order on every processor. A killed agent leaves an
odd number at worst, on which readers give up and keep the limits that they have; the next change
goes on from there. Called in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
import time
from typing import TYPE_CHECKING

from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation.vgpu_config import (
    MAGIC,
    SIZE,
    SLOT_SEQUENCE,
    SLOT_SIZE,
    VERSION,
    limits_offset,
    slot_offset,
)
from vgpu_agent.runtime import host_files

if TYPE_CHECKING:
    from vgpu_agent.isolation.vgpu_config import SlotLimit

# struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, pid
_FLOCK = struct.Struct("<hhxxxxqqixxxx")
# how long a writer waits for another one, and the pause between two tries
_LOCK_SECONDS = 1.0
_PAUSE_SECONDS = 0.005
_HEAD = struct.Struct("<2I")  # the file begins with its magic number and the version of its layout
_WRAP = 0xFFFFFFFF  # a sequence number has 32 bits
# Without following a link, and without waiting for a lease that a container has taken.
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# Keeps our own threads apart where the lock of a reader prevents ours on the file.
_changing = threading.Lock()


def change_limit(path: str, index: int, limit: SlotLimit) -> None:
    """Put ``limit`` in force for one card of the container with this ``vgpu.config``. ``index`` is
    that of the card on the host. Readers see the old limit or the new one.

    Raises:
        HostFileError: the file is not one of the agent's, or another process is changing that slot.
    """
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError as err:
        raise host_files.file_error("open", path, err) from err
    try:
        _require_ours(descriptor, path)
        with _changing:
            _lock(descriptor, path, slot_offset(index))
            _write(descriptor, slot_offset(index), limits_offset(index), limit.packed())
    except OSError as err:
        raise host_files.file_error("write", path, err) from err
    finally:
        os.close(descriptor)  # and with it the lock


def _require_ours(descriptor: int, path: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != SIZE:
        raise HostFileError(
            f"{path} is no file of {SIZE} bytes, so it has no limits to change; recreate the pod"
        )
    if os.pread(descriptor, _HEAD.size, 0) != _HEAD.pack(MAGIC, VERSION):
        raise HostFileError(
            f"{path} has a layout that this agent does not write, so its limits are left as they "
            "are; recreate the pod"
        )


def _lock(descriptor: int, path: str, start: int) -> None:
    """Lock the slot against other writers.

    A container has the file open for reading and may hold a lock for reading on it for ever. Only a
    writer's lock is waited for, and a container can have none.
    """
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_WRLCK, start))
        except OSError as err:
            if err.errno not in {errno.EAGAIN, errno.EACCES}:
                raise
        else:
            return
        held = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock_of(fcntl.F_WRLCK, start))
        if _FLOCK.unpack(held)[0] == fcntl.F_RDLCK and not _has_writer(descriptor, start):
            return
        if time.monotonic() > until:
            raise HostFileError(
                f"another program is changing {path} and has not ended within "
                f"{_LOCK_SECONDS:g} s; see who has it open"
            )
        time.sleep(_PAUSE_SECONDS)


def _has_writer(descriptor: int, start: int) -> bool:
    """Tell whether a writer has a lock behind that of a reader: the kernel names one of them."""
    read_lock = _lock_of(fcntl.F_RDLCK, start)
    held = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, read_lock)
    return bool(_FLOCK.unpack(held)[0] != fcntl.F_UNLCK)


def _lock_of(kind: int, start: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, SLOT_SIZE, 0)


def _write(descriptor: int, at: int, limits_at: int, limits: bytes) -> None:
    (sequence,) = SLOT_SEQUENCE.unpack(os.pread(descriptor, SLOT_SEQUENCE.size, at))
    odd = sequence | 1
    os.pwrite(descriptor, SLOT_SEQUENCE.pack(odd), at)
    os.pwrite(descriptor, limits, limits_at)
    os.pwrite(descriptor, SLOT_SEQUENCE.pack((odd + 1) & _WRAP), at)
