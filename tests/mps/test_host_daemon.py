"""The operator's own daemon on the host:
what can be proven of it, by the control binary or by its files.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mps.supervised import Node
from vgpu_agent.mps import host_tools
from vgpu_agent.mps.host_daemon import HostDaemon
from vgpu_agent.sim.mps_tools import end_daemon

pytestmark = pytest.mark.component  # each test starts processes


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """The directory of its pipe, which is not there yet;
    the daemon that a test starts there ends with it.
    """
    directory = tmp_path / "tmp/nvidia-mps"
    yield directory
    end_daemon(directory)


def _daemon_of_the_host(node: Node, pipe: Path) -> None:
    pipe.mkdir(parents=True)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)}
    subprocess.run([str(node.tools.control), "-d"], check=True, env=environment, timeout=20)


async def test_a_daemon_that_answers_is_there(node: Node, pipe: Path) -> None:
    """The control binary is asked, so that a pipe which a dead daemon has left proves nothing."""
    host = HostDaemon(str(pipe))
    assert await host.why_missing() == f"the agent sees no directory {pipe}"
    await asyncio.to_thread(_daemon_of_the_host, node, pipe)
    assert await host.why_missing() == ""
    await asyncio.to_thread(end_daemon, pipe)
    await asyncio.to_thread((pipe / "control").touch)
    assert await host.why_missing() == f"there is no MPS control daemon at {pipe}"


async def test_without_a_control_binary_the_pipe_is_what_can_be_proven(
    node: Node, pipe: Path
) -> None:
    """The agent's container has NVIDIA's programs only where it asks for them."""
    node.use_programs(control="/nowhere/nvidia-cuda-mps-control")
    host = HostDaemon(str(pipe))
    await asyncio.to_thread(pipe.mkdir, parents=True)
    assert await host.why_missing() == f"there is no control pipe in {pipe}"
    await asyncio.to_thread((pipe / "control").touch)
    assert await host.why_missing() == ""


async def test_a_daemon_that_hangs_is_told_with_the_tools_words(
    node: Node, pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may serve its clients all the same. This cannot be known."""
    await asyncio.to_thread(_daemon_of_the_host, node, pipe)
    node.tools.misbehave(get_default_active_thread_percentage="hang")
    monkeypatch.setattr(host_tools, "COMMAND_TIMEOUT_SECONDS", 0.3)
    reason = await HostDaemon(str(pipe)).why_missing()
    assert reason.startswith(f"the MPS control daemon at {pipe} does not answer: ")
    assert "has not ended after 0.3 s" in reason
