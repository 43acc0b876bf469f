"""The removal of files that containers have left behind, in whatever form.

A container may leave a million files, a tree of any depth, names of 255 bytes, and directories that
not even root may enter without capabilities. So nothing here recurses, keeps a list, or builds a
long path: a directory that is not empty is lifted to the top of the tree, and emptied from there.
Every tree takes the same few descriptors and little memory, and work ends when its time is up, to
go on later from what is left. Called by `grants`, in a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from typing import TYPE_CHECKING

from vgpu_agent.runtime import host_files, region_slots

if TYPE_CHECKING:
    from collections.abc import Callable

_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NAME_ONLY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIFTED = ".vgpu-agent-lifted-"
_MAX_TRIES = 64  # names that a container has taken before us
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}


class _TimeUpError(Exception):
    """The time is up. This is no failure: the next call removes the rest."""


def remove_tree(
    path: str, *, seconds: float = float("inf"), clock: Callable[[], float] = time.monotonic
) -> bool:
    """Remove a directory and all in it, following no link; fine when it is gone already. Only a
    link into a slot is followed: first its target is removed, then the link.

    Args:
        path: of the directory.
        seconds: stop after this time.
        clock: measures it.

    Returns:
        whether it is gone; what is left after ``seconds`` is removed by further calls.

    Raises:
        HostFileError: something cannot be removed; all the rest has been.
    """
    until = clock() + seconds
    try:
        if not os.path.islink(path):
            return _Tree(path, until, clock).remove()
        if (inside := region_slots.resolve_slot(path)) != path and not _Tree(
            inside, until, clock
        ).remove():
            return False
        os.unlink(path)
    except _TimeUpError:
        return False
    except OSError as err:
        raise host_files.file_error("remove", path, err) from err
    return True


class _Tree:
    """The removal of one tree until ``until``, in passes that each remove or move what they can."""

    def __init__(self, path: str, until: float, clock: Callable[[], float]) -> None:
        self._path = path
        self._until = until
        self._clock = clock
        self._lifted = 0  # directories moved to the top so far, for their new names
        # of the present pass: whether anything was removed or moved, and the last error
        self._progress = False
        self._trouble: OSError | None = None

    def remove(self) -> bool:
        try:
            if self._removed_empty():
                return True
            top = self._entered(None, self._path)
        except OSError as err:
            raise host_files.file_error("remove", self._path, err) from err
        try:
            while True:
                self._progress, self._trouble = False, None
                self._empty(top, top)
                if not self._progress:
                    break
        except OSError as err:
            self._trouble = err
        finally:
            os.close(top)
        try:
            if self._trouble is None and self._removed_empty():
                return True
        except OSError as err:
            self._trouble = err
        left = self._trouble or OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        raise host_files.file_error("remove all of", self._path, left) from left

    def _removed_empty(self) -> bool:
        """Remove the directory if it is empty; tell whether it is gone."""
        try:
            os.rmdir(self._path)
        except FileNotFoundError:
            return True
        except OSError as err:
            if err.errno not in _NOT_EMPTY:
                raise
            return False
        return True

    def _empty(self, directory: int, top: int) -> None:
        """Empty ``directory``, an open one that is ``top`` or lies in it; directories in it that
        are not empty go to ``top``.
        """
        with os.scandir(directory) as entries:
            for entry in entries:
                if self._clock() > self._until:
                    raise _TimeUpError
                try:
                    if entry.is_dir(follow_symlinks=False):
                        self._remove_directory(entry.name, directory, top)
                    else:
                        os.unlink(entry.name, dir_fd=directory)
                        self._progress = True
                except FileNotFoundError:
                    self._progress = True  # the container deletes files there, too
                except OSError as err:
                    self._trouble = err

    def _remove_directory(self, name: str, directory: int, top: int) -> None:
        try:
            os.rmdir(name, dir_fd=directory)
        except OSError as err:
            if err.errno not in _NOT_EMPTY:
                raise
        else:
            self._progress = True
            return
        if directory != top:
            self._lift(name, directory, top)
            return
        inner = self._entered(directory, name)
        try:
            self._empty(inner, top)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=directory)
        self._progress = True

    def _lift(self, name: str, directory: int, top: int) -> None:
        for attempt in range(_MAX_TRIES):
            self._lifted += 1
            try:
                os.rename(name, f"{_LIFTED}{self._lifted}", src_dir_fd=directory, dst_dir_fd=top)
            except OSError as err:
                if err.errno == errno.EACCES and not attempt:
                    _make_writable(directory, name)  # to move a directory is to write to it
                elif err.errno not in {*_NOT_EMPTY, errno.ENOTDIR}:
                    raise
            else:
                self._progress = True
                return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    @staticmethod
    def _entered(parent: int | None, name: str) -> int:
        """Open a directory, made accessible first; without ``parent``, ``name`` is its path."""
        _make_writable(parent, name)
        return os.open(name, _ENTER, dir_fd=parent)


def _make_writable(parent: int | None, name: str) -> None:
    """Give the directory's owner full access to it. Do nothing if the agent may not do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(name, _NAME_ONLY, dir_fd=parent)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_IMODE(mode) & stat.S_IRWXU != stat.S_IRWXU:
                os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IMODE(mode) | stat.S_IRWXU)
        finally:
            os.close(descriptor)
