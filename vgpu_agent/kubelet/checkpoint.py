"""The kubelet's checkpoint of device allocations. Only this file has the UID of a pod together with
its device ids and the plugin's answer to ``Allocate``.

`records` reads it at the agent's start, for each comparison of the ledger with the kubelet's
records, and when a container is about to start. The agent never writes it (kubelet §9). The format
is internal to the kubelet: the flat list of ids became a map by NUMA node in 1.20. Both forms are
accepted, unknown keys are ignored, and anything else raises an error. The checksum is not checked,
because it is computed from a dump of Go's data structures.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import CheckpointError
from vgpu_agent.kubelet.names import is_allowed_in_checkpoint

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


class CheckpointEntry(msgspec.Struct, frozen=True):
    """The ids of one resource that one container holds.

    An init container and the regular container that gets its ids later both have an entry. The
    entry of an ended pod stays until the kubelet writes the file for another reason.

    Attributes:
        device_ids: the ids, as a flat list, or as number of a NUMA node → its ids.
        alloc_resp: the plugin's answer in base64, see `answer`.
    """

    pod_uid: str
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str] | None] | list[str] | None
    alloc_resp: str | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """Return all ids in the order of the file, without their NUMA nodes."""
        if isinstance(self.device_ids, dict):
            # a fast path for the usual case, because one start of a container reads this hundreds
            # of times
            if len(self.device_ids) == 1:
                (only,) = self.device_ids.values()
                return tuple(only or ())
            return tuple(device for ids in self.device_ids.values() for device in ids or ())
        return tuple(self.device_ids or ())

    @property
    def answer(self) -> bytes:
        """Return the encoded ContainerAllocateResponse of the plugin; empty if the file has none.

        Raises:
            CheckpointError: the stored text is not base64.
        """
        try:
            return base64.b64decode(self.alloc_resp or "", validate=True)
        except ValueError as err:  # binascii.Error, or of a text that is not ASCII
            raise CheckpointError(
                f"the stored answer for container {self.container_name} of pod {self.pod_uid} is "
                f"not base64: {err}"
            ) from err


class _Line(msgspec.Struct, frozen=True, rename="pascal"):
    """An entry of the file. The ids stay encoded, because they are decoded only for the resources
    that the reader wants. Other resources may have fifty thousand of them.
    """

    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: msgspec.Raw = msgspec.field(name="DeviceIDs")
    alloc_resp: str | None = None


class _Content(msgspec.Struct, frozen=True, rename="pascal"):
    pod_device_entries: list[_Line] | None


class _File(msgspec.Struct, frozen=True, rename="pascal"):
    data: _Content


_decoder = msgspec.json.Decoder(_File)
_ids_decoder: msgspec.json.Decoder[dict[str, list[str] | None] | list[str] | None] = (
    msgspec.json.Decoder(dict[str, list[str] | None] | list[str] | None)
)


# After the entries, the file has the list of all device ids. Where ids stand for units of memory,
# the list is the larger part of the file. The agent does not need it, and each start of a container
# waits for a reading. So reading stops at `_DEVICES`, and `_CLOSING` in its place completes the
# JSON.
_DEVICES, _CLOSING = b',"RegisteredDevices":', b"}}"
# read by one call, beyond the size of the last file's entries
_PART_BYTES = 256 * 1024
_MAX_PENDING_CLOSES = 8  # files that wait for the thread that closes them

# Real files have less than 15 MB, most of it the list of all devices. Decoding takes several times
# the size of the file for a moment, and the agent has 256 MiB. Many tiny or empty entries and ids
# would take the most, so their numbers are limited as well.
_MAX_BYTES = 24 * 1024 * 1024
_MAX_ENTRIES = 20_000
_MAX_IDS = 500_000
_MAX_ID_BYTES_UNCOUNTED = 1024 * 1024  # up to this size of all ids, they are not counted
_ENTRY = b'"PodUID"'  # occurs once in each entry


class _RejectedError(Exception):
    """The file must not be decoded. The message is a predicate: the file's name precedes it."""


def _open(path: str, flags: int) -> int:
    """Open a file without following a link, and without waiting for the other end of a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _RejectedError("is not a regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise _RejectedError(f"belongs to user {status.st_uid} and not to root")


class _Buffer:
    """The reusable buffer for the file's content. Allocating megabytes for each reading would take
    ten times as long as reading the file.

    State: the buffer, as large as the largest file since the last `release`, which one thread at a
    time uses; and the size of the entries in the last file. The next file has entries of about that
    size, so they are read by one call: each further call releases the GIL, and may then wait for
    other threads to release it.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(4096)
        self._lock = threading.Lock()
        self._entries_bytes = 0
        # The kubelet often replaces the file. The last process that closes a replaced file frees
        # its megabytes in the kernel. That takes milliseconds, and the start of a container waits
        # for the entries. So another thread closes the files.
        self._closing = concurrent.futures.ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="close kubelet's checkpoint"
        )
        self._pending_closes = threading.BoundedSemaphore(_MAX_PENDING_CLOSES)

    @contextlib.contextmanager
    def content(self, path: Path, *, whole: bool) -> Iterator[memoryview]:
        """Read the file; the result is valid only inside the ``with`` block.

        Args:
            path: the file.
            whole: also read the list of all devices at its end.

        Raises:
            OSError: the file cannot be read.
            _RejectedError: it is not a regular file, belongs to another user, or is too large.
        """
        with self._lock:
            # `Path.open` takes no opener; `_close` closes the file
            file = open(path, "rb", buffering=0, opener=_open)  # noqa: SIM115
            try:
                filled = self._fill(file, whole=whole)
            finally:
                self._close(file)
            yield memoryview(self._buffer)[:filled]

    def _close(self, file: io.FileIO) -> None:
        if not self._pending_closes.acquire(blocking=False):
            # the disk is slow, and each file that is still open keeps a descriptor and page cache
            file.close()
            return

        def close() -> None:
            try:
                file.close()
            finally:
                self._pending_closes.release()

        self._closing.submit(close)

    def _fill(self, file: io.FileIO, *, whole: bool) -> int:
        """Read ``file`` into the buffer; return the size of the content in it."""
        status = os.fstat(file.fileno())
        _check_file(status)
        size, filled = min(status.st_size, _MAX_BYTES), 0
        if size >= len(self._buffer):
            self._buffer = bytearray(size + size // 4)
        part_bytes = len(self._buffer) if whole else self._entries_bytes + _PART_BYTES
        while count := file.readinto(memoryview(self._buffer)[filled : filled + part_bytes]):
            if not whole and (end := self._end_of_entries(filled, filled + count)) >= 0:
                self._buffer[end : end + len(_CLOSING)] = _CLOSING
                self._entries_bytes = end
                self._check_entries(end)
                return end + len(_CLOSING)
            filled += count
            if filled > _MAX_BYTES:
                raise _RejectedError(f"has more than {_MAX_BYTES} bytes that would have to be read")
            if filled == len(self._buffer):
                self._buffer = self._buffer + bytearray(filled)
        self._check_entries(filled)
        return filled

    def _check_entries(self, filled: int) -> None:
        if (count := self._buffer.count(_ENTRY, 0, filled)) > _MAX_ENTRIES:
            raise _RejectedError(f"has {count} entries; at most {_MAX_ENTRIES} are read")

    def _end_of_entries(self, begin: int, end: int) -> int:
        """Return the position at which the list of all devices begins, in the part of the buffer
        from ``begin`` to ``end``, which was read last; -1 if it is not there.

        A JSON string cannot contain `_DEVICES`, because of the quotes, so the first match is right.
        The search begins near the end of the last file's entries, where a match is likely.
        """
        likely = max(begin, self._entries_bytes - _PART_BYTES)
        found = self._buffer.find(_DEVICES, likely, end)
        return (
            found
            if found >= 0
            else self._buffer.find(
                _DEVICES, max(0, begin - len(_DEVICES)), min(end, likely + len(_DEVICES))
            )
        )

    def release(self) -> None:
        """Free the buffer; the next reading allocates a new one."""
        with self._lock:
            self._buffer, self._entries_bytes = bytearray(4096), 0


_buffer = _Buffer()


def _any_resource(_: str) -> bool:
    return True


async def read_checkpoint(
    path: Path, is_wanted: Callable[[str], bool] = _any_resource
) -> tuple[CheckpointEntry, ...]:
    """Read the entries of the checkpoint in a thread.

    Return no entries if the file does not exist, because then the kubelet has allocated nothing.
    The file can have megabytes when resources have tens of thousands of ids.

    Args:
        path: the checkpoint file.
        is_wanted: tells whether to return the entries of a resource, given its name.

    Raises:
        CheckpointError: the file cannot be read or decoded. If the kubelet restarts with such a
            file, it knows no allocations, and may allocate ids that running containers use. The
            message warns of that.
    """
    return await asyncio.to_thread(_read, path, is_wanted)


def release_memory() -> None:
    """Free the buffer that successive readings share.

    Blocks while a reading is in progress, so do not call it in the event loop's thread.
    """
    _buffer.release()


def parse_checkpoint(
    content: bytes | memoryview, *, name: str, is_wanted: Callable[[str], bool] = _any_resource
) -> tuple[CheckpointEntry, ...]:
    """Decode the entries in ``content``, without those with names that Kubernetes forbids.

    Args:
        content: the JSON text.
        name: the file's name, for errors.
        is_wanted: tells whether to return the entries of a resource, given its name.

    Raises:
        CheckpointError: it cannot be decoded.
    """
    try:
        lines = _decoder.decode(content).data.pod_device_entries or ()
        _check_ids(lines, is_wanted)
        return tuple(
            CheckpointEntry(
                line.pod_uid,
                line.container_name,
                line.resource_name,
                _ids_decoder.decode(line.device_ids),
                line.alloc_resp,
            )
            for line in lines
            if is_wanted(line.resource_name)
            and is_allowed_in_checkpoint(line.pod_uid, line.container_name)
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise _unusable(
            name,
            "is empty" if not bytes(content[:4096]).strip() else f"cannot be understood: {err}",
        ) from err
    except _RejectedError as err:
        raise _unusable(name, str(err)) from err


def _check_ids(lines: Iterable[_Line], is_wanted: Callable[[str], bool]) -> None:
    raw = [line.device_ids for line in lines if is_wanted(line.resource_name)]
    if sum(len(memoryview(ids)) for ids in raw) > _MAX_ID_BYTES_UNCOUNTED:
        count = sum(bytes(ids).count(b",") + 1 for ids in raw)
        if count > _MAX_IDS:
            raise _RejectedError(f"has {count} ids; at most {_MAX_IDS} are read")


def _unusable(name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the kubelet's checkpoint {name} {reason}; the kubelet writes it again at the next "
        "change, until then pods are known by name only. If the kubelet restarts before that, it "
        "forgets who holds which device"
    )


def _read(path: Path, is_wanted: Callable[[str], bool]) -> tuple[CheckpointEntry, ...]:
    try:
        with contextlib.suppress(CheckpointError), _buffer.content(path, whole=False) as content:
            return parse_checkpoint(content, name=str(path), is_wanted=is_wanted)
        # A kubelet may order the keys differently: decode the whole file.
        with _buffer.content(path, whole=True) as content:
            return parse_checkpoint(content, name=str(path), is_wanted=is_wanted)
    except FileNotFoundError:
        return ()
    except _RejectedError as err:
        _buffer.release()  # megabytes that no later reading needs
        raise _unusable(str(path), str(err)) from err
    except OSError as err:
        if err.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            raise _unusable(str(path), "is not a regular file") from err
        raise CheckpointError(
            f"the kubelet's checkpoint {path} cannot be read: {err.strerror or err}; the agent "
            "has to run as root"
        ) from err
