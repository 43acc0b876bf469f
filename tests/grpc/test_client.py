"""Calls that we make: each failure is an error of ours that names the socket, and calls that follow
each other share a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.grpc.parts import ECHO, FAIL, HANG, LIMITS, SLOW, Served
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS, eventually
from vgpu_agent.errors import CapacityError
from vgpu_agent.grpc.client import Caller, CallError, call
from vgpu_agent.grpc.server import GrpcServer
from vgpu_agent.grpc.sockets import bind


def _cancelled_times() -> int:
    """Return how often the cancellation of this test was requested and not taken back."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_a_missing_socket_is_an_error_of_ours(directory: Path) -> None:
    """grpclib lets a plain OSError through; callers catch one family."""
    with pytest.raises(
        CallError, match=r"Register: cannot connect to .*kubelet\.sock: No such file or directory"
    ) as failure:
        await call(
            directory / "kubelet.sock",
            "/v1beta1.Registration/Register",
            b"",
            timeout_seconds=PATIENCE_SECONDS,
        )

    assert failure.value.status == "UNAVAILABLE"


async def test_a_dead_socket_is_an_error_of_ours(directory: Path) -> None:
    """A stopped kubelet leaves a dead socket behind."""
    bind(directory / "kubelet.sock", "--dir").close()

    with pytest.raises(CallError, match="Connection refused"):
        await call(
            directory / "kubelet.sock",
            "/v1beta1.Registration/Register",
            b"",
            timeout_seconds=PATIENCE_SECONDS,
        )


async def test_an_answer_that_does_not_come_is_an_error_of_ours(served: Served) -> None:
    """No call waits longer than its caller allows."""
    with pytest.raises(
        CallError, match=r"Hang on .* was not answered within 0\.05 s|DEADLINE_EXCEEDED"
    ):
        await call(served.path, HANG, b"", timeout_seconds=0.05)
    assert _cancelled_times() == 0


async def test_a_peer_that_never_speaks_is_an_error_of_ours(directory: Path) -> None:
    """A listening socket that accepts no connection."""
    with bind(directory / "a.sock", "--dir") as listener:
        listener.listen()
        with pytest.raises(CallError, match=r"not answered within 0\.05 s"):
            await call(directory / "a.sock", ECHO, b"", timeout_seconds=0.05)


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(range(256)) * 4]
)
async def test_a_peer_that_speaks_something_else_is_an_error_of_ours(
    directory: Path, answer: bytes
) -> None:
    """Another program's socket under kubelet's name,
    or a kubelet that dies in the middle of an answer.
    """

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(speak, sock=bind(directory / "a.sock", "--dir")):
        with pytest.raises(CallError):
            await call(directory / "a.sock", ECHO, b"", timeout_seconds=PATIENCE_SECONDS)


async def test_a_connection_that_breaks_off_cancels_nothing_of_the_callers(served: Served) -> None:
    """grpclib wakes the task that waits by a cancellation that it never takes back, here and where
    the time is over. A task that lives on, such as a loop of `Supervisor`, could not tell that from
    its own end. On Python 3.11.2 none of its later time limits would end with a TimeoutError.
    """

    async def break_off() -> None:
        await served.service.watching.wait()
        for connection in served.server._server._connections:
            connection.transport.abort()

    breaking = asyncio.ensure_future(break_off())
    with pytest.raises(CallError, match="broke off"):
        await call(served.path, HANG, b"", timeout_seconds=PATIENCE_SECONDS)
    await breaking
    assert _cancelled_times() == 0


async def test_who_is_cancelled_during_a_call_ends(served: Served) -> None:
    """At once, and nothing of the call goes on."""
    calling = asyncio.ensure_future(call(served.path, HANG, b"", timeout_seconds=PATIENCE_SECONDS))
    await served.service.watching.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert calling.cancelling() == 1
    await asyncio.wait_for(served.service.cleaned_up.wait(), PATIENCE_SECONDS)


async def test_an_error_status_keeps_its_name_and_text(served: Served) -> None:
    """Callers decide by the status, people by the text."""
    served.service.failure = CapacityError("nothing left")

    with pytest.raises(CallError) as failure:
        await call(served.path, FAIL, b"", timeout_seconds=PATIENCE_SECONDS)

    assert (failure.value.status, failure.value.text) == ("RESOURCE_EXHAUSTED", "nothing left")


async def test_calls_that_follow_each_other_share_a_connection(served: Served) -> None:
    """Until it is closed on purpose."""
    caller = Caller(served.path, kept_seconds=FOR_EVER_SECONDS)
    connections = served.server._server._connections
    for _ in range(3):
        assert await caller.call(ECHO, b"x", timeout_seconds=PATIENCE_SECONDS) == b"x"
    assert len(connections) == 1

    caller.close()
    await eventually(lambda: all(connection.transport.is_closing() for connection in connections))


async def test_a_connection_that_nobody_has_used_for_a_while_is_closed(served: Served) -> None:
    """The next call makes another."""
    caller = Caller(served.path, kept_seconds=0.05)
    connections = served.server._server._connections
    for _ in range(2):
        assert await caller.call(ECHO, b"x", timeout_seconds=PATIENCE_SECONDS) == b"x"
        await eventually(
            lambda: all(connection.transport.is_closing() for connection in connections)
        )


async def test_calls_at_the_same_time_have_connections_of_their_own(served: Served) -> None:
    """One that is cut off takes no other with it, and one connection is enough to keep."""
    caller = Caller(served.path, kept_seconds=FOR_EVER_SECONDS)
    slow = asyncio.ensure_future(caller.call(SLOW, b"slow", timeout_seconds=PATIENCE_SECONDS))
    await served.service.watching.wait()
    assert await caller.call(ECHO, b"x", timeout_seconds=PATIENCE_SECONDS) == b"x"
    with pytest.raises(CallError, match=r"not answered within|DEADLINE_EXCEEDED"):
        await caller.call(HANG, b"", timeout_seconds=0.05)
    served.service.ending.set()
    assert await slow == b"slow"
    caller.close()


async def test_a_server_that_has_started_anew_is_found_over_a_new_connection(
    directory: Path,
) -> None:
    """The kubelet makes its socket anew. Callers of the one before get no notice of its end."""
    caller = Caller(directory / "a.sock", kept_seconds=FOR_EVER_SECONDS)
    for answer in (b"first", b"second"):

        async def method(_: bytes, answer: bytes = answer) -> bytes:
            return answer

        server = GrpcServer(unary={ECHO: method}, streams={}, limits=LIMITS)
        await server.start(bind(directory / "a.sock", "--dir"))
        assert await caller.call(ECHO, b"", timeout_seconds=PATIENCE_SECONDS) == answer
        await server.drain(0.1)
        (directory / "a.sock").unlink(missing_ok=True)
    with pytest.raises(CallError, match="cannot connect"):
        await caller.call(ECHO, b"", timeout_seconds=PATIENCE_SECONDS)


async def test_a_kept_connection_that_breaks_off_costs_nobody_the_answer(directory: Path) -> None:
    """The other side may close it at the very moment of the next call,
    here in the middle of the second one.
    """
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

    server = GrpcServer(unary={ECHO: echo}, streams={}, limits=LIMITS)
    await server.start(bind(directory / "real.sock", "--dir"))
    caller = Caller(directory / "a.sock", kept_seconds=FOR_EVER_SECONDS)
    async with await asyncio.start_unix_server(between, sock=bind(directory / "a.sock", "--dir")):
        for number in range(8):
            assert (
                await caller.call(ECHO, b"%d" % number, timeout_seconds=PATIENCE_SECONDS)
                == b"%d" % number
            )
        caller.close()
        assert len(accepted) == 2
        await server.drain(0.1)
