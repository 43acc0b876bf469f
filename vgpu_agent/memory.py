"""Memory tuning: options of the C library and of Python's garbage collector for this process.

Lists of ids for the kubelet, its records and its checkpoint have up to 5 MB each on a node where
each unit of GPU memory has an id. glibc keeps freed blocks of that size in one heap per thread, and
does not return them to the system. Resident memory with 110 pods (`scripts/bench --only volcano`;
the limit is 72 MiB):

* 63 MiB with all three functions,
* 67 MiB without `freeze_objects`,
* 80 MiB without `limit_heaps`,
* 100 MiB without any of them.

The agent calls `limit_heaps` once, before the first thread starts, `freeze_objects` a moment after
its start, and `release_free_pages` after each regular pass over the kubelet's records. The
scheduler extender calls `freeze_objects` once it has read all Nodes and pods: with 10,000 pods each
full collection takes 30 to 40 ms, in which it answers no call of kube-scheduler. The webhook calls
it before it serves. Until then all commands have the thresholds that `cli.main` has set.
"""

from __future__ import annotations

import ctypes
import gc

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Blocks from this size on are mapped one by one and unmapped when freed. Setting the threshold
# stops glibc from raising it.
_OWN_MAPPING_FROM_BYTES = 64 * 1024
# When more than this is free at the end of the heap, glibc returns it to the system.
_KEPT_AT_MOST_BYTES = 128 * 1024

# The thresholds of the three generations of the garbage collector (`gc.set_threshold`). The start
# of a container creates some thousand objects, hardly any in cycles. With the defaults of Python up
# to 3.12 (700, 10, 10) the collector took 4 % of the time of a burst of starts.
_GC_THRESHOLDS = 2000, 20, 10


def limit_heaps() -> None:
    """Set the options of glibc. Do nothing under musl, which has no such heaps."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_FROM_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST_BYTES)


def freeze_objects() -> None:
    """Exclude all present objects from garbage collection: they live as long as the process, and
    every collection would visit them.

    Call this once, when the start is over. Garbage among them stays. It is that of the imports, a
    thousand objects of 100,000; a collection before would block the event loop for up to 60 ms.
    """
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def release_free_pages() -> None:
    """Return free pages between used blocks to the system. glibc never does that by itself.

    Blocks for a few milliseconds, so do not call it in the event loop's thread.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
