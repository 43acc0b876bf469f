"""One grpclib connection, for servers and clients: it limits the memory and work that a peer may
cost, and passes encoded messages on as they are.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from grpclib.encoding.base import CodecBase
from grpclib.protocol import H2Protocol
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

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = log.get(__name__)

_FRAME_COSTS_BYTES = 512  # of memory, in addition to its content
# Frames that cost us work and the peer nothing. A kubelet pings once for some ten KiB of a list,
# and breaks off a call now and then.
_MAX_IDLE_FRAMES, _IDLE_FRAMES_SECONDS = 10_000, 10.0
_MAX_RESETS = 200  # in the same time
# More than this is passed on at once: it fills a send anyway, and the flow control does not see the
# data that waits here.
_MAX_COALESCED_BYTES = 32 * 1024
_FED_AT_ONCE_BYTES = 16 * 1024  # h2 makes events of all its input before they can be checked


class Bytes(CodecBase):
    """A codec that lets grpclib move encoded messages instead of objects."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """See `CodecBase`."""
        del message_type
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """See `CodecBase`."""
        del message_type
        return data


class Connection(H2Protocol):
    """A connection that corrects some of grpclib's behaviour,
    and that is closed when its peer sends too much.

    As HTTP/2 demands, it ignores frames of an unknown kind, where grpclib would drop the
    connection. When it is lost, a method that waits for room in the write buffer continues, where
    grpclib would leave it waiting for ever. Data that is written together is sent together
    (`CoalescingTransport`).

    grpclib's flow-control windows limit nothing, because it accepts all data at once. So the data
    of unfinished messages is counted. So are frames that cost only the agent something: pings,
    settings, priorities, empty data, and streams that are reset at once.

    State: in addition to grpclib's, the counts: memory by stream; and frames without content, and
    resets, in the last seconds.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        plain: H2Protocol,
        most_bytes: int,
        *,
        caller: object = None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the place of ``plain``.

        Args:
            plain: the object that grpclib has made for the same connection; its settings are
                taken over.
            most_bytes: the limit for the data of unfinished messages.
            caller: whatever identifies the peer for the methods that ask for it; None for none.
            lost: called when the connection has ended.
        """
        super().__init__(plain.handler, plain.config, plain.h2_config)
        self._most_bytes = most_bytes
        self._caller, self._lost = caller, lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast("asyncio.Transport", transport)
        super().connection_made(CoalescingTransport(self.transport, self._caller))
        processors: dict[Any, Any] = self.processor.processors
        for event in (UnknownFrameReceived, AlternativeServiceAvailable):
            processors[event] = lambda _: None
        for event, count in self._counters().items():
            processors[event] = _both(count, processors[event])
        self._costs: dict[int, int] = {}  # stream id → bytes of memory for its data
        self._idle_frames = self._resets = 0
        self._counted_from = asyncio.get_running_loop().time()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for start in range(0, len(data), _FED_AT_ONCE_BYTES):
            if self.connection.is_closing():
                return
            try:
                super().data_received(data[start : start + _FED_AT_ONCE_BYTES])
            except Exception as err:  # noqa: BLE001
                # h2 and hpack raise arbitrary exceptions on some malformed input
                self._end(f"its data cannot be decoded ({type(err).__name__})")

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self.resume_writing()
        self._lost()

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
                f"it sent more than {_size(self._most_bytes)} in messages that are not complete"
            )

    def _count_reset(self, event: StreamReset) -> None:
        self._resets += 1
        self._count_idle(event)
        if self._resets > _MAX_RESETS:
            self._end(
                f"it opened and reset more than {_MAX_RESETS} streams within "
                f"{_IDLE_FRAMES_SECONDS:g} s"
            )

    def _count_idle(self, _: object) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._counted_from > _IDLE_FRAMES_SECONDS:
            # a reset that is being counted is already in `_resets`
            self._counted_from, self._idle_frames, self._resets = now, 0, min(self._resets, 1)
        self._idle_frames += 1
        if self._idle_frames > _MAX_IDLE_FRAMES:
            self._end(
                f"it sent more than {_MAX_IDLE_FRAMES} frames without content within "
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


def _size(count: int) -> str:
    mib, rest = divmod(count, 1024 * 1024)
    return f"{count // 1024} KiB" if rest else f"{mib} MiB"


class CoalescingTransport(asyncio.Transport):
    """A transport that joins the writes of one iteration of the event loop into one write to
    ``transport`` at its end, because each send wakes the other side up and costs a system call on
    both.

    grpclib writes headers, message and trailers one after the other, and several calls may be
    answered in one iteration.

    State: the data that was not passed on yet; nothing between iterations.
    """

    def __init__(self, transport: asyncio.Transport, caller: object = None) -> None:
        """Write to ``transport``; ``caller`` is shown as the name of the peer, which a unix socket
        does not have.
        """
        super().__init__()
        self._transport = transport
        self._caller = caller
        self._call_soon = asyncio.get_running_loop().call_soon
        self._pieces: list[Any] = []
        self._bytes = 0

    def write(self, data: Any) -> None:
        """Send ``data``, a bytes-like object, soon."""
        if not self._pieces:
            self._call_soon(self._pass_on)
        self._pieces.append(data)
        self._bytes += len(data)
        if self._bytes > _MAX_COALESCED_BYTES:
            self._pass_on()

    def close(self) -> None:
        """Send the remaining data, then close."""
        self._pass_on()
        self._transport.close()

    def is_closing(self) -> bool:
        """Tell whether nothing more can be sent."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See `asyncio.BaseTransport.get_extra_info`."""
        if name == "peername" and self._caller is not None:
            return self._caller
        return self._transport.get_extra_info(name, default)

    def _pass_on(self) -> None:
        if self._pieces:
            pieces, self._pieces, self._bytes = self._pieces, [], 0
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
