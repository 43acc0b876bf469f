"""``vgpu-agent status`` against a real server on loopback."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING

import pytest
import yaml

from vgpu_agent.cli import main, status
from vgpu_agent.errors import AgentError, ConfigError, UnreachableError
from vgpu_agent.journal import Entry
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
    """Simulation is loud; GPUs, resources, pods and problems are there. The status says that the
    node is not as it should be.
    """
    assert await run("--debug-listen", agent.debug_address, "-o", "wide") == 1
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
    assert await run("--debug-listen", agent.debug_address, "--json") == 1
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
    assert await run() == 1
    assert "node node-a" in capsys.readouterr().out


async def test_a_flag_beats_the_environment(
    agent: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag beats the environment everywhere in this command line."""
    monkeypatch.setenv("VGPU_AGENT_DEBUG_LISTEN", "127.0.0.1:1")
    assert await run("--debug-listen", agent.debug_address) == 1


async def test_a_proxy_of_the_environment_does_not_stand_between(
    agent: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node behind a proxy still reaches its own loopback interface."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert await run("--debug-listen", agent.debug_address) == 1


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


def healthy() -> AgentStatus:
    """The same node without a problem."""
    node = a_node()
    node.not_ready = ()
    node.plugins = (
        PluginStatus(
            "nvidia.com/gpu", "nvidia", PluginState.REGISTERED, stream_open=True, ids_sent=10
        ),
    )
    return node


class Changing:
    """A node that may change while a command waits."""

    def __init__(self) -> None:
        self.node = a_node()

    def __call__(self) -> AgentStatus:
        return self.node


@pytest.fixture
async def changing() -> AsyncIterator[tuple[WebServer, Changing]]:
    """An agent whose state a test changes."""
    node = Changing()
    server = WebServer(
        node,
        listen="127.0.0.1:0",
        debug_listen="127.0.0.1:0",
        max_body_bytes=1024,
        request_timeout_seconds=20,
        shutdown_seconds=1,
    )
    async with server:
        yield server, node


@pytest.mark.parametrize("form", [(), ("-o", "wide"), ("-o", "json"), ("-o", "yaml")])
async def test_the_exit_status_tells_the_state_of_the_node(
    changing: tuple[WebServer, Changing], form: tuple[str, ...]
) -> None:
    """0 healthy, 1 degraded, in every form; 2 is for an agent that does not answer."""
    agent, state = changing
    assert await run("--debug-listen", agent.debug_address, *form) == 1
    state.node = healthy()
    assert await run("--debug-listen", agent.debug_address, *form) == 0
    state.node.config_problems = ("config.yaml:3: no",)
    assert await run("--debug-listen", agent.debug_address, *form) == 1


async def test_yaml_and_json_have_the_same(
    agent: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """For tools that read YAML."""
    await run("--debug-listen", agent.debug_address, "-o", "json")
    as_json = json.loads(capsys.readouterr().out)
    await run("--debug-listen", agent.debug_address, "-o", "yaml")
    as_yaml = yaml.safe_load(capsys.readouterr().out)
    assert list(as_yaml) == list(as_json)
    assert as_yaml["pods"] == as_json["pods"]


@pytest.mark.parametrize(("columns", "most"), [(None, 80), ("60", 60), ("junk", 80), ("1", 80)])
async def test_a_pipe_gets_lines_of_80_columns_without_colours(
    agent: WebServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: str | None,
    most: int,
) -> None:
    """kubectl exec gives a pipe, and its user has a terminal. COLUMNS names another width."""
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    await run("--debug-listen", agent.debug_address)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= most
    assert "\033" not in shown


@pytest.mark.parametrize(
    ("environment", "colours"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
async def test_a_terminal_gets_colours_unless_it_wants_none(
    agent: WebServer, environment: dict[str, str], *, colours: bool
) -> None:
    """https://no-color.org, and terminals that cannot."""
    shown = await in_terminal(environment, "--debug-listen", agent.debug_address)
    assert ("\033[" in shown) == colours
    assert "node node-a" in shown


async def in_terminal(environment: dict[str, str], *words: str) -> str:
    """The output of the command on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    without = {"NO_COLOR", "COLUMNS"}
    inherited = {name: text for name, text in os.environ.items() if name not in without}
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "vgpu_agent", "status", *words],
        stdout=theirs,
        stderr=theirs,
        env={**inherited, "TERM": "xterm", **environment},
        timeout=60,
        check=False,
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert ran.returncode == 1, shown
    return shown


async def test_waiting_ends_when_the_agent_is_ready(
    changing: tuple[WebServer, Changing], capsys: pytest.CaptureFixture[str]
) -> None:
    """A script goes on at that moment, also if a problem remains that stops nothing."""
    agent, state = changing
    waiting = asyncio.create_task(
        run("--debug-listen", agent.debug_address, "--wait", "ready", "--timeout", "60")
    )
    await asyncio.sleep(0.2)
    assert not waiting.done()
    state.node = healthy()
    state.node.config_problems = ("config.yaml:3: no",)
    assert await waiting == 0
    assert "node node-a · ready" in capsys.readouterr().out
    words = ("--debug-listen", agent.debug_address, "--wait", "healthy", "--timeout", "0.6")
    assert await run(*words) == 1
    state.node.config_problems = ()
    assert await run(*words) == 0


async def test_waiting_ends_in_time(agent: WebServer, capsys: pytest.CaptureFixture[str]) -> None:
    """With what is wrong; an agent that is not there is an error of its own."""
    words = ("--wait", "ready", "--timeout", "0.6")
    assert await run("--debug-listen", agent.debug_address, *words) == 1
    shown = capsys.readouterr()
    assert "not registered with kubelet" in " ".join(shown.out.split())
    assert shown.err == "vgpu-agent: not ready within 0.6 s\n"
    with pytest.raises(UnreachableError, match="connection refused"):
        await run("--debug-listen", "127.0.0.1:1", *words)


async def test_watching_shows_changes_and_survives_a_restart(
    changing: tuple[WebServer, Changing],
) -> None:
    """In a pipe one page after the other, until it is interrupted."""
    agent, state = changing
    # Tests that run in the background of a shell ignore SIGINT, and what they start would, too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vgpu_agent", "status", "--debug-listen", agent.debug_address),
        *("--watch", "0.1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    try:
        await until_shown(process.stdout, "NOT READY")
        state.node = healthy()
        await until_shown(process.stdout, "node node-a · ready")
        await agent.stop()
        await until_shown(process.stdout, "connection refused")
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 130


async def until_shown(output: asyncio.StreamReader, text: str) -> None:
    """Read lines until one has ``text``."""
    async with asyncio.timeout(60):
        while text not in (await output.readline()).decode():
            pass


def test_an_agent_that_is_away_is_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Told apart from a node with problems."""
    assert main.main(["status", "--debug-listen", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("vgpu-agent: cannot reach the agent at 127.0.0.1:1")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("gpus",), ("GPUs", "Tesla T4", "GPU-0", "HELD BY ml/train-0/main")),
        (("pods",), ("Pods", "ml/train-0", "nvidia.com/gpu", "GPU-0")),
        (("events", "--since", "5m"), ("Events", "1s ago", "gpu.unhealthy", "gpu: GPU-0, xid: 79")),
        (("events", "--event", "start"), ("none of the kind that was asked",)),
        (("explain", "ml/train-0"), ("pod ml/train-0", "Container main has GPU 0")),
    ],
)
async def test_the_parts_of_the_node_are_commands(
    changing: tuple[WebServer, Changing],
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    texts: tuple[str, ...],
) -> None:
    """The image has no curl: one ``kubectl exec`` is enough. Each fits, and is there as JSON."""
    agent, state = changing
    state.node.events = (Entry(time.time() - 1.5, "gpu.unhealthy", {"gpu": "GPU-0", "xid": 79}),)
    called = [*words, "--debug-listen", agent.debug_address]
    assert await asyncio.to_thread(main.main, called) == 0
    shown = capsys.readouterr().out
    assert [text for text in texts if text not in shown] == []
    assert max(map(len, shown.splitlines())) <= 80
    assert await asyncio.to_thread(main.main, [*called, "-o", "json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


async def test_a_choice_that_the_agent_does_not_understand_is_a_wrong_call(
    agent: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the agent's own words."""
    words = ["events", "--since", "yesterday", "--debug-listen", agent.debug_address]
    assert await asyncio.to_thread(main.main, words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "since 'yesterday' is not understood; write an age" in line
