"""The connection that makes room for a new one, and a listener without descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.web import connections as limits
from vgpu_agent.web.connections import Connections, bounded_by_descriptors
from vgpu_agent.webhook.certificates import context_of, make

_MOST = 8


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    """A server that takes `_MOST` connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    application = web.Application()
    application.router.add_get("/", _answer)
    runner = web.AppRunner(application)
    await runner.setup()
    assert runner.server is not None
    connections = Connections(listener, runner.server, max_connections=_MOST)
    connections.start()
    yield listener.getsockname()
    connections.stop()
    await runner.cleanup()


async def _answer(_: web.Request) -> web.Response:
    return web.Response(text="here")


async def _open(
    address: tuple[str, int], client: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*address, local_addr=(client, 0))


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    return await reader.readline()


async def test_the_oldest_of_whoever_has_most_makes_room(address: tuple[str, int]) -> None:
    """One connection each of two other clients stays, and still serves,
    while a greedy one opens many.
    """
    others = [await _open(address, f"127.0.0.{number}") for number in (2, 3)]
    assert [await _asked(*other) for other in others] == [b"HTTP/1.1 200 OK\r\n"] * 2
    greedy = [await _open(address) for _ in range(3 * _MOST)]
    assert await _asked(*greedy[-1]) == b"HTTP/1.1 200 OK\r\n"
    await eventually(lambda: sum(_has_ended(reader) for reader, _ in greedy) == 2 * _MOST + 2)
    for reader, writer in others:
        await reader.readuntil(b"here")
        assert await _asked(reader, writer) == b"HTTP/1.1 200 OK\r\n"
    for _, writer in (*others, *greedy):
        writer.close()


@contextlib.asynccontextmanager
async def _with_tls(most: int) -> AsyncIterator[tuple[str, int]]:
    """A server that takes ``most`` connections, a quarter of them in their TLS handshake."""
    context = await asyncio.to_thread(lambda: context_of(make(("a",), time.time())))

    async def tls() -> ssl.SSLContext:
        return context

    application = web.Application()
    application.router.add_get("/", _answer)
    runner = web.AppRunner(application)
    await runner.setup()
    assert runner.server is not None
    listener = socket.create_server(("127.0.0.1", 0))
    connections = Connections(listener, runner.server, max_connections=most, tls=tls)
    connections.start()
    try:
        yield listener.getsockname()
    finally:
        connections.stop()
        await runner.cleanup()


def _has_ended(reader: asyncio.StreamReader) -> bool:
    return reader.at_eof() or reader.exception() is not None


def _trusting() -> ssl.SSLContext:
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    found.check_hostname, found.verify_mode = False, ssl.CERT_NONE
    return found


async def _asked_over_tls(address: tuple[str, int], trusting: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection(
        *address, local_addr=("127.0.0.2", 0), ssl=trusting
    )
    try:
        return await _asked(reader, writer)
    finally:
        writer.transport.abort()


async def test_unfinished_handshakes_of_one_client_do_not_shut_out_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest of whoever has most of them ends, however long a handshake may take."""
    monkeypatch.setattr(limits, "UNDISTURBED_SECONDS", 0.0)
    async with _with_tls(16) as address:
        patient = await _open(address, "127.0.0.3")
        silent = [await _open(address) for _ in range(4 * 16)]
        async with asyncio.timeout(limits.HANDSHAKE_SECONDS / 2):
            assert await _asked_over_tls(address, _trusting()) == b"HTTP/1.1 200 OK\r\n"
            # its only handshake is left alone
            writer = patient[1]
            await writer.start_tls(_trusting())
            assert await _asked(*patient) == b"HTTP/1.1 200 OK\r\n"
        writer.transport.abort()
        await eventually(lambda: _has_ended(silent[0][0]))
        assert not _has_ended(silent[-1][0])
        for _, each in silent:
            each.transport.abort()


async def test_a_burst_of_handshakes_that_make_progress_waits_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that opens many connections at once loses none of them."""
    monkeypatch.setattr(limits, "UNDISTURBED_SECONDS", PATIENCE_SECONDS)
    async with _with_tls(64) as address:
        trusting = _trusting()
        answers = await asyncio.gather(
            *(_asked_over_tls(address, trusting) for _ in range(3 * 64 // 4))
        )
    assert set(answers) == {b"HTTP/1.1 200 OK\r\n"}


async def test_a_listener_without_descriptors_pauses_and_goes_on() -> None:
    """A process without descriptors for a moment loses nothing but that moment,
    and does not keep the loop busy by failing.
    """
    accepting, accepted = 0, socket.socketpair()

    class Listener:
        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            nonlocal accepting
            accepting += 1
            if accepting <= 2:
                raise OSError(errno.EMFILE, "Too many open files")
            if accepting == 3:
                return accepted[0], ("127.0.0.1", 1)
            raise BlockingIOError

        def __getattr__(self, name: str) -> Any:
            return getattr(listening, name)

    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        runner = web.AppRunner(web.Application())
        await runner.setup()
        assert runner.server is not None
        server = runner.server
        # a listener and a server with the few methods that are called here
        connections = Connections(Listener(), server, max_connections=_MOST)  # type: ignore[arg-type]  # a stand-in with the members that are used
        connections.start()
        await eventually(lambda: server.connections)
        connections.stop()
        await runner.cleanup()
    accepted[1].close()


def test_few_descriptors_are_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP clients leave the rest of the agent the descriptors that it needs."""
    limits = {"soft": 1 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits["soft"], -1))
    assert bounded_by_descriptors(256) == 256
    limits["soft"] = 256
    assert bounded_by_descriptors(256) == 32
    limits["soft"] = resource.RLIM_INFINITY
    assert bounded_by_descriptors(256) == 256
