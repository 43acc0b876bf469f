"""The check of whether a path on the host is mounted into some container.

It comes before a file of a grant is removed or replaced: a container that still runs may have the
file mounted, and would go on seeing the old one. The mounts are read from the mount table of every
process, as the kernel shows it in ``/proc/<pid>/mountinfo`` (proc_pid_mountinfo(5)). Called by
`host_files` and `grants`, always in a thread.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

_ESCAPED = re.compile(rb"\\([0-7]{3})")


class Use(enum.Enum):
    """The state of a path in the mount tables."""

    MOUNTED = "mounted"
    FREE = "free"
    UNKNOWN = "unknown"  # the agent sees no other mount namespace (no host PIDs), so it cannot know


class _Mount(msgspec.Struct, frozen=True):
    """One line of a mount table: ``root`` is the path, inside the file system ``device``
    (``major:minor``), of the part that is mounted, and ``point`` is the mount point.
    """

    device: bytes
    root: bytes
    point: bytes


class MountTables:
    """The mount tables of all processes below ``proc_root``. Nothing is kept: every call reads
    them again.
    """

    def __init__(self, proc_root: str = "/proc") -> None:
        self._proc_root = proc_root

    def mounted_below(self, path: str) -> Use:
        """Tell whether ``path``, or something in it, is mounted anywhere, or something is mounted
        onto it.

        A bind mount is found by the file system it comes from and the path inside that, since its
        mount point differs between containers. A kernel that hides other processes makes the answer
        ``UNKNOWN``, never a false ``FREE``.
        """
        own = _read(f"{self._proc_root}/self/mountinfo")
        if own is None:
            return Use.UNKNOWN
        real = os.fsencode(os.path.realpath(path))
        mounts = list(_parsed(own))
        if any(_is_below(mount.point, real) for mount in mounts):
            return Use.MOUNTED
        source = _source(mounts, real)
        if source is None:
            return Use.UNKNOWN
        # Most lines of most tables have nothing to do with us; only those that mention the last
        # part of the path are parsed.
        mentioned = _escape(os.path.basename(real))
        others = 0  # tables of other mount namespaces
        own_digest = hashlib.blake2b(own).digest()
        seen: set[str] = set()
        for namespace, table in self._tables(seen):
            read = _searched(table, mentioned, source)
            if read is True:
                return Use.MOUNTED
            if read is not None and namespace:
                seen.add(namespace)
            # only a table that differs from ours proves that the agent sees other namespaces
            others += read not in {None, own_digest}
        return Use.FREE if others else Use.UNKNOWN

    def _tables(self, seen: Container[str]) -> Iterator[tuple[str, str]]:
        """Yield mount namespaces with the path of a process's mount table, but none of those that
        are in ``seen`` by then. A process may end before its table is read; then another one of its
        namespace follows. The namespace is empty where the kernel does not let us tell it.
        """
        try:
            names = [name for name in os.listdir(self._proc_root) if name.isdecimal()]
        except OSError:
            return
        for name in names:
            try:
                namespace = os.readlink(f"{self._proc_root}/{name}/ns/mnt")
            except OSError:
                # without CAP_SYS_PTRACE the link may be unreadable although the table is readable
                namespace = ""
            if namespace in seen:
                continue
            yield namespace, f"{self._proc_root}/{name}/mountinfo"


def _searched(path: str, mentioned: bytes, source: _Mount) -> bool | bytes | None:
    """Return True when a mount in the table at ``path`` comes from ``source``, else a digest of the
    table; None when it is unreadable. Only lines with ``mentioned`` are
    parsed.

    It is read line by line, because a container can make its table as long as it likes.
    """
    digest = hashlib.blake2b()
    try:
        with open(path, "rb") as file:
            for line in file:
                if mentioned in line and any(_comes_from(mount, source) for mount in _parsed(line)):
                    return True
                digest.update(line)
    except OSError:
        return None  # the process has ended meanwhile, or is not ours to look at
    return digest.digest()


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None  # the process has ended meanwhile, or is not ours to look at


def _parsed(table: bytes) -> Iterator[_Mount]:
    for line in table.splitlines():
        fields = line.split(b" ", 5)
        if len(fields) > 5:
            yield _Mount(
                fields[2], _unescape(fields[3]).removesuffix(b"//deleted"), _unescape(fields[4])
            )


def _unescape(text: bytes) -> bytes:
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), text)


def _escape(text: bytes) -> bytes:
    """Escape as the kernel does: space, tab, newline and backslash as octal numbers."""
    return re.sub(rb"[ \t\n\\]", lambda match: b"\\%03o" % match[0][0], text)


def _is_below(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory.rstrip(b"/") + b"/")


def _source(mounts: list[_Mount], path: bytes) -> _Mount | None:
    """Find the file system on which ``path`` lies; `root` of the result is the path inside that."""
    # Of two mounts at one place, the later one is seen.
    best: _Mount | None = None
    for mount in mounts:
        if _is_below(path, mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    if best is None:
        return None
    inner = path[len(best.point.rstrip(b"/")) :].lstrip(b"/")
    return _Mount(best.device, best.root.rstrip(b"/") + b"/" + inner, path)


def _comes_from(mount: _Mount, source: _Mount) -> bool:
    """Tell whether the mount shows ``source`` or something in it."""
    return mount.device == source.device and _is_below(mount.root, source.root)
