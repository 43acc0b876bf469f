"""The wrapper of grpclib, against grpcio and against peers that speak nonsense (python-stack: each pitfall here was met)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.settings
import hyperframe.frame
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # missing in the stubs
from structlog.testing import capture_logs

from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS, eventually
from vgpu_agent.errors import (
    AgentError,
    CapacityError,
    KubeletError,
    LedgerError,
    RequestRefusedError,
    UnhealthyDeviceError,
    UnknownDeviceError,
)
from vgpu_agent.kubelet import grpc as room
from vgpu_agent.kubelet import sockets
from vgpu_agent.kubelet.gathering import GatheringTransport
from vgpu_agent.kubelet.grpc import CallError, GrpcServer

ECHO, FAIL, HANG, SLOW, WATCH = "/t.T/Echo", "/t.T/Fail", "/t.T/Hang", "/t.T/Slow", "/t.T/Watch"


class Service:
    """Methods to be called in tests."""

    def __init__(self) -> None:
        self.failure: Exception = ValueError("a bug")
        self.ending = asyncio.Event()
        self.watching = asyncio.Event()
        self.cleaned_up = asyncio.Event()
        self.message = b"x"

    async def echo(self, request: bytes) -> bytes:
        return request

    async def fail(self, _: bytes) -> bytes:
        raise self.failure

    async def slow(self, request: bytes) -> bytes:
        self.watching.set()
        await self.ending.wait()
        return request

    async def hang(self, _: bytes) -> bytes:
        self.watching.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cleaned_up.set()
        return b""

    async def watch(self, _: bytes, send: Callable[[bytes], Awaitable[None]]) -> None:
        try:
            self.watching.set()
            await send(self.message)
            await self.ending.wait()
        finally:
            self.cleaned_up.set()


class Served:
    """A running server, and a grpcio channel to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.service = Service()
        self.server = GrpcServer(
            unary={ECHO: self.service.echo, FAIL: self.service.fail, HANG: self.service.hang, SLOW: self.service.slow},
            streams={WATCH: self.service.watch},
        )
        self.channel: Any = grpc.aio.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)])

    def call(self, method: str, request: bytes = b"", timeout_seconds: float = PATIENCE_SECONDS) -> Any:
        return self.channel.unary_unary(method)(request, timeout=timeout_seconds)

    def watch(self) -> Any:
        return self.channel.unary_stream(WATCH)(b"")


@pytest.fixture
async def served(directory: Path) -> AsyncIterator[Served]:
    """The service above on a socket."""
    built = Served(directory / "a.sock")
    await built.server.start(sockets.bind(built.path))
    yield built
    await built.channel.close(None)
    await built.server.drain(0.2)


async def _status(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call
    return refusal.value.code().name, refusal.value.details() or ""


async def test_a_call_moves_bytes_both_ways(served: Served) -> None:
    """Megabytes as well: kubelet's GetPreferredAllocation has no limit on our side (kubelet contract §10)."""
    request = b"x" * 5_000_000

    assert await served.channel.unary_unary(ECHO)(b"", timeout=PATIENCE_SECONDS) == b""
    assert await room.call(served.path, ECHO, request, timeout_seconds=PATIENCE_SECONDS) == request


async def test_nothing_that_arrives_is_described_byte_by_byte(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of megabytes is not turned into digits for a trace that is off."""
    described: list[bytes | None] = []

    def describe(data: bytes | None) -> str:
        described.append(data)
        return ""

    monkeypatch.setattr(hyperframe.frame, "_raw_data_repr", describe)
    assert await room.call(served.path, ECHO, b"hello", timeout_seconds=PATIENCE_SECONDS) == b"hello"
    assert described == []


async def test_an_unknown_method_is_unimplemented(served: Served) -> None:
    """grpclib's own refusal lacks a content type and reaches other stacks as ``Unknown``."""
    assert await _status(served.call("/v1beta1.DevicePlugin/Surprise")) == ("UNIMPLEMENTED", "vgpu-agent does not serve this method")


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RequestRefusedError("at most 1"), "INVALID_ARGUMENT"),
        (UnknownDeviceError("unknown id x"), "INVALID_ARGUMENT"),
        (UnhealthyDeviceError("x is unhealthy"), "FAILED_PRECONDITION"),
        (LedgerError("taken"), "FAILED_PRECONDITION"),
        (CapacityError("no memory left"), "RESOURCE_EXHAUSTED"),
        (KubeletError("no checkpoint"), "UNAVAILABLE"),
    ],
)
async def test_our_errors_reach_kubelet_with_their_text(served: Served, failure: AgentError, status: str) -> None:
    """What kubelet copies into the pod's status is our sentence."""
    served.service.failure = failure

    assert await _status(served.call(FAIL)) == (status, str(failure))


async def test_a_bug_reaches_kubelet_as_a_short_text_and_the_log_as_a_whole(served: Served) -> None:
    """A traceback in a pod's status helps nobody; in our log it does. Other calls go on."""
    with capture_logs() as lines:
        status, text = await _status(served.call(FAIL))

    assert (status, text) == ("INTERNAL", "internal error in vgpu-agent (ValueError); its log has the details under grpc.bug")
    (line,) = [line for line in lines if line["event"] == "grpc.bug"]
    assert (line["method"], str(line["exc_info"])) == (FAIL, "a bug")
    assert await served.call(ECHO, b"still there") == b"still there"


async def test_a_long_error_text_is_cut(served: Served) -> None:
    """An error text is an HTTP/2 header; a list of a thousand ids must not break the connection."""
    served.service.failure = RequestRefusedError("é" * 100_000)

    status, text = await _status(served.call(FAIL))

    assert (status, text) == ("INVALID_ARGUMENT", "é" * 1024)


async def test_a_cancelled_stream_is_cleaned_up_at_once(served: Served) -> None:
    """kubelet's cancel reaches the method as a cancellation; the connection stays usable."""
    call = served.watch()
    await call.read()

    call.cancel()

    await asyncio.wait_for(served.service.cleaned_up.wait(), PATIENCE_SECONDS)
    assert await served.call(ECHO, b"still there") == b"still there"


async def test_a_reader_that_goes_away_during_a_send_is_cleaned_up_at_once(served: Served) -> None:
    """The method is blocked in a send of more than the flow-control window when the connection is cut."""
    served.service.message = b"x" * 20_000_000
    reader, writer = await _raw_watch(served.path, _client())
    await asyncio.wait_for(served.service.watching.wait(), PATIENCE_SECONDS)
    await reader.read(1000)

    writer.transport.abort()

    await asyncio.wait_for(served.service.cleaned_up.wait(), PATIENCE_SECONDS)


async def test_draining_ends_streams_cleanly_while_the_client_keeps_its_connection(served: Served) -> None:
    """kubelet never closes its connection by itself; grpclib's own stop would wait for it forever on Python 3.12 and later."""
    call = served.watch()
    await call.read()
    served.service.ending.set()

    await asyncio.wait_for(served.server.drain(FOR_EVER_SECONDS), PATIENCE_SECONDS)

    assert await call.read() == EOF
    assert await call.code() == grpc.StatusCode.OK


async def test_draining_lets_a_running_call_finish(served: Served) -> None:
    """An Allocate in flight gets its answer, while nobody new is let in."""
    answer = asyncio.ensure_future(served.call(SLOW, b"answer"))
    await served.service.watching.wait()

    drain = asyncio.create_task(served.server.drain(FOR_EVER_SECONDS))
    await asyncio.sleep(0)
    with pytest.raises(CallError, match="Connection refused"):
        await room.call(served.path, ECHO, b"", timeout_seconds=PATIENCE_SECONDS)
    served.service.ending.set()

    assert await answer == b"answer"
    await drain


async def test_draining_cancels_what_does_not_finish_in_time(served: Served) -> None:
    """A method that hangs costs the grace time and no more."""
    hanging = asyncio.ensure_future(_status(served.call(HANG)))
    await served.service.watching.wait()

    began = time.perf_counter()
    await asyncio.wait_for(served.server.drain(0.1), PATIENCE_SECONDS)

    assert time.perf_counter() - began >= 0.1
    assert served.service.cleaned_up.is_set()
    assert (await hanging)[0] in {"UNAVAILABLE", "CANCELLED", "UNKNOWN"}


async def test_draining_cuts_off_a_peer_that_does_not_read(served: Served) -> None:
    """It has cancelled its stream and reads no more: neither the end nor a task may wait for room in the write buffer."""
    served.service.message = b"x" * 20_000_000
    client = _client()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
    client.increment_flow_control_window(2**30)
    _, writer = await _raw_watch(served.path, client)
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream's transport can both
    await asyncio.wait_for(served.service.watching.wait(), PATIENCE_SECONDS)
    client.reset_stream(1)
    writer.write(client.data_to_send())
    await asyncio.wait_for(served.service.cleaned_up.wait(), PATIENCE_SECONDS)

    began = time.perf_counter()
    await served.server.drain(10.0)

    assert time.perf_counter() - began < 9.0  # it gets a tenth of the grace
    assert [task for task in asyncio.all_tasks() if "request_handler" in repr(task)] == []
    writer.transport.abort()


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500, b""]
)
async def test_garbage_on_the_socket_disturbs_nobody(served: Served, junk: bytes) -> None:
    """A peer that speaks nonsense loses its own connection; a call before and after it is answered."""
    assert await served.call(ECHO, b"before") == b"before"
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(junk)
    writer.write_eof()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()

    assert await served.call(ECHO, b"after") == b"after"


async def test_an_unknown_frame_does_not_end_the_connection(served: Served) -> None:
    """HTTP/2 demands that frames of an unknown type are ignored; grpclib alone would drop the connection."""
    client = _client()
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(client.data_to_send() + b"\x00\x00\x04\xbb\x00\x00\x00\x00\x00abcd")
    _post(client, ECHO, b"hello")
    writer.write(client.data_to_send())

    received = b""
    while b"hello" not in received:
        chunk = await asyncio.wait_for(reader.read(4096), PATIENCE_SECONDS)
        assert chunk, "the connection was closed"
        received += chunk
    writer.close()


async def test_a_call_without_a_request_message_is_refused(served: Served) -> None:
    """A request that ends after its headers must not leave kubelet waiting."""
    client = _client()
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    _post(client, ECHO, None)
    writer.write(client.data_to_send())

    trailers: dict[bytes, bytes] = {}
    while b"grpc-status" not in trailers:
        for event in client.receive_data(await asyncio.wait_for(reader.read(4096), PATIENCE_SECONDS)):
            trailers.update(getattr(event, "headers", None) or [])
    writer.close()

    assert (trailers[b"grpc-status"], trailers[b"grpc-message"]) == (b"3", b"the call carries no request message")


async def test_a_missing_socket_is_an_error_of_ours(directory: Path) -> None:
    """grpclib lets a plain OSError through; callers catch one family."""
    with pytest.raises(CallError, match=r"Register: cannot connect to .*kubelet\.sock: No such file or directory") as failure:
        await room.call(directory / "kubelet.sock", "/v1beta1.Registration/Register", b"", timeout_seconds=PATIENCE_SECONDS)

    assert failure.value.status == "UNAVAILABLE"


async def test_a_dead_socket_is_an_error_of_ours(directory: Path) -> None:
    """What a stopped kubelet leaves behind."""
    sockets.bind(directory / "kubelet.sock").close()

    with pytest.raises(CallError, match="Connection refused"):
        await room.call(directory / "kubelet.sock", "/v1beta1.Registration/Register", b"", timeout_seconds=PATIENCE_SECONDS)


async def test_an_answer_that_does_not_come_is_an_error_of_ours(served: Served) -> None:
    """No call waits longer than its caller said."""
    with pytest.raises(CallError, match=r"Hang on .* was not answered within 0\.05 s|DEADLINE_EXCEEDED"):
        await room.call(served.path, HANG, b"", timeout_seconds=0.05)


async def test_a_peer_that_never_speaks_is_an_error_of_ours(directory: Path) -> None:
    """A socket on which somebody listens and nobody accepts."""
    with sockets.bind(directory / "a.sock") as listener:
        listener.listen()
        with pytest.raises(CallError, match=r"not answered within 0\.05 s"):
            await room.call(directory / "a.sock", ECHO, b"", timeout_seconds=0.05)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(range(256)) * 4])
async def test_a_peer_that_speaks_something_else_is_an_error_of_ours(directory: Path, answer: bytes) -> None:
    """Another program's socket under kubelet's name, or a kubelet that dies in the middle of an answer."""

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(speak, sock=sockets.bind(directory / "a.sock")):
        with pytest.raises(CallError):
            await room.call(directory / "a.sock", ECHO, b"", timeout_seconds=PATIENCE_SECONDS)


async def test_an_error_status_keeps_its_name_and_text(served: Served) -> None:
    """Callers decide by the status, people by the text."""
    served.service.failure = CapacityError("nothing left")

    with pytest.raises(CallError) as failure:
        await room.call(served.path, FAIL, b"", timeout_seconds=PATIENCE_SECONDS)

    assert (failure.value.status, failure.value.text) == ("RESOURCE_EXHAUSTED", "nothing left")


def _client() -> h2.connection.H2Connection:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    return client


def _post(client: h2.connection.H2Connection, method: str, message: bytes | None) -> None:
    headers = [(":method", "POST"), (":path", method), (":scheme", "http"), (":authority", "localhost")]
    client.send_headers(1, [*headers, ("content-type", "application/grpc"), ("te", "trailers")], end_stream=message is None)
    if message is not None:
        client.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)


async def _raw_watch(path: Path, client: h2.connection.H2Connection) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A ListAndWatch-like call on a connection of our own."""
    _post(client, WATCH, b"")
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, str(path))
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    writer.write(client.data_to_send())
    return reader, writer


async def test_calls_that_follow_each_other_share_a_connection(served: Served) -> None:
    """Until it is closed on purpose."""
    caller = room.Caller(served.path, kept_seconds=FOR_EVER_SECONDS)
    connections = served.server._server._connections
    for _ in range(3):
        assert await caller.call(ECHO, b"x", timeout_seconds=PATIENCE_SECONDS) == b"x"
    assert len(connections) == 1

    caller.close()
    await eventually(lambda: all(connection.transport.is_closing() for connection in connections))


async def test_a_connection_that_nobody_has_used_for_a_while_is_closed(served: Served) -> None:
    """And the next call makes another."""
    caller = room.Caller(served.path, kept_seconds=0.05)
    connections = served.server._server._connections
    for _ in range(2):
        assert await caller.call(ECHO, b"x", timeout_seconds=PATIENCE_SECONDS) == b"x"
        await eventually(lambda: all(connection.transport.is_closing() for connection in connections))


async def test_calls_at_the_same_time_have_connections_of_their_own(served: Served) -> None:
    """One that is cut off takes no other with it, and one connection is enough to keep."""
    caller = room.Caller(served.path, kept_seconds=FOR_EVER_SECONDS)
    slow = asyncio.ensure_future(caller.call(SLOW, b"slow", timeout_seconds=PATIENCE_SECONDS))
    await served.service.watching.wait()
    assert await caller.call(ECHO, b"x", timeout_seconds=PATIENCE_SECONDS) == b"x"
    with pytest.raises(CallError, match=r"not answered within|DEADLINE_EXCEEDED"):
        await caller.call(HANG, b"", timeout_seconds=0.05)
    served.service.ending.set()
    assert await slow == b"slow"
    caller.close()


async def test_a_server_that_has_started_anew_is_found_over_a_new_connection(directory: Path) -> None:
    """kubelet makes its socket anew; whoever asked the one before is not told of its end."""
    caller = room.Caller(directory / "a.sock", kept_seconds=FOR_EVER_SECONDS)
    for answer in (b"first", b"second"):

        async def method(_: bytes, answer: bytes = answer) -> bytes:
            return answer

        server = GrpcServer(unary={ECHO: method}, streams={})
        await server.start(sockets.bind(directory / "a.sock"))
        assert await caller.call(ECHO, b"", timeout_seconds=PATIENCE_SECONDS) == answer
        await server.drain(0.1)
        (directory / "a.sock").unlink(missing_ok=True)
    with pytest.raises(CallError, match="cannot connect"):
        await caller.call(ECHO, b"", timeout_seconds=PATIENCE_SECONDS)


async def test_a_kept_connection_that_breaks_off_costs_nobody_the_answer(directory: Path) -> None:
    """The other side may close it at the very moment of the next call, here in the middle of the second one."""
    accepted: list[asyncio.StreamWriter] = []

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        there = await asyncio.open_unix_connection(directory / "real.sock")

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while piece := await source.read(65536):
                    sink.write(piece)
            sink.close()

        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    async def echo(request: bytes) -> bytes:
        if request == b"1" and len(accepted) == 1:
            accepted[0].transport.abort()
        return request

    server = GrpcServer(unary={ECHO: echo}, streams={})
    await server.start(sockets.bind(directory / "real.sock"))
    caller = room.Caller(directory / "a.sock", kept_seconds=FOR_EVER_SECONDS)
    async with await asyncio.start_unix_server(between, sock=sockets.bind(directory / "a.sock")):
        for number in range(8):
            assert await caller.call(ECHO, b"%d" % number, timeout_seconds=PATIENCE_SECONDS) == b"%d" % number
        caller.close()
        assert len(accepted) == 2
        await server.drain(0.1)


async def test_what_is_written_in_one_turn_is_sent_at_once() -> None:
    """Headers, message and trailers of an answer wake the other side up once; long answers do not pile up."""
    sent: list[int] = []

    class Recording(asyncio.Transport):
        def write(self, data: Any) -> None:
            sent.append(len(data))

        def is_closing(self) -> bool:
            return False

        def close(self) -> None:
            sent.append(-1)

    gathering = GatheringTransport(Recording())
    for piece in (b"ab", b"c", b"def"):
        gathering.write(piece)
    assert sent == []
    await asyncio.sleep(0)
    assert sent == [6]
    for _ in range(3):
        gathering.write(bytes(20_000))
    assert sent == [6, 40_000]
    gathering.close()
    assert sent == [6, 40_000, 20_000, -1]
