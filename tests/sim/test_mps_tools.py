"""The stand-ins of NVIDIA's MPS control binary and
of nvidia-smi behave like the real ones as far as a supervisor can tell.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.simulated import simulated_node
from vgpu_agent.sim.mps_control import PID_FILE
from vgpu_agent.sim.mps_tools import MpsTools, daemon_pid, end_daemon
from vgpu_agent.sim.state import SimulatedNode

pytestmark = pytest.mark.component  # it starts programs


class _Node:
    def __init__(self, tmp_path: Path) -> None:
        self.gpus = simulated_node(tmp_path)
        self.tools = MpsTools.install(tmp_path / "tools", self.gpus.directory)
        self.pipe, self.log = tmp_path / "pipe", tmp_path / "log"
        self.pipe.mkdir()
        self.log.mkdir()

    def run(
        self, *arguments: str, commands: str = "", seconds: float = PATIENCE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }
        program = [str(self.tools.control), *arguments]
        return subprocess.run(
            program,
            input=commands,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def ask(self, command: str) -> str:
        done = self.run(commands=command + "\n")
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def node(tmp_path: Path) -> Iterator[_Node]:
    """Simulated GPUs, the tools, and directories for one daemon,
    which does not outlive the test.
    """
    made = _Node(tmp_path)
    yield made
    end_daemon(made.pipe)


def test_a_daemon_starts_once_and_keeps_what_it_is_told(node: _Node) -> None:
    """-d returns while a daemon serves the pipe. Defaults are 100 percent and no memory limit.
    A second daemon is refused.
    """
    assert node.run("-d").returncode == 0
    assert node.ask("get_default_active_thread_percentage") == "100.0\n"
    assert node.ask("set_default_active_thread_percentage 25") == "25.0\n"
    assert node.ask("set_default_device_pinned_mem_limit 0 10240M") == ""
    assert node.ask("get_default_active_thread_percentage") == "25.0\n"
    assert node.ask("get_default_device_pinned_mem_limit 0") == "10240M\n"
    again = node.run("-d")
    assert (again.returncode, again.stderr) == (
        1,
        "An instance of this daemon is already running\n",
    )
    assert "Cmd:set_default_active_thread_percentage 25" in (node.log / "control.log").read_text()


def test_without_a_daemon_commands_fail(node: _Node) -> None:
    """Before the start, after a kill (which leaves the socket behind) and after quit the binary
    finds no daemon. It can start again.
    """
    missing = (1, "Cannot find MPS control daemon process\n")
    before = node.run(commands="get_server_list\n")
    node.run("-d")
    end_daemon(node.pipe)
    killed = node.run(commands="get_server_list\n")
    assert node.run("-d").returncode == 0
    node.ask("quit")
    after = node.run(commands="get_server_list\n")
    assert [(done.returncode, done.stderr) for done in (before, killed, after)] == [missing] * 3
    assert not (node.pipe / "control").exists()


def test_clients_get_the_limits_of_their_server_and_die_with_it(node: _Node) -> None:
    """The first client starts the server, which keeps the defaults of that moment. Both are listed.
    When the daemon dies, all do.
    """
    node.run("-d")
    node.ask("set_default_active_thread_percentage 25")
    first = node.tools.client(node.pipe)
    assert first.stdout is not None
    assert first.stdout.readline() == "threads=25.0 memory=\n"
    node.ask("set_default_active_thread_percentage 50")
    second = node.tools.client(node.pipe)
    assert second.stdout is not None
    assert second.stdout.readline() == "threads=25.0 memory=\n"
    server = node.ask("get_server_list").strip()
    assert sorted(node.ask(f"get_client_list {server}").split()) == sorted(
        [str(first.pid), str(second.pid)]
    )
    second.terminate()
    second.communicate()
    end_daemon(node.pipe)
    _, said = first.communicate(timeout=PATIENCE_SECONDS)
    assert "CUDA error 806" in said
    _await_end(int(server))


def test_each_call_is_written_down(node: _Node) -> None:
    """A test of the supervisor asks for the binary's commands and environment."""
    node.run("-d")
    node.ask("get_server_list")
    calls = node.tools.calls
    assert [(call["arguments"], call["commands"]) for call in calls] == [
        (["-d"], []),
        ([], ["get_server_list"]),
    ]
    assert calls[0]["environment"] == {
        "CUDA_MPS_PIPE_DIRECTORY": str(node.pipe),
        "CUDA_MPS_LOG_DIRECTORY": str(node.log),
    }


def test_commands_can_be_told_to_misbehave(node: _Node) -> None:
    """Refusing, printing nonsense, crashing, forgetting and hanging,
    each for one command and until further notice.
    """
    node.run("-d")
    node.tools.misbehave(
        quit="refuse",
        get_server_list="nonsense",
        get_client_list="crash",
        set_default_active_thread_percentage="forget",
    )
    assert node.run(commands="quit\n").returncode == 1
    assert "lorem" in node.run(commands="get_server_list\n").stdout
    assert node.run(commands="get_client_list 1\n").returncode in (
        -signal.SIGSEGV,
        128 + signal.SIGSEGV,
    )
    node.ask("set_default_active_thread_percentage 25")
    assert node.ask("get_default_active_thread_percentage") == "100.0\n"
    node.tools.misbehave(get_server_list="hang")
    with pytest.raises(subprocess.TimeoutExpired):
        node.run(commands="get_server_list\n", seconds=0.3)
    node.tools.behave()
    assert node.ask("get_server_list") == ""


def test_a_start_can_fail_or_be_followed_by_a_death(node: _Node) -> None:
    """A daemon that refuses to start says why.
    One that crashes at once has answered its start with success.
    """
    node.tools.misbehave(start="refuse")
    assert node.run("-d").returncode == 1
    node.tools.misbehave(start="crash")
    assert node.run("-d").returncode == 0
    assert node.run(commands="get_server_list\n").returncode == 1
    assert daemon_pid(node.pipe) is None


def test_a_daemon_whose_node_was_deleted_ends(node: _Node) -> None:
    """Tests and the demo delete their folders, and leave no process behind."""
    node.run("-d")
    pid = daemon_pid(node.pipe)
    assert pid is not None
    shutil.rmtree(node.pipe)
    _await_end(pid)


@pytest.mark.parametrize("text", ["-1", "0", "1", "ourselves", ""])
def test_only_the_stand_in_is_taken_for_the_daemon(tmp_path: Path, text: str) -> None:
    """The caller kills that pid, and -1 is every process of the machine. So a file that names
    anything else names no process.
    """
    (tmp_path / PID_FILE).write_text(text.replace("ourselves", str(os.getpid())))
    assert daemon_pid(tmp_path) is None


def test_memory_limits_can_be_shown_in_whole_gib(node: _Node) -> None:
    """Driver 595 shows 10134M as 9G."""
    node.run("-d")
    node.tools.misbehave(shown="gib")
    node.ask("set_default_device_pinned_mem_limit 1 10134M")
    assert node.ask("get_default_device_pinned_mem_limit 1") == "9G\n"


def test_nvidia_smi_sets_the_compute_mode_that_nvml_shows(node: _Node) -> None:
    """The mode goes into the simulated node's state.
    A GPU that is not there is refused as the real tool does.
    """
    uuid = node.gpus.uuids[1]

    def smi(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(node.tools.smi), *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    assert smi("-i", uuid, "-c", "EXCLUSIVE_PROCESS").returncode == 0
    shown = SimulatedNode.open(node.gpus.directory)
    assert [shown.state.gpus[number].compute_mode for number in range(2)] == [0, 3]
    assert smi("-i", uuid, "-c", "DEFAULT").returncode == 0
    assert shown.state.gpus[1].compute_mode == 0
    assert smi("-i", "GPU-none", "-c", "DEFAULT").returncode == 6
    node.tools.misbehave(nvidia_smi="refuse")
    assert "Insufficient permissions" in smi("-i", uuid, "-c", "DEFAULT").stderr


def _await_end(pid: int) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} lives on")
