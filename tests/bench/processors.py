"""The processors while the agent is measured:
it has its own, and the stand-ins for the rest of a node have the others.

A node with GPUs has dozens of processors, and kubelet and the API server do not take the agent's
away; on a machine with two, the stand-ins for both, and the kernel that writes their checkpoint,
would. Used by `volcano` and `mixed`, whose stand-ins have the most to do.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

REFERENCE_SECONDS = 0.14
"""The time that five million additions take on the processor for which the limits were chosen."""


def seconds_for_additions() -> float:
    """Return how fast this machine is now. A shared one may need half as long again from one hour
    to the next.
    """
    number, began = 0, time.perf_counter()
    for each in range(5_000_000):
        number += each
    return time.perf_counter() - began


@contextlib.contextmanager
def apart() -> Iterator[tuple[str, ...]]:
    """Keep this thread, and all that it starts, on the first half of the processors; the command
    that takes a process to the second half.

    The command is empty on a machine with one processor.
    """
    processors = sorted(os.sched_getaffinity(0))
    ours, theirs = processors[: len(processors) // 2], processors[len(processors) // 2 :]
    if not ours:
        yield ()
        return
    os.sched_setaffinity(0, ours)
    try:
        yield ("taskset", "--cpu-list", ",".join(map(str, theirs)))
    finally:
        os.sched_setaffinity(0, processors)


def seconds_of(pid: int) -> float:
    """The processor time, user and system, that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
