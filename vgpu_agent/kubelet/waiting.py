"""Waiting for the first of several events. A plugin server always waits for more than one.

Used by `plugin` and `server`. The awaited things must be safe to abandon: the losers are cancelled before this
returns.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


async def first_of(*waits: Coroutine[Any, Any, object], timeout_seconds: float | None = None) -> bool:
    """Wait until one of ``waits`` has returned, or until the time is over.

    Returns:
        Whether one of them has returned.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return bool(done)


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do ``work``, but abandon it as soon as ``stopping`` is set; an exception of the work passes through.

    Returns:
        Whether the work was finished.
    """
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        stop.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)
