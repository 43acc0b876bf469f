"""What this agent wrote on one object and when it may write there again, so that it never fights its own watch, nor for ever with others.

After a write the watch still shows the old value for a moment; writing again then would be noise. And a value that somebody keeps changing
back must be repaired without a war. Used by `node_publisher` for our Node and by `pod_publisher` for each pod.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vgpu_agent.config.binding import Cluster

# Undone this often within its growing pauses, a value is contested and not just repaired.
_CONTESTED = 3
_WATCH_IS_LATE_SECONDS = 1.0


@dataclasses.dataclass(slots=True)
class _Write:
    before: object  # what the watch showed when we wrote
    value: object
    at: float
    pause_seconds: float  # before the same value is written again
    shown: bool = False  # the watch has shown it since
    undone: int = 0  # how often in a row somebody has changed it back
    since: float = 0.0  # when the first write of that row was made


class Written:
    """The last write of each key of one object.

    State: memory only. A new agent knows nothing of it and looks at what stands there, which is why it must not be needed for more than
    good manners.
    """

    def __init__(self, settings: Cluster) -> None:
        self._settings = settings
        self._writes: dict[str, _Write] = {}

    def seconds_until_due(self, key: str, shown: object, desired: object, *, apart_seconds: float = 0.0) -> float | None:
        """When ``wished`` should be written under ``key``: 0 for now, None for not at all because it stands.

        Args:
            key: any name that is unique in the object.
            shown: what the watch shows there; None for nothing.
            desired: what should stand there; None for nothing.
            apart_seconds: what must lie between two writes of this key, whatever their values.
        """
        write = self._writes.get(key)
        if shown == desired:
            if write is not None and write.value == desired:
                write.shown = True
            return None
        if write is None:
            return 0.0
        wait = apart_seconds
        if write.value == desired:
            unseen = not write.shown and shown == write.before
            wait = max(wait, write.pause_seconds, self._settings.request_timeout_seconds if unseen else 0.0)
        return max(0.0, write.at + wait - asyncio.get_running_loop().time())

    def why_later(self, key: str, shown: object, desired: object) -> str:
        """Why `seconds_until_due` says later, for the log; empty when it does not."""
        write = self._writes.get(key)
        if write is None or shown == desired:
            return ""
        if write.value != desired:
            return "it was written a moment ago, and writes of it are kept apart"
        if asyncio.get_running_loop().time() - write.at < _WATCH_IS_LATE_SECONDS:
            return ""  # usually the watch shows the write in a moment
        return "it was written and stands no longer: somebody has changed it back, or the watch is late"

    def note(self, key: str, before: object, value: object, *, patience_seconds: float = 0.0) -> bool:
        """Take note that ``value`` was just written where the watch showed ``before``.

        Returns:
            Whether somebody keeps changing it back, and has done so for ``patience_seconds``.
        """
        now = asyncio.get_running_loop().time()
        last = self._writes.get(key)
        shortest, longest = self._settings.backoff_min_seconds, self._settings.backoff_max_seconds
        write = self._writes[key] = _Write(before, value, now, shortest, since=now)
        if last is not None and last.value == value and now - last.at < 2 * longest:
            write.pause_seconds = min(last.pause_seconds * 2, longest)
            write.undone = last.undone + (last.shown or before != last.before)
            write.since = last.since
        return write.undone >= _CONTESTED and now - write.since >= patience_seconds

    def forget(self) -> None:
        """Begin anew: the object of this name is another one now."""
        self._writes.clear()
