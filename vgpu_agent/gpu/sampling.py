"""Samples of the processes on GPUs, many times a second, while a container needs them.

A library that limits compute needs the GPU usage of each process. If every process asked the driver
itself, that would cost more than the whole agent. So the agent reads the usage of all processes in
the last second (vgpu-manager §8.6), and the libraries read it from a file.

The samples are taken in the NVML thread, between the waits for events, a few GPUs at a time. One
thread is the only user of NVML, because NVML can only be reopened when it has no other user in the
process. A call that hangs stops the samples together with all other uses of NVML. It is detected in
the same way, and readers of the samples see their age. The driver's rows, one for each process, are
passed on unchanged (those of a newer call in the form of the older one), in buffers that are
allocated once, because pynvml's objects would take most of the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from typing import TYPE_CHECKING, Protocol

from vgpu_agent.errors import NvmlError
from vgpu_agent.gpu import return_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.gpu.nvml import Handle, Nvml

# The interval of the samples of one GPU, and the most GPUs sampled one right after the other: as in
# vgpu-manager's watcher (vgpu-manager §8.6).
INTERVAL_SECONDS = 0.08
BATCH = 4
# NVML is asked for the use in this time before the call.
SINCE_MICROSECONDS = 1_000_000
# processes of one GPU; the rest is cut
MAX_ROWS = 1024
_MAX_ROOM = 16 * MAX_ROWS  # rows in the largest buffer; a longer answer is not read at all

# bytes of a row of use (nvmlProcessUtilizationSample_t) and of a process (nvmlProcessInfo_t)
SAMPLE_BYTES, PROCESS_BYTES = 32, 24
# nvmlProcessesUtilizationInfo_t, version 1, and its rows: for drivers without the older call
_EXTENDED_VERSION, _EXTENDED_ROW_BYTES = 1, 40


class Sink(Protocol):
    """The place for samples; called in the NVML thread, so it may wait for nothing."""

    def write(
        self,
        index: int,
        since: int,
        samples: memoryview | None,
        compute: memoryview,
        graphics: memoryview,
    ) -> None:
        """Take the rows of one GPU, as NVML lays them out.

        Args:
            index: NVML's, of the GPU.
            since: unix microseconds; the samples are not older.
            samples: rows of use; None when the driver has none since then, or too many.
            compute: processes that compute.
            graphics: processes that draw.
        """


class ProcessSampler:
    """The sampler of some GPUs.

    State: which GPUs, when the next of them are due, and the buffers. `aim` may be called on the
    event loop at any time; all else belongs to the NVML thread.
    """

    def __init__(self, nvml: Nvml, handle: Callable[[str], Handle | None]) -> None:
        """Begin with no GPU; ``handle`` returns the present handle for a GPU's UUID, None for one
        that did not answer when all GPUs were last read.
        """
        self._nvml, self._handle = nvml, handle
        # the GPUs (index, UUID) in batches, and where their samples go
        self._aim: tuple[tuple[tuple[tuple[int, str], ...], ...], Sink | None] = ((), None)
        self._turn = 0  # the batch that was sampled last
        self._due = 0.0  # monotonic, of the next batch
        self._samples = _Rows(SAMPLE_BYTES)
        self._compute, self._graphics = _Rows(PROCESS_BYTES), _Rows(PROCESS_BYTES)
        self._extended = _Rows(_EXTENDED_ROW_BYTES)
        # kind of processes → the NVML function that lists them; the driver may lack the newer one
        self._names = {
            "compute": "nvmlDeviceGetComputeRunningProcesses_v3",
            "graphics": "nvmlDeviceGetGraphicsRunningProcesses_v3",
        }
        self._by_extended = False  # the driver lacks the older of the two calls for the use
        self.taken = 0  # samples of one GPU, for tests and measurements

    def aim(self, gpus: Sequence[tuple[int, str]], sink: Sink) -> None:
        """Sample these GPUs, given by index and UUID, from now on; an empty list ends it."""
        self._aim = batches(gpus), sink

    def wait_seconds(self) -> float:
        """The seconds until the next GPUs are due; infinite without any."""
        return max(self._due - time.monotonic(), 0.0) if self._aim[0] else math.inf

    def sample(self) -> None:
        """Sample the next batch if it is due."""
        groups, sink = self._aim
        now = time.monotonic()
        if not groups or sink is None or now < self._due:
            return
        # at regular times; one that was missed is left out
        pause = INTERVAL_SECONDS / len(groups)
        self._due = max(self._due + pause, now + pause / 2)
        self._turn = (self._turn + 1) % len(groups)
        for index, uuid in groups[self._turn]:
            handle = self._handle(uuid)
            if handle is not None:
                # the next poll, the regular reading of all GPUs, finds the error
                with contextlib.suppress(NvmlError):
                    self._sample(index, handle, sink)
                    self.taken += 1

    def _sample(self, index: int, handle: Handle, sink: Sink) -> None:
        since = time.time_ns() // 1000 - SINCE_MICROSECONDS
        compute = self._processes("compute", self._compute, handle)
        graphics = self._processes("graphics", self._graphics, handle)
        samples = self._use(handle, since)
        sink.write(index, since, samples, compute, graphics)

    def _processes(self, kind: str, rows: _Rows, handle: Handle) -> memoryview:
        try:
            return self._filled(self._names[kind], handle, rows) or memoryview(b"")
        except NvmlError as err:
            name = self._names[kind]
            if err.code != return_codes.FUNCTION_NOT_FOUND or name.endswith("_v2"):
                raise
            self._names[kind] = name.removesuffix("_v3") + "_v2"  # has the same rows
            return self._processes(kind, rows, handle)

    def _use(self, handle: Handle, since: int) -> memoryview | None:
        """The rows of use since ``since``; None when there are none, or too many."""
        if not self._by_extended:
            try:
                return self._filled("nvmlDeviceGetProcessUtilization", handle, self._samples, since)
            except NvmlError as err:
                if err.code not in return_codes.ABSENT:
                    raise
                self._by_extended = True
        found = self._filled_extended(handle, since)
        return None if found is None else self._samples.take(map(_narrowed, found))

    def _filled(
        self, name: str, handle: Handle, rows: _Rows, since: int | None = None
    ) -> memoryview | None:
        """Call an NVML function that fills rows; None when it has none, or too many."""
        while True:
            rows.count.value = rows.room
            pointer = ctypes.byref(rows.count)
            if since is None:
                code = self._nvml.raw(name, handle, pointer, rows.buffer)
            else:
                code = self._nvml.raw(name, handle, rows.buffer, pointer, ctypes.c_ulonglong(since))
            if code == 0:
                return rows.view(rows.count.value)
            if code != return_codes.INSUFFICIENT_SIZE or not rows.grow():
                _accept(name, code)
                return None

    def _filled_extended(self, handle: Handle, since: int) -> list[bytes] | None:
        name, rows = "nvmlDeviceGetProcessesUtilizationInfo", self._extended
        while True:
            asked = _Extended(count=rows.room, since=since)
            # the form in which NVML expects the version of a struct
            asked.version = ctypes.sizeof(_Extended) | _EXTENDED_VERSION << 24
            asked.rows = ctypes.addressof(rows.buffer)
            code = self._nvml.raw(name, handle, ctypes.byref(asked))
            if code == 0:
                view = bytes(rows.view(asked.count))
                return [
                    view[at : at + _EXTENDED_ROW_BYTES]
                    for at in range(0, len(view), _EXTENDED_ROW_BYTES)
                ]
            if code != return_codes.INSUFFICIENT_SIZE or not rows.grow():
                _accept(name, code)
                return None


class _Extended(ctypes.Structure):
    """``nvmlProcessesUtilizationInfo_t``."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("since", ctypes.c_ulonglong),
        ("rows", ctypes.c_void_p),
    )


class _Rows:
    """A buffer for ``room`` rows of ``size`` bytes, and the C integer for their number."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.count = ctypes.c_uint(0)
        self.room = MAX_ROWS
        self._make()

    def _make(self) -> None:
        self.buffer = (ctypes.c_char * (self.room * self._size))()
        self._view = memoryview(self.buffer).cast("B")

    def grow(self) -> bool:
        """Make more room; tell whether that was possible."""
        if self.room >= _MAX_ROOM:
            return False
        self.room *= 2
        self._make()
        return True

    def view(self, number: int) -> memoryview:
        """The first rows, at most `MAX_ROWS`."""
        return self._view[: min(number, MAX_ROWS) * self._size]

    def take(self, rows: map[bytes]) -> memoryview:
        """Copy rows into the buffer."""
        joined = b"".join(rows)[: MAX_ROWS * self._size]
        self._view[: len(joined)] = joined
        return self._view[: len(joined)]


def batches(gpus: Sequence[tuple[int, str]]) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Divide the GPUs into groups of at most `BATCH`, as even as possible."""
    number = -(-len(gpus) // BATCH)
    return tuple(tuple(gpus[place::number]) for place in range(number))


def _narrowed(row: bytes) -> bytes:
    """A row of the newer call (time, process, use …) in the shape of the older one's."""
    return row[8:12] + bytes(4) + row[:8] + row[12:28]


def _accept(name: str, code: int) -> None:
    """Accept the codes for "nothing new" and "too many".

    Raises:
        NvmlError: any other.
    """
    if code not in {return_codes.NOT_FOUND, return_codes.INSUFFICIENT_SIZE}:
        raise NvmlError(name, code, "failed")
