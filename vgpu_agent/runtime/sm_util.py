"""The file of samples that the libraries of all containers read: ``watcher/sm_util.config``
(vgpu-manager §7.7, §8.6). The samples are the GPU use of each process, by NVML.

Containers have it mounted read-only and map it. Each GPU has its own part of the file, here called
its slot. A slot has a lock on one byte that belongs to an open file and not to a process (fcntl(2),
F_OFD_SETLK). Even a process that can only read the file can take such a lock and keep it, and one
container's lock must not stop the samples of all others. So the lock is tried for a moment, and
then the slot is written without it. A reader may then see half of an old sample and half of a new
one, until the next sample 80 ms later.

The file is written with system calls and not through a mapping: a process that writes to a mapping
of a truncated file gets SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from typing import TYPE_CHECKING

from vgpu_agent.isolation.vgpu_config import MAX_CARDS
from vgpu_agent.isolation.vgpu_tables import (
    SM_UTIL_COMPUTE,
    SM_UTIL_COMPUTE_COUNT,
    SM_UTIL_GRAPHICS,
    SM_UTIL_GRAPHICS_COUNT,
    SM_UTIL_LAST_SEEN,
    SM_UTIL_LOCK,
    SM_UTIL_PROCESS,
    SM_UTIL_SAMPLE,
    SM_UTIL_SAMPLE_COUNT,
    SM_UTIL_SAMPLES,
    SM_UTIL_SIZE,
    SM_UTIL_SLOT_SIZE,
)
from vgpu_agent.runtime.host_files import file_error, make_directory, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "sm_util.config"
_MODE = 0o644
# of the number of rows, and of the time since when the samples count
_COUNT, _SEEN = struct.Struct("<I"), struct.Struct("<Q")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
_TRIES, _PAUSE_SECONDS = 4, 0.0001  # a reader copies a slot in less
# For this long, a lock that could not be taken is tried only once for each write.
_REST_SECONDS = 1.0


class SmUtilFile:
    """The file, open. Any one thread may write to it.

    State: the open file, and the slots whose locks are held by others.

    Args:
        directory: made when it is missing; containers mount it.
        kept_locked: called with the index of a GPU whose lock another process keeps, each time
            that a write has tried for a moment to take it, at most once in `_REST_SECONDS`.

    Raises:
        HostFileError: the file cannot be made.
    """

    def __init__(self, directory: str, kept_locked: Callable[[int], None]) -> None:
        self._path = os.path.join(directory, NAME)
        self._kept_locked = kept_locked
        # of each slot: until when (monotonic seconds) its lock is tried only once for each write
        self._rests_until = [0.0] * MAX_CARDS
        make_directory(directory)
        self._descriptor = self._opened()

    def write(
        self,
        index: int,
        since: int,
        samples: memoryview | None,
        compute: memoryview,
        graphics: memoryview,
    ) -> None:
        """Put the rows of one GPU, as NVML lays them out, into its slot.

        Old samples stay where there are no newer ones: readers leave out those from before
        ``since``.

        Args:
            index: of the GPU, the number of its slot.
            since: unix microseconds; the samples are not older.
            samples: rows of use, one for each process and time; None where there are no newer ones.
            compute: rows of the processes that compute.
            graphics: rows of the processes that draw.
        """
        if not 0 <= index < MAX_CARDS:
            return
        slot = index * SM_UTIL_SLOT_SIZE  # where the slot begins in the file
        locked = self._lock(index)
        try:
            if samples is not None:
                self._rows(slot, SM_UTIL_SAMPLES, SM_UTIL_SAMPLE_COUNT, samples, SM_UTIL_SAMPLE)
            self._rows(slot, SM_UTIL_COMPUTE, SM_UTIL_COMPUTE_COUNT, compute, SM_UTIL_PROCESS)
            self._rows(slot, SM_UTIL_GRAPHICS, SM_UTIL_GRAPHICS_COUNT, graphics, SM_UTIL_PROCESS)
            os.pwrite(self._descriptor, _SEEN.pack(since), slot + SM_UTIL_LAST_SEEN)
        finally:
            if locked:
                self._set_lock(index, fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the file, whose last samples stay in it."""
        os.close(self._descriptor)

    def _rows(
        self, slot: int, at: int, count_at: int, rows: memoryview, layout: struct.Struct
    ) -> None:
        """Write ``rows`` of ``layout`` and their number into the slot that begins at ``slot``;
        ``at`` and ``count_at`` are the places in the slot.
        """
        if rows.nbytes:
            os.pwrite(self._descriptor, rows, slot + at)
        os.pwrite(self._descriptor, _COUNT.pack(rows.nbytes // layout.size), slot + count_at)

    def _lock(self, index: int) -> bool:
        """Try for a moment to lock the slot; tell whether it is locked. It is written anyway."""
        if time.monotonic() < self._rests_until[index]:
            return self._set_lock(index, fcntl.F_WRLCK)
        for _ in range(_TRIES):
            if self._set_lock(index, fcntl.F_WRLCK):
                return True
            time.sleep(_PAUSE_SECONDS)
        self._rests_until[index] = time.monotonic() + _REST_SECONDS
        self._kept_locked(index)
        return False

    def _set_lock(self, index: int, kind: int) -> bool:
        at = index * SM_UTIL_SLOT_SIZE + SM_UTIL_LOCK
        request = _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)
        except OSError as err:
            if err.errno in {errno.EAGAIN, errno.EACCES}:
                return False
            raise
        return True

    def _opened(self) -> int:
        """Open the file. A file of the right size is kept, because containers have it mapped."""
        try:
            descriptor = self._open()
            if descriptor is None:
                replace_file(self._path, bytes(SM_UTIL_SIZE), _MODE)
                descriptor = self._open()
        except OSError as err:
            raise file_error("open", self._path, err) from err
        if descriptor is None:
            raise file_error("open", self._path, OSError(errno.EIO, "it was replaced meanwhile"))
        return descriptor

    def _open(self) -> int | None:
        try:
            descriptor = os.open(
                self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as err:
            if err.errno in {errno.ENOENT, errno.ELOOP, errno.ENXIO}:
                return None
            raise
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size == SM_UTIL_SIZE:
            os.fchmod(descriptor, _MODE)
            return descriptor
        os.close(descriptor)
        return None
