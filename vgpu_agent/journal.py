"""The last thousand events of this agent, for ``/debug/events``.

Written by most components; read by `web`. It is in memory only: what must survive a restart is in
the kubelet's own records, and every entry is a log line as well.
"""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent import log
from vgpu_agent.bounded import bounded

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = log.get(__name__)

MAX_ENTRY_BYTES = 16 * 1024
MAX_BYTES = 4 * 1024 * 1024


class Entry(msgspec.Struct, frozen=True):
    """One event: when (unix seconds), what (a fixed event name) and its facts."""

    at: float
    event: str
    facts: dict[str, Any]


class Journal:
    """A ring of entries; the oldest is dropped when there are more entries than ``size``.

    State: memory only, about ``most_bytes`` at most. The facts of an entry are cut when it is
    recorded (`MAX_ENTRY_BYTES`), because a pod may have written them.
    """

    def __init__(
        self,
        size: int = 1000,
        clock: Callable[[], float] = time.time,
        *,
        most_bytes: int = MAX_BYTES,
    ) -> None:
        # each with its size in bytes
        self._entries: collections.deque[tuple[Entry, int]] = collections.deque()
        self._size, self._most_bytes = size, most_bytes
        self._bytes = 0
        self._clock = clock

    def record(self, event: str, /, *, level: str = "info", **facts: Any) -> None:
        """Keep the event and log it at ``level`` under the same name."""
        # the facts as plain values, cut where they are too long, and their size in bytes
        kept, size = bounded(facts, most_bytes=MAX_ENTRY_BYTES)
        self._entries.append((Entry(self._clock(), event, kept), size))
        self._bytes += size
        while len(self._entries) > self._size or self._bytes > self._most_bytes:
            self._bytes -= self._entries.popleft()[1]
        getattr(_logger, level)(event, **kept)

    @property
    def entries(self) -> list[Entry]:
        """All entries, oldest first."""
        return [entry for entry, _ in self._entries]
