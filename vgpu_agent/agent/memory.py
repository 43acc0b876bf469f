"""Keep the process small: memory of big messages returns to the system when they are gone.

Lists, kubelet's records and its checkpoint have up to 5 MB each on a node that counts memory in ids. glibc remembers the largest block that
was ever freed and keeps blocks of that size, one heap a thread, for a next time; that made 25 MiB in a measurement. `composition` calls
`keep_small` once, before the first thread starts, and `verification` calls `give_back` after each reading of kubelet's records.

Blocks above a size are mapped and unmapped then, so asyncio must not ask for such a block whenever something arrives. It takes 256 KiB
before it knows how much that is: 18 µs for a hundred bytes, instead of 3 with a block from the heap.

aiohttp makes two TLS contexts with all of the system's certificates when it is imported, 2 MiB that the agent does not use: a connection to
the API server has a context of its own (`cluster.connections`). So `load_http` imports it under `without_system_certificates`, before the
first module that needs it: the parts that speak HTTP are a third of all imports, and a registration with the kubelet waits for none of
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
import threading
from asyncio import selector_events
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# mallopt(3): blocks from this size on are mapped one by one and unmapped when freed; setting it stops glibc from raising it.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_OWN_MAPPING_FROM_BYTES = 64 * 1024
_KEPT_AT_MOST_BYTES = 128 * 1024
_RECEIVED_AT_ONCE_BYTES = 32 * 1024

# New objects before a search among them, such searches before one among the older ones, and those before one among all. A start of a
# container makes some thousand objects, hardly any in cycles; the 700, 10 and 10 of Python up to 3.12 took 4 % of a burst of starts.
_SEARCH_AFTER = 2000, 20, 10

# OpenSSL looks there for certificates by default (X509_get_default_cert_file_env).
_NO_CERTIFICATES = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
_LOADING = threading.Lock()


@contextlib.contextmanager
def without_system_certificates() -> Iterator[None]:
    """Make TLS contexts without certificates meanwhile: they would trust no server, rather than any."""
    before = {name: os.environ.get(name) for name in _NO_CERTIFICATES}
    os.environ.update(_NO_CERTIFICATES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def load_http(module: str) -> None:
    """Import ``module``, which needs aiohttp; takes some hundred milliseconds, so not for the event loop's thread."""
    with _LOADING:  # two threads would put each other's environment back
        if "aiohttp" not in sys.modules:
            with without_system_certificates():
                importlib.import_module("aiohttp")
    importlib.import_module(module)


def keep_small() -> None:
    """Configure the C library; one without these options (musl) has no such heaps either."""
    transport = getattr(selector_events, "_SelectorTransport", None)  # there is no setting for it
    if transport is not None:
        transport.max_size = _RECEIVED_AT_ONCE_BYTES
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_FROM_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST_BYTES)


def settle() -> None:
    """Take what the start has made out of Python's search for unreachable cycles: it stays anyway, and every search would walk through it.

    To be called once, when the start is over; takes some ten milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SEARCH_AFTER)


def give_back() -> None:
    """Return free pages between blocks in use, which glibc never does by itself; it takes a moment, so not for the event loop's thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
