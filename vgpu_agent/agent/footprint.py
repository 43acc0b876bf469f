"""Keeps the process small: memory of big messages goes back to the system when they are gone.

Lists, kubelet's records and its checkpoint have up to 5 MB each on a node that counts memory in ids. glibc remembers the largest block that
was ever freed and keeps blocks of that size, one heap a thread, for a next time; that made 25 MiB in a measurement. `composition` calls
`keep_small` once, before the first thread starts, and `verification` calls `give_back` after each reading of kubelet's records.
"""

from __future__ import annotations

import ctypes

# mallopt(3): blocks from this size on are mapped one by one and unmapped when freed; setting it stops glibc from raising it.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_OWN_MAPPING_FROM_BYTES = 64 * 1024
_KEPT_AT_MOST_BYTES = 128 * 1024


def keep_small() -> None:
    """Ask the C library for it; one that does not know these wishes (musl) has no such heaps either."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_FROM_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST_BYTES)


def give_back() -> None:
    """Return free pages between blocks in use, which glibc never does by itself; it takes a moment, so not for the event loop's thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
