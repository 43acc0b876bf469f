"""Waiting for the first of several events: one of several snapshots has moved on, or a time is over.

Used by the writers of this package.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vgpu_agent.concurrency import Latest


class Versions:
    """The versions of some snapshots at one moment, so that no change after it is missed.

    Take it before reading the snapshots: what changes while the writer is busy then ends the next wait at once.
    """

    def __init__(self, *snapshots: Latest[Any]) -> None:
        self._snapshots = [(snapshot, snapshot.version) for snapshot in snapshots]

    async def passed(self, *, timeout_seconds: float) -> bool:
        """Wait until one of them is newer; return whether one is, before ``timeout_seconds`` were over."""
        if any(snapshot.version > version for snapshot, version in self._snapshots):
            return True
        tasks = [asyncio.ensure_future(snapshot.newer_than(version)) for snapshot, version in self._snapshots]
        try:
            done, _ = await asyncio.wait(tasks, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return bool(done)
