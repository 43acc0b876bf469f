"""The last thousand decisions of this agent, for ``/debug/events`` and for whoever asks the next morning what happened at night.

Written by the health watch, the plugin servers and the allocator; read by `web`. It is memory only: what must survive a restart stands in
the kubelet's own records, and every entry is a log line as well.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from vgpu_agent import log

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = log.get(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One decision: when (unix seconds), what (a fixed event name) and its facts."""

    at: float
    event: str
    facts: dict[str, Any]


class Journal:
    """A ring of entries; the oldest goes when ``size`` is reached."""

    def __init__(self, size: int = 1000, clock: Callable[[], float] = time.time) -> None:
        self._entries: collections.deque[Entry] = collections.deque(maxlen=size)
        self._clock = clock

    def record(self, event: str, /, *, level: str = "info", **facts: Any) -> None:
        """Keep the decision and log it at ``level`` under the same name."""
        self._entries.append(Entry(self._clock(), event, facts))
        getattr(_logger, level)(event, **facts)

    @property
    def entries(self) -> list[Entry]:
        """Oldest first."""
        return list(self._entries)
