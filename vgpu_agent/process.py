"""Facts from the operating system about this process, for the metrics of the agent and of the
extender.
"""

from __future__ import annotations

import os
import resource

import msgspec


class ProcessFacts(msgspec.Struct, frozen=True):
    """Facts from the operating system about this process. None where the kernel gives no value."""

    resident_bytes: float = 0.0
    cpu_seconds: float = 0.0
    open_descriptors: int | None = None


def process_facts() -> ProcessFacts:
    """Read memory, CPU time and descriptors of this process, from getrusage(2) and /proc/self,
    without disk access.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessFacts(
        resident_bytes=_resident_pages() * os.sysconf("SC_PAGE_SIZE"),
        cpu_seconds=used.ru_utime + used.ru_stime,
        open_descriptors=_open_descriptors(),
    )


def _resident_pages() -> int:
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.pread(statm, 200, 0).split()[1])  # the second number, proc(5)
    finally:
        os.close(statm)


def _open_descriptors() -> int | None:
    """Return the size of /proc/self/fd, which exists since Linux 6.2. Older kernels report 0, and
    listing is too slow for a scrape.
    """
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        size = os.fstat(folder).st_size
    finally:
        os.close(folder)
    return size - 1 if size else None  # without the descriptor of /proc/self/fd itself
