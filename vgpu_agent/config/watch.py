"""Notices new content of the configuration file while the agent runs.

`agent` iterates over `changes` in a task of its own and puts in force what comes; a file that cannot be used comes as the error, and the
settings in force stay. Content is compared, not times or inodes: a ConfigMap is swapped by renaming the ``..data`` link above the file,
an editor renames a new file over the old one, and ``cat >`` writes in place, and all three look the same from here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.config import load
from vgpu_agent.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_logger = log.get(__name__)

# A file that is written in place is empty for a moment, and an empty file means "all defaults". So new content counts only when it is
# still there after this part of the interval.
_SETTLE_PART = 0.1


async def changes(
    loaded: load.Loaded, *, interval_seconds: float, sources: Callable[[], Awaitable[load.Sources]] | None = None
) -> AsyncIterator[load.Loaded | ConfigError]:
    """Each new content of the file that ``loaded`` was made of, as new settings or as the reason why it has none.

    When a bad file is put right again, the settings come once more, even if they are the ones in force. A file that vanishes is no
    change; it is logged once. Ends at once when there is no file.

    Args:
        loaded: what is in force.
        interval_seconds: how often the file is read, ``configReloadSeconds``.
        sources: asked before each look, where something else than the files decides what the configuration is made of; other flags than
            before are a change, too.
    """
    if sources is None and loaded.sources.file is None:
        return
    asked = loaded.sources
    seen, vanished = loaded.digest, False
    while True:
        await asyncio.sleep(interval_seconds)
        before, asked = asked, asked if sources is None else await sources()
        if asked.file is None:
            if asked != before:
                yield await _judged(asked, None)
            continue
        reading = await _settled(asked.file, seen, interval_seconds * _SETTLE_PART)
        if reading is None:
            if not vanished:
                _logger.warning("config.vanished", file=asked.file, in_force="the settings from before")
            vanished = True
            asked = before
            continue
        if vanished:
            _logger.info("config.returned", file=asked.file)
            vanished = False
        if (mark := _mark(reading)) != seen or asked != before:
            seen = mark
            yield await _judged(asked, reading)


async def _settled(file: str, seen: str, pause_seconds: float) -> bytes | ConfigError | None:
    """What is in the file, as soon as it is what was seen before or two readings in a row agree; None when there is no file."""
    reading = await _read(file)
    while reading is not None and _mark(reading) != seen:
        await asyncio.sleep(pause_seconds)
        again = await _read(file)
        if again is None or _mark(again) == _mark(reading):
            return again
        reading = again
    return reading


async def _read(file: str) -> bytes | ConfigError | None:
    try:
        return await asyncio.to_thread(load.read, file)
    except ConfigError as err:
        return None if isinstance(err.__cause__, FileNotFoundError) else err


async def _judged(sources: load.Sources, reading: bytes | ConfigError | None) -> load.Loaded | ConfigError:
    if isinstance(reading, ConfigError):
        return reading
    try:
        return await asyncio.to_thread(load.load_content, sources, reading)
    except ConfigError as err:
        return err


def _mark(reading: bytes | ConfigError) -> str:
    """What tells one reading from another."""
    return load.digest_of(reading) if isinstance(reading, bytes) else str(reading)
