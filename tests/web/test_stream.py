"""The stream of the page's changes over HTTP: bytes, limits, slow and vanished viewers, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.patience import PATIENCE_SECONDS, eventually
from tests.web.conftest import MAX_BODY_BYTES, Snapshot, a_grant
from vgpu_agent.model import GpuUsage
from vgpu_agent.status import AgentStatus
from vgpu_agent.web import connections, server
from vgpu_agent.web.dashboard import stream
from vgpu_agent.web.server import WebServer

HTML = {"Accept": "text/html"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes are looked for every hundredth of a second."""
    monkeypatch.setattr(stream, "REFRESH_SECONDS", 0.01)


class Viewer:
    """A browser with the page open."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def event(self) -> dict[str, str]:
        """The fields of the next event; ``data`` is empty at the end of the stream."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while line := (await self.response.content.readline()).decode():
                if line == "\n":
                    return fields
                name, _, value = line.rstrip("\n").partition(": ")
                fields[name] = value
        return fields

    async def changes(self) -> dict[str, Any]:
        """The changes in the next message."""
        found: dict[str, Any] = json.loads((await self.event())["data"])["changes"]
        return found


@contextlib.asynccontextmanager
async def viewing(address: str, **headers: str) -> AsyncIterator[Viewer]:
    """Open the page, and follow it from the version that it has, as ``dashboard.js`` does."""
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.get(f"http://{address}/", headers=HTML) as answer:
            (version,) = re.findall(r'data-version="(.*?)"', await answer.text())
        async with session.get(f"http://{address}/stream?have={version}") as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream"
            viewer = Viewer(response)
            assert await viewer.event() == {"retry": "3000"}
            yield viewer


def heat(source: Snapshot, celsius: int) -> None:
    """The first GPU has another temperature."""
    usage = (GpuUsage("GPU-0", 1024, 81920, 55, celsius, 250.5), *source.current.usage[1:])
    source.current = msgspec.structs.replace(source.current, usage=usage)


async def test_a_viewer_gets_what_changes_and_nothing_else(
    web: WebServer, source: Snapshot
) -> None:
    """The page itself had the rest. The id of an event is the version for the next connection."""
    async with viewing(web.public_address) as viewer:
        heat(source, 60)
        event = await viewer.event()
        assert json.loads(event["data"])["changes"] == {"set": {"g0w": "60 °C · 250 W"}}
        heat(source, 61)
        assert await viewer.changes() == {"set": {"g0w": "61 °C · 250 W"}}
    async with (
        aiohttp.ClientSession(headers={"Last-Event-ID": event["id"]}) as session,
        session.get(f"http://{web.public_address}/stream?have=outdated") as response,
    ):
        again = Viewer(response)
        event = await again.event()
        assert event["retry"] == "3000"
        assert json.loads((event | await _data(again, event))["data"])["changes"] == {
            "set": {"g0w": "61 °C · 250 W"}
        }


async def _data(viewer: Viewer, event: dict[str, str]) -> dict[str, str]:
    """The next event, unless this one has data."""
    return {} if "data" in event else await viewer.event()


async def test_a_silent_stream_says_that_it_is_alive(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser cannot see that its connection is dead."""
    monkeypatch.setattr(stream, "SILENCE_SECONDS", 0.05)
    async with viewing(web.public_address) as viewer:
        assert await viewer.changes() == {}
        assert await viewer.changes() == {}


async def test_an_agent_that_was_restarted_sends_all_of_the_page(web: WebServer) -> None:
    """The browser has what another process had sent."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{web.public_address}/stream?have=0123abcd-7") as response,
    ):
        viewer = Viewer(response)
        await viewer.event()
        assert set((await viewer.changes())["set"]) == {"head", "main"}


async def test_viewers_are_bounded(
    web: WebServer, source: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more than fit ends the oldest, which is told so, and the others go on."""
    monkeypatch.setattr(connections, "MAX_VIEWERS", 3)
    async with contextlib.AsyncExitStack() as stack:
        first, *others = [
            await stack.enter_async_context(viewing(web.public_address)) for _ in range(4)
        ]
        assert (await first.event())["event"] == "full"
        assert await first.event() == {}
        heat(source, 70)
        for viewer in others:
            assert await viewer.changes() == {"set": {"g0w": "70 °C · 250 W"}}


def test_the_address_with_the_most_viewers_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody who opens many streams shuts out an operator."""
    monkeypatch.setattr(connections, "MAX_VIEWERS", 4)
    viewers = connections.Viewers()
    with contextlib.ExitStack() as stack:
        operator = stack.enter_context(viewers.one("10.0.0.1"))
        greedy = [stack.enter_context(viewers.one("10.0.0.9")) for _ in range(20)]
        assert not operator.is_set()
        assert [end.is_set() for end in greedy] == [True] * 17 + [False] * 3
        assert len(viewers) == 4
    assert len(viewers) == 0


@pytest.mark.parametrize("request_timeout_seconds", [0.5])
async def test_a_viewer_that_does_not_read_is_dropped(
    web: WebServer, source: Snapshot, node: AgentStatus
) -> None:
    """Little waits for it in this process until then. Others are served as before."""
    host, _, port = web.public_address.rpartition(":")
    lazy = socket.socket()
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(lazy, (host, int(port)))
    await loop.sock_sendall(lazy, b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    await eventually(lambda: len(web._viewers) == 1)
    deadline, number = time.monotonic() + PATIENCE_SECONDS, 0
    while len(web._viewers):
        assert time.monotonic() < deadline
        number += 1  # eighty pods come, and eighty others go
        pods = [a_grant(each, "GPU-0", f"pod-{number}-{each}") for each in range(80)]
        node.ledger.grants = tuple(pods)
        await asyncio.sleep(0.01)
    lazy.close()
    async with viewing(web.public_address) as viewer:
        heat(source, 50)
        assert (await viewer.changes())["set"]["g0w"] == "50 °C · 250 W"


async def test_a_viewer_that_leaves_is_forgotten(web: WebServer, source: Snapshot) -> None:
    """A closed tab costs nothing."""
    async with viewing(web.public_address):
        assert len(web._viewers) == 1
    await eventually(lambda: len(web._viewers) == 0)
    heat(source, 40)
    assert "40 °C" in await _page(web.public_address)


async def _page(address: str) -> str:
    async with (
        aiohttp.ClientSession(headers=HTML) as session,
        session.get(f"http://{address}/") as answer,
    ):
        return await answer.text()


@pytest.mark.parametrize("request_timeout_seconds", [0.2])
async def test_a_stream_lasts_longer_than_a_request_may_take(
    web: WebServer, source: Snapshot
) -> None:
    """Its handler never ends by itself."""
    async with viewing(web.public_address) as viewer:
        await asyncio.sleep(0.5)
        heat(source, 66)
        assert await viewer.changes() == {"set": {"g0w": "66 °C · 250 W"}}


def read_ledger(source: Snapshot, verified_at: float) -> None:
    """The kubelet's records were last read then; 0 for never."""
    ledger = msgspec.structs.replace(source.current.ledger, verified_at=verified_at)
    source.current = msgspec.structs.replace(source.current, ledger=ledger)


async def _is_answered(web: WebServer, seconds: float) -> bool:
    """Tell whether a stream begins within that time."""
    try:
        async with asyncio.timeout(seconds), viewing(web.public_address):
            return True
    except TimeoutError:
        return False


async def test_a_stream_begins_when_the_ledger_has_been_read(
    web: WebServer, source: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page from before a restart would lose its pods, and with them the focus."""
    monkeypatch.setattr(server, "_LOOK_SECONDS", 0.01)
    read_ledger(source, 0)
    assert not await _is_answered(web, 0.3)
    async with asyncio.TaskGroup() as group:
        begins = group.create_task(_is_answered(web, PATIENCE_SECONDS))
        await asyncio.sleep(0.1)
        read_ledger(source, 1)
    assert begins.result()
    read_ledger(source, 0)
    assert await _is_answered(web, 0.3), "it is asked until then only"


async def test_a_stream_begins_soon_where_the_ledger_cannot_be_read(
    web: WebServer, source: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without a kubelet, or with one that does not answer, is shown all the same."""
    monkeypatch.setattr(server, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(server, "_FIRST_READING_SECONDS", 0.5)
    read_ledger(source, 0)
    assert await _is_answered(web, PATIENCE_SECONDS)


async def test_streams_that_wait_for_the_ledger_cost_little(
    web: WebServer, source: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any client on the network may open them, and a restarted agent has other work to do."""
    monkeypatch.setattr(web._kept, "_seconds_left", -60.0)
    monkeypatch.setattr(server, "_LOOK_SECONDS", 0.01)
    looks = 0

    def status() -> AgentStatus:
        nonlocal looks
        looks += 1
        return source.current

    read_ledger(source, 0)
    monkeypatch.setattr(web, "_status", status)
    waiting = [asyncio.create_task(web._until_ledger_is_read()) for _ in range(100)]
    await asyncio.sleep(0.2)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert looks == 1


def _to_be_stopped(source: Snapshot) -> WebServer:
    """A server that would wait long for its answers."""
    return WebServer(
        source.status,
        listen="127.0.0.1:0",
        debug_listen="127.0.0.1:0",
        max_body_bytes=MAX_BODY_BYTES,
        request_timeout_seconds=PATIENCE_SECONDS,
        shutdown_seconds=PATIENCE_SECONDS,
    )


async def test_a_stop_ends_streams_at_once(source: Snapshot) -> None:
    """The kubelet kills a pod that waits for open browsers."""
    stopped = _to_be_stopped(source)
    await stopped.start()
    async with viewing(stopped.public_address) as viewer:
        began = time.monotonic()
        await stopped.stop()
        assert time.monotonic() - began < PATIENCE_SECONDS / 2
        assert await viewer.event() == {}


async def test_a_stop_ends_streams_that_wait_for_the_ledger(
    source: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that is stopped soon after its start ends as quickly."""
    monkeypatch.setattr(server, "_FIRST_READING_SECONDS", PATIENCE_SECONDS)
    read_ledger(source, 0)
    stopped = _to_be_stopped(source)
    await stopped.start()
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(session.get(f"http://{stopped.public_address}/stream"))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await stopped.stop()
        assert time.monotonic() - began < PATIENCE_SECONDS / 2
        await (await asked).read()  # to its end


async def test_only_the_pages_own_files_are_run(ask: Callable[..., Awaitable[Any]]) -> None:
    """No inline script or style, nothing of another origin, no frame around the page."""
    page = await ask("/", headers=HTML)
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";")
    )
    assert policy == {
        "default-src": "'none'",
        "style-src": "'self'",
        "script-src": "'self'",
        "connect-src": "'self'",
        "img-src": "data:",
        "form-action": "'self'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
    }
    assert not re.search(r"<style|style=|<script(?! src)", page.text)
    for path, kind in (("/dashboard.css", "text/css"), ("/dashboard.js", "text/javascript")):
        answer = await ask(path)
        assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert f'"{path.removeprefix("/")}"' in page.text


@pytest.mark.parametrize("path", ["/stream", "/dashboard.css", "/dashboard.js", "/?pod=ml/train-0"])
async def test_names_of_pods_are_on_the_debug_address_only_where_that_is_set(
    source: Snapshot, path: str
) -> None:
    """``web.podNames: debug`` moves the page with its stream and its search."""
    async with (
        WebServer(
            source.status,
            listen="127.0.0.1:0",
            debug_listen="127.0.0.1:0",
            max_body_bytes=MAX_BODY_BYTES,
            request_timeout_seconds=PATIENCE_SECONDS,
            shutdown_seconds=1,
            pod_names_everywhere=False,
        ) as served,
        aiohttp.ClientSession(headers=HTML) as session,
    ):
        async with session.get(f"http://{served.public_address}{path}") as answer:
            assert answer.status in (403, 404)
            assert "train-0" not in await answer.text()
        async with session.get(f"http://{served.debug_address}{path}") as answer:
            assert answer.status == 200


async def test_a_search_is_answered_on_the_page(ask: Callable[..., Awaitable[Any]]) -> None:
    """A form without scripts, whose address can be passed on."""
    answer = await ask("/?pod=ml/train-0", headers=HTML)
    assert "Container main has GPU 0" in answer.text
    assert 'value="ml/train-0"' in answer.text


async def test_searches_in_a_loop_are_refused(
    web: WebServer, ask: Callable[..., Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number is not bounded, so keeping the answers would not help. Probes are served."""
    monkeypatch.setattr(web._searches, "_seconds_left", -60.0)
    answer = await ask("/?pod=ml/train-0", headers=HTML)
    assert answer.status == 503
    assert "There are too many searches now" in answer.text
    assert (await ask("/", headers=HTML)).status == 200
    assert (await ask("/livez")).status == 200
