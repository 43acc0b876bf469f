"""Directories and files on the host that a container needs before it starts.

Isolation backends name them (`Provision.directories`, `Provision.files`), `grants` calls here to make them, `hami_library` to install a
file. Everything blocks and belongs into a thread. A file appears whole under its name or not at all, whenever the agent is killed.

Containers may write into some of these directories, so nothing there is trusted: links are never followed, and what has the wrong kind is
replaced or refused.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import random
import shutil
import stat
from typing import TYPE_CHECKING

from vgpu_agent.errors import CarrierError
from vgpu_agent.runtime.mounts import Use

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.isolation.edits import HostFile, Provision
    from vgpu_agent.runtime.mounts import MountTables

# A leading dot and this end: what reads the directory (the runtime for CDI specs, a monitor for *.cache) passes it over.
TEMPORARY_PREFIX = ".vgpu-agent-"
TEMPORARY_SUFFIX = ".tmp"

_PASSABLE = 0o755

_NEAR_BYTES = 4096  # a page is written, and takes its space, as a whole


class _State(enum.Enum):
    """What is found under the name of a file that is wanted."""

    MISSING = "missing"  # or something that is not this file at all
    FRESH = "fresh"  # as if it had just been made
    USED = "used"  # a file of its size with other content


_REMEDIES = {
    errno.ENOSPC: "free some space on that file system",
    errno.EDQUOT: "raise the quota of that file system",
    errno.EROFS: "mount it writable for the agent, or set another directory",
    errno.EACCES: "let the agent write there (owner, mode, security policy)",
    errno.EPERM: "let the agent write there (owner, mode, security policy)",
    errno.ENOTDIR: "move away what stands in the place of a directory",
    errno.EEXIST: "move away what stands in the place of a directory",
    errno.EISDIR: "move away the directory that stands in the place of the file",
    errno.ELOOP: "replace the symbolic link by what it names",
    errno.ENOENT: "mount the directory into the agent under the same path",
    errno.EIO: "look after the disk (see the kernel's log)",
}


def trouble(action: str, path: str, err: OSError) -> CarrierError:
    """The error for an operator: what could not be done, to which path, why, and what helps."""
    remedy = _REMEDIES.get(err.errno or 0, "look after that file system")
    return CarrierError(f"cannot {action} {path}: {err.strerror or err}; {remedy}")


def make(provision: Provision, mounts: MountTables) -> None:
    """Make the provision's directories, then its files; what is there already and right stays untouched.

    Raises:
        CarrierError: the first that could not be made; those before it are whole.
    """
    for directory in provision.directories:
        make_directory(directory.path, directory.mode)
    for file in provision.files:
        make_file(file, mounts)


def make_directory(path: str, mode: int = 0o755) -> None:
    """Make ``path`` with exactly ``mode``, whatever the umask; missing parents get 0755.

    Raises:
        CarrierError: it cannot be made, or something else stands there.
    """
    try:
        if not _is_directory(path, mode):
            _make_directory(path, mode)
    except OSError as err:
        raise trouble("make directory", path, err) from err


def make_file(file: HostFile, mounts: MountTables) -> None:
    """Make the file, as its `HostFile` says.

    One that is there with the same content stays. One that containers have mounted keeps its inode and gets ``renewed`` in place. One
    that nobody has mounted is what an ended container left, and is replaced by a fresh one, so that its old entries are nobody's burden.

    Raises:
        CarrierError: it cannot be made.
    """
    try:
        state = _state(file)
        if state is _State.FRESH:
            _set_mode(file.path, file.mode)
        elif state is _State.USED and file.renewed and mounts.mounted_below(file.path) is not Use.FREE:
            _write_in_place(file.path, file.renewed, file.mode)
        else:
            _replace(file.path, file.size, file.parts, file.mode)
    except OSError as err:
        raise trouble("write", file.path, err) from err


def replace_file(path: str, content: bytes, mode: int = 0o644) -> None:
    """Put ``content`` under ``path``: the old file or the new one is seen, never a part; an old one keeps living where it is mounted.

    Its directory is made where there is none, as /run has none after a reboot.

    Raises:
        CarrierError: it cannot be written.
    """
    try:
        try:
            _replace(path, len(content), ((0, content),), mode)
        except FileNotFoundError:
            if os.path.isdir(os.path.dirname(path)):
                raise  # it was something else, and the directory keeps its mode
            make_directory(os.path.dirname(path))
            _replace(path, len(content), ((0, content),), mode)
    except OSError as err:
        raise trouble("write", path, err) from err


def has(path: str, content: bytes) -> bool:
    """Whether ``path`` is a file with exactly ``content``; a link is not, nor what cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.read(descriptor, len(content) + 1) == content
        finally:
            os.close(descriptor)
    except OSError:
        return False


def remove_tree(path: str) -> None:
    """Remove a directory and all in it, following no link; fine when it is gone already.

    Raises:
        CarrierError: something in it cannot be removed.
    """
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as err:
        raise trouble("remove", str(err.filename or path), err) from err


def is_temporary(name: str) -> bool:
    """Whether a file of this name is a half-written one that a killed agent left."""
    return name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX)


def _is_directory(path: str, mode: int) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == mode


def _make_directory(path: str, mode: int) -> None:
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, 0o700)
        except FileNotFoundError:
            _make_parents(path)
            os.mkdir(path, 0o700)
    # Through a descriptor, so that the mode is given to this directory and to nothing that a link names.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _make_parents(path: str) -> None:
    parent = os.path.dirname(path.rstrip("/"))
    if not parent or os.path.isdir(parent):
        return
    _make_parents(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(parent, 0o700)
        os.chmod(parent, _PASSABLE)


def _state(file: HostFile) -> _State:
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        if err.errno in {errno.ENOENT, errno.ELOOP, errno.ENXIO}:
            return _State.MISSING  # a link or a socket is replaced like nothing
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
            return _State.MISSING
        return _State.FRESH if _is_fresh(descriptor, file) else _State.USED
    finally:
        os.close(descriptor)


def _is_fresh(descriptor: int, file: HostFile) -> bool:
    """Whether the parts stand there and all else is zero; only what takes up space is read, a few pages of a large file."""
    if any(os.pread(descriptor, len(part), offset) != part for offset, part in file.parts):
        return False
    begin = 0
    while begin < file.size:
        try:
            begin = os.lseek(descriptor, begin, os.SEEK_DATA)
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as err:
            if err.errno == errno.ENXIO:
                return True  # a hole up to the end
            raise
        found = bytearray(os.pread(descriptor, end - begin, begin))
        for offset, part in file.parts:
            low, high = max(offset, begin), min(offset + len(part), end)
            if low < high:
                found[low - begin : high - begin] = bytes(high - low)
        if found.count(0) != len(found):
            return False
        begin = end
    return True


def _set_mode(path: str, mode: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _write_in_place(path: str, parts: Sequence[tuple[int, bytes]], mode: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _write_parts(descriptor, parts)
    finally:
        os.close(descriptor)
    _set_mode(path, mode)


def _replace(path: str, size: int, parts: Sequence[tuple[int, bytes]], mode: int) -> None:
    # The name need only be new. Whoever guesses it can lay nothing in its place, because the file is made and not opened; a container that
    # did so in its own directory would only keep itself from starting.
    name = f"{TEMPORARY_PREFIX}{random.getrandbits(64):016x}{TEMPORARY_SUFFIX}"
    temporary = os.path.join(os.path.dirname(path), name)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            joined = _joined(parts)
            _write_parts(descriptor, joined)
            if max(map(_end, joined), default=0) < size:
                os.ftruncate(descriptor, size)  # what no part covers stays a hole: it reads as zero and takes no space
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _joined(parts: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The same parts for an empty file, those near to each other as one, with zeros between.

    A container waits for them, and around each system call a thread has to wait for the interpreter, which the event loop may have.
    """
    joined: list[tuple[int, bytes]] = []
    end = 0  # the furthest of all so far; what overlaps is written one over the other, in order
    for offset, part in parts:
        if joined and 0 <= offset - end < _NEAR_BYTES and _end(joined[-1]) == end:
            before, content = joined.pop()
            joined.append((before, content + bytes(offset - end) + part))
        elif part:
            joined.append((offset, part))
        end = max(end, offset + len(part))
    return joined


def _end(part: tuple[int, bytes]) -> int:
    offset, content = part
    return offset + len(content)


def _write_parts(descriptor: int, parts: Sequence[tuple[int, bytes]]) -> None:
    for offset, part in parts:
        written = 0
        while written < len(part):
            written += os.pwrite(descriptor, part[written:], offset + written)
