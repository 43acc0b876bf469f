"""An API server, or a proxy before it, that answers whatever a test wants, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import pytest

from tests import constants
from tests.cluster.scripted import QUICK
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.credentials import Access, Credentials

Answer = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def answer(
    body: bytes, *, status: str = "200 OK", headers: str = "", kind: str = "application/json"
) -> bytes:
    """A whole answer."""
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n{headers}\r\n"
    )
    return head.encode() + body


async def send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One piece of an answer that began with `CHUNKED`."""
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


@contextlib.asynccontextmanager
async def served(answers: Answer) -> AsyncIterator[str]:
    """Serve; each connection is closed after its first answer. The URL."""
    writers: set[asyncio.StreamWriter] = set()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        if (task := asyncio.current_task()) is not None:
            tasks.add(task)
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            request = await reader.readuntil(b"\r\n\r\n")
            await answers(writer, request)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def asked(
    answers: Answer, *, others: Mapping[str, float] = QUICK, token: str = ""
) -> AsyncIterator[ApiClient]:
    """A client of such a server, with other values of constants."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        constants.use(monkeypatch, others)
        async with served(answers) as url:
            client = ApiClient(
                Credentials(lambda: Access(url, authorization=token and f"Bearer {token}"), "test"),
            )
            try:
                yield client
            finally:
                await client.close()


def always(body: bytes) -> Answer:
    """The same bytes for every request."""

    async def write(writer: asyncio.StreamWriter, _: bytes) -> None:
        writer.write(body)

    return write
