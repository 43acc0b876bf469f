"""A gRPC server on a unix socket that can be drained.

It moves bytes; its user gives them meaning. What grpclib leaves to its users is done here: closing
connections that clients keep open, UNIMPLEMENTED in a form that grpc-go understands, and errors
with a text that an operator can act on.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias

import grpclib
import msgspec
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from grpclib.server import Server, Stream

from vgpu_agent import log
from vgpu_agent.errors import (
    AgentError,
    CapacityError,
    LedgerError,
    PermissionDeniedError,
    RequestRefusedError,
    UnhealthyDeviceError,
    UnknownDeviceError,
)
from vgpu_agent.grpc.connection import Bytes, Connection

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from grpclib.protocol import H2Protocol

_logger = log.get(__name__)

UnaryMethod: TypeAlias = "Callable[[bytes], Awaitable[bytes]]"
"""A method that takes the encoded request and returns the encoded response."""

CallerMethod: TypeAlias = "Callable[[bytes, Any], Awaitable[bytes]]"
"""The same, with the object that was handed to `GrpcServer.take` with the connection: it says who
calls.
"""

StreamMethod: TypeAlias = "Callable[[bytes, Send], Awaitable[None]]"
"""A method that takes the encoded request and sends as many encoded responses as it likes;
returning ends the stream with status OK.
"""

Send: TypeAlias = "Callable[[bytes], Awaitable[None]]"
"""A function that sends one encoded response."""

_ByteStream: TypeAlias = "Stream[bytes, bytes]"

_REQUEST_SECONDS = 10.0  # from the headers to the last byte
_LOOK_SECONDS = 0.01  # between two checks whether a client is still connected

# An error text travels in an HTTP/2 header, percent-encoded; the kubelet copies it
# into the pod's status.
_LONGEST_TEXT = 1024


class Limits(msgspec.Struct, frozen=True):
    """The most that the clients of one server may have at a time.

    Attributes:
        connections: when one more opens, the oldest without a running call is closed.
        streams: running calls with many answers; one more is refused.
        request_bytes: data of requests that are not complete, for one connection; with more it is
            closed.
    """

    connections: int
    streams: int
    request_bytes: int


class GrpcServer:
    """One gRPC server on one socket; made inside a running event loop,
    started once and drained once.

    State: grpclib's server and the methods that are running. A method that fails ends its own call
    only.
    """

    def __init__(
        self,
        *,
        unary: Mapping[str, UnaryMethod],
        streams: Mapping[str, StreamMethod],
        limits: Limits,
        by_caller: Mapping[str, CallerMethod] | None = None,
    ) -> None:
        """Serve the methods of ``unary``, ``streams`` and ``by_caller``, by gRPC path.

        Those of ``by_caller`` are for connections that are handed to `take`.
        """
        self._most_streams = limits.streams
        self._running = self._streaming = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._only_streams = asyncio.Event()  # no call with a single answer is running
        self._only_streams.set()
        handlers = {
            path: Handler(self._unary(path, method), Cardinality.UNARY_UNARY, bytes, bytes)
            for path, method in unary.items()
        }
        for path, method in streams.items():
            handlers[path] = Handler(
                self._stream(path, method), Cardinality.UNARY_STREAM, bytes, bytes
            )
        for path, call in (by_caller or {}).items():
            handlers[path] = Handler(
                self._unary_by_caller(path, call), Cardinality.UNARY_UNARY, bytes, bytes
            )
        self._server = _ClosableServer(handlers, limits)

    async def start(self, listener: socket.socket) -> None:
        """Serve on ``listener``, a bound socket, which the server owns from now on."""
        await self._server.start(sock=listener)

    async def take(
        self, connection: socket.socket, caller: object, lost: Callable[[], None]
    ) -> Callable[[], None]:
        """Serve an accepted connection, which the server owns from now on.

        Args:
            connection: does not block.
            caller: any object that tells the methods of ``by_caller`` who calls.
            lost: called when the connection has ended.

        Returns:
            A function that ends the connection at once.
        """
        return await self._server.take(connection, caller, lost)

    def abort(self) -> None:
        """End all running methods and all connections at once."""
        self._server.cancel_methods()
        self._server.abort_connections()

    async def wait_until_quiet(self, seconds: float) -> None:
        """Wait until no call with a single answer is running, at most for ``seconds``; new calls
        are served meanwhile.
        """
        await _within(seconds, self._only_streams.wait())

    async def until_disconnected(self, seconds: float) -> None:
        """Wait until the clients have closed their connections, at most for ``seconds``; calls are
        served meanwhile.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._server.has_connections:  # noqa: ASYNC110 - grpclib tells nobody
                    await asyncio.sleep(_LOOK_SECONDS)

    async def drain(self, grace_seconds: float) -> None:
        """Accept nothing new, let running methods return for up to ``grace_seconds``,
        then close every connection.

        grpclib's own way would wait for clients to close their connections, which the kubelet never
        does. A peer that does not read what we still have for it gets a tenth of the grace and is
        cut off.
        """
        if not self._server.started:
            return
        self._server.stop_accepting()
        await _within(grace_seconds, self._idle.wait())
        self._server.close()
        # cancelled methods need a moment to clean up
        await _within(grace_seconds, self._idle.wait())
        self._server.close_connections()
        if not await _within(grace_seconds / 10, self._server.wait_closed()):
            self._server.abort_connections()
            await _within(grace_seconds / 10, self._server.wait_closed())

    def _unary(self, path: str, method: UnaryMethod) -> Callable[[_ByteStream], Awaitable[None]]:
        async def serve(stream: _ByteStream) -> None:
            async with self._counted(path):
                await stream.send_message(await method(await _request(stream)))

        return serve

    def _unary_by_caller(
        self, path: str, call: CallerMethod
    ) -> Callable[[_ByteStream], Awaitable[None]]:
        async def serve(stream: _ByteStream) -> None:
            async with self._counted(path):
                caller = stream.peer.addr()  # a `Connection` shows it in place of an address
                await stream.send_message(await call(await _request(stream), caller))

        return serve

    def _stream(self, path: str, method: StreamMethod) -> Callable[[_ByteStream], Awaitable[None]]:
        async def serve(stream: _ByteStream) -> None:
            # The raw stream, no async generator: a generator whose client went away during a send
            # is never closed.
            async with self._counted(path):
                request = await _request(stream)
                # each holds a list of megabytes while its client does not read
                if self._streaming >= self._most_streams:
                    raise grpclib.GRPCError(
                        Status.RESOURCE_EXHAUSTED,
                        f"vgpu-agent serves {self._most_streams} streams at a time",
                    )
                self._count(streaming=1)
                try:
                    await method(request, stream.send_message)
                finally:
                    self._count(streaming=-1)

        return serve

    @contextlib.asynccontextmanager
    async def _counted(self, path: str) -> Any:
        """Count a call while it runs, and turn its exceptions into errors of gRPC."""
        self._count(running=1)
        try:
            yield
        except (grpclib.GRPCError, StreamTerminatedError, ProtocolError):
            raise
        except AgentError as err:
            raise grpclib.GRPCError(_status_of(err), str(err)[:_LONGEST_TEXT]) from err
        except Exception as err:
            # A bug of ours ends this call only; the client gets a short text, the log all of it.
            _logger.error("grpc.bug", method=path, exc_info=err)
            raise grpclib.GRPCError(
                Status.INTERNAL,
                f"internal error in vgpu-agent ({type(err).__name__}); its log has the details "
                "under grpc.bug",
            ) from err
        finally:
            self._count(running=-1)

    def _count(self, *, running: int = 0, streaming: int = 0) -> None:
        """Count calls that begin and end; those with many answers are among the running ones."""
        self._running += running
        self._streaming += streaming
        for event, calls in (
            (self._idle, self._running),
            (self._only_streams, self._running - self._streaming),
        ):
            if calls:
                event.clear()
            else:
                event.set()


class _Methods(dict[str, Handler]):
    """The method table of grpclib, with an answer for names that are not served.

    grpclib itself aborts such a call without a content type, which grpc-go reports as ``Unknown``
    instead of ``Unimplemented``.
    """

    def get(self, path: str, default: Any = None) -> Any:
        del default
        return super().get(path) or Handler(_unimplemented, Cardinality.UNARY_UNARY, bytes, bytes)


class _ClosableServer(Server):
    """grpclib's server, with a list of its connections so that they can be closed."""

    def __init__(self, methods: dict[str, Handler], limits: Limits) -> None:
        super().__init__([_Servable(methods)], codec=Bytes())  # leaves messages encoded
        self._limits = limits
        self._mapping = _Methods(methods)
        self._connections: list[Connection] = []  # oldest first

    def _protocol_factory(self) -> H2Protocol:
        connection = Connection(super()._protocol_factory(), self._limits.request_bytes)
        self._make_room()
        self._connections.append(connection)
        return connection

    async def take(
        self, connection: socket.socket, caller: object, lost: Callable[[], None]
    ) -> Callable[[], None]:
        """Serve an accepted connection; return a function that ends it."""
        plain = super()._protocol_factory()
        made = Connection(plain, self._limits.request_bytes, caller=caller, lost=lost)
        self._forget_closed()
        self._connections.append(made)
        await self._loop.connect_accepted_socket(lambda: made, connection)
        return made.transport.abort

    def _forget_closed(self) -> None:
        # without `connection`, one is not established yet
        self._connections[:] = [
            one
            for one in self._connections
            if not hasattr(one, "connection") or not one.connection.is_closing()
        ]

    def _make_room(self) -> None:
        """Close the oldest connection without a running call if there are too many; if each has
        one, close the newest.
        """
        self._forget_closed()
        if len(self._connections) < self._limits.connections:
            return
        established = self._established()
        oldest = next(
            (one for one in established if not one.processor.streams),
            established[-1] if established else None,
        )
        if oldest is not None:
            _logger.warning(
                "grpc.connection_closed",
                reason=f"there are more than {self._limits.connections} connections to one socket",
            )
            oldest.processor.close("too many connections")
            oldest.transport.abort()

    @property
    def started(self) -> bool:
        """Tell whether there is something to close."""
        return self._server is not None

    @property
    def has_connections(self) -> bool:
        """Tell whether a connection is open."""
        self._forget_closed()
        return bool(self._connections)

    def stop_accepting(self) -> None:
        """Close the listening socket and keep the connections."""
        if self._server is not None:
            self._server.close()

    def cancel_methods(self) -> None:
        """Cancel all running methods."""
        for handler in self._handlers:
            handler.close()

    def close_connections(self) -> None:
        """Close the remaining connections, once their last bytes have been written."""
        for connection in self._established():
            connection.processor.close("the server stops")

    def abort_connections(self) -> None:
        """Close the remaining connections, at once."""
        for connection in self._established():
            connection.transport.abort()

    def _established(self) -> list[Connection]:
        """The connections that are established; before, grpclib has not made their processor."""
        return [connection for connection in self._connections if hasattr(connection, "processor")]


class _Servable:
    """The object that grpclib expects: one that knows its methods."""

    def __init__(self, methods: dict[str, Handler]) -> None:
        self._methods = methods

    def __mapping__(self) -> dict[str, Handler]:
        return self._methods


async def _within(seconds: float, wait: Coroutine[Any, Any, object]) -> bool:
    """Tell whether ``wait`` returned in time."""
    try:
        async with asyncio.timeout(seconds):
            await wait
    except TimeoutError:
        return False
    return True


async def _request(stream: _ByteStream) -> bytes:
    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            request = await stream.recv_message()
    except TimeoutError as err:
        raise RequestRefusedError(
            f"the request was not complete within {_REQUEST_SECONDS:g} s"
        ) from err
    except NotImplementedError as err:
        raise grpclib.GRPCError(
            Status.UNIMPLEMENTED, "vgpu-agent reads no compressed messages"
        ) from err
    except AssertionError as err:  # grpclib asserts where a message breaks off
        raise RequestRefusedError("the request message breaks off") from err
    if request is None:
        raise RequestRefusedError("the call carries no request message")
    return request


async def _unimplemented(_: _ByteStream) -> None:
    raise grpclib.GRPCError(Status.UNIMPLEMENTED, "vgpu-agent does not serve this method")


def _status_of(err: AgentError) -> Status:
    """Choose the gRPC status that names the faulty party to a reader of the kubelet's log; the
    kubelet treats all alike (kubelet §8).
    """
    match err:
        case RequestRefusedError() | UnknownDeviceError():
            return Status.INVALID_ARGUMENT
        case CapacityError():
            return Status.RESOURCE_EXHAUSTED
        case UnhealthyDeviceError() | LedgerError():
            return Status.FAILED_PRECONDITION
        case PermissionDeniedError():
            return Status.PERMISSION_DENIED
        case _:
            return Status.UNAVAILABLE
