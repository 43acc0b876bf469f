"""Attacks on a plugin socket: only root can reach it,
but a client that has gone mad must not end the kubelet's own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import hpack
import pytest
import structlog.testing
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
)

from tests.grpc.conftest import directory, served
from tests.grpc.parts import ECHO, SLOW, WATCH, Served
from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.grpc import server as grpc_server
from vgpu_agent.grpc.server import Limits
from vgpu_agent.kubelet.server import LIMITS

__all__ = ["directory", "served"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
_MIB = 1024 * 1024


@pytest.fixture
def limits() -> Limits:
    """Those of the plugin sockets."""
    return LIMITS


@pytest.fixture
async def kubelet(served: Served) -> AsyncIterator[Served]:
    """The kubelet, which has its stream of lists;
    after the attack it still has it, and is answered.
    """
    watch = served.watch()
    assert await watch.read() == b"x"
    yield served
    assert await served.call(ECHO, b"still here") == b"still here"
    assert not watch.done()
    served.service.ending.set()
    await watch.read()


def _headers(stream: int, path: str = ECHO, *, end: bool = False) -> bytes:
    fields = [
        (":method", "POST"),
        (":path", path),
        (":scheme", "http"),
        (":authority", "a"),
        ("content-type", "application/grpc"),
    ]
    frame = HeadersFrame(
        stream, hpack.Encoder().encode([*fields, ("te", "trailers")]), flags=["END_HEADERS"]
    )
    if end:
        frame.flags.add("END_STREAM")
    return frame.serialize()


def _message(stream: int, data: bytes, *, end: bool = False) -> bytes:
    return DataFrame(stream, data, flags=["END_STREAM"] if end else []).serialize()


async def _closed(served: Served, frames: Callable[[int], bytes], *, most: int) -> int:
    """Send ``frames`` (numbered from 0) until the server closes the connection;
    how many went out before that.
    """
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    reading = asyncio.ensure_future(_drained(reader))
    sent = 0
    try:
        writer.write(_PREFACE)
        with contextlib.suppress(ConnectionError):
            while sent < most and not reading.done():
                writer.write(frames(sent))
                sent += 1
                await writer.drain()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reading
    finally:
        reading.cancel()
        writer.close()
    return sent


async def _drained(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(65536):
            pass


async def _answers(reader: asyncio.StreamReader, number: int) -> None:
    """Wait until so many streams have ended."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while number:
            frame, length = Frame.parse_frame_header(memoryview(await reader.readexactly(9)))
            await reader.readexactly(length)
            number -= "END_STREAM" in frame.flags


async def test_rapid_resets_cannot_keep_the_loop_busy(kubelet: Served) -> None:
    """A stream that is opened and reset at once is never counted as open,
    so no limit of HTTP/2's own holds.
    """
    with structlog.testing.capture_logs() as logs:
        sent = await _closed(
            kubelet,
            lambda n: _headers(2 * n + 1, SLOW) + RstStreamFrame(2 * n + 1, 8).serialize(),
            most=20_000,
        )
    assert sent < 20_000
    assert [line["event"] for line in logs].count("grpc.connection_closed") == 1
    assert "reset" in next(
        line["reason"] for line in logs if line["event"] == "grpc.connection_closed"
    )


async def test_a_message_of_64_mib_is_not_collected(kubelet: Served) -> None:
    """The length comes first, then the data, frame by frame.
    The largest honest request has below four.
    """
    first = _headers(1) + _message(1, b"\0" + struct.pack(">I", 64 * _MIB))
    part = _message(1, bytes(16384))
    sent = await _closed(kubelet, lambda n: first if n == 0 else part, most=64 * 64)
    assert sent * 16384 < 40 * _MIB  # 16 MiB, and what sockets and streams hold


async def test_many_unfinished_messages_are_not_collected_either(kubelet: Served) -> None:
    """Each below the limit, all together above it."""

    def frames(n: int) -> bytes:
        stream = 2 * (n % 90) + 1
        first = (
            _headers(stream) + _message(stream, b"\0" + struct.pack(">I", 4 * _MIB))
            if n < 90
            else b""
        )
        return first + _message(stream, bytes(16384))

    assert await _closed(kubelet, frames, most=64 * 64) * 16384 < 40 * _MIB


async def test_tiny_frames_cannot_swell_in_memory(kubelet: Served) -> None:
    """A byte takes some hundred bytes of memory while its message is not complete."""
    first = _headers(1) + _message(1, b"\0" + struct.pack(">I", 4 * _MIB))
    part = _message(1, b"x") * 1000
    assert await _closed(kubelet, lambda n: first if n == 0 else part, most=400) < 400


@pytest.mark.parametrize(
    "frame",
    [
        PingFrame(0, b"12345678"),
        SettingsFrame(0, {4: 65535}),
        PriorityFrame(1, depends_on=0, stream_weight=1),
        DataFrame(1, b""),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_frames_that_say_nothing_cannot_be_sent_without_end(
    kubelet: Served, frame: Frame
) -> None:
    """Each costs the sender a few bytes, and us work or an answer."""
    part = frame.serialize() * 1000
    assert await _closed(kubelet, lambda n: _headers(1) if n == 0 else part, most=100) < 100


async def test_headers_that_never_end_are_cut_off(kubelet: Served) -> None:
    """CONTINUATION after CONTINUATION, none of which is the last."""
    first = HeadersFrame(1, hpack.Encoder().encode([(":method", "POST")])).serialize()
    part = ContinuationFrame(1, hpack.Encoder().encode([("x-endless", "y" * 8000)])).serialize()
    assert await _closed(kubelet, lambda n: first if n == 0 else part, most=2000) < 2000


async def test_more_streams_than_allowed_end_the_connection_that_opens_them(
    kubelet: Served,
) -> None:
    """Calls that never end, one beside the other."""
    call = _message(1, b"\0\0\0\0\0", end=True)
    assert (
        await _closed(
            kubelet, lambda n: _headers(2 * n + 1, SLOW) + (call if n == 0 else b""), most=2000
        )
        < 2000
    )


async def test_nobody_else_can_open_streams_of_lists_without_end(kubelet: Served) -> None:
    """Each holds a list of megabytes while its client does not read."""
    reader, writer = await asyncio.open_unix_connection(str(kubelet.path))
    writer.write(_PREFACE)
    for stream in range(1, 41, 2):
        writer.write(_headers(stream, WATCH) + _message(stream, b"\0\0\0\0\0", end=True))
    server: Any = kubelet.server
    await _answers(reader, 17)
    assert server._streaming == 4
    writer.close()
    await eventually(lambda: server._streaming == 1)


async def test_silent_connections_cannot_take_the_place_of_the_kubelets(kubelet: Served) -> None:
    """A few of a hundred connections that ask nothing stay,
    and so does the older one of the kubelet.
    """
    server: Any = kubelet.server
    opened = [await asyncio.open_unix_connection(str(kubelet.path)) for _ in range(100)]
    reading = [asyncio.ensure_future(_drained(reader)) for reader, _ in opened]
    await eventually(lambda: sum(one.done() for one in reading) >= 100 - LIMITS.connections)
    assert (
        len([one for one in server._server._established() if not one.connection.is_closing()])
        <= LIMITS.connections
    )
    for _, writer in opened:
        writer.close()
    await asyncio.gather(*reading)


async def test_a_compressed_message_is_refused_without_a_traceback(kubelet: Served) -> None:
    """So is a message that breaks off. Neither is logged as a bug of the agent."""
    with structlog.testing.capture_logs() as logs:
        reader, writer = await asyncio.open_unix_connection(str(kubelet.path))
        compressed = _headers(1) + _message(1, b"\1\0\0\0\1x", end=True)
        writer.write(_PREFACE + compressed + _headers(3) + _message(3, b"\0\0\0\0\5x", end=True))
        await _answers(reader, 2)
        writer.close()
    assert not [line for line in logs if line["event"] == "grpc.bug"]


async def test_a_request_that_never_ends_is_answered_in_time(
    kubelet: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a message, then silence: the call ends, and other calls are answered meanwhile."""
    monkeypatch.setattr(grpc_server, "_REQUEST_SECONDS", 0.2)
    reader, writer = await asyncio.open_unix_connection(str(kubelet.path))
    writer.write(_PREFACE + _headers(1) + _message(1, b"\0\0\0\0\5x"))
    server: Any = kubelet.server
    await eventually(lambda: server._running == 2)
    assert await kubelet.call(ECHO, b"meanwhile") == b"meanwhile"
    await eventually(lambda: server._running == 1)
    writer.close()
    del reader


async def test_a_polite_client_cannot_send_a_message_of_64_mib_either(kubelet: Served) -> None:
    """One that keeps to the windows of HTTP/2, which are opened again for whatever has come."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
    ]
    mad: Any = grpc.aio.insecure_channel(f"unix:{kubelet.path}", options=options)
    with pytest.raises(grpc.aio.AioRpcError):
        await mad.unary_unary(ECHO)(bytes(64 * _MIB), timeout=PATIENCE_SECONDS)
    await mad.close(None)
