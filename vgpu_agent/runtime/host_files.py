"""Directories and files on the host that a container needs before it starts.

Isolation backends name them (`Provision.directories`, `Provision.files`), `grants` calls this to
make them, and `delivered_library` to install a library. All functions block, so call them in a
thread. A file or directory appears whole under its name or not at all, whenever the agent is
killed. Unfinished ones have fixed names, so they cannot pile up.

Containers write to the files, so nothing in them is trusted, and a file is opened once, without
following links and without waiting. The directories around them belong to the agent alone.
`require_only_root` checks that for every source of a mount.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import os
import stat
from typing import TYPE_CHECKING

from vgpu_agent.errors import HostFileError
from vgpu_agent.runtime.mounts import Use

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vgpu_agent.isolation.edits import HostFile, Provision
    from vgpu_agent.runtime.mounts import MountTables

# Programs that read the directory (the runtime for CDI specs, a monitor for *.cache) ignore names
# with a leading dot and this suffix.
TEMPORARY_PREFIX = ".vgpu-agent-"
TEMPORARY_SUFFIX = ".tmp"

_PASSABLE = 0o755  # the mode of missing parents: containers may pass through them
_WRITABLE_BY_OTHERS = 0o022  # by the group, or by all users

_NEAR_BYTES = 4096  # parts nearer than a page are joined: it is written as a whole in any case
_MAX_LINKS = 40  # followed in one path, as the kernel does

# Without following a link, and without waiting: for a FIFO's other end, or for a lease that a
# container has taken (fcntl(2)).
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# For each directory on the way to a file.
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# The prefix of a directory that was moved aside, within its parent, to be removed.
ASIDE_PREFIX = f"{TEMPORARY_PREFIX}gone-"
_MAX_ASIDE = 16


class _State(enum.Enum):
    """The state of a path that should be a file of ours."""

    MISSING = "missing"  # or something that is not this file at all
    FRESH = "fresh"  # as if it had just been made
    USED = "used"  # a file of its size with other content


_REMEDIES = {
    errno.ENOSPC: "free some space on that file system",
    errno.EDQUOT: "raise the quota of that file system",
    errno.EROFS: "mount it writable for the agent, or set another directory",
    errno.EACCES: "give the agent write access (owner, mode, security policy)",
    errno.EPERM: "give the agent write access (owner, mode, security policy)",
    errno.ENOTDIR: "move away the file that is in the place of a directory",
    errno.EEXIST: "move away the file that is in the place of a directory",
    errno.EISDIR: "move away the directory that stands in the place of the file",
    errno.ELOOP: "replace the symbolic link with what it names",
    errno.ENOENT: "mount the directory into the agent under the same path",
    errno.EIO: "check the disk (see the kernel's log)",
}


# The errors of the rename in `_make_directory` where another thread was faster.
_MADE_MEANWHILE = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}


def file_error(action: str, path: str, err: OSError) -> HostFileError:
    """The error for an operator: what could not be done, to which path, why, and what helps."""
    remedy = _REMEDIES.get(err.errno or 0, "check that file system")
    return HostFileError(f"cannot {action} {path}: {err.strerror or err}; {remedy}")


def make(provision: Provision, mounts: MountTables) -> None:
    """Make the provision's directories, then its files;
    those that exist and are right stay untouched.

    Args:
        provision: names them.
        mounts: tells whether a container has an existing file mounted; see `make_file`.

    Raises:
        HostFileError: the first that could not be made; those before it are whole.
    """
    for directory in provision.directories:
        make_directory(directory.path, directory.mode)
    for file in provision.files:
        make_file(file, mounts)
    if provision.replaces_earlier:  # the container mounts the directory of an earlier version
        _remake(provision)
    require_only_root(mount.host_path for mount in provision.edits.mounts)


def require_only_root(paths: Iterable[str]) -> None:
    """Refuse a mount source that others than root and the agent could replace.
    The path's own target may be writable.

    The container runtime follows links in a source, so anyone who can write to a directory on the
    way decides what a container sees. A sticky directory such as /tmp is fine: only the owner of an
    entry may replace it. A missing source is reported by the runtime.

    Raises:
        HostFileError: it could be replaced, or is named by too many links.
    """
    judged: set[str] = set()  # the directories that were found right
    for path in paths:
        _require_only_root(path, judged)


def move_aside(path: str) -> str:
    """Rename a directory within its parent, at once and with any content, and return its new path;
    "" when there is none.

    Within one parent a directory of any owner and mode can be renamed, and mounts of it stay as
    they are.

    Raises:
        HostFileError: it cannot be renamed.
    """
    parent, name = os.path.split(path)
    for number in range(_MAX_ASIDE):
        aside = os.path.join(parent, f"{ASIDE_PREFIX}{_digest(f'{name}/{number}')}")
        if os.path.lexists(aside):
            continue
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return ""
        except OSError as err:
            raise file_error("move aside", path, err) from err
        return aside
    raise HostFileError(
        f"cannot move aside {path}: {_MAX_ASIDE} earlier ones are still beside it; remove "
        f"{parent}/{ASIDE_PREFIX}* by hand"
    )


def make_directory(path: str, mode: int = 0o755) -> None:
    """Make ``path`` with exactly ``mode``, whatever the umask; missing parents get 0755.

    Raises:
        HostFileError: it cannot be made, the path is no directory, or it belongs to another user.
    """
    try:
        if not _is_directory(path, mode):
            _make_directory(path, mode)
    except OSError as err:
        raise file_error("make directory", path, err) from err


def make_file(file: HostFile, mounts: MountTables) -> None:
    """Make the file as its `HostFile` describes: its parts are (offset, bytes), and all else is
    zero. If it is ``allocated``, all of its space is taken on the disk at once; otherwise a full
    disk would later kill a process that has the file mapped.

    An existing file with the same content stays. One that containers have mounted keeps its inode,
    and only the parts in `HostFile.renewed` (such as limits) are written into it. One without
    mounts was left by an ended container. It is replaced by a fresh one, so that the entries of
    that container's processes burden no new container.

    Args:
        file: its description.
        mounts: tells whether a container has the existing file mounted.

    Raises:
        HostFileError: it cannot be made.
    """
    try:
        descriptor = _open(file)
        if descriptor is None:
            _replace(file.path, file.size, file.parts, file.mode, allocated=file.allocated)
            return
        try:
            state = _state(descriptor, file)
            if (
                state is _State.USED
                and file.renewed
                # mounted somewhere, or the agent cannot see that
                and mounts.mounted_below(file.path) is not Use.FREE
            ):
                _write_parts(descriptor, file.renewed)
                state = _State.FRESH
            if state is _State.FRESH:
                if file.allocated:
                    os.posix_fallocate(descriptor, 0, file.size)
                os.fchmod(descriptor, file.mode)
                return
        finally:
            os.close(descriptor)
        _replace(file.path, file.size, file.parts, file.mode, allocated=file.allocated)
    except OSError as err:
        raise file_error("write", file.path, err) from err


def remove_file(directory: str, path: str) -> None:
    """Remove the file with the relative path ``path`` within ``directory``, which is the agent's
    own; fine when it is gone already.

    No link is followed; one in the place of the file is removed itself.

    Raises:
        HostFileError: it cannot be removed, or ``path`` leads out of ``directory``.
    """
    *parents, name = path.split("/")
    shown = f"{directory}/{path}"
    if not directory or {"", ".", ".."} & {*parents, name}:
        raise HostFileError(
            f"cannot remove {shown}: it is no path within the container's directory"
        )
    at: int | None = None
    try:
        for step in (directory, *parents):
            above, at = at, os.open(step, _STEP, dir_fd=at)
            if above is not None:
                os.close(above)
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        pass
    except OSError as err:
        raise file_error("remove", shown, err) from err
    finally:
        if at is not None:
            os.close(at)


def replace_file(path: str, content: bytes, mode: int = 0o644) -> None:
    """Put ``content`` under ``path``: the old file or the new one is seen, never a part; where the
    old one is mounted, it stays.

    Its directory is made where there is none, as /run has none after a reboot.

    Raises:
        HostFileError: it cannot be written.
    """
    try:
        try:
            _replace(path, len(content), ((0, content),), mode)
        except FileNotFoundError:
            if os.path.isdir(os.path.dirname(path)):
                raise  # something else is missing, and the directory keeps its mode
            make_directory(os.path.dirname(path))
            _replace(path, len(content), ((0, content),), mode)
    except OSError as err:
        raise file_error("write", path, err) from err


def has(path: str, content: bytes) -> bool:
    """Tell whether ``path`` is a file with exactly ``content``.
    A link or an unreadable file does not count.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
        try:
            return os.read(descriptor, len(content) + 1) == content
        finally:
            os.close(descriptor)
    except OSError:
        return False


def is_temporary(name: str) -> bool:
    """Tell whether a file of this name is one that is being written, or that a killed agent has
    left half-written.
    """
    return name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX)


def _is_directory(path: str, mode: int) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and stat.S_IMODE(status.st_mode) == mode
        and status.st_uid == os.geteuid()
    )


def _make_directory(path: str, mode: int) -> None:
    if os.path.lexists(path):
        # Through a descriptor, so that the mode is given to this directory and to nothing that a
        # link names.
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN_FLAGS)
        try:
            if (owner := os.fstat(descriptor).st_uid) != os.geteuid():
                raise PermissionError(errno.EPERM, f"it belongs to the user {owner}")
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        return
    _make_parents(path)
    unfinished = _temporary(path)
    with contextlib.suppress(FileExistsError):  # one that a killed agent has left
        os.mkdir(unfinished, 0o700)
    try:
        os.chmod(unfinished, mode)
        os.rename(unfinished, path)
    except OSError as err:
        # Another thread may have made it meanwhile. Then `unfinished` is gone, or `path` has
        # content already.
        if err.errno not in _MADE_MEANWHILE or not _is_directory(path, mode):
            raise
        with contextlib.suppress(OSError):
            os.rmdir(unfinished)


def _make_parents(path: str) -> None:
    missing: list[str] = []
    parent = os.path.dirname(path.rstrip("/"))
    while parent and not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    for each in reversed(missing):
        _make_directory(each, _PASSABLE)


def _remake(provision: Provision) -> None:
    """Make `Provision.earlier_directory` again, which an earlier version of the agent has given to
    the container, with the files of the grant under the names that they have in its own directory.
    """
    move_aside(provision.earlier_directory)
    make_directory(provision.earlier_directory)
    for file in provision.files:
        path = os.path.join(provision.earlier_directory, os.path.basename(file.path))
        try:
            os.link(file.path, path, follow_symlinks=False)
        except OSError as err:
            raise file_error("write", path, err) from err


def _require_only_root(path: str, judged: set[str]) -> None:
    left = [part for part in reversed(path.split("/")) if part]
    at, links = "", 0
    while True:
        if not left:
            return
        if at not in judged:
            _require_unwritable(at or "/", path)
            judged.add(at)
        part = left.pop()
        if part == "..":
            at = os.path.dirname(at)
            continue
        try:
            status = os.lstat(f"{at}/{part}")
        except FileNotFoundError:
            return
        except OSError as err:
            raise file_error("look at", f"{at}/{part}", err) from err
        if (
            status.st_uid not in {0, os.geteuid()}
            and not stat.S_ISREG(status.st_mode)
            and not _is_device(status)
        ):
            raise HostFileError(
                f"{path} is not mounted into containers: {at}/{part} belongs to the user "
                f"{status.st_uid}, who could replace it; make root its owner"
            )
        if not stat.S_ISLNK(status.st_mode):
            at = f"{at}/{part}"
            continue
        links += 1
        if links > _MAX_LINKS:
            raise HostFileError(
                f"{path} is not mounted into containers: it is named by more than {_MAX_LINKS} "
                "links; name it directly"
            )
        target = os.readlink(f"{at}/{part}")
        at = "" if target.startswith("/") else at
        left += [step for step in reversed(target.split("/")) if step and step != "."]


def _require_unwritable(directory: str, source: str) -> None:
    status = os.stat(directory)
    if status.st_mode & _WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
        raise HostFileError(
            f"{source} is not mounted into containers: users other than root may write to "
            f"{directory} (mode {stat.S_IMODE(status.st_mode):o}), and could replace it; chmod "
            f"go-w {directory}"
        )


def _is_device(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)


def _digest(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _temporary(path: str) -> str:
    """The path under which ``path`` is made before it gets its name:
    always the same, and never too long.
    """
    parent, name = os.path.split(path)
    return os.path.join(parent, f"{TEMPORARY_PREFIX}{_digest(name)}{TEMPORARY_SUFFIX}")


def _open(file: HostFile) -> int | None:
    """Open the file; None if there is none that can be opened at once,
    so that it is replaced as if it were missing.
    """
    try:
        return os.open(file.path, os.O_RDWR | _OPEN_FLAGS)
    except OSError as err:
        if err.errno in {errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EWOULDBLOCK}:
            return None
        raise


def _state(descriptor: int, file: HostFile) -> _State:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
        return _State.MISSING
    return _State.FRESH if _is_fresh(descriptor, file) else _State.USED


def _is_fresh(descriptor: int, file: HostFile) -> bool:
    """Tell whether the file has its parts and all else is zero.
    Only allocated pages are read, a few of a large file.
    """
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


def _replace(
    path: str, size: int, parts: Sequence[tuple[int, bytes]], mode: int, *, allocated: bool = False
) -> None:
    temporary = _temporary(path)
    descriptor = _made(temporary)
    try:
        try:
            if allocated:
                os.posix_fallocate(descriptor, 0, size)
            joined = _joined(parts)
            _write_parts(descriptor, joined)
            if max(map(_end, joined), default=0) < size:
                os.ftruncate(descriptor, size)  # what no part covers stays a hole: it reads as zero
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _made(path: str) -> int:
    """Make a new file and open it; one that a killed agent has left there is removed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o600)


def _joined(parts: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Join parts for an empty file that are near to each other, with zeros between them.

    A start waits for the writes, and after each system call a thread has to wait for Python's
    interpreter lock, which the event loop may hold.
    """
    joined: list[tuple[int, bytes]] = []
    end = 0  # the furthest end so far; overlapping parts are written one after the other
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
