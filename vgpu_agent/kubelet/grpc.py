"""The one place that knows grpclib: a server that can be drained,
and calls that end in time and in our own errors.

Both sides move bytes; `codec` gives them meaning. What grpclib leaves to its users is done here:
closing connections that kubelet keeps open, UNIMPLEMENTED in a form that grpc-go understands,
errors with a text that an operator can act on, unknown HTTP/2 frames that must not end a
connection, and client errors of one family.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import grpclib
from grpclib.client import Channel
from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream
from h2.events import (
    AlternativeServiceAvailable,
    DataReceived,
    PingAckReceived,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    StreamReset,
    UnknownFrameReceived,
)

from vgpu_agent import log
from vgpu_agent.errors import (
    AgentError,
    CapacityError,
    KubeletError,
    LedgerError,
    RequestRefusedError,
    UnhealthyDeviceError,
    UnknownDeviceError,
)
from vgpu_agent.kubelet.write_coalescing import CoalescingTransport

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from pathlib import Path


_logger = log.get(__name__)

UnaryMethod: TypeAlias = "Callable[[bytes], Awaitable[bytes]]"
"""Takes the encoded request and returns the encoded response."""

StreamMethod: TypeAlias = "Callable[[bytes, Send], Awaitable[None]]"
"""Takes the encoded request and sends as many encoded responses as it likes;
returning ends the stream with status OK.
"""

Send: TypeAlias = "Callable[[bytes], Awaitable[None]]"
_ByteStream: TypeAlias = "Stream[bytes, bytes]"

# Data of the unfinished requests of one connection. The largest Allocate has below 4 MiB, the
# largest answer of pod-resources below 15.
_MOST_REQUEST_BYTES, _MOST_ANSWER_BYTES = 16 * 1024 * 1024, 32 * 1024 * 1024
_FRAME_COSTS_BYTES = 512  # of memory, besides its content
# Frames that cost us work and the peer nothing. A kubelet pings once for some ten KiB of a list,
# and breaks off a call now and then.
_MOST_IDLE_FRAMES, _IDLE_FRAMES_SECONDS = 10_000, 10.0
_MOST_RESETS = 200  # in the same time
_FED_AT_ONCE_BYTES = 16 * 1024  # h2 makes events of all its input before they can be checked
# kubelet has one connection to each of our sockets, and one stream of lists over it.
_MOST_CONNECTIONS, _MOST_STREAMS = 8, 4
_REQUEST_SECONDS = 10.0  # from the headers to the last byte

# An error text travels in an HTTP/2 header, percent-encoded; kubelet copies it into the pod's
# status.
_LONGEST_TEXT = 1024


class CallError(KubeletError):
    """A gRPC call failed.

    Attributes:
        status: the gRPC status' name, e.g. ``RESOURCE_EXHAUSTED``; ``UNAVAILABLE`` when there was
            no answer at all.
        text: the peer's text, without our preface.
    """

    def __init__(self, message: str, *, status: str, text: str = "") -> None:
        super().__init__(message)
        self.status, self.text = status, text


class GrpcServer:
    """One gRPC server on one socket; made inside a running event loop,
    started once and drained once.

    State: grpclib's server and the methods that are running. A method that fails ends its own call
    only.
    """

    def __init__(
        self, *, unary: Mapping[str, UnaryMethod], streams: Mapping[str, StreamMethod]
    ) -> None:
        self._running = self._streaming = 0
        self._idle = asyncio.Event()
        self._idle.set()
        handlers = {
            path: Handler(self._unary(path, method), Cardinality.UNARY_UNARY, bytes, bytes)
            for path, method in unary.items()
        }
        for path, method in streams.items():
            handlers[path] = Handler(
                self._stream(path, method), Cardinality.UNARY_STREAM, bytes, bytes
            )
        self._server = _ClosableServer(handlers)

    async def start(self, listener: socket.socket) -> None:
        """Serve on ``listener``, a bound socket, which the server owns from now on."""
        await self._server.start(sock=listener)

    async def drain(self, grace_seconds: float) -> None:
        """Accept nothing new, let running methods return for up to ``grace_seconds``,
        then close every connection.

        grpclib's own way would wait for kubelet to close its connection, which it never does. A
        peer that does not read what we still have for it gets a tenth of the grace and is cut off.
        """
        if not self._server.started:
            return
        self._server.stop_accepting()
        await _within(grace_seconds, self._idle.wait())
        self._server.close()
        # the cancelled ones need a moment to clean up
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

    def _stream(self, path: str, method: StreamMethod) -> Callable[[_ByteStream], Awaitable[None]]:
        async def serve(stream: _ByteStream) -> None:
            # The raw stream, no async generator: a generator whose client went away during a send
            # is never closed.
            async with self._counted(path):
                request = await _request(stream)
                # each holds a list of megabytes while its client does not read
                if self._streaming >= _MOST_STREAMS:
                    raise grpclib.GRPCError(
                        Status.RESOURCE_EXHAUSTED,
                        f"vgpu-agent serves {_MOST_STREAMS} streams at a time",
                    )
                self._streaming += 1
                try:
                    await method(request, stream.send_message)
                finally:
                    self._streaming -= 1

        return serve

    @contextlib.asynccontextmanager
    async def _counted(self, path: str) -> Any:
        self._running += 1
        self._idle.clear()
        try:
            yield
        except (grpclib.GRPCError, StreamTerminatedError, ProtocolError):
            raise
        except AgentError as err:
            raise grpclib.GRPCError(_status_of(err), str(err)[:_LONGEST_TEXT]) from err
        except Exception as err:
            # A bug of ours ends this call only; kubelet gets a short text, the log the whole story.
            _logger.error("grpc.bug", method=path, exc_info=err)
            raise grpclib.GRPCError(
                Status.INTERNAL,
                f"internal error in vgpu-agent ({type(err).__name__}); its log has the details "
                "under grpc.bug",
            ) from err
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


async def call(socket_path: Path, method: str, request: bytes, *, timeout_seconds: float) -> bytes:
    """Make one unary call over a connection of its own.

    Raises:
        CallError: the socket has no listener, the answer is an error, or it did not come within
            ``timeout_seconds``.
    """
    channel = _Channel(path=str(socket_path), codec=_Bytes())
    try:
        return await _answer(channel, socket_path, method, request, timeout_seconds)
    finally:
        channel.close()


class Caller:
    """Unary calls over one connection while they follow each other closely;
    making one costs as much as a call.

    State: the idle connection, closed ``kept_seconds`` after it was last used. A server that starts
    anew makes its socket anew, so a call that a kept connection breaks off is made again over a new
    one.
    """

    def __init__(self, socket_path: Path, *, kept_seconds: float) -> None:
        self._socket_path = socket_path
        self._kept_seconds = kept_seconds
        self._kept: Channel | None = None
        self._closing: asyncio.TimerHandle | None = None

    async def call(self, method: str, request: bytes, *, timeout_seconds: float) -> bytes:
        """See `call`; for methods that may be called twice."""
        if (kept := self._taken()) is not None:
            try:
                return await self._call(kept, method, request, timeout_seconds)
            except CallError as err:
                if err.status != Status.UNAVAILABLE.name:
                    raise
        return await self._call(
            _Channel(path=str(self._socket_path), codec=_Bytes()), method, request, timeout_seconds
        )

    def close(self) -> None:
        """Close the idle connection."""
        if (kept := self._taken()) is not None:
            kept.close()

    async def _call(
        self, channel: Channel, method: str, request: bytes, timeout_seconds: float
    ) -> bytes:
        try:
            answer = await _answer(channel, self._socket_path, method, request, timeout_seconds)
        except BaseException:
            channel.close()
            raise
        self.close()  # of two that were used at the same time one is enough
        self._kept = channel
        self._closing = asyncio.get_running_loop().call_later(self._kept_seconds, self.close)
        return answer

    def _taken(self) -> Channel | None:
        if self._closing is not None:
            self._closing.cancel()
        kept, self._kept, self._closing = self._kept, None, None
        return kept


async def _answer(
    channel: Channel, socket_path: Path, method: str, request: bytes, timeout_seconds: float
) -> bytes:
    name = method.rpartition("/")[2]
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            channel.request(
                method, Cardinality.UNARY_UNARY, bytes, bytes, timeout=timeout_seconds
            ) as stream,
        ):
            await stream.send_message(request, end=True)
            response = await stream.recv_message()
    except grpclib.GRPCError as err:
        text = err.message or ""
        raise CallError(
            f"{name} on {socket_path} failed: {err.status.name}: {text}",
            status=err.status.name,
            text=text,
        ) from err
    except TimeoutError as err:
        message = f"{name} on {socket_path} was not answered within {timeout_seconds:g} s"
        raise CallError(message, status=Status.DEADLINE_EXCEEDED.name) from err
    except OSError as err:
        message = f"{name}: cannot connect to {socket_path}: {err.strerror or err}"
        raise CallError(message, status=Status.UNAVAILABLE.name) from err
    except (StreamTerminatedError, ProtocolError, AssertionError) as err:
        # grpclib asserts where an answer breaks off
        raise CallError(
            f"{name} on {socket_path} broke off: {err}", status=Status.UNAVAILABLE.name
        ) from err
    if response is None:
        raise CallError(
            f"{name} on {socket_path} was answered with no message", status=Status.UNKNOWN.name
        )
    return response


class _Bytes(CodecBase):
    """Lets grpclib move encoded messages instead of objects."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        del message_type
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        del message_type
        return data


class _Methods(dict[str, Handler]):
    """The method table of grpclib, with an answer for names that are not served.

    grpclib itself aborts such a call without a content type, which grpc-go reports as ``Unknown``
    instead of ``Unimplemented``.
    """

    def get(self, path: str, default: Any = None) -> Any:
        del default
        return super().get(path) or Handler(_unimplemented, Cardinality.UNARY_UNARY, bytes, bytes)


class _Connection(H2Protocol):
    """A connection that repairs some habits of grpclib's,
    and that ends a peer's excessive requests.

    As HTTP/2 demands, it ignores frames of an unknown kind, where grpclib would drop the
    connection. When it is lost, a method that waits for room in the write buffer continues, where
    grpclib would leave it waiting for ever. Data that is written together is sent together (see
    `write_coalescing`).

    grpclib's windows bound nothing, because it accepts all data at once. So the data of unfinished
    messages is counted. So are frames that cost only the agent something: pings, settings,
    priorities, empty data, and streams that are reset at once.

    State: besides grpclib's, the counts.
    """

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        super().connection_made(CoalescingTransport(self.transport))
        processors: dict[Any, Any] = self.processor.processors
        for event in (UnknownFrameReceived, AlternativeServiceAvailable):
            processors[event] = lambda _: None
        for event, count in self._counters().items():
            processors[event] = _both(count, processors[event])
        self._most_bytes = _MOST_ANSWER_BYTES if self.h2_config.client_side else _MOST_REQUEST_BYTES
        self._costs: dict[int, int] = {}
        self._idle_frames = self._resets = 0
        self._counted_from = asyncio.get_running_loop().time()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _FED_AT_ONCE_BYTES):
            if self.connection.is_closing():
                return
            try:
                super().data_received(data[start : start + _FED_AT_ONCE_BYTES])
            except Exception as err:  # noqa: BLE001
                # h2 and hpack raise arbitrary exceptions on some malformed input
                self._end(f"its data cannot be decoded ({type(err).__name__})")

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.resume_writing()

    def _counters(self) -> dict[type[Any], Callable[[Any], None]]:
        counters: dict[type[Any], Callable[[Any], None]] = {
            DataReceived: self._count_data,
            StreamReset: self._count_reset,
        }
        counters |= dict.fromkeys(
            (PingReceived, PingAckReceived, RemoteSettingsChanged, PriorityUpdated),
            self._count_idle,
        )
        counters[UnknownFrameReceived] = self._count_idle
        return counters

    def _count_data(self, event: DataReceived) -> None:
        if not event.data and not event.stream_ended:
            self._count_idle(event)
        streams = self.processor.streams
        if len(self._costs) > len(streams):
            self._costs = {
                stream: cost for stream, cost in self._costs.items() if stream in streams
            }
        self._costs[event.stream_id] = (
            self._costs.get(event.stream_id, 0) + len(event.data) + _FRAME_COSTS_BYTES
        )
        if sum(self._costs.values()) > self._most_bytes:
            self._end(
                f"it sent more than {self._most_bytes // 1024 // 1024} MiB in messages that are "
                "not complete"
            )

    def _count_reset(self, event: StreamReset) -> None:
        self._resets += 1
        self._count_idle(event)
        if self._resets > _MOST_RESETS:
            self._end(
                f"it opened and reset more than {_MOST_RESETS} streams within "
                f"{_IDLE_FRAMES_SECONDS:g} s"
            )

    def _count_idle(self, _: object) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._counted_from > _IDLE_FRAMES_SECONDS:
            self._counted_from, self._idle_frames, self._resets = now, 0, min(self._resets, 1)
        self._idle_frames += 1
        if self._idle_frames > _MOST_IDLE_FRAMES:
            self._end(
                f"it sent more than {_MOST_IDLE_FRAMES} frames without content within "
                f"{_IDLE_FRAMES_SECONDS:g} s"
            )

    def _end(self, reason: str) -> None:
        if not self.connection.is_closing():
            _logger.warning("grpc.connection_closed", reason=reason)
            self.processor.close(reason)
            self.transport.abort()


def _both(first: Callable[[Any], None], second: Callable[[Any], None]) -> Callable[[Any], None]:
    def process(event: Any) -> None:
        first(event)
        second(event)

    return process


class _Channel(Channel):
    """grpclib's client, over such a connection."""

    def _protocol_factory(self) -> H2Protocol:
        plain = super()._protocol_factory()
        return _Connection(plain.handler, plain.config, plain.h2_config)


class _ClosableServer(Server):
    """grpclib's server, knowing its connections so that they can be closed."""

    def __init__(self, methods: dict[str, Handler]) -> None:
        super().__init__([_Servable(methods)], codec=_Bytes())
        self._mapping = _Methods(methods)
        self._connections: list[_Connection] = []  # oldest first

    def _protocol_factory(self) -> H2Protocol:
        plain = super()._protocol_factory()
        connection = _Connection(plain.handler, plain.config, plain.h2_config)
        self._make_room()
        self._connections.append(connection)
        return connection

    def _make_room(self) -> None:
        """Close the oldest connection over which nothing is asked;
        kubelet's has its stream of lists.
        """
        self._connections[:] = [
            one
            for one in self._connections
            if not hasattr(one, "connection") or not one.connection.is_closing()
        ]
        if len(self._connections) < _MOST_CONNECTIONS:
            return
        made = self._made()
        oldest = next(
            (one for one in made if not one.processor.streams), made[-1] if made else None
        )
        if oldest is not None:
            _logger.warning(
                "grpc.connection_closed",
                reason=f"there are more than {_MOST_CONNECTIONS} connections to one socket",
            )
            oldest.processor.close("too many connections")
            oldest.transport.abort()

    @property
    def started(self) -> bool:
        """Tell whether there is something to close."""
        return self._server is not None

    def stop_accepting(self) -> None:
        """Close the listening socket and keep the connections."""
        if self._server is not None:
            self._server.close()

    def close_connections(self) -> None:
        """Close the remaining connections, once their last bytes have been written."""
        for connection in self._made():
            connection.processor.close("the server stops")

    def abort_connections(self) -> None:
        """Close the remaining connections, at once."""
        for connection in self._made():
            connection.transport.abort()

    def _made(self) -> list[_Connection]:
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
        case _:
            return Status.UNAVAILABLE
