"""Pauses and log lines when the API server is away, busy or refuses: one line about each trouble.

Used by the writers, each with a `Backoff` for every kind of write that can fail by itself, and by
`reflector` between its watches.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from vgpu_agent.log import ChangeFilter

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.errors import ClusterError
    from vgpu_agent.journal import Journal

# Pauses after a failed request or watch.
BACKOFF_MIN_SECONDS = 0.8
BACKOFF_MAX_SECONDS = 30.0
# Answers that the same request would get again: malformed, forbidden, too large, invalid.
_LASTING = (400, 403, 405, 413, 422)
# A lasting failure is tried again this many longest pauses later: permissions can be granted while
# the agent runs.
_LASTING_PAUSES = 10


def lasting(err: ClusterError) -> bool:
    """Tell whether the same request would be refused again, whatever the API server's health."""
    return err.status in _LASTING


def slow_seconds() -> float:
    """Return how long to pause after a lasting refusal."""
    return BACKOFF_MAX_SECONDS * _LASTING_PAUSES


class Backoff:
    """The time at which one kind of request may be tried again.

    State: failures in a row and the end of the pause, on the event loop's clock.
    """

    def __init__(self, jitter: Callable[[float, float], float] = random.uniform) -> None:
        # so that the agents of a whole cluster do not come back in one moment
        self._jitter = jitter
        self._until = 0.0
        self.failures = 0

    @property
    def seconds_left(self) -> float:
        """Return how long the next try must wait; 0 when it need not."""
        return max(0.0, self._until - asyncio.get_running_loop().time())

    def pause(self, err: ClusterError | None = None) -> float:
        """Return the pause in seconds after one more try that failed with ``err``, or only ended.

        It doubles, grows for longer after a lasting refusal, and is no shorter than the API server
        asked for.
        """
        # A forbidden request stays forbidden until the role changes, and asking is a request, too.
        longest = slow_seconds() if err is not None and lasting(err) else BACKOFF_MAX_SECONDS
        shortest = BACKOFF_MIN_SECONDS
        pause = min(
            shortest * 2.0 ** min(self.failures, 30), max(shortest, longest)
        ) * self._jitter(0.5, 1.0)
        self.failures += 1
        return max(pause, err.retry_after_seconds if err is not None else 0.0)

    def failed(self, err: ClusterError) -> None:
        """Take note of a failed write: after a lasting refusal the longest pause begins at once,
        because the same write is sent again.
        """
        pause = self.pause(err)
        if lasting(err):
            pause = max(slow_seconds(), err.retry_after_seconds)
        self._until = asyncio.get_running_loop().time() + pause

    def succeeded(self) -> None:
        """The next failure is the first one again."""
        self.failures, self._until = 0, 0.0


class Complaints:
    """The log of troubles, by a key of the writer's own: each one once, and once that it is over,
    however often it is met in between.
    """

    def __init__(self, journal: Journal, writer: str) -> None:
        self._journal = journal
        self._writer = writer
        self._changes = ChangeFilter()

    def failed(self, key: str, err: ClusterError, permission: str, /, **facts: Any) -> None:
        """Note that a write named ``key`` has failed; ``permission`` is the RBAC permission it
        needs, e.g. ``patch nodes/status``.
        """
        if err.status == 403:
            verb, _, resource = permission.partition(" ")
            text = (
                f"the API server forbids this agent to {permission}: {err}; grant its service "
                f"account the verb {verb!r} on {resource!r} (the ClusterRole in manifests/ has it)"
            )
            self.say(
                key,
                f"{self._writer}.forbidden",
                "forbidden",
                level="error",
                error=text,
                permission=permission,
                **facts,
            )
        elif lasting(err):
            self.say(
                key,
                f"{self._writer}.refused",
                str(err),
                level="error",
                error=str(err),
                status=err.status,
                **facts,
            )
        else:
            self.say(
                key,
                f"{self._writer}.failed",
                "away",
                level="warning",
                error=str(err),
                status=err.status,
                **facts,
            )

    def say(self, key: str, event: str, trouble: str, /, *, level: str, **facts: Any) -> None:
        """Record ``event`` unless ``trouble`` is the last recorded about ``key``."""
        if self._changes.is_new(key, trouble):
            self._journal.record(event, level=level, **facts)

    def over(self, key: str) -> None:
        """``key`` has no trouble any more."""
        if self._changes.over(key):
            self._journal.record(f"{self._writer}.recovered", key=key)

    def forget(self, part: str) -> None:
        """Forget the troubles of ``part`` of a key, which is gone,
        so that they neither last nor are over.
        """
        self._changes.keep_only([key for key in self._changes if part not in str(key)])
