"""The agent's own writes to one object, and the times of its next writes.

After a write the watch still shows the old value for a moment, in which the value must not be
written again. If another client keeps changing a value back, the agent writes it again with growing
pauses. Used by `node_publisher` for our Node and by `pod_publisher` for each pod.
"""

from __future__ import annotations

import asyncio

import msgspec

from vgpu_agent.cluster import api, retrying

# After this many changes by another client in a row, a value counts as contested.
_CONTESTED_AFTER = 3
# For this long after a write it is normal that the watch does not show the written value yet.
_WATCH_DELAY_SECONDS = 1.0


class _Write(msgspec.Struct):
    before: object  # the value that the watch showed before the write
    value: object  # the value that was written
    at: float  # the time of the write, on the event loop's clock
    pause_seconds: float  # the pause until the same value may be written again
    shown: bool = False  # the watch has shown the value after the write
    overwritten: int = 0  # how often in a row another client has changed the value back
    first_at: float = 0.0  # the time of the first write of this value in a row


class WriteHistory:
    """The last write of each key of one object.

    State: in memory only. A new agent starts without it and reads the current values. So only the
    pace of writes may depend on it, not their correctness.
    """

    def __init__(self) -> None:
        self._writes: dict[str, _Write] = {}

    def seconds_until_due(
        self, key: str, shown: object, desired: object, *, apart_seconds: float = 0.0
    ) -> float | None:
        """Return the time until ``desired`` may be written: 0 for now, None if it is already there.

        Args:
            key: any name of the value that is unique in the object, such as the annotation's.
            shown: the value that the watch shows; None for no value.
            desired: the desired value; None for no value.
            apart_seconds: the minimum time between two writes of this key, even of different
                values.
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
            # the watch does not show the write yet; it gets the time that any request may take
            unseen = not write.shown and shown == write.before
            wait = max(wait, write.pause_seconds, api.REQUEST_TIMEOUT_SECONDS if unseen else 0.0)
        return max(0.0, write.at + wait - asyncio.get_running_loop().time())

    def delay_reason(self, key: str, shown: object, desired: object) -> str:
        """Explain for the log why `seconds_until_due` is above 0; "" if there is nothing to log."""
        write = self._writes.get(key)
        if write is None or shown == desired:
            return ""
        if write.value != desired:
            return "it was written a moment ago, and there is a minimum time between its writes"
        if asyncio.get_running_loop().time() - write.at < _WATCH_DELAY_SECONDS:
            return ""  # usually the watch shows the write in a moment
        return (
            "the API server no longer shows the written value: another client has changed it, or "
            "the watch is late"
        )

    def note_write(
        self, key: str, before: object, value: object, *, patience_seconds: float = 0.0
    ) -> bool:
        """Record that ``value`` was just written while the watch showed ``before``.

        Returns:
            True if another client keeps changing the value back, for at least
            ``patience_seconds``.
        """
        now = asyncio.get_running_loop().time()
        last = self._writes.get(key)
        shortest, longest = retrying.BACKOFF_MIN_SECONDS, retrying.BACKOFF_MAX_SECONDS
        write = self._writes[key] = _Write(before, value, now, shortest, first_at=now)
        if last is not None and last.value == value and now - last.at < 2 * longest:
            write.pause_seconds = min(last.pause_seconds * 2, longest)
            write.overwritten = last.overwritten + (last.shown or before != last.before)
            write.first_at = last.first_at
        return write.overwritten >= _CONTESTED_AFTER and now - write.first_at >= patience_seconds

    def forget(self) -> None:
        """Forget all writes, because the object was replaced by another one of the same name."""
        self._writes.clear()
