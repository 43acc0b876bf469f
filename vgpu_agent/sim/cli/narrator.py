"""Scenes, checks and their numbering for the demo's stories.
Used by `demo`, `demo_volcano`, `demo_vgpu_manager`, `demo_scheduler` and `demo_mps`.

Lines are wrapped to the width of the terminal, and to 80 columns elsewhere. Only a terminal gets
colours, and a line that counts the seconds until the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import textwrap
import time
from typing import TYPE_CHECKING

from vgpu_agent.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_COLUMNS = 80
_WIDEST = 100  # longer lines are hard to read
_TICK_SECONDS = 0.5
_CLEARED = "\r\033[K"  # to the beginning of the line, which is erased
_SCENE, _HOLDS, _WAITS = "1;36", "32", "2"  # SGR: bold cyan, green, dim


class Narrator:
    """The demo's output on stdout; ``proofs`` counts the checks so far.

    State: the counts, and the time of the last line.

    Args:
        scenes: how many there are.
    """

    def __init__(self, scenes: int) -> None:
        self.proofs = 0
        self._scenes, self._scene = scenes, 0
        self._terminal = sys.stdout.isatty()
        self._said_at = time.monotonic()
        self._waiting = False

    def scene(self, title: str) -> None:
        """Begin a scene."""
        self._scene += 1
        self.say("")
        self.say(f"── {self._scene}/{self._scenes} {title}", style=_SCENE)

    def prove(self, holds: bool, what: str) -> None:
        """Count and tell something that must hold.

        Raises:
            SimulationError: it does not.
        """
        if not holds:
            raise SimulationError(what)
        self.proofs += 1
        self.say(f"   ✓ {what}", style=_HOLDS)

    def say(self, line: str, *, style: str = "") -> None:
        """Tell a line at once, also into a pipe, below its indentation where it is wrapped.

        Args:
            line: the text.
            style: of its first character on a terminal, a mark such as ✓ (the SGR parameters); of
                the whole line for a scene.
        """
        for paragraph in line.split("\n"):
            self.command("\n".join(self._wrapped(paragraph)), style=style)

    def command(self, text: str, *, style: str = "") -> None:
        """Tell lines as they are, not wrapped, so that commands in them can be copied."""
        if self._waiting:
            print(_CLEARED, end="")
            self._waiting = False
        print(self._styled(text, style) if style and self._terminal else text, flush=True)
        self._said_at = time.monotonic()

    @contextlib.asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        """Show on a terminal for how long the next line has been awaited."""
        if not self._terminal:
            yield
            return
        counting = asyncio.ensure_future(self._count())
        try:
            yield
        finally:
            counting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await counting

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            seconds = time.monotonic() - self._said_at
            if seconds >= 1:
                print(f"{_CLEARED}\033[{_WAITS}m   … {seconds:.0f} s\033[0m", end="", flush=True)
                self._waiting = True

    def _wrapped(self, line: str) -> list[str]:
        columns = shutil.get_terminal_size((_COLUMNS, 24)).columns if self._terminal else _COLUMNS
        indented = len(line) > len(line.lstrip(" ")) or line.startswith("──")
        below = " " * (len(line) - len(line.lstrip(" ")) + 2 * indented)
        return textwrap.wrap(
            line,
            min(max(columns, _COLUMNS // 2), _WIDEST),
            subsequent_indent=below,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        ) or [""]

    def _styled(self, text: str, style: str) -> str:
        if style == _SCENE:
            return f"\033[{style}m{text}\033[0m"
        mark = text.lstrip(" ")[:1]
        return text.replace(mark, f"\033[{style}m{mark}\033[0m", 1)
