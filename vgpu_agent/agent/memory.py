"""Keep the process small: memory of big messages returns to the system when they are gone.

Lists, the kubelet's records and its checkpoint have up to 5 MB each on a node that counts memory in
ids. glibc keeps freed blocks of that size for a next time, in one heap a thread. These are options
of the C library and of Python's collector, for this process alone. Of RSS with 110 pods
(`scripts/bench --only volcano`), where 72 MiB are allowed:

* 63 MiB with all that is here,
* 67 MiB without `settle`,
* 80 MiB without the options of `keep_small`, 100 MiB without any of the three.

`composition` calls `keep_small` once, before the first thread starts. `verification` calls
`give_back` after each reading of the kubelet's records.
"""

from __future__ import annotations

import ctypes
import gc

# mallopt(3): blocks from this size on are mapped one by one and unmapped when freed; setting it
# stops glibc from raising it.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_OWN_MAPPING_FROM_BYTES = 64 * 1024
_KEPT_AT_MOST_BYTES = 128 * 1024

# New objects before a search among them, such searches before one among the older ones, and those
# before one among all. A start of a container makes some thousand objects, hardly any in cycles;
# the 700, 10 and 10 of Python up to 3.12 took 4 % of a burst of starts.
_SEARCH_AFTER = 2000, 20, 10


def keep_small() -> None:
    """Configure the C library; one without these options (musl) has no such heaps either."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_FROM_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST_BYTES)


def settle() -> None:
    """Take what the start has made out of Python's search for unreachable cycles: it stays anyway,
    and every search would walk through it.

    To be called once, when the start is over; takes some ten milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SEARCH_AFTER)


def give_back() -> None:
    """Return free pages between blocks in use, which glibc never does by itself; it takes a moment,
    so not for the event loop's thread.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
