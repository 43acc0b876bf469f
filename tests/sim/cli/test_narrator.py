"""The demo's lines: wrapped, and coloured on a terminal only."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.cli.narrator import Narrator

_LONG = "word " * 30


def test_a_pipe_gets_80_columns_and_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    """A check's lines are below each other, and a command stays as it is."""
    narrator = Narrator(2)
    narrator.scene("First")
    narrator.prove(True, _LONG)
    narrator.command(_LONG)
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[:2] == ["", "── 1/2 First"]
    assert max(map(len, lines[:-1])) <= 80
    assert lines[2].startswith("   ✓ word")
    assert lines[3].startswith("     word")
    assert lines[-1] == _LONG
    assert "\033" not in shown


def test_words_that_are_longer_than_a_line_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """An annotation can be copied."""
    Narrator(1).say(f"     key: {'x' * 100}")
    assert capsys.readouterr().out == f"     key:\n       {'x' * 100}\n"


def test_what_does_not_hold_ends_the_story() -> None:
    """And is not counted."""
    narrator = Narrator(1)
    with pytest.raises(SimulationError, match="two pods got one share"):
        narrator.prove(False, "two pods got one share")
    assert narrator.proofs == 0


async def test_a_terminal_gets_colours_and_the_seconds_of_what_is_awaited() -> None:
    """The counting line is gone before the next line."""
    program = (
        "import asyncio\n"
        "from vgpu_agent.sim.cli.narrator import Narrator\n"
        "async def main():\n"
        "    narrator = Narrator(1)\n"
        "    async with narrator.counting():\n"
        "        narrator.scene('Wait')\n"
        "        await asyncio.sleep(1.8)\n"
        "        narrator.prove(True, 'it came')\n"
        "asyncio.run(main())\n"
    )
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program],
        stdout=theirs,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "\033[1;36m── 1/1 Wait\033[0m" in shown
    assert "… 1 s" in shown
    assert "\r\033[K   \033[32m✓\033[0m it came" in shown
