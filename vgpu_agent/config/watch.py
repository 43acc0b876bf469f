"""Watching the content of the configuration files while the agent runs: ours, and the one of
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
    force. A file that vanishes is not a change; it is logged once. Without a file and without
    ``sources`` the iterator ends at once.

    Args:
        loaded: the settings in force.
        interval_seconds: how often the files are read, ``RELOAD_SECONDS`` of `agent.reload`.
        sources: None where the files are always the same ones. Otherwise it returns the current
            sources (flags, environment variables, our file's name) before each reading of the
            files: a label may choose another configuration file of NVIDIA's plugin, whose name is
            then in `load.Sources.flags`. Different flags count as a change even if the content is
            the same.
    """
    files = _FileReader(loaded)
    if sources is None and not files.has_files:
        return
    seen, seen_sources = loaded.contents.digest, loaded.sources
    while True:
        await asyncio.sleep(interval_seconds)
        if sources is not None:
            files.sources = await sources()
        found = await files.read_until_stable(seen, interval_seconds * _SETTLE_PART)
        if (fingerprint := _fingerprint(found)) != seen or files.sources != seen_sources:
            seen, seen_sources = fingerprint, files.sources
            yield await _loaded(files.sources, found)


class _FileReader:
    """The reader of the files, which reads them again and again.

    State: the last content of each file, which counts while the file is missing.
    """

    def __init__(self, loaded: load.Loaded) -> None:
        self.sources = loaded.sources
        self._last = loaded.contents
        # the sources and the content of our file that name `_nvidia_file`
        self._nvidia_file_for: tuple[load.Sources, bytes | None] | None = None
        self._nvidia_file = ""  # the file of NVIDIA's plugin; empty for none
        self._missing_logged = log.ChangeFilter()  # the missing files, until they are back

    @property
    def has_files(self) -> bool:
        """Tell whether there is a file to watch."""
        return self.sources.file is not None or bool(self._last.nvidia_file)

    async def read_until_stable(self, seen: str, pause_seconds: float) -> Found:
        """Read the files until two readings in a row agree, or one has the fingerprint ``seen``
        (`_fingerprint`).
        """
        found = await asyncio.to_thread(self._read)
        while _fingerprint(found) != seen:
            await asyncio.sleep(pause_seconds)
            again = await asyncio.to_thread(self._read)
            if _fingerprint(again) == _fingerprint(found):
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
            if self._missing_logged.is_new(file):
                _logger.warning("config.missing", file=file, in_force="the previous settings")
            return before
        if self._missing_logged.forget(file):
            _logger.info("config.found", file=file)
        return content


async def _loaded(sources: load.Sources, found: Found) -> load.Loaded | ConfigError:
    if isinstance(found, ConfigError):
        return found
    try:
        return await asyncio.to_thread(load.load_contents, sources, found)
    except ConfigError as err:
        return err


def _fingerprint(found: Found) -> str:
    """Return a text that is the same for readings of the same content or with the same error."""
    return found.digest if isinstance(found, load.Contents) else str(found)
