"""``vgpu-agent why`` against a server on loopback."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from vgpu_agent.cli import why
from vgpu_agent.errors import AgentError, ConfigError
from vgpu_agent.scheduler.explain import Explanation, Row

EXPLAINED = Explanation(
    "ml/train-0",
    "no-room",
    ("It fits on none of 1 Node now.",),
    ("container main: 1 card with 16384 MiB and no limit of compute",),
    table=(Row("InsufficientVGPUMemory", "Insufficient vGPU memory", {}, "", 1, ("n0",)),),
)


@contextlib.asynccontextmanager
async def answering(
    body: bytes, status: str = "200 OK", context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, list[str]]]:
    """A server that answers every request alike: its address, and the lines of requests."""
    asked = list[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            asked.append((await reader.readline()).decode().strip())
            while (await reader.readline()).strip():
                pass
            writer.write(f"HTTP/1.0 {status}\r\n\r\n".encode() + body)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that has signed itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with the openssl command, which is not here")
    files = tmp_path / "tls.crt", tmp_path / "tls.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=extender"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-out", str(files[0]), "-keyout", str(files[1])),
        ],
        check=True,
        capture_output=True,
    )
    return files


def arguments(*given: str) -> argparse.Namespace:
    """The command line after ``vgpu-agent``, parsed as the real one is."""
    parser = argparse.ArgumentParser(prog="vgpu-agent")
    why.add_parser(parser.add_subparsers())
    return parser.parse_args(["why", *given])


async def run(*given: str) -> int:
    """The command in a thread, as the server of the test runs on this loop."""

    def in_thread() -> int:
        parsed = arguments(*given)
        return int(parsed.run(parsed))

    return await asyncio.to_thread(in_thread)


async def test_a_pod_is_explained_as_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    """The extender answers in JSON, and the command makes the page."""
    async with answering(msgspec.json.encode(EXPLAINED)) as (address, asked):
        assert await run("ml/train-0", "--scheduler", f"http://{address}") == 0
        assert await run("ml/train-0", "--scheduler", address, "--all") == 0
    assert asked == [
        "GET /explain?pod=ml/train-0&all=0 HTTP/1.1",
        "GET /explain?pod=ml/train-0&all=1 HTTP/1.1",
    ]
    shown = capsys.readouterr().out
    assert shown.startswith(
        "pod ml/train-0: no-room\n  It fits on none of 1 Node now.\n\nRequest\n"
    )
    assert "  1      Insufficient vGPU memory  -" in shown


async def test_json_is_the_extenders_own_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts, complete."""
    async with answering(msgspec.json.encode(EXPLAINED)) as (address, _):
        assert await run("ml/train-0", "--scheduler", address, "--json") == 0
    assert json.loads(capsys.readouterr().out)["situation"] == "no-room"


async def test_the_environment_says_where_the_extender_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a flag beats it. A proxy stands in no one's way."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with answering(msgspec.json.encode(EXPLAINED)) as (address, asked):
        monkeypatch.setenv("VGPU_AGENT_SCHEDULER", f"http://{address}/prefix/")
        assert await run("ml/train-0") == 0
        monkeypatch.setenv("VGPU_AGENT_SCHEDULER", "http://127.0.0.1:1")
        assert await run("ml/train-0", "--scheduler", address) == 0
    assert asked[0].startswith("GET /prefix/explain?pod=ml/train-0")


async def test_an_extender_with_tls_is_found_at_the_default_address(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``kubectl vgpu why`` cannot know how the extender in the pod serves. Another address is taken
    at its word.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with answering(msgspec.json.encode(EXPLAINED), context=context) as (address, asked):
        monkeypatch.setattr(why, "_DEFAULT", f"http://{address}")
        assert await run("ml/train-0") == 0
        with pytest.raises(AgentError):
            await run("ml/train-0", "--scheduler", f"http://{address}")
    assert [line for line in asked if line.startswith("GET")] == [
        "GET /explain?pod=ml/train-0&all=0 HTTP/1.1"
    ]
    with pytest.raises(AgentError, match="connection refused"):
        await run("ml/train-0")


async def test_a_pod_that_does_not_exist_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """A script must not take it for an explained one."""
    unknown = msgspec.json.encode(Explanation("ml/x", "unknown", ("There is no pod ml/x.",)))
    async with answering(unknown, "404 Not Found") as (address, _):
        assert await run("ml/x", "--scheduler", address) == 1
    assert capsys.readouterr().out == "pod ml/x: unknown\n  There is no pod ml/x.\n"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            "503 Service Unavailable",
            b'{"error": "the extender has not read all Nodes and pods yet"}',
            "answers 503: the extender has not read all Nodes and pods yet",
        ),
        ("200 OK", b"<html>", "answers 200 with something that is not an extender's explanation"),
        ("404 Not Found", b"404: Not Found", "answers 404 with something that is not"),
        ("200 OK", b'{"pod": 7}', "answers 200 with something that is not"),
        ("200 OK", b"[]", "answers 200 with something that is not"),
    ],
)
async def test_an_answer_that_explains_nothing_is_one_line(
    status: str, body: bytes, message: str
) -> None:
    """With the address, so that a wrong port is seen."""
    async with answering(body, status) as (address, _):
        with pytest.raises(AgentError, match=message) as refused:
            await run("ml/train-0", "--scheduler", address)
    assert "\n" not in str(refused.value)
    assert address in str(refused.value)


def test_an_extender_that_does_not_run_is_one_line() -> None:
    """With the remedy that is needed most often."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    parsed = arguments("ml/train-0", "--scheduler", f"127.0.0.1:{port}")
    with pytest.raises(
        AgentError,
        match=rf"^cannot reach the extender at http://127\.0\.0\.1:{port}: connection refused; "
        r"forward its port with kubectl port-forward, or name its address with --scheduler$",
    ):
        parsed.run(parsed)


def test_a_host_that_has_no_address_is_one_line() -> None:
    """A name of the cluster does not resolve outside of it."""
    parsed = arguments("ml/train-0", "--scheduler", "http://scheduler.invalid:3456")
    with pytest.raises(
        AgentError, match=r"^cannot reach the extender at http://scheduler\.invalid:3456: [^\n]*$"
    ):
        parsed.run(parsed)


def test_an_extender_that_does_not_answer_ends_in_time() -> None:
    """A listening socket without a server: the given time is kept."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        parsed = arguments("ml/train-0", "--scheduler", address, "--timeout", "0.05")
        with pytest.raises(AgentError, match=r"did not answer within 0\.05 s"):
            parsed.run(parsed)


async def test_http_where_the_extender_serves_https_and_the_other_way_round(
    certificate: tuple[Path, Path],
) -> None:
    """The two most likely mistakes."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with answering(b"", context=context) as (address, _):
        with pytest.raises(AgentError, match="write https:// if the extender serves with TLS"):
            await run("ml/train-0", "--scheduler", f"http://{address}")

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(16)
        writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(AgentError, match="if the extender serves without TLS, write http://"):
            await run("ml/train-0", "--scheduler", url)


async def test_a_certificate_is_checked(certificate: tuple[Path, Path]) -> None:
    """Its CA can be named, and the check can be left out on demand."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with answering(msgspec.json.encode(EXPLAINED), context=context) as (address, _):
        url = f"https://{address}"
        with pytest.raises(
            AgentError, match=r"is not accepted: self.signed certificate; name its CA with"
        ):
            await run("ml/train-0", "--scheduler", url)
        assert await run("ml/train-0", "--scheduler", url, "--insecure") == 0
        trusted = ("--ca-file", str(certificate[0]))
        assert await run("ml/train-0", "--scheduler", url, *trusted) == 0
        for file in ("/nowhere.crt", str(certificate[1])):
            with pytest.raises(ConfigError, match="expected certificates in PEM"):
                await run("ml/train-0", "--scheduler", url, "--ca-file", file)


@pytest.mark.parametrize("address", ["ftp://x", "http://", "http://x:port", "http://[::1", "x:0"])
def test_an_address_that_makes_no_sense_is_refused(address: str) -> None:
    """The error names the flag and says what to write instead."""
    parsed = arguments("ml/train-0", "--scheduler", address)
    with pytest.raises(ConfigError, match=r"^--scheduler: .* is no address; write http://HOST"):
        parsed.run(parsed)


@pytest.mark.parametrize("pod", ["train-0", "ml/", "/train-0", "ml/train/0", "ml/train 0"])
def test_a_pod_without_its_namespace_is_refused(
    pod: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two namespaces may have pods of one name."""
    with pytest.raises(SystemExit):
        arguments(pod)
    assert "expected NAMESPACE/NAME, for example default/train-0" in capsys.readouterr().err
