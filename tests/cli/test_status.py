"""``vgpu-agent status`` against a real server on loopback."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from typing import TYPE_CHECKING

import pytest

from vgpu_agent.cli import status
from vgpu_agent.errors import AgentError, ConfigError
from vgpu_agent.model import Gpu, Grant, GrantState, Inventory, Owner, Share
from vgpu_agent.status import (
    AgentStatus,
    LedgerStatus,
    PluginState,
    PluginStatus,
    Problem,
    ProblemKind,
)
from vgpu_agent.web.server import WebServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def a_node() -> AgentStatus:
    """One simulated GPU, one pod, one problem."""
    return AgentStatus(
        node="node-a",
        version="0.1.0",
        simulated=True,
        inventory=Inventory(gpus=(Gpu("GPU-0", 0, 0, "Tesla T4", 15360),)),
        plugins=(PluginStatus("nvidia.com/gpu", "nvidia", PluginState.SERVING, ids_sent=10),),
        ledger=LedgerStatus(
            grants=(
                Grant(
                    1,
                    "nvidia",
                    "nvidia.com/gpu",
                    ("a",),
                    (Share("GPU-0"),),
                    GrantState.GRANTED,
                    Owner("main", "u", "ml", "train-0"),
                ),
            )
        ),
        not_ready=(Problem(ProblemKind.RESOURCE, "nvidia.com/gpu", "not registered with kubelet"),),
    )


@pytest.fixture
async def agent() -> AsyncIterator[WebServer]:
    """A running agent's servers."""
    server = WebServer(
        a_node,
        listen="127.0.0.1:0",
        debug_listen="127.0.0.1:0",
        max_body_bytes=1024,
        request_timeout_seconds=20,
        shutdown_seconds=1,
    )
    async with server:
        yield server


def arguments(*given: str) -> argparse.Namespace:
    """The command line after ``vgpu-agent``, parsed as the real one is."""
    parser = argparse.ArgumentParser(prog="vgpu-agent")
    status.add_parser(parser.add_subparsers())
    return parser.parse_args(["status", *given])


async def run(*given: str) -> int:
    """The command in a thread, as the server of the test runs on this loop."""

    def in_thread() -> int:
        parsed = arguments(*given)
        return int(parsed.run(parsed))

    return await asyncio.to_thread(in_thread)


async def test_the_running_agent_is_shown_as_a_table(
    agent: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulation is loud; GPUs, resources, pods and problems are there."""
    assert await run("--debug-listen", agent.debug_address) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("node node-a · NOT READY · vgpu-agent 0.1.0\n*** SIMULATED GPUs")
    assert [
        word
        for word in (
            "Tesla T4",
            "serving, not registered",
            "ml/train-0",
            "not registered with kubelet",
        )
        if word not in shown
    ] == []


async def test_json_is_the_agents_own_answer(
    agent: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """For scripts, complete."""
    assert await run("--debug-listen", agent.debug_address, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["node"], shown["ready"], shown["pods"][0]["pod"]) == (
        "node-a",
        False,
        "ml/train-0",
    )


async def test_the_environment_says_where_the_agent_is(
    agent: WebServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same variable that the agent itself reads."""
    monkeypatch.setenv("VGPU_AGENT_DEBUG_LISTEN", agent.debug_address)
    assert await run() == 0
    assert "node node-a" in capsys.readouterr().out


async def test_a_flag_beats_the_environment(
    agent: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag beats the environment everywhere in this command line."""
    monkeypatch.setenv("VGPU_AGENT_DEBUG_LISTEN", "127.0.0.1:1")
    assert await run("--debug-listen", agent.debug_address) == 0


async def test_a_proxy_of_the_environment_does_not_stand_between(
    agent: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node behind a proxy still reaches its own loopback interface."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert await run("--debug-listen", agent.debug_address) == 0


def test_an_agent_that_does_not_run_is_one_clear_line() -> None:
    """The line says what was tried, what happened and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    parsed = arguments("--debug-listen", f":{port}")
    with pytest.raises(
        AgentError,
        match=(
            rf"^cannot reach the agent at 127\.0\.0\.1:{port}: connection refused; is it running\? "
            r"[^\n]*$"
        ),
    ):
        parsed.run(parsed)


def test_an_agent_that_does_not_answer_ends_in_time() -> None:
    """A listening socket without a server: the given time is kept."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        parsed = arguments(
            "--debug-listen", f"127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.05"
        )
        with pytest.raises(AgentError, match=r"did not answer within 0\.05 s"):
            parsed.run(parsed)


async def test_the_wrong_port_of_the_agent_is_recognised(agent: WebServer) -> None:
    """9394 instead of 9395 is the likeliest mistake."""
    with pytest.raises(
        AgentError,
        match=r"answers /debug/status with 404 Not Found; is that the agent's debug address\?",
    ):
        await run("--debug-listen", agent.public_address)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "something that is not an agent's status"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"node": 7}', "something that is not an agent's status"),
        (
            b"SSH-2.0-OpenSSH_9.9\r\n",
            r"the server at .* does not speak HTTP \(BadStatusLine\); check --debug-listen",
        ),
        (b"", r"does not speak HTTP \(RemoteDisconnected\)"),
    ],
)
async def test_something_else_that_listens_there_is_recognised(answer: bytes, message: str) -> None:
    """Another program's answer is an error on one line, not a traceback."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as other:
        with pytest.raises(AgentError, match=message) as refused:
            await run("--debug-listen", f"127.0.0.1:{other.sockets[0].getsockname()[1]}")
    assert "\n" not in str(refused.value)


def test_an_address_that_makes_no_sense_is_refused() -> None:
    """Before anything is connected to, as a wrong call, with the name of what was wrong."""
    parsed = arguments("--debug-listen", "9395")
    with pytest.raises(
        ConfigError, match=r"^--debug-listen: address '9395' is not understood; write HOST:PORT"
    ):
        parsed.run(parsed)


def test_a_senseless_address_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would not be found."""
    monkeypatch.setenv("VGPU_AGENT_DEBUG_LISTEN", "here")
    parsed = arguments()
    with pytest.raises(
        ConfigError, match=r"^environment variable VGPU_AGENT_DEBUG_LISTEN: address 'here'"
    ):
        parsed.run(parsed)


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan", "inf", "1e9"])
def test_a_timeout_that_makes_no_sense_is_a_usage_error(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 and the expected form."""
    with pytest.raises(SystemExit) as ended:
        arguments("--timeout", seconds)
    assert ended.value.code == 2
    assert "expected seconds above 0 and up to 3600" in capsys.readouterr().err


async def test_one_pod_is_explained_in_sentences(
    agent: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shortest way from a pod's name to its GPU."""
    assert await run("--debug-listen", agent.debug_address, "--pod", "ml/train-0") == 0
    assert (
        "  Container main has GPU 0 (GPU-0) without a limit through nvidia.com/gpu.\n"
    ) in capsys.readouterr().out


async def test_one_pod_is_explained_to_scripts_as_well(
    agent: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent's own answer."""
    assert await run("--debug-listen", agent.debug_address, "--pod", "ml/never", "--json") == 0
    assert json.loads(capsys.readouterr().out)["answer"][0].startswith(
        "Nothing is known of a pod ml/never"
    )


@pytest.mark.parametrize("pod", ["train-0", "ml/", "/train-0", "ml/train/0", "ml/train 0"])
def test_a_pod_without_its_namespace_is_refused(
    pod: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two namespaces may have pods of one name."""
    with pytest.raises(SystemExit):
        arguments("--pod", pod)
    assert "expected NAMESPACE/NAME, for example default/train-0" in capsys.readouterr().err
