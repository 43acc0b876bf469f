"""Connections of one HTTP listener: the limits on their number and rate, and the choice of the one
that is closed to make room for a new one.

Any client that reaches the port can open connections and leave them open. A new connection is
always accepted, since it may be the kubelet's probe. Where there are too many, the client address
with the most connections loses its oldest one. The same holds for connections whose TLS handshake
is unfinished. A limit per address that refuses new connections would shut out the kubelet, too:
connections through a NodePort come from the node's own address.

aiohttp itself ends a connection on which no complete request arrives in time, and has no other
limit.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import resource
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import log

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from aiohttp import web

_logger = log.get(__name__)

_ACCEPTED_AT_ONCE = 16  # then other tasks of the event loop run
# A connection costs about 0.3 ms. The queue in the kernel is as long as what is accepted in two
# seconds, so a probe gets through in time.
_ACCEPTED_A_SECOND = 400.0
BACKLOG = 800
_WITHOUT_DESCRIPTORS_SECONDS = 0.2  # the pause when the process may open no more files
# A client that does not finish the TLS handshake in that time is disconnected.
HANDSHAKE_SECONDS = 5.0
# A handshake takes milliseconds. One that takes longer than this may be aborted for a new
# connection, and a burst of quick ones waits. With 256 connections, a queue full of slow ones is
# cleared in three seconds.
UNDISTURBED_SECONDS = 0.2
# Browsers that follow the page: the overview at ``/``, whose changes reach each of them as a
# stream. More people rarely look at one node, and each costs a connection.
MAX_VIEWERS = 16
# One listener may use the process's number of file descriptors, divided by this.
_DESCRIPTORS_DIVISOR = 8


class _Connection(msgspec.Struct):
    transport: asyncio.Transport
    host: str


class _Starting(msgspec.Struct):
    """A connection that is being set up.

    Attributes:
        accepted: its socket.
        host: the client's address.
        since: when it was accepted, by the loop's clock.
    """

    accepted: socket.socket
    host: str
    since: float


def bounded_by_descriptors(most: int) -> int:
    """Return ``most``, or a smaller number of connections if this process may open few files."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        max(4, min(most, descriptors // _DESCRIPTORS_DIVISOR))
        if descriptors != resource.RLIM_INFINITY
        else most
    )


class Connections:
    """The accepted connections of ``listener`` for ``server``, at most ``max_connections`` at a
    time. With ``tls``, a connection gets the TLS context that ``tls`` returns at that moment.

    State: the connections, oldest first, until aiohttp's server has forgotten them; those that are
    being set up, oldest first; how many may be accepted now.
    """

    def __init__(
        self,
        listener: socket.socket,
        server: web.Server,
        *,
        max_connections: int,
        tls: Callable[[], Awaitable[ssl.SSLContext]] | None = None,
    ) -> None:
        self._tls = tls
        self._listener = listener
        self._server = server
        self._max_connections = max_connections
        self._loop = asyncio.get_running_loop()
        # by the object in which aiohttp's server keeps the connection
        self._open: dict[object, _Connection] = {}
        self._starting: dict[asyncio.Task[None], _Starting] = {}
        # how many may be accepted now by the limit of the rate, and when that was computed
        self._allowed, self._counted_at = float(max_connections), self._loop.time()
        self._resuming: asyncio.TimerHandle | None = None  # ends a pause
        self._accepting = False  # true from `start` to `stop`, also in a pause

    def start(self) -> None:
        """Listen and accept."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._accepting = True
        self._loop.add_reader(self._listener, self._accept)

    def stop(self) -> None:
        """Accept nothing more and close the listener; open connections stay until aiohttp's server
        closes them.
        """
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener)
            if self._resuming is not None:
                self._resuming.cancel()
        self._listener.close()

    def _accept(self) -> None:
        now = self._loop.time()
        self._allowed = min(
            float(self._max_connections),
            self._allowed + (now - self._counted_at) * _ACCEPTED_A_SECOND,
        )
        self._counted_at = now
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._allowed < 1 or not self._can_start(now):
                self._pause(_ACCEPTED_AT_ONCE / _ACCEPTED_A_SECOND)
                return
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as err:
                # Too many open files, most likely. Without a pause the loop would do nothing but
                # fail.
                _logger.error(
                    "web.not_accepted",
                    error=err.strerror or str(err),
                    retry_in_seconds=_WITHOUT_DESCRIPTORS_SECONDS,
                )
                self._pause(_WITHOUT_DESCRIPTORS_SECONDS)
                return
            self._allowed -= 1
            self._make_room()
            accepted.setblocking(False)
            host = str(address[0])
            starting = self._loop.create_task(self._connect(accepted, host))
            self._starting[starting] = _Starting(accepted, host, now)
            starting.add_done_callback(self._started)

    def _can_start(self, now: float) -> bool:
        """Tell whether one more connection may be set up, after closing another one if need be.

        Connections that are being set up have a limit of their own, a quarter of all, so that a
        burst of them does not push out all open ones.
        """
        most = self._max_connections // 4
        if len(self._starting) < most:
            return True
        host, held = _busiest(one.host for one in self._starting.values())
        task, oldest = next(item for item in self._starting.items() if item[1].host == host)
        if now - oldest.since < UNDISTURBED_SECONDS:
            return False
        _logger.warning(
            "web.connection_evicted", client=host, connections_of_client=held, most=most
        )
        self._give_up(task)
        return True

    def _give_up(self, task: asyncio.Task[None]) -> None:
        accepted = self._starting.pop(task).accepted
        task.cancel()
        # a task that has not run yet closes nothing
        task.add_done_callback(lambda _: accepted.close())

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.pop(task, None)

    async def _connect(self, accepted: socket.socket, host: str) -> None:
        try:
            if self._tls is None:
                connecting = self._loop.connect_accepted_socket(self._server, accepted)
            else:
                connecting = self._loop.connect_accepted_socket(
                    self._server,
                    accepted,
                    ssl=await self._tls(),
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                )
            transport, protocol = await connecting
        except OSError:
            accepted.close()  # it ended before it was set up
            return
        self._open[protocol] = _Connection(transport, host)

    def _make_room(self) -> None:
        if len(self._open) + len(self._starting) < self._max_connections:
            return
        known = set(self._server.connections)
        self._open = {
            protocol: one
            for protocol, one in self._open.items()
            if protocol in known and not _ended(one)
        }
        if not self._open or len(self._open) + len(self._starting) < self._max_connections:
            return
        host, held = _busiest(one.host for one in self._open.values())
        protocol, oldest = next(
            (protocol, one) for protocol, one in self._open.items() if one.host == host
        )
        _logger.warning(
            "web.connection_evicted",
            client=host,
            connections_of_client=held,
            most=self._max_connections,
        )
        del self._open[protocol]
        oldest.transport.abort()  # close() would wait for a client that reads nothing

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._resuming = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._resuming = None
        if self._accepting:
            self._loop.add_reader(self._listener, self._accept)


class Viewers:
    """The browsers that follow the page, at most `MAX_VIEWERS`. A new one is always accepted. Where
    there are too many, the client address with the most of them loses its oldest one.

    State: the event that ends each viewer's stream → the client's address, the oldest first;
    whether the server stops.
    """

    def __init__(self) -> None:
        self._open: dict[asyncio.Event, str] = {}
        self.stopping = False

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def one(self, host: str) -> Iterator[asyncio.Event]:
        """Count a viewer from the address ``host`` while the context is open. The event is set when
        its stream has to end, from the start on while the server stops.
        """
        if len(self._open) >= MAX_VIEWERS:
            busiest, held = _busiest(self._open.values())
            oldest = next(end for end, address in self._open.items() if address == busiest)
            _logger.info(
                "web.viewer_evicted", client=busiest, viewers_of_client=held, most=MAX_VIEWERS
            )
            del self._open[oldest]
            oldest.set()
        end = asyncio.Event()
        if self.stopping:  # the request came before the stop
            end.set()
        self._open[end] = host
        try:
            yield end
        finally:
            self._open.pop(end, None)

    def end_all(self) -> None:
        """End all streams, because the server stops."""
        self.stopping = True
        while self._open:
            self._open.popitem()[0].set()


def _busiest(hosts: Iterable[str]) -> tuple[str, int]:
    """Return the address that occurs most often, and how often."""
    ((host, held),) = collections.Counter(hosts).most_common(1)
    return host, held


def _ended(connection: _Connection) -> bool:
    """Tell whether nothing of the connection is left.

    A connection that is closing keeps its descriptor until its last bytes are taken.
    """
    return connection.transport.is_closing() and not connection.transport.get_write_buffer_size()
