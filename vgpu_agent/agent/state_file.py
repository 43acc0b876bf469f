"""JSON files in ``stateDirectory``: what a restart would otherwise have forgotten.

Each is a cache: the agent starts without it as well. A damaged file is logged and written again.
Used by `remembered`, `records.missing_devices` and `records.share_seconds`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from vgpu_agent import log
from vgpu_agent.status import WriteFailure

_logger = log.get(__name__)

Facts = TypeVar("Facts")  # the content of a file


class StateFile(Generic[Facts]):
    """One file.

    State: the file, replaced atomically, so that a crash leaves the old or the new content. Facts
    that were written last are not written again.
    """

    def __init__(
        self,
        directory: str,
        name: str,
        facts: type[Facts],
        *,
        when_unreadable: str,
        when_not_written: str,
    ) -> None:
        """Define the file; nothing is read yet.

        Args:
            directory: ``stateDirectory``; made when it is missing.
            name: the name of the file in it.
            facts: the type that is encoded.
            when_unreadable: what happens without the content of a damaged file; the log has it as
                ``remedy``.
            when_not_written: what is lost until the file can be written.
        """
        self._path = Path(directory) / name
        self._type = facts
        self._when_unreadable = when_unreadable
        self._when_not_written = when_not_written
        self._written: Facts | None = None
        # A thread goes on with a write whose caller was cancelled, and the next write has another
        # thread.
        self._replacing = threading.Lock()
        # why the last facts could not be written; None while the file has them
        self.failure: WriteFailure | None = None
        self._changes = log.ChangeFilter()  # of failures, so that a repeated one is not logged

    async def read(self) -> Facts | None:
        """Read what was written last, by this process or an earlier one;
        None when there is no file or it is damaged.
        """
        try:
            content = await asyncio.to_thread(self._path.read_bytes)
            self._written = msgspec.json.decode(content, type=self._type)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            _logger.warning(
                "state.unreadable",
                path=str(self._path),
                error=str(err),
                remedy=self._when_unreadable,
            )
            return None
        return self._written

    async def write(self, facts: Facts) -> bool:
        """Write ``facts`` when they are new; return whether the file has them. A failure is logged
        once, and the next call tries again.
        """
        if facts == self._written:
            self._recovered()
            return True
        try:
            await asyncio.to_thread(self._replace, msgspec.json.encode(facts))
        except OSError as err:
            self.failure = WriteFailure(
                directory=str(self._path.parent),
                files=self._path.name,
                error=err.strerror or str(err),
                meanwhile=self._when_not_written,
            )
            if self._changes.is_new("write"):
                _logger.warning(
                    "state.not_written",
                    path=str(self._path),
                    error=str(err),
                    remedy=(
                        "make stateDirectory a directory with room in which the agent can write; "
                        f"until then {self._when_not_written}"
                    ),
                )
            return False
        self._recovered()
        self._written = facts
        return True

    def _recovered(self) -> None:
        self._changes.forget("write")
        self.failure = None

    def _replace(self, content: bytes) -> None:
        with self._replacing:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # always the same, so that nothing can pile up
            unfinished = self._path.with_suffix(".new")
            unfinished.write_bytes(content)
            unfinished.chmod(0o600)
            os.replace(unfinished, self._path)
