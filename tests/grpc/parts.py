"""A server with methods to be called in tests of the wrapper of grpclib,
and a client of plain HTTP/2 frames.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import pytest

from tests.patience import PATIENCE_SECONDS
from vgpu_agent.grpc.server import GrpcServer, Limits

ECHO, FAIL, HANG, SLOW, WATCH = "/t.T/Echo", "/t.T/Fail", "/t.T/Hang", "/t.T/Slow", "/t.T/Watch"

LIMITS = Limits(connections=8, streams=4, request_bytes=16 * 1024 * 1024)


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

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path = path
        self.service = Service()
        self.server = GrpcServer(
            unary={
                ECHO: self.service.echo,
                FAIL: self.service.fail,
                HANG: self.service.hang,
                SLOW: self.service.slow,
            },
            streams={WATCH: self.service.watch},
            limits=limits,
        )
        self.channel: Any = grpc.aio.insecure_channel(
            f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def call(
        self, method: str, request: bytes = b"", timeout_seconds: float = PATIENCE_SECONDS
    ) -> Any:
        return self.channel.unary_unary(method)(request, timeout=timeout_seconds)

    def watch(self) -> Any:
        return self.channel.unary_stream(WATCH)(b"")


async def status_of(call: Any) -> tuple[str, str]:
    """Status and text with which a call of grpcio is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call
    return refusal.value.code().name, refusal.value.details() or ""


def new_client() -> h2.connection.H2Connection:
    """The client's end of an HTTP/2 connection, whose bytes are still to be sent."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    return client


def post(client: h2.connection.H2Connection, method: str, message: bytes | None) -> None:
    """A gRPC call on stream 1; without a message it ends after its headers."""
    headers = [
        (":method", "POST"),
        (":path", method),
        (":scheme", "http"),
        (":authority", "localhost"),
    ]
    client.send_headers(
        1,
        [*headers, ("content-type", "application/grpc"), ("te", "trailers")],
        end_stream=message is None,
    )
    if message is not None:
        client.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)


async def raw_watch(
    path: Path, client: h2.connection.H2Connection
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A ListAndWatch-like call on a connection of our own."""
    post(client, WATCH, b"")
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, str(path))
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    writer.write(client.data_to_send())
    return reader, writer
