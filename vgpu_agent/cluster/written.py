"""The agent's own writes on one object and the times of the next ones.

After a write the watch still shows the old value for a moment. Writing again then would be noise. A
value that another writer keeps changing back must be repaired without a fight. Used by
`node_publisher` for our Node and by `pod_publisher` for each pod.
"""

from __future__ import annotations

import asyncio
import dataclasses

from vgpu_agent.cluster import api, retrying

# Undone this often within its growing pauses, a value is contested and not just repaired.
_CONTESTED = 3
_WATCH_IS_LATE_SECONDS = 1.0


@dataclasses.dataclass(slots=True)
class _Write:
    before: object  # the value that the watch showed when we wrote
    value: object
    at: float
    pause_seconds: float  # before the same value is written again
    shown: bool = False  # the watch has shown it since
    undone: int = 0  # how often in a row another writer has changed it back
    since: float = 0.0  # when the first write of that row was made


class Written:
    """The last write of each key of one object.

    State: memory only. A new agent does not have it and reads the current values. So correctness
    must not depend on it, only the pace of writes.
    """

    def __init__(self) -> None:
        self._writes: dict[str, _Write] = {}

    def seconds_until_due(
        self, key: str, shown: object, desired: object, *, apart_seconds: float = 0.0
    ) -> float | None:
        """Return when ``desired`` is due under ``key``: 0 for now, None when it is already there.

        Args:
            key: any name that is unique in the object.
            shown: the value that the watch shows; None for nothing.
            desired: the value to be there; None for nothing.
            apart_seconds: the least time between two writes of this key, whatever their values.
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
            wait = max(wait, write.pause_seconds, api.REQUEST_TIMEOUT_SECONDS if unseen else 0.0)
        return max(0.0, write.at + wait - asyncio.get_running_loop().time())

    def why_later(self, key: str, shown: object, desired: object) -> str:
        """Explain why `seconds_until_due` is above 0, for the log; empty when it is not."""
        write = self._writes.get(key)
        if write is None or shown == desired:
            return ""
        if write.value != desired:
            return "it was written a moment ago, and writes of it are spaced out"
        if asyncio.get_running_loop().time() - write.at < _WATCH_IS_LATE_SECONDS:
            return ""  # usually the watch shows the write in a moment
        return (
            "the API server no longer shows the written value: another client has changed it, or "
            "the watch is late"
        )

    def note(
        self, key: str, before: object, value: object, *, patience_seconds: float = 0.0
    ) -> bool:
        """Take note that ``value`` was just written where the watch showed ``before``.

        Returns:
            whether another writer keeps changing it back, and has done so for ``patience_seconds``.
        """
        now = asyncio.get_running_loop().time()
        last = self._writes.get(key)
        shortest, longest = retrying.BACKOFF_MIN_SECONDS, retrying.BACKOFF_MAX_SECONDS
        write = self._writes[key] = _Write(before, value, now, shortest, since=now)
        if last is not None and last.value == value and now - last.at < 2 * longest:
            write.pause_seconds = min(last.pause_seconds * 2, longest)
            write.undone = last.undone + (last.shown or before != last.before)
            write.since = last.since
        return write.undone >= _CONTESTED and now - write.since >= patience_seconds

    def forget(self) -> None:
        """Begin again: the object of this name is another one now."""
        self._writes.clear()
