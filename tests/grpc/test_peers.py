"""The process at the other end of a unix socket, as the kernel knows it. Nothing that the other end
sends is used.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.grpc.parts import ECHO, LIMITS
from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.grpc.peers import Peer, peer_of
from vgpu_agent.grpc.server import GrpcServer
from vgpu_agent.grpc.sockets import bind

WHO, SLOW = "/t.T/Who", "/t.T/Slow"


class Taking:
    """A server that takes over connections one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = bind(path, "--dir")
        self.listener.listen(8)
        self.lost = 0
        self.server = GrpcServer(
            unary={}, streams={}, limits=LIMITS, by_caller={WHO: self.who, SLOW: self.slow}
        )

    async def who(self, request: bytes, caller: object) -> bytes:
        assert isinstance(caller, Peer)
        return f"{request.decode()} {caller.pid} {caller.uid} {caller.gid}".encode()

    async def slow(self, _: bytes, caller: object) -> bytes:
        del caller
        await asyncio.Event().wait()
        return b""

    async def take(self) -> object:
        connection, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        return await self.server.take(connection, peer_of(connection), self.was_lost)

    def was_lost(self) -> None:
        self.lost += 1


@pytest.fixture
async def taking(directory: Path) -> AsyncIterator[Taking]:
    """Such a server."""
    made = Taking(directory / "a.sock")
    yield made
    made.server.abort()
    made.listener.close()


def test_the_kernel_names_the_process_and_the_time() -> None:
    """Its number, user and group; the time is that of the boot's clock, like that of processes."""
    one, other = socket.socketpair()
    with one, other:
        before = time.clock_gettime(time.CLOCK_BOOTTIME)
        found = peer_of(one)
        assert (found.pid, found.uid, found.gid) == (os.getpid(), os.geteuid(), os.getegid())
        assert before <= found.seen_at <= time.clock_gettime(time.CLOCK_BOOTTIME)


async def test_a_method_is_told_who_calls(taking: Taking) -> None:
    """The caller is the one with which the connection was taken over."""
    channel: Any = grpc.aio.insecure_channel(
        f"unix:{taking.path}", options=[("grpc.use_local_subchannel_pool", 1)]
    )
    call = channel.unary_unary(WHO)(b"hello", timeout=PATIENCE_SECONDS)
    await taking.take()
    assert await call == f"hello {os.getpid()} {os.geteuid()} {os.getegid()}".encode()
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await channel.unary_unary(ECHO)(b"", timeout=PATIENCE_SECONDS)
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await channel.close(None)


async def test_the_end_of_a_connection_is_told(taking: Taking) -> None:
    """Whoever counts connections has to know."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(taking.path))
    await taking.take()
    assert taking.lost == 0
    client.close()
    await eventually(lambda: taking.lost == 1)


async def test_an_end_of_the_server_ends_what_it_has_taken(taking: Taking) -> None:
    """Also a method that would wait for ever."""
    channel: Any = grpc.aio.insecure_channel(
        f"unix:{taking.path}", options=[("grpc.use_local_subchannel_pool", 1)]
    )
    call = channel.unary_unary(SLOW)(b"", timeout=PATIENCE_SECONDS)
    await taking.take()
    await eventually(lambda: taking.server._running == 1)
    taking.server.abort()
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    await eventually(lambda: taking.lost == 1 and not taking.server._running)
    await channel.close(None)
