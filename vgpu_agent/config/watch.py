"""The watch over the content of the configuration files while the agent runs: ours, and the one of
NVIDIA's plugin.

`agent` iterates over `changes` in a task of its own and puts new settings in force. For an unusable
file `changes` yields the error, and the settings in force stay. Content is compared, not times or
inodes: a ConfigMap is swapped by renaming the ``..data`` link above the file, an editor renames a
new file over the old one, and ``cat >`` writes in place. To a reader of the content all three look
the same.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.config import load, options
from vgpu_agent.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_logger = log.get(__name__)

# A file that is written in place is empty for a moment, and an empty file of NVIDIA's plugin means
# "all defaults". So new content counts only when it is still there after this part of the interval.
_SETTLE_PART = 0.1

Found = load.Contents | ConfigError


async def changes(
    loaded: load.Loaded,
    *,
    interval_seconds: float,
    sources: Callable[[], Awaitable[load.Sources]] | None = None,
) -> AsyncIterator[load.Loaded | ConfigError]:
    """Yield each new content of ``loaded``'s files, as new settings or as the error in it.

    When a bad file is corrected, the settings are yielded once more, even if they are the ones in
    force. A file that vanishes is no change; it is logged once. Without a file and without
    ``sources`` it ends at once.

    Args:
        loaded: the settings in force.
        interval_seconds: how often the files are read, ``RELOAD_SECONDS`` of `agent.reload`.
        sources: None where the files are always the same ones. Otherwise it returns the current
            sources (flags, environment variables, our file's name) before each reading of the
            files: a label may choose another configuration file of NVIDIA's plugin, whose name is
            then in `load.Sources.flags`. Other flags than before are a change even if the content
            is the same.
    """
    look = _Look(loaded)
    if sources is None and not look.has_files:
        return
    seen, seen_sources = loaded.contents.digest, loaded.sources
    while True:
        await asyncio.sleep(interval_seconds)
        if sources is not None:
            look.sources = await sources()
        found = await look.read_until_stable(seen, interval_seconds * _SETTLE_PART)
        if (mark := _mark(found)) != seen or look.sources != seen_sources:
            seen, seen_sources = mark, look.sources
            yield await _loaded(look.sources, found)


class _Look:
    """The repeated reading of the files.

    State: the last content of each file, which counts while the file is missing.
    """

    def __init__(self, loaded: load.Loaded) -> None:
        self.sources = loaded.sources
        self._last = loaded.contents
        # the file of NVIDIA's plugin, and the sources and the content of our file that name it
        self._nvidia_file_for: tuple[load.Sources, bytes | None] | None = None
        self._nvidia_file = ""
        self._changes = log.ChangeFilter()  # has each missing file logged once, until it is back

    @property
    def has_files(self) -> bool:
        """Tell whether there is a file to watch."""
        return self.sources.file is not None or bool(self._last.nvidia_file)

    async def read_until_stable(self, seen: str, pause_seconds: float) -> Found:
        """Read the files until two readings in a row agree, or one has the mark ``seen``, a text
        that stands for its content or error (`_mark`).
        """
        found = await asyncio.to_thread(self._read)
        while _mark(found) != seen:
            await asyncio.sleep(pause_seconds)
            again = await asyncio.to_thread(self._read)
            if _mark(again) == _mark(found):
                break
            found = again
        if isinstance(found, load.Contents):
            self._last = found
        return found

    def _read(self) -> Found:
        try:
            own = self._content(self.sources.file, options.CONFIG_FLAG, self._last.own)
            if (self.sources, own) != self._nvidia_file_for:
                self._nvidia_file_for, self._nvidia_file = (
                    (self.sources, own),
                    load.nvidia_file(self.sources, own),
                )
            file = self._nvidia_file
            before = self._last.nvidia if file == self._last.nvidia_file else None
            return load.Contents(
                own=own,
                nvidia_file=file,
                nvidia=self._content(file or None, load.nvidia_file_named_by(self.sources), before),
            )
        except ConfigError as err:
            return err

    def _content(self, file: str | None, named_by: str, before: bytes | None) -> bytes | None:
        """Read ``file``, which ``named_by`` (a flag, a variable or a key, for errors) names; return
        ``before`` when it has vanished.

        Raises:
            ConfigError: it cannot be read, or was never there.
        """
        if file is None:
            return None
        try:
            content = load.read(file, named_by)
        except ConfigError as err:
            if before is None or not isinstance(err.__cause__, FileNotFoundError):
                raise
            if self._changes.is_new(file):
                _logger.warning("config.missing", file=file, in_force="the previous settings")
            return before
        if self._changes.forget(file):
            _logger.info("config.found", file=file)
        return content


async def _loaded(sources: load.Sources, found: Found) -> load.Loaded | ConfigError:
    if isinstance(found, ConfigError):
        return found
    try:
        return await asyncio.to_thread(load.load_contents, sources, found)
    except ConfigError as err:
        return err


def _mark(found: Found) -> str:
    """Return a text that is the same for readings of the same content or with the same error."""
    return found.digest if isinstance(found, load.Contents) else str(found)
