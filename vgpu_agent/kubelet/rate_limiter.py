"""A rate limiter: a bucket that fills up with time,
counted as the kubelet itself counts calls (kubelet §13).

`pod_resources` keeps one, so that it never exceeds the kubelet's rate. It rather takes the slower
way that needs one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class RateLimiter:
    """At most ``at_once`` calls in a moment, and ``a_second`` in the long run.

    State: how many are left, and when that was counted.
    """

    def __init__(self, at_once: int, a_second: float, clock: Callable[[], float]) -> None:
        """Begin with a full bucket; ``clock`` in seconds."""
        self._at_once = at_once
        self._a_second = a_second
        self._clock = clock
        self._left, self._counted_at = float(at_once), clock()

    def take_all(self, calls: int) -> bool:
        """Take that many calls if they are left, else none; return whether they were left."""
        self._refill()
        if self._left < calls:
            return False
        self._left -= calls
        return True

    def take(self, calls: int) -> None:
        """Take that many, or as many as are left: they are made in any case."""
        self._refill()
        self._left = max(0.0, self._left - calls)

    def spend(self) -> None:
        """Empty the bucket: another client has used the rate."""
        self._left, self._counted_at = 0.0, self._clock()

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._at_once, self._left + (now - self._counted_at) * self._a_second)
        self._counted_at = now
