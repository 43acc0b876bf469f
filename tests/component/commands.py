"""Commands of the package as an operator runs them beside the agent: a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import NamedTuple

from tests.patience import PATIENCE_SECONDS


class Ran(NamedTuple):
    """A command that has ended."""

    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()


async def command(*words: str, environment: dict[str, str] | None = None) -> Ran:
    """Run ``vgpu-agent`` with these words to its end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "vgpu_agent",
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "80", **(environment or {})},
    )
    async with asyncio.timeout(3 * PATIENCE_SECONDS):
        out, err = await process.communicate()
    return Ran(process.returncode or 0, out, err.decode())
