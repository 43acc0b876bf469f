"""A wake-up call within 0.3 ms after a directory has changed:
the part of Linux' inotify that `directory` needs, through ctypes.

The change itself is not reported, because `directory` reads the directory: events can be lost, and
a read is needed after the first wake-up anyway. Changes of irrelevant names cause no wake-up: the
kubelet rewrites its checkpoint in the same directory several times for every pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# linux/inotify.h
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = (
    0x40,
    0x80,
    0x100,
    0x200,
    0x400,
    0x800,
)
_MASK = _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF

# struct inotify_event: number of the watch, mask, cookie, length of the name that follows
_EVENT = struct.Struct("iIII")
_READ_AT_ONCE = 16 * 1024  # an event has 272 bytes at most; the rest causes another wake-up

_libc = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """A watch on at most one directory at a time;
    calls ``wake`` on the event loop for each batch of changes.

    Raises:
        OSError: the kernel gives no instance (``fs.inotify.max_user_instances`` reached).
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise _error("inotify_init1")
        self._watch = -1  # the kernel's number of the watch; -1 while there is none
        self._ending = b""
        asyncio.get_running_loop().add_reader(self._descriptor, self._readable)

    def watch(self, directory: Path, *, ending: str = "") -> None:
        """Watch ``directory`` instead of the previous one;
        a call for the same directory changes nothing.

        A directory that was replaced by another of the same name is noticed here: its watch has a
        new number.

        Args:
            directory: the directory to watch.
            ending: the ending of the relevant names; changes of the directory itself are always
                relevant.

        Raises:
            OSError: it is not there, or ``fs.inotify.max_user_watches`` is reached.
        """
        watch = _libc.inotify_add_watch(self._descriptor, os.fsencode(directory), _MASK)
        if watch < 0:
            raise _error(f"inotify_add_watch {directory}")
        if watch != self._watch:
            if self._watch >= 0:
                _libc.inotify_rm_watch(self._descriptor, self._watch)
            self._watch = watch
        self._ending = os.fsencode(ending)

    def close(self) -> None:
        """Stop watching, and close the inotify descriptor."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _readable(self) -> None:
        events = b""
        with contextlib.suppress(BlockingIOError):
            events = os.read(self._descriptor, _READ_AT_ONCE)
        if self._matters(events):
            self._wake()

    def _matters(self, events: bytes) -> bool:
        """Tell whether one of ``events`` concerns a relevant name or the directory itself,
        or reports lost events.
        """
        position = 0
        while position < len(events):
            watch, _, _, length = _EVENT.unpack_from(events, position)
            position += _EVENT.size + length
            name = events[position - length : position].rstrip(b"\0")
            if watch != self._watch or not name or name.endswith(self._ending):
                return True
        return False


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
