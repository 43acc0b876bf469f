"""Sockets in a rig's network namespace, for an ordinary process on the host.

A socket belongs for life to the namespace in which it was made, whatever uses it later. So only its
making has to happen inside: a thread that joins the namespace, connects, and ends. The calling
thread never leaves the host's namespace.

Called by api.py, and by tests through `Rig.connect`. System call: setns(2).
"""

from __future__ import annotations

import ctypes
import os
import socket
from concurrent.futures import ThreadPoolExecutor

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def connect(namespace: str, address: tuple[str, int], *, timeout_seconds: float) -> socket.socket:
    """A TCP connection made inside the network namespace that the file ``namespace`` stands for.

    Raises:
        OSError: the namespace is gone, or ``address`` has no listener.
    """

    def inside() -> socket.socket:
        descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _libc.setns(descriptor, _CLONE_NEWNET):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), namespace)
        finally:
            os.close(descriptor)
        return socket.create_connection(address, timeout=timeout_seconds)

    # joined at the end of the block, so no thread of ours stays in the namespace
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(inside).result()
