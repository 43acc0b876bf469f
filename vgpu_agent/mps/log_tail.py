"""The transfer of an MPS control daemon's ``control.log`` into the agent's log, which also keeps
that file small.

The file is on a tmpfs (``/run``), the daemon never shortens it, and each of our own probes adds
lines to it. So lines about mere queries are left out, and a file that has become large is
emptied. Called by `daemon` after each probe, in a thread.
"""

from __future__ import annotations

import os

_LONGEST_READ = 65536  # bytes at once; the next `read` gets the rest
_LONGEST_LINE = 500  # characters
_LARGEST_FILE = 8 << 20  # allocated bytes
# The daemon's lines about a client that asks it something, and the beginning of a query's own line.
_ABOUT_QUERIES = ("Accepting connection...", "NEW UI", "UI closed")
_QUERY_PREFIX = "Cmd:get_"


class LogTail:
    """A reader of one ``control.log``, which remembers its position and empties a file that has
    become large.

    Args:
        path: need not exist yet.
        from_the_end: skip the existing lines, which an earlier agent has reported.
    """

    def __init__(self, path: str, *, from_the_end: bool) -> None:
        self._path, self._skip = path, from_the_end
        self._inode, self._offset = 0, 0

    def read(self) -> list[str]:
        """Return the lines that are new, without those about queries;
        empty when there is no file or it cannot be read.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return []
        try:
            return self._read(descriptor)
        except OSError:
            return []
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int) -> list[str]:
        status = os.fstat(descriptor)
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, status.st_size if self._skip else 0
            self._skip = False
        chunk = os.pread(descriptor, _LONGEST_READ, self._offset)
        end = chunk.rfind(b"\n") + 1
        if not end and len(chunk) == _LONGEST_READ:
            end = len(chunk)  # one line without an end, too long to be read
        self._offset += end
        # By blocks, not by size: a daemon that goes on writing at its old offset after the file was
        # emptied leaves a hole, and the file looks as large as before.
        if status.st_blocks * 512 > _LARGEST_FILE and self._offset >= status.st_size:
            os.ftruncate(descriptor, 0)
            self._offset = 0
        lines = chunk[:end].replace(b"\0", b"").decode(errors="replace").splitlines()
        return [line[:_LONGEST_LINE] for line in lines if line and not _is_about_query(line)]


def _is_about_query(line: str) -> bool:
    text = line.partition("] ")[2]
    return text in _ABOUT_QUERIES or text.startswith(_QUERY_PREFIX)
