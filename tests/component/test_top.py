"""``vgpu-agent top`` beside the agent's real process, in a pipe and on a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.component.commands import command
from tests.component.conftest import QUICK, SHARED, Stage
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS


async def test_a_pipe_gets_one_table(stage: Stage) -> None:
    """GPUs with temperature and power, and the pods below them."""
    agent = await stage.ready_agent(QUICK + SHARED)
    await stage.admit("train", 2)
    await agent.until("/debug/status", lambda found: found["pods"][0]["name"] == "train")
    ran = await command("top", "--debug-listen", agent.debug_address)
    assert ran.status == 0, ran.err
    lines = ran.text.splitlines()
    assert lines[0].startswith("node ")
    assert "SIMULATED" in lines[1]
    gpus = [line for line in lines if "A100-SXM4-40GB" in line]
    assert [line.split()[0] for line in gpus] == ["0", "1"]
    assert all("1/4" in line and " C " in line and " W " in line for line in gpus)
    assert lines.count("    default/train main: no limit (nvidia.com/gpu)") == 2
    assert "\033" not in ran.text


async def test_an_agent_that_is_not_there_is_one_line(folder: object) -> None:
    """The same as for ``status``."""
    ran = await command("top", "--debug-listen", "127.0.0.1:1")
    assert (ran.status, len(ran.err.splitlines())) == (2, 1)


class Terminal:
    """A terminal of 80 columns and 24 lines with ``top`` in it."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vgpu_agent", "top", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self.shown = ""

    def until(self, text: str) -> None:
        """Read until the terminal was sent ``text``."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            try:
                self.shown += os.read(self._ours, 65536).decode()
            except BlockingIOError:
                time.sleep(0.02)

    def press(self, keys: str) -> None:
        """Type into the terminal, and forget what was shown."""
        self.shown = ""
        os.write(self._ours, keys.encode())

    def close(self) -> None:
        """End the process if it runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


async def test_the_live_view_follows_the_node_and_ends_with_q(stage: Stage) -> None:
    """A GPU that fails is seen without a key, an agent that ends is said so, and the terminal is as
    before at the end.
    """
    agent = await stage.ready_agent(
        f"version: v1\ngpu: {{recovery: {{quietSeconds: {FOR_EVER_SECONDS}}}}}\n{SHARED}"
    )
    terminal = Terminal("--debug-listen", agent.debug_address, "--interval", "0.2")
    try:
        await asyncio.to_thread(terminal.until, "\033[?1049h")
        await asyncio.to_thread(terminal.until, "memory [")
        stage.node.xid(0, 79)
        await asyncio.to_thread(terminal.until, "XID 79")
        await agent.terminate()
        await asyncio.to_thread(terminal.until, "cannot reach the agent")
        terminal.press("q")
        await asyncio.to_thread(terminal.until, "\033[?1049l")
        assert await asyncio.to_thread(terminal.process.wait, PATIENCE_SECONDS) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("words", [("--interval", "0"), ("--timeout", "x")])
async def test_a_wrong_call_is_one_line(words: tuple[str, str]) -> None:
    """With what was expected."""
    ran = await command("top", *words)
    assert ran.status == 2
    assert "expected seconds above 0" in ran.err
