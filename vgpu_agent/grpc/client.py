"""Unary gRPC calls over a unix socket, with a time limit and the agent's own errors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpclib
from grpclib.client import Channel
from grpclib.const import Cardinality, Status
from grpclib.exceptions import ProtocolError, StreamTerminatedError

from vgpu_agent.errors import AgentError
from vgpu_agent.grpc.connection import Bytes, Connection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

    from grpclib.protocol import H2Protocol

# Limit of one connection for answers that are not complete. The largest answer of pod-resources
# has less than 15 MiB.
_MAX_ANSWER_BYTES = 32 * 1024 * 1024


class CallError(AgentError):
    """A gRPC call failed.

    Attributes:
        status: the gRPC status' name, e.g. ``RESOURCE_EXHAUSTED``; ``UNAVAILABLE`` when there was
            no answer at all.
        text: the server's own text alone.
    """

    def __init__(self, message: str, *, status: str, text: str = "") -> None:
        super().__init__(message)
        self.status, self.text = status, text


async def call(
    socket_path: Path,
    method: str,
    request: bytes,
    *,
    timeout_seconds: float,
    on_connected: Callable[[], Awaitable[None]] | None = None,
) -> bytes:
    """Make one unary call over a connection of its own.

    Args:
        socket_path: of the server.
        method: ``/package.Service/Method``.
        request: the message.
        timeout_seconds: for the whole call.
        on_connected: awaited after connecting and before the message is sent, for a check that
            counts only once the server listens; if it raises, the call is not made.

    Raises:
        CallError: the socket has no listener, the answer is an error, or it did not come within
            ``timeout_seconds``.
    """
    channel = _Channel(path=str(socket_path), codec=Bytes())  # leaves messages encoded
    try:
        return await _answer(channel, socket_path, method, request, timeout_seconds, on_connected)
    finally:
        channel.close()


class Caller:
    """Unary calls that share a connection while they follow each other closely;
    opening one costs as much as a call.

    State: the idle connection, closed ``kept_seconds`` after it was last used. A server that
    restarts creates a new socket, so a call that fails on a kept connection is repeated over a new
    one.
    """

    def __init__(self, socket_path: Path, *, kept_seconds: float) -> None:
        self._socket_path = socket_path
        self._kept_seconds = kept_seconds
        self._kept: Channel | None = None
        self._closing: asyncio.TimerHandle | None = None

    async def call(self, method: str, request: bytes, *, timeout_seconds: float) -> bytes:
        """Make a call like the function `call`; only for methods that may be called twice."""
        if (kept := self._taken()) is not None:
            try:
                return await self._call(kept, method, request, timeout_seconds)
            except CallError as err:
                if err.status != Status.UNAVAILABLE.name:
                    raise
        return await self._call(
            _Channel(path=str(self._socket_path), codec=Bytes()), method, request, timeout_seconds
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
        self.close()  # of two calls at the same time, one connection is kept
        self._kept = channel
        self._closing = asyncio.get_running_loop().call_later(self._kept_seconds, self.close)
        return answer

    def _taken(self) -> Channel | None:
        """Return the idle connection, which is then no longer kept; None without one."""
        if self._closing is not None:
            self._closing.cancel()
        kept, self._kept, self._closing = self._kept, None, None
        return kept


async def _answer(
    channel: Channel,
    socket_path: Path,
    method: str,
    request: bytes,
    timeout_seconds: float,
    on_connected: Callable[[], Awaitable[None]] | None = None,
) -> bytes:
    name = method.rpartition("/")[2]
    try:
        response = await _in_own_task(
            _exchange(channel, method, request, timeout_seconds, on_connected), timeout_seconds
        )
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
        # grpclib raises AssertionError where an answer is incomplete
        raise CallError(
            f"{name} on {socket_path} broke off: {err}", status=Status.UNAVAILABLE.name
        ) from err
    if response is None:
        raise CallError(
            f"{name} on {socket_path} was answered with no message", status=Status.UNKNOWN.name
        )
    return response


async def _in_own_task(
    exchange: Coroutine[Any, Any, bytes | None], timeout_seconds: float
) -> bytes | None:
    """Return the result of ``exchange``, which runs in a task of its own.

    Where a connection breaks off or the time is over, grpclib wakes the task that waits by
    cancelling it, and never takes that back (`asyncio.Task.uncancel`). The caller's task would
    count as cancelled from then on.

    Raises:
        TimeoutError: it has not ended within ``timeout_seconds``.
    """
    task = asyncio.ensure_future(exchange)
    try:
        await asyncio.wait((task,), timeout=timeout_seconds)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task  # its exception refers to this frame: a cycle, which only the collector would free


async def _exchange(
    channel: Channel,
    method: str,
    request: bytes,
    timeout_seconds: float,
    on_connected: Callable[[], Awaitable[None]] | None,
) -> bytes | None:
    async with channel.request(
        method, Cardinality.UNARY_UNARY, bytes, bytes, timeout=timeout_seconds
    ) as stream:
        if on_connected is not None:
            await stream.send_request()  # connects; a server waits for the message
            await on_connected()
        await stream.send_message(request, end=True)
        return await stream.recv_message()


class _Channel(Channel):
    """grpclib's client, over a connection that is closed when the server sends too much."""

    def _protocol_factory(self) -> H2Protocol:
        return Connection(super()._protocol_factory(), _MAX_ANSWER_BYTES)
