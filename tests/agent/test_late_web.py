"""The web server behind the registrations:
not before them, not much later, and never in their way.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.cli.test_status import a_node
from tests.patience import PATIENCE_SECONDS
from tests.settings import settings as settings_of
from vgpu_agent.agent.late_web import LateWeb
from vgpu_agent.errors import ListenError


@pytest.fixture
def port() -> int:
    """One that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def on(port: int) -> LateWeb:
    """A server that is to listen there."""
    return LateWeb(a_node, settings_of(listen=f"127.0.0.1:{port}", debug_listen="127.0.0.1:0"))


async def answers(port: int) -> bool:
    """Tell whether a server listens there."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def test_it_serves_once_everything_is_registered(port: int) -> None:
    """Its libraries are imported in a thread then, and nothing listens before or afterwards."""
    registered = asyncio.Event()
    async with on(port) as web, asyncio.timeout(PATIENCE_SECONDS):
        starting = asyncio.create_task(web.start(registered.is_set))
        await asyncio.sleep(0)
        assert not await answers(port)
        registered.set()
        await starting
        assert await answers(port)
    assert not await answers(port)


async def test_a_start_that_waits_is_shown(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver or an API server that is away for minutes: probes and ``/debug`` say so."""
    monkeypatch.setattr("vgpu_agent.agent.late_web._LONGEST_SECONDS", 0.05)
    async with on(port) as web, asyncio.timeout(PATIENCE_SECONDS):
        await web.start(lambda: False)
        assert await answers(port)


async def test_a_taken_port_is_noticed_before_anything_is_registered(port: int) -> None:
    """An agent that ended after its registration would have had pods admitted
    that it never serves.
    """
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ListenError, match="the address is already in use"),
    ):
        await on(port).__aenter__()


async def test_a_port_that_is_taken_later_is_an_error_as_well(port: int) -> None:
    """A waiting caller receives the failure of the start, and nothing is left listening."""
    async with on(port) as web:
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ListenError, match="the address is already in use"),
        ):
            await web.start(lambda: True)
