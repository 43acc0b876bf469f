"""Accept the connections of containers to a socket of the agent's, fairly.

The socket is that of `process_registry`, to which each process of a container that uses a GPU
reports itself. Every container that has the socket can connect as often as it likes, and the event
loop that answers also answers the kubelet. So a separate thread accepts, and asks the kernel which
process connects. It closes excess connections before the loop learns of them: each container may
connect and call `BURST` times at once and `PER_SECOND` times a second in the long run, and all
containers together may connect `ACCEPTED_PER_SECOND` times a second. A client whose connection is
closed before it is answered connects again after a moment, so this delays the container that is too
busy, and no other.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import log
from vgpu_agent.grpc.peers import peer_of
from vgpu_agent.runtime.cgroups import ContainerKey, container_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from vgpu_agent.grpc.peers import Peer

_logger = log.get(__name__)

# For connections, and separately for calls. Every process of a container makes one call, when it
# first uses a GPU.
BURST, PER_SECOND = 128.0, 32.0
ACCEPTED_PER_SECOND = 500
_MAX_KNOWN = 1024  # callers whose calls are counted
_ACCEPT_PAUSE_SECONDS = 0.1  # after an error that will not be over at once, such as EMFILE


class Caller(msgspec.Struct, frozen=True):
    """A connected process, and the container that its cgroup, read from the kernel, names; None if
    it is in none, or has ended already.
    """

    peer: Peer
    container: ContainerKey | None


class RateLimiter:
    """The calls that each caller may still make.

    State: a token bucket for each of the latest callers. Only one thread may use it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # container (None: processes in none) → calls left, and the time at which they were counted
        self._left: collections.OrderedDict[ContainerKey | None, tuple[float, float]] = (
            collections.OrderedDict()
        )

    def take(self, container: ContainerKey | None) -> bool:
        """Use up one call of the caller; tell whether there was one left."""
        now = self._clock()
        left, since = self._left.pop(container, (BURST, now))
        left = min(BURST, left + (now - since) * PER_SECOND)
        allowed = left >= 1.0
        self._left[container] = (left - 1.0 if allowed else left, now)
        if len(self._left) > _MAX_KNOWN:
            self._left.popitem(last=False)
        return allowed


class Acceptor:
    """The thread that accepts connections on one listening socket, and closes it at its end.

    State: the thread, and whether it is to end.
    """

    def __init__(
        self,
        listener: socket.socket,
        arrived: Callable[[socket.socket, Caller], None],
        *,
        proc_root: str,
    ) -> None:
        """Begin to accept; ``arrived`` is called on the event loop for each accepted connection,
        and has to close it. ``proc_root`` is where the host's processes are seen.
        """
        self._listener, self._arrived, self._proc_root = listener, arrived, proc_root
        self._rate_limiter = RateLimiter()
        self._loop = asyncio.get_running_loop()
        self._closing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._accept_all, name="registry acceptor", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Accept nothing more."""
        os.eventfd_write(self._closing, 1)

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._closing, select.POLLIN)
        # When the next connection may be accepted. It lags by a second at most, so no more than
        # `ACCEPTED_PER_SECOND` are made up for at once after a time without connections.
        allowed_at = time.monotonic()
        try:
            while True:
                if any(descriptor == self._closing for descriptor, _ in poll.poll()):
                    return
                now = time.monotonic()
                allowed_at = max(allowed_at, now - 1.0) + 1.0 / ACCEPTED_PER_SECOND
                if allowed_at > now:
                    time.sleep(allowed_at - now)
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError as err:
                    _logger.warning("registry.not_accepted", error=err.strerror or str(err))
                    time.sleep(_ACCEPT_PAUSE_SECONDS)
                    continue
                self._let_in(connection)
        finally:
            self._listener.close()
            os.close(self._closing)

    def _let_in(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            peer = peer_of(connection)
        except OSError:
            connection.close()
            return
        # A pid of 0: this process cannot see it. By `seen_at`, a later process with the same pid is
        # recognised.
        container = (
            container_of(self._proc_root, peer.pid, seen_at=peer.seen_at) if peer.pid else None
        )
        if not self._rate_limiter.take(container):
            connection.close()
            return
        try:
            self._loop.call_soon_threadsafe(self._arrived, connection, Caller(peer, container))
        except RuntimeError:  # the event loop has ended
            with contextlib.suppress(OSError):
                connection.close()
