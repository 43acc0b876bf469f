"""Fixtures of the gRPC room: a directory for sockets, and a bare server."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from tests.grpc.parts import LIMITS, Served
from vgpu_agent.grpc.server import Limits
from vgpu_agent.grpc.sockets import bind


@pytest.fixture(autouse=True, scope="session")
def grpcio_stays_initialised() -> Iterator[None]:
    """grpcio joins a thread when its last object goes,
    which in the middle of a test would count as blocking the loop.
    """
    loop = asyncio.new_event_loop()  # grpcio binds itself to "the" loop when it is initialised
    asyncio.set_event_loop(loop)
    grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # missing in the stubs
    asyncio.set_event_loop(None)
    yield
    grpc.aio.shutdown_grpc_aio()  # type: ignore[attr-defined]  # likewise
    loop.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for sockets; short, because a socket path has 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="vg", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def limits() -> Limits:
    """The limits of the server for its clients."""
    return LIMITS


@pytest.fixture
async def served(directory: Path, limits: Limits) -> AsyncIterator[Served]:
    """The service of `parts` on a socket."""
    built = Served(directory / "a.sock", limits)
    await built.server.start(bind(built.path, "--dir"))
    yield built
    await built.channel.close(None)
    await built.server.drain(0.2)
