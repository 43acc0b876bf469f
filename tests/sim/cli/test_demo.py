"""``vgpu-agent demo`` as a process: what it prints works, what dies under it comes back,
and it leaves nothing behind.
"""

from __future__ import annotations

import http.client
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.component

_SECONDS = 90


class Demo:
    """A running demo whose words go to a file.

    State: the process; ``directory`` is where its node lies, once an agent of it was seen.
    """

    def __init__(self, output: Path, *flags: str) -> None:
        self._output = output
        self.directory: Path | None = None
        with output.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vgpu_agent", "demo", *flags], stdout=stream, stderr=stream
            )

    @property
    def said(self) -> str:
        """Everything so far."""
        return self._output.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition``, while the demo lives."""
        deadline = time.monotonic() + _SECONDS
        while not condition():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def agents(self) -> list[int]:
        """Process ids of the agents that run on this demo's node;
        other demos may run on this machine.
        """
        found = []
        for pid in _pids():
            node = re.search(r" --simulate (\S+)/node ", _command_line(pid))
            if node and _parent(pid) == self.process.pid:
                self.directory = Path(node[1])
                found.append(pid)
        return found


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it has just ended


def _command_line(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""  # it has just ended


def _type(command: str) -> None:
    """Do as a person that copies the line; raises when it fails."""
    words = shlex.split(command)
    if words[0] == "curl":  # which not every machine has
        connection = http.client.HTTPConnection(words[1].partition("/")[0], timeout=_SECONDS)
        connection.request("GET", words[1].removeprefix(words[1].partition("/")[0]))
        assert connection.getresponse().status == 200, command
        connection.close()
        return
    if words[0].startswith(".venv"):
        words[:1] = [sys.executable, "-m", "vgpu_agent"]
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture
def demos(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Starts demos, and ends what a failed test leaves of them."""
    # A shell starts what it puts into the background with Ctrl-C ignored, and children inherit
    # that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started: list[Demo] = []

    def start(*flags: str) -> Demo:
        started.append(Demo(tmp_path / f"said-{len(started)}", *flags))
        return started[-1]

    yield start
    for demo in started:
        if demo.process.poll() is None:
            demo.process.terminate()
            demo.process.wait(_SECONDS)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGHUP, signal.SIGINT],
    ids=["SIGTERM", "closed terminal", "Ctrl-C"],
)
def test_ended_in_the_middle_of_the_story_nothing_is_left_behind(
    demos: Callable[..., Demo], number: signal.Signals
) -> None:
    """Neither its directory nor an agent that would hold the port."""
    demo = demos("--check")
    demo.until(lambda: "✓" in demo.said)
    agents = demo.agents()
    demo.process.send_signal(number)
    assert demo.process.wait(_SECONDS) in (130, 143)
    assert "Traceback" not in demo.said
    assert agents
    assert demo.directory is not None
    assert not demo.directory.exists()
    assert [pid for pid in agents if "vgpu_agent" in _command_line(pid)] == []


def test_the_node_that_stays_up_survives_the_death_of_its_agent(demos: Callable[..., Demo]) -> None:
    """It is started again as kubelet would, all printed commands work,
    and Ctrl-C ends it with 0.
    """
    demo = demos()
    demo.until(lambda: "The page of this node: http://127.0.0.1:9394/\n" in demo.said)
    assert "\n── 9/9 MPS" in demo.said
    assert "\033" not in demo.said  # no terminal
    (agent,) = demo.agents()
    os.kill(agent, signal.SIGKILL)
    demo.until(lambda: "ready again and knows the 6 containers" in demo.said)
    assert "killed by SIGKILL" in demo.said

    commands = re.findall(
        r"^  ((?:\.venv/bin/vgpu-agent|curl|sed) .*?)(?:  +[a-z].*)?$", demo.said, re.MULTILINE
    )
    assert len(commands) == 9
    for command in commands:
        _type(command)
    demo.until(lambda: "GPU 1: Unhealthy: XID 79" in demo.said)
    demo.until(lambda: "nvidia.com/gpu: 16 of 16 ids are healthy" in demo.said)
    assert "GPU 1: Healthy" in demo.said

    second = demos()  # the usual ports are taken now
    second.until(lambda: "The page of this node" in second.said)
    assert "Something else listens on port 9394, so this agent took 127.0.0.1:" in second.said
    assert re.search(r"vgpu-agent status --debug-listen 127\.0\.0\.1:\d+\n", second.said)
    second.process.terminate()
    assert second.process.wait(_SECONDS) == 0

    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(_SECONDS) == 0
    assert demo.said.endswith("Ended. Agent, node and logs are gone.\n")
    assert demo.directory is not None
    assert not demo.directory.exists()
