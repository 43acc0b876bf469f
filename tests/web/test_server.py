"""The two HTTP servers: every path, every kind of nonsense, and ports."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.patience import eventually
from vgpu_agent import log
from vgpu_agent.errors import ListenError
from vgpu_agent.status import AgentStatus, Problem, ProblemKind
from vgpu_agent.web.server import WebServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PUBLIC = [
    "/",
    "/dashboard.css",
    "/dashboard.js",
    "/healthz",
    "/livez",
    "/metrics",
    "/readyz",
    "/stream",
]
ENDING = [path for path in PUBLIC if path != "/stream"]  # a stream has no end
DEBUG = [
    "/debug/",
    "/debug/allocations",
    "/debug/cluster",
    "/debug/config",
    "/debug/devices",
    "/debug/events",
    "/debug/explain",
    "/debug/ledger",
    "/debug/loglevel",
    "/debug/mps",
    "/debug/pods",
    "/debug/resources",
    "/debug/status",
    "/debug/tasks",
]
_IMPATIENT = pytest.mark.parametrize("request_timeout_seconds", [0.5])
_ESTABLISHED = "01"  # in /proc/net/tcp
JUNK = b"\x00\xffjunk" * 175_000  # 1.05 MB


async def raw(address: str, request: bytes) -> bytes:
    """Return the server's answer to bytes that no HTTP library would send."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("path", [*ENDING, *DEBUG, "/debug"])
async def test_every_path_answers(ask: Callable[..., Awaitable[Any]], path: str) -> None:
    """A healthy node: 200 everywhere, without telling what software serves it."""
    answer = await ask(path)
    assert answer.status == 200
    assert answer.text
    assert "Server" not in answer.headers


@pytest.mark.parametrize("path", [path for path in DEBUG if path != "/debug/"])
async def test_a_debug_answer_is_one_line_of_json_and_more_when_pretty(
    ask: Callable[..., Awaitable[Any]], path: str
) -> None:
    """For grep and for eyes. Both say the same."""
    plain, pretty = await ask(path), await ask(f"{path}?pretty")
    assert plain.headers["Content-Type"] == "application/json"
    assert plain.text.count("\n") == 1
    assert pretty.text.count("\n") > 1
    assert json.loads(plain.text) == json.loads(pretty.text)


async def test_the_debug_index_lists_every_path_with_a_sentence(
    ask: Callable[..., Awaitable[Any]],
) -> None:
    """A user who knows only the port finds the rest."""
    paths = json.loads((await ask("/debug/")).text)["paths"]
    assert sorted(entry["path"] for entry in paths) == [path for path in DEBUG if path != "/debug/"]
    assert all(entry["about"].endswith(".") for entry in paths)


@pytest.mark.parametrize("path", [*PUBLIC, *DEBUG])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_a_megabyte_of_junk_gets_one_clear_line_and_the_server_goes_on(
    ask: Callable[..., Awaitable[Any]], path: str, method: str
) -> None:
    """The answer to any method is a 4xx that names the reason. The next request is served."""
    answer = await ask(path, method=method, data=io.BytesIO(JUNK))
    assert answer.status == 413
    assert (
        answer.text == '{"error":"the request body is too large; at most 65536 bytes are read"}\n'
    )
    assert (await ask("/livez")).status == 200


@pytest.mark.parametrize("path", ["/metrics", "/debug/ledger", "/debug/loglevel"])
@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_junk_of_unknown_length_is_cut_off_too(
    ask: Callable[..., Awaitable[Any]], path: str, method: str
) -> None:
    """Chunked transfer has no Content-Length that could be refused beforehand."""

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(JUNK), 65536):
            yield JUNK[start : start + 65536]

    answer = await ask(path, method=method, data=chunks())
    assert answer.status in (400, 405, 413)
    assert list(json.loads(answer.text)) == ["error"]
    assert (await ask("/debug/ledger")).status == 200


async def test_a_get_with_a_small_body_is_told_to_leave_it_out(
    ask: Callable[..., Awaitable[Any]],
) -> None:
    """A body that is not read is more likely a mistake than a request."""
    answer = await ask("/debug/pods", data=b"pod=default/a")
    assert (answer.status, answer.text) == (
        400,
        '{"error":"GET /debug/pods takes no request body; send it without one"}\n',
    )


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00" * 100,
        b"GET /" + b"x" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
        b"\r\n" * 10 + JUNK,
    ],
)
async def test_what_is_not_http_is_refused_without_a_traceback(web: WebServer, junk: bytes) -> None:
    """TLS on the wrong port, an endless path, binary junk:
    400 or a closed connection, one log line, and the server goes on.
    """
    with pytest.MonkeyPatch.context() as patch:
        lines = io.StringIO()
        patch.setattr("vgpu_agent.web.server._logger", _lines_to(lines))
        try:
            answer = await raw(web.public_address, junk)
        except ConnectionError:
            answer = b""
        while not lines.getvalue():  # noqa: ASYNC110 - the connection may end before the line comes
            await asyncio.sleep(0.01)
    assert b"Traceback" not in answer
    assert lines.getvalue().count("web.bad_request") == 1
    assert b" 200 " in await raw(web.public_address, b"GET /livez HTTP/1.0\r\n\r\n")


def _lines_to(stream: io.StringIO) -> Any:
    class Lines:
        def info(self, event: str, **facts: object) -> None:
            stream.write(f"{event} {facts}\n")

    return Lines()


async def test_a_wrong_method_is_told_the_right_one(ask: Callable[..., Awaitable[Any]]) -> None:
    """405 with Allow, as HTTP asks, and in words."""
    answer = await ask("/debug/loglevel", method="POST", data=b"debug")
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD, PUT")
    assert (
        answer.text == '{"error":"POST is not possible on /debug/loglevel; use GET, HEAD or PUT"}\n'
    )


async def test_an_unknown_path_is_answered_with_those_that_exist(
    ask: Callable[..., Awaitable[Any]],
) -> None:
    """A typing error costs one request."""
    answer = await ask("/metric")
    assert answer.status == 404
    assert json.loads(answer.text) == {"error": "there is no /metric here", "paths": PUBLIC}


async def test_a_path_of_the_other_port_is_sent_there(web: WebServer) -> None:
    """Two ports are easily mixed up."""
    public = await raw(web.public_address, b"GET /debug/pods HTTP/1.0\r\n\r\n")
    debug = await raw(web.debug_address, b"GET /metrics HTTP/1.0\r\n\r\n")
    assert f"/debug is served at {web.debug_address}".encode() in public
    assert f"it is served at {web.public_address}".encode() in debug


async def test_a_long_wrong_path_is_not_repeated_in_full(
    ask: Callable[..., Awaitable[Any]],
) -> None:
    """An error stays one readable line."""
    answer = await ask("/" + "x" * 5000)
    assert answer.status == 404
    assert len(answer.text) < 400


@_IMPATIENT
async def test_a_body_that_does_not_arrive_ends_in_time(web: WebServer) -> None:
    """A client that announces a body and falls silent is answered with 408
    after the settable time.
    """
    answer = await raw(
        web.debug_address, b"PUT /debug/loglevel HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nde"
    )
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'{"error":"the request did not arrive within 0.5 s"}' in answer


@_IMPATIENT
async def test_a_silent_connection_is_closed(web: WebServer) -> None:
    """Connections that never ask anything do not pile up."""
    assert await raw(web.public_address, b"") == b""


@_IMPATIENT
async def test_a_client_that_does_not_read_is_let_go(web: WebServer) -> None:
    """A scraper that hangs in the middle of an answer keeps neither its connection nor its
    answer.
    """
    host, _, port = web.debug_address.rpartition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        await asyncio.get_running_loop().sock_sendall(
            client, b"GET /debug/status HTTP/1.1\r\nHost: a\r\n\r\n" * 2000
        )
        await eventually(lambda: connections(int(port)))
        await eventually(lambda: not connections(int(port)))


def connections(port: int) -> int:
    """Return the number of connections to a server of this machine."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == _ESTABLISHED for row in rows)


async def test_a_bug_in_an_answer_is_logged_and_not_shown(
    ask: Callable[..., Awaitable[Any]], source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger gets one line, the log gets the traceback, and other paths still answer."""
    errors: list[dict[str, object]] = []
    monkeypatch.setattr(
        "vgpu_agent.web.server._logger.error",
        lambda event, **facts: errors.append({"event": event, **facts}),
        raising=False,
    )
    source.current.ledger = None
    answer = await ask("/debug/ledger")
    assert answer.status == 500
    assert json.loads(answer.text) == {
        "error": "this answer failed inside the agent; its log has the reason (web.failed)"
    }
    assert [(error["event"], error["path"]) for error in errors] == [
        ("web.failed", "/debug/ledger")
    ]
    assert (await ask("/debug/tasks")).status == 200


@pytest.mark.parametrize("body", [b"debug", b" debug\n", b'"debug"', b'{"level": "debug"}'])
@pytest.mark.usefixtures("log_level")
async def test_the_log_level_is_changed_by_word_or_json(
    ask: Callable[..., Awaitable[Any]], body: bytes
) -> None:
    """Both forms people try first; GET shows the new level."""
    log.set_level("info")
    answer = await ask("/debug/loglevel", method="PUT", data=body)
    assert (answer.status, json.loads(answer.text)) == (200, {"level": "debug", "was": "info"})
    assert json.loads((await ask("/debug/loglevel")).text)["level"] == "debug"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"verbose",
        b"DEBUG",
        b"\xff\xfe",
        b"{",
        b'{"level": 7}',
        b'{"lvl": "debug"}',
        b"[]",
        b"x" * 60000,
    ],
)
@pytest.mark.usefixtures("log_level")
async def test_a_nonsense_log_level_changes_nothing_and_names_the_levels(
    ask: Callable[..., Awaitable[Any]], body: bytes
) -> None:
    """One clear line."""
    log.set_level("warning")
    answer = await ask("/debug/loglevel", method="PUT", data=body)
    assert answer.status == 400
    assert (
        "is not known; send one of debug, info, warning, error" in json.loads(answer.text)["error"]
    )
    assert len(answer.text) < 400
    assert log.current_level() == "warning"


async def test_a_browser_gets_a_page_and_curl_gets_text(ask: Callable[..., Awaitable[Any]]) -> None:
    """The overview on ``/`` suits its reader."""
    page, text = await ask("/", headers={"Accept": "text/html,*/*"}), await ask("/")
    assert page.headers["Content-Type"].startswith("text/html")
    assert page.text.startswith("<!doctype html>")
    assert text.headers["Content-Type"].startswith("text/plain")
    assert text.text.startswith("node node-a")


async def test_the_scrape_is_served_with_its_format(ask: Callable[..., Awaitable[Any]]) -> None:
    """Prometheus chooses its parser by the content type."""
    answer = await ask("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    assert "# TYPE vgpu_agent_build_info gauge\n" in answer.text


async def test_a_failing_probe_is_503_with_its_reason(
    ask: Callable[..., Awaitable[Any]], source: Any
) -> None:
    """The kubelet looks at the code, the operator at the text; not ready is not dead."""
    source.current.not_ready = (Problem(ProblemKind.RESOURCE, "nvidia.com/gpu", "not registered"),)
    assert (
        (await ask("/readyz")).status,
        (await ask("/livez")).status,
        (await ask("/healthz")).status,
    ) == (503, 200, 200)
    assert "nvidia.com/gpu: not registered" in (await ask("/readyz?verbose")).text


def a_server(*, listen: str, debug_listen: str) -> WebServer:
    """A server on the given addresses."""
    return WebServer(
        AgentStatus,
        listen=listen,
        debug_listen=debug_listen,
        max_body_bytes=1024,
        request_timeout_seconds=1,
        shutdown_seconds=1,
    )


async def test_a_port_in_use_is_an_error_that_leaves_nothing_listening() -> None:
    """The debug server, which came up first, is closed again."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        server = a_server(listen=f"127.0.0.1:{holder.getsockname()[1]}", debug_listen="127.0.0.1:0")
        with pytest.raises(ListenError, match="already in use"):
            await server.start()
        with pytest.raises(ConnectionRefusedError):
            await raw(server.debug_address, b"")


async def test_the_real_port_is_reported_and_closed_at_the_end() -> None:
    """Port 0 takes a free one. After `stop` there is no answer, and stopping twice is fine."""
    server = a_server(
        listen=":0",
        debug_listen="[::1]:0" if socket.has_ipv6 and _has_ipv6_loopback() else "127.0.0.1:0",
    )
    await server.start()
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1{server.public_address}/livez") as answer,
    ):
        assert answer.status == 200
    assert not server.debug_address.endswith(":0")
    await server.stop()
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await raw(f"127.0.0.1{server.public_address}", b"")


def _has_ipv6_loopback() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 9)) == 111  # refused by a program, hence reachable
