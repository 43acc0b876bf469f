"""kubelet's checkpoint: the only local place that knows a pod's UID together with its device ids
and our own answer.

Read by `records` at start, for verification, and when a container is about to start. The format is
the kubelet's own affair and has changed before (a flat id list became a map by NUMA node in 1.20),
so both forms are understood, unknown keys are ignored, and anything else is one clear error. Its
checksum covers a dump that only Go can make; it is not checked. Read only: the kubelet is the owner
(kubelet §9).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import concurrent.futures
import contextlib
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import CheckpointError
from vgpu_agent.kubelet.names import is_entry

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


class CheckpointEntry(msgspec.Struct, frozen=True):
    """Ids of one resource that one container holds.

    An init container and the container that takes over its ids both have an entry. Entries of ended
    pods stay until the kubelet writes the file for another reason.
    """

    pod_uid: str
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str] | None] | list[str] | None
    alloc_resp: str | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """All ids, in the order of the file; their NUMA nodes are left out."""
        if isinstance(self.device_ids, dict):
            # the usual case without NUMA nodes; asked hundreds of times in a start
            if len(self.device_ids) == 1:
                (only,) = self.device_ids.values()
                return tuple(only or ())
            return tuple(device for ids in self.device_ids.values() for device in ids or ())
        return tuple(self.device_ids or ())

    @property
    def answer(self) -> bytes:
        """The encoded ContainerAllocateResponse that we once gave; decoded on use.

        Raises:
            CheckpointError: it is not base64.
        """
        try:
            return base64.b64decode(self.alloc_resp or "", validate=True)
        except binascii.Error as err:
            raise CheckpointError(
                f"the stored answer for container {self.container_name} of pod {self.pod_uid} is "
                f"not base64: {err}"
            ) from err


class _Line(msgspec.Struct, frozen=True, rename="pascal"):
    """An entry of the file. Its ids are read only when its resource is of interest:
    there may be fifty thousand of others.
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


# The kubelet's text behind the entries, and the text that closes the file in its place. The list of
# all devices is the larger part of the file where memory is counted in ids. It is not needed, and
# every start of a container waits for a reading.
_DEVICES, _CLOSING = b',"RegisteredDevices":', b"}}"
_PART_BYTES = 256 * 1024
_MAX_TO_CLOSE = 8

# Real ones have below 15 MB, most of it the list of all devices. The decoded text takes several
# times its size for a moment, and the agent has 256 MiB: entries and ids of a few characters, or
# none, would take the most.
_MAX_BYTES = 24 * 1024 * 1024
_MAX_ENTRIES = 20_000
_MAX_IDS = 500_000
_MAX_ID_BYTES_UNCOUNTED = 1024 * 1024
_ENTRY = b'"PodUID"'


class _UnfitError(Exception):
    """The file is not read; the message goes on from its name."""


def _open(path: str, flags: int) -> int:
    """Without waiting for the other end of a FIFO, and without following a link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _UnfitError("is not a regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise _UnfitError(f"belongs to user {status.st_uid} and not to root")


class _Memory:
    """The memory into which files are read each time:
    fresh memory for their megabytes takes ten times as long as reading.

    State: the memory, as large as the largest file since it was last let go; one thread at a time
    uses it. How long the entries were the last time: the next file's will be about as long, and are
    read at once, because each part gives the interpreter away.
    """

    def __init__(self) -> None:
        self._memory = bytearray(4096)
        self._lock = threading.Lock()
        self._entries_bytes = 0
        # The kubelet replaces the file all the time. The process that closes a replaced one last
        # has to free its megabytes.
        # That takes milliseconds, and the start of a container waits for the entries.
        self._closing = concurrent.futures.ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="close kubelet's checkpoint"
        )
        self._may_wait = threading.BoundedSemaphore(_MAX_TO_CLOSE)

    @contextlib.contextmanager
    def content(self, path: Path, *, whole: bool) -> Iterator[memoryview]:
        """Read the content, valid inside the ``with`` only;
        if not ``whole``, without the list of all devices at its end.

        Raises:
            OSError: it cannot be read.
            _UnfitError: it is no regular file, another user's, or too large.
        """
        with self._lock:
            # pathlib has no opener; `_close` ends it
            file = open(path, "rb", buffering=0, opener=_open)  # noqa: SIM115
            try:
                filled = self._fill(file, whole=whole)
            finally:
                self._close(file)
            yield memoryview(self._memory)[:filled]

    def _close(self, file: io.FileIO) -> None:
        if not self._may_wait.acquire(blocking=False):
            # the disk is slow, and each waiting one keeps a descriptor and the file's memory
            file.close()
            return

        def close() -> None:
            try:
                file.close()
            finally:
                self._may_wait.release()

        self._closing.submit(close)

    def _fill(self, file: io.FileIO, *, whole: bool) -> int:
        """Read ``file`` into the memory; how much of it counts."""
        status = os.fstat(file.fileno())
        _check_file(status)
        size, filled = min(status.st_size, _MAX_BYTES), 0
        if size >= len(self._memory):
            self._memory = bytearray(size + size // 4)
        most = len(self._memory) if whole else self._entries_bytes + _PART_BYTES
        while count := file.readinto(memoryview(self._memory)[filled : filled + most]):
            if not whole and (end := self._end_of_entries(filled, filled + count)) >= 0:
                self._memory[end : end + len(_CLOSING)] = _CLOSING
                self._entries_bytes = end
                self._check_entries(end)
                return end + len(_CLOSING)
            filled += count
            if filled > _MAX_BYTES:
                raise _UnfitError(f"has more than {_MAX_BYTES} bytes that would have to be read")
            if filled == len(self._memory):
                self._memory = self._memory + bytearray(filled)
        self._check_entries(filled)
        return filled

    def _check_entries(self, filled: int) -> None:
        if (count := self._memory.count(_ENTRY, 0, filled)) > _MAX_ENTRIES:
            raise _UnfitError(f"has {count} entries; at most {_MAX_ENTRIES} are read")

    def _end_of_entries(self, begin: int, end: int) -> int:
        """Find the beginning of the list of all devices in the part between ``begin`` and ``end``;
        -1 if it is not there.

        No string of JSON can have these characters inside, so the first match is right. The search
        begins near the end, where it is likely.
        """
        likely = max(begin, self._entries_bytes - _PART_BYTES)
        found = self._memory.find(_DEVICES, likely, end)
        return (
            found
            if found >= 0
            else self._memory.find(
                _DEVICES, max(0, begin - len(_DEVICES)), min(end, likely + len(_DEVICES))
            )
        )

    def release(self) -> None:
        """Give the memory back; the next reading takes fresh one."""
        with self._lock:
            self._memory, self._entries_bytes = bytearray(4096), 0


_memory = _Memory()


def _everything(_: str) -> bool:
    return True


async def read_checkpoint(
    path: Path, wanted: Callable[[str], bool] = _everything
) -> tuple[CheckpointEntry, ...]:
    """Read the entries of the checkpoint; none when the file does not exist,
    because then the kubelet has granted nothing.

    In a thread: the file can have megabytes when resources have tens of thousands of ids.

    Args:
        path: of the file.
        wanted: tells whether the resource of that name is of interest; entries of others are left
            out.

    Raises:
        CheckpointError: the file cannot be read or understood. The kubelet itself would begin
            without any knowledge in that case, so it may grant ids again that running containers
            use. The message warns of that.
    """
    return await asyncio.to_thread(_read, path, wanted)


def release_memory() -> None:
    """Release the buffer that readings in quick succession share.

    Blocks while a reading is in progress, so do not call it in the event loop's thread.
    """
    _memory.release()


def parse_checkpoint(
    content: bytes | memoryview, *, name: str, wanted: Callable[[str], bool] = _everything
) -> tuple[CheckpointEntry, ...]:
    """The ``wanted`` entries in ``content``, without those with names that Kubernetes forbids;
    ``name`` is the file's, for errors.

    Raises:
        CheckpointError: see `read_checkpoint`.
    """
    try:
        lines = _decoder.decode(content).data.pod_device_entries or ()
        _check_ids(lines, wanted)
        return tuple(
            CheckpointEntry(
                line.pod_uid,
                line.container_name,
                line.resource_name,
                _ids_decoder.decode(line.device_ids),
                line.alloc_resp,
            )
            for line in lines
            if wanted(line.resource_name) and is_entry(line.pod_uid, line.container_name)
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise _unusable(
            name,
            "is empty" if not bytes(content[:4096]).strip() else f"cannot be understood: {err}",
        ) from err
    except _UnfitError as err:
        raise _unusable(name, str(err)) from err


def _check_ids(lines: Iterable[_Line], wanted: Callable[[str], bool]) -> None:
    raw = [line.device_ids for line in lines if wanted(line.resource_name)]
    if sum(len(memoryview(ids)) for ids in raw) > _MAX_ID_BYTES_UNCOUNTED:
        count = sum(bytes(ids).count(b",") + 1 for ids in raw)
        if count > _MAX_IDS:
            raise _UnfitError(f"has {count} ids; at most {_MAX_IDS} are read")


def _unusable(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the kubelet's checkpoint {name} {what}; the kubelet writes it anew at the next change, "
        "until then pods are known by name only. If the kubelet restarts before that, it forgets "
        "who holds which device"
    )


def _read(path: Path, wanted: Callable[[str], bool]) -> tuple[CheckpointEntry, ...]:
    try:
        with contextlib.suppress(CheckpointError), _memory.content(path, whole=False) as content:
            return parse_checkpoint(content, name=str(path), wanted=wanted)
        # Not as the kubelet writes it today: then all of it counts.
        with _memory.content(path, whole=True) as content:
            return parse_checkpoint(content, name=str(path), wanted=wanted)
    except FileNotFoundError:
        return ()
    except _UnfitError as err:
        _memory.release()  # megabytes that no later reading needs
        raise _unusable(str(path), str(err)) from err
    except OSError as err:
        if err.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            raise _unusable(str(path), "is not a regular file") from err
        raise CheckpointError(
            f"the kubelet's checkpoint {path} cannot be read: {err.strerror or err}; the agent "
            "has to run as root"
        ) from err
