"""The form of a moment in every JSON answer: ISO-8601 text in UTC beside its age in seconds. Both are null for "never".

Used by all views of this package.
"""

from __future__ import annotations

import datetime as dt

import msgspec


class When(msgspec.Struct, frozen=True):
    """A moment: ISO-8601 in UTC, and how many seconds ago that was."""

    at: str | None = None
    seconds_ago: float | None = None


def when(unix_seconds: float, now: float) -> When:
    """The moment ``unix_seconds``; 0 is never."""
    if not unix_seconds:
        return When()
    at = dt.datetime.fromtimestamp(unix_seconds, dt.UTC).isoformat(timespec="milliseconds")
    return When(at.replace("+00:00", "Z"), round(now - unix_seconds, 3))
