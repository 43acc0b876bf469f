"""A wake-up call when a directory changes, 0.3 ms after it did: the part of Linux' inotify that `directory` needs, by ctypes.

What changed is not reported, because `directory` looks for itself: events can be lost, and a look is needed after the first wake-up anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# linux/inotify.h
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x40, 0x80, 0x100, 0x200, 0x400, 0x800
_MASK = _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF

_libc = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """Watches at most one directory at a time and calls ``wake`` on the event loop for each batch of changes.

    Raises:
        OSError: the kernel gives no instance (``fs.inotify.max_user_instances`` reached).
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise _error("inotify_init1")
        self._watch = -1
        asyncio.get_running_loop().add_reader(self._descriptor, self._readable)

    def watch(self, directory: Path) -> None:
        """Watch ``directory`` instead of what was watched before; a call for the same directory changes nothing.

        A directory that was replaced by another of the same name is noticed here: its watch has a new number.

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

    def close(self) -> None:
        """Give the instance back to the kernel."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 65536)
        self._wake()


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
