"""The guard that keeps region files, and other files that backends mount writable, at their size.

A container has its region mounted writable, so it can make the file grow until the node's disk is
full. No file that an unprivileged agent can make has a size that only the agent may change: seals
belong to files in memory, which the kernel does not allow to be mounted. So growth is undone: the
kernel reports every write (inotify(7)), and the file is cut back within milliseconds, through a
descriptor that is held open. The library itself writes through a mapping, which the kernel does not
report, and never beyond the end.

The descriptor also keeps a container from taking a lease on the file (fcntl(2)), on which an open
would wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import itertools
import os
import select
import stat
import struct
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent import log
from vgpu_agent.errors import HostFileError
from vgpu_agent.runtime.own_thread import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vgpu_agent.journal import Journal

_logger = log.get(__name__)

# IN_MODIFY, IN_ATTRIB of linux/inotify.h: written, cut or allocated; attributes take space too
_MODIFIED = 0x2 | 0x4
# struct inotify_event: watch, mask, cookie, length of the name that follows
_EVENT = struct.Struct("iIII")
_READ_AT_ONCE = 64 * 1024

_PAUSE_SECONDS = 0.001  # between two looks at files that are being written, however often they are
_MAX_FILES = 4096  # containers of one backend that are looked at
_MAX_FILES_EACH = 32  # of one container, in one of its directories
_DEADLINE_SECONDS = 30.0  # for one `look` at all files
_ROOM_SECONDS = 0.5  # the longest that `free_disk_space` waits
_REST_SECONDS = 10.0  # a region that could not be cut to its size is left alone for this long
_BLOCK_BYTES = 512  # of st_blocks (stat(2))
_SLACK_BYTES = 128 << 10  # what a file system adds to a file for itself

_libc = ctypes.CDLL(None, use_errno=True)


class GuardedPlace(NamedTuple):
    """The files that the containers of one backend write to.

    Attributes:
        directory: where each container has a directory of its own.
        folders: the directories in it that have the files; "" for the container's directory itself.
        allowed_size: a file's name → how large it may be, in bytes; None for a file that is left
            alone.
    """

    directory: str
    folders: Sequence[str]
    allowed_size: Callable[[str], int | None]


class RegionGuard:
    """The watch on the files that containers write to. Here *region* means any of them, also those
    of backends other than HAMi-core.

    State: a descriptor and a watch for each region, and the regions that have grown. A new agent
    makes all of it again from the files.

    Args:
        places: where the regions are.
        journal: each region that grew is recorded there once.
        pause_seconds: between two searches for new regions, which also check all sizes, in case
            there is no inotify.
    """

    def __init__(
        self, places: Sequence[GuardedPlace], journal: Journal, *, pause_seconds: float
    ) -> None:
        self.cuts = 0  # how often a region was cut
        self._places = tuple(places)
        self._journal = journal
        self._pause_seconds = pause_seconds
        self._own_thread = OwnThread("region files")
        self._regions: dict[str, int] = {}  # path → descriptor
        self._watches: dict[int, str] = {}  # of inotify → path
        self._changing = threading.Lock()  # held while `_regions` and `_watches` are used
        self._inotify = -1
        # wakes the thread for `free_disk_space`
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._looked = threading.Event()  # set once all is cut that `free_disk_space` asked for
        # what was logged already: the paths of regions that were cut, "read" while that
        # fails, and "watch" once that has failed
        self._changes = log.ChangeFilter()
        # path → until when it is left as it is (monotonic seconds)
        self._rests_until: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self) -> None:
        """Guard until cancelled."""
        self._loop = asyncio.get_running_loop()
        if self._thread is None:
            self._begin()
        directories = " and ".join(place.directory for place in self._places)
        while True:
            try:
                await self._own_thread.run(directories, self.look, seconds=_DEADLINE_SECONDS)
                self._changes.forget("read")
            except HostFileError as err:
                if self._changes.is_new("read"):
                    _logger.warning("regions.not_read", directory=directories, error=str(err))
            await asyncio.sleep(self._pause_seconds)

    def look(self) -> None:
        """Begin to guard new regions, stop guarding those that are gone, and cut what has grown.
        Blocks.
        """
        found = set(self._found())
        with self._changing:
            gone = [path for path in self._regions if path not in found]
        for path in gone:
            with self._changing:
                self._let_go(path)
            self._changes.forget(path)
            self._rests_until.pop(path, None)
        for path in found:
            self.take(path)
        self.cut_all()

    def take(self, path: str) -> None:
        """Begin to guard one region, also one that has replaced another at its path. Any other
        file is left alone. Blocks.
        """
        if self._allowed_size(path) is None:
            return
        with self._changing:
            known = self._regions.get(path)
            try:
                if known is not None and os.path.samestat(os.fstat(known), os.lstat(path)):
                    return
                if known is not None:
                    self._let_go(path)
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                return  # gone again, or leased: the next look tries again
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or os.path.basename(path).startswith(
                "."
            ):
                os.close(descriptor)
                return
            self._regions[path] = descriptor
            if self._inotify >= 0:
                watch = _libc.inotify_add_watch(
                    self._inotify, f"/proc/self/fd/{descriptor}".encode(), _MODIFIED
                )
                if watch >= 0:
                    self._watches[watch] = path
                elif self._changes.is_new("watch"):
                    number = ctypes.get_errno()
                    _logger.warning(
                        "regions.not_watched",
                        path=path,
                        error=os.strerror(number),
                        remedy=(
                            "raise fs.inotify.max_user_watches"
                            if number == errno.ENOSPC
                            else "check that the agent runs as root and may read that file"
                        ),
                    )

    def free_disk_space(self) -> None:
        """Have the guard cut all that has grown, because the disk is full, and wait a moment for
        it. Call this in any thread but the event loop's.
        """
        self._looked.clear()
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._looked.wait(_ROOM_SECONDS)

    def cut_all(self) -> None:
        """Cut every region that has grown. Blocks."""
        with self._changing:
            paths = tuple(self._regions)
        for path in paths:
            self._cut(path)

    def _begin(self) -> None:
        self._inotify = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._inotify < 0:
            _logger.warning(
                "regions.inotify_unavailable",
                error=os.strerror(ctypes.get_errno()),
                remedy=(
                    "raise fs.inotify.max_user_instances; until then sizes are looked at now and "
                    "then"
                ),
                pause_seconds=self._pause_seconds,
            )
        with self._changing:  # taken before inotify, so unwatched; `look` takes them again
            for path in tuple(self._regions):
                self._let_go(path)
        self._thread = threading.Thread(target=self._follow, name="region sizes", daemon=True)
        self._thread.start()

    def _found(self) -> Iterator[str]:
        for place in self._places:
            try:
                with os.scandir(place.directory) as owners:
                    for owner in itertools.islice(owners, _MAX_FILES):
                        # is_dir() is true for a link into a slot, too; only the agent makes links
                        if not owner.name.startswith(".") and owner.is_dir():
                            yield from self._found_in(owner.path, place)
            except OSError:  # a grant is being removed, or there has been none yet
                continue

    @staticmethod
    def _found_in(owner: str, place: GuardedPlace) -> Iterator[str]:
        """Yield the files in the directory ``owner`` of one container."""
        for folder in place.folders:
            with (
                contextlib.suppress(FileNotFoundError),
                os.scandir(os.path.join(owner, folder)) as files,
            ):
                for file in itertools.islice(files, _MAX_FILES_EACH):
                    if (
                        file.is_file(follow_symlinks=False)
                        and place.allowed_size(file.name) is not None
                    ):
                        yield file.path

    def _allowed_size(self, path: str) -> int | None:
        for place in self._places:
            if path.startswith(f"{place.directory}/"):
                return place.allowed_size(os.path.basename(path))
        return None

    def _let_go(self, path: str) -> None:
        """Close the region's descriptor and watch; only while `_changing` is held."""
        for watch in [watch for watch, watched in self._watches.items() if watched == path]:
            del self._watches[watch]
            _libc.inotify_rm_watch(self._inotify, watch)
        os.close(self._regions.pop(path))

    def _follow(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._inotify >= 0:
            poll.register(self._inotify, select.POLLIN)
        while True:
            poll.poll()
            asked = _drained(self._wake, 8)
            events = _drained(self._inotify, _READ_AT_ONCE) if self._inotify >= 0 else b""
            if asked:
                self.cut_all()
                self._looked.set()
            for path in self._changed(events):
                self._cut(path)
            time.sleep(_PAUSE_SECONDS)

    def _changed(self, events: bytes) -> list[str]:
        watches, position = set(), 0
        while position < len(events):
            watch, _, _, length = _EVENT.unpack_from(events, position)
            position += _EVENT.size + length
            watches.add(watch)
        with self._changing:
            if -1 in watches:  # the kernel's queue of events was full
                return list(self._regions)
            return [self._watches[watch] for watch in watches if watch in self._watches]

    def _cut(self, path: str) -> None:
        size = self._allowed_size(path)
        if size is None or time.monotonic() < self._rests_until.get(path, 0.0):
            return
        try:
            with self._changing:
                known = self._regions.get(path)
                if known is None:
                    return
                descriptor = os.dup(known)  # the file may go meanwhile, and to cut it may take long
            try:
                if not _has_grown(descriptor, size):
                    return
                os.ftruncate(descriptor, size)
                if _has_grown(descriptor, size):
                    # Space after the end, or in attributes, which the size does not show. The byte
                    # before the end is unused.
                    for name in os.listxattr(descriptor):
                        if name.startswith("user."):
                            os.removexattr(descriptor, name)
                    os.ftruncate(descriptor, size - 1)
                    os.ftruncate(descriptor, size)
                if _has_grown(descriptor, size):
                    # Nothing helps, and the kernel would report each attempt at once as a change.
                    self._rests_until[path] = time.monotonic() + _REST_SECONDS
            finally:
                os.close(descriptor)
        except OSError as err:
            _logger.warning("region.not_cut", path=path, error=err.strerror or str(err))
            return
        self._call(self._note, path)

    def _owner(self, path: str) -> str:
        """Return the name of the container's directory that has the file; empty if none has."""
        for place in self._places:
            if path.startswith(f"{place.directory}/"):
                return path.removeprefix(f"{place.directory}/").partition("/")[0]
        return ""

    def _call(self, call: Callable[[str], None], path: str) -> None:
        """Have the event loop call ``call`` with ``path``."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call, path)
        except RuntimeError:
            return  # the event loop has ended

    def _note(self, path: str) -> None:
        self.cuts += 1
        if self._changes.is_new(path):
            self._journal.record(
                "region.cut",
                level="warning",
                path=path,
                container=self._owner(path),
                reason=(
                    f"its container made it larger than {self._allowed_size(path)} bytes, to fill "
                    "the disk or by "
                    "mistake"
                ),
            )


def _has_grown(descriptor: int, size: int) -> bool:
    status = os.fstat(descriptor)
    return status.st_size > size or status.st_blocks * _BLOCK_BYTES > size + _SLACK_BYTES


def _drained(descriptor: int, most: int) -> bytes:
    try:
        return os.read(descriptor, most)
    except BlockingIOError:
        return b""
