"""Host tools that print too much, leave a child with their stdout, or cannot even be killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from vgpu_agent.errors import MpsError
from vgpu_agent.mps.host_tools import HostTool


def _tool(tmp_path: Path, script: str, *, seconds: float = PATIENCE_SECONDS) -> HostTool:
    path = tmp_path / "tool"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return HostTool(str(path), timeout_seconds=seconds)


async def test_stdin_environment_and_output_go_through(tmp_path: Path) -> None:
    """The tool sees the text and exactly the environment that it is given."""
    tool = await asyncio.to_thread(_tool, tmp_path, 'read line; echo "$line $ONLY $HOME"')
    assert await tool.run(stdin="hello\n", environment={"ONLY": "this"}) == "hello this \n"


async def test_a_program_is_found_by_the_agents_own_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's environment has two variables and no PATH. Its program is found all the same."""
    await asyncio.to_thread(_tool, tmp_path, "echo here")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert (
        await HostTool("tool", timeout_seconds=PATIENCE_SECONDS).run(environment={"ONLY": "this"})
        == "here\n"
    )


async def test_output_without_end_is_cut(tmp_path: Path) -> None:
    """A tool that prints for ever finds its file full after 64 KiB, long before its time is up."""
    tool = await asyncio.to_thread(_tool, tmp_path, "exec yes")
    with pytest.raises(MpsError, match=r"/tool ended with status 1: '.*Operation not permitted'"):
        await tool.run()


async def test_a_child_that_keeps_stdout_open_holds_nobody_up(tmp_path: Path) -> None:
    """A daemon that does not close its parent's stdout is started all the same."""
    tool = await asyncio.to_thread(_tool, tmp_path, "echo started; sleep 30 & echo $! > $0.child")
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await tool.run() == "started\n"
    os.kill(int(await asyncio.to_thread((tmp_path / "tool.child").read_text)), signal.SIGKILL)


async def test_what_it_complains_of_is_in_the_error(tmp_path: Path) -> None:
    """On one line, printable, and with the exit status."""
    tool = await asyncio.to_thread(_tool, tmp_path, "printf 'no\\n\\001 GPU' >&2; exit 9")
    with pytest.raises(MpsError, match=r"/tool -i 1 ended with status 9: 'no GPU'"):
        await tool.run("-i", "1")


async def test_a_program_that_cannot_be_killed_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that wait for a dead driver in the kernel do not end. One of them is enough."""
    monkeypatch.setattr("vgpu_agent.mps.host_tools._KILL_SECONDS", 0.05)
    kill = asyncio.subprocess.Process.kill
    monkeypatch.setattr(asyncio.subprocess.Process, "kill", lambda _: None)
    tool = await asyncio.to_thread(_tool, tmp_path, f"exec sleep {FOR_EVER_SECONDS}", seconds=0.05)

    async def end() -> None:
        assert tool._stuck is not None
        kill(tool._stuck)
        await tool._stuck.wait()

    with pytest.raises(MpsError, match=r"has not ended after 0\.05 s and was killed"):
        await tool.run()
    with pytest.raises(MpsError, match=r"does not end even when killed; the driver hangs"):
        await tool.run()
    await end()
    with pytest.raises(MpsError, match="has not ended"):
        await tool.run()
    await end()
