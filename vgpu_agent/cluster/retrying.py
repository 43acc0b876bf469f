"""Pauses and log messages for requests that fail because the API server is away or busy, or refuses
them.

Used by the writers, each of which has a `Backoff` for every kind of write that can fail
independently, and by `reflector`, which lists and watches objects, between its watches.
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
# HTTP statuses that the same request would get again: malformed, forbidden, not allowed, too large,
# invalid.
_PERMANENT = (400, 403, 405, 413, 422)
# A permanent failure is tried again after this many of the longest pauses, because permissions can
# be granted while the agent runs.
_PERMANENT_PAUSES = 10


def is_permanent(err: ClusterError) -> bool:
    """Tell whether the same request would be refused again, whatever the API server's health."""
    return err.status in _PERMANENT


# Rights that only a Kustomize component in manifests/ grants; all others are in rbac.yaml there.
_COMPONENTS = {
    "create pods/eviction": "components/eviction",
    "create pods": "components/reschedule",
    "delete pods": "components/reschedule",
    "create tokenreviews": "components/scrape-reviews",
    "create subjectaccessreviews": "components/scrape-reviews",
}


def granted_by(permission: str) -> str:
    """Return the path below ``manifests/`` of what grants the permission, e.g. for
    ``create pods/eviction``.
    """
    return _COMPONENTS.get(permission, "rbac.yaml")


def slow_seconds() -> float:
    """Return the pause in seconds after a permanent failure."""
    return BACKOFF_MAX_SECONDS * _PERMANENT_PAUSES


class Backoff:
    """The time at which one kind of request may be tried again.

    State: failures in a row and the end of the pause, on the event loop's clock.
    """

    def __init__(self, jitter: Callable[[float, float], float] = random.uniform) -> None:
        # returns a random factor between two numbers, by which pauses are shortened so that the
        # agents of a cluster do not retry at the same moment
        self._jitter = jitter
        self._until = 0.0
        self.failures = 0

    @property
    def seconds_left(self) -> float:
        """The time until the next try; 0 if it may be made now."""
        return max(0.0, self._until - asyncio.get_running_loop().time())

    def pause(self, err: ClusterError | None = None) -> float:
        """Count one more failed try, and return the pause after it in seconds.

        The pause doubles with each failure in a row. Its maximum is larger after a permanent
        failure, and it is never shorter than the API server demands.

        Args:
            err: the failure; None for a watch that has only ended.
        """
        # A request stays forbidden until the role changes, and each try is work for the API server.
        longest = slow_seconds() if err is not None and is_permanent(err) else BACKOFF_MAX_SECONDS
        shortest = BACKOFF_MIN_SECONDS
        pause = min(
            shortest * 2.0 ** min(self.failures, 30), max(shortest, longest)
        ) * self._jitter(0.5, 1.0)
        self.failures += 1
        return max(pause, err.retry_after_seconds if err is not None else 0.0)

    def failed(self, err: ClusterError) -> None:
        """Begin the pause after a failed write.

        After a permanent failure it is the longest pause, because the same write is sent again.
        """
        pause = self.pause(err)
        if is_permanent(err):
            pause = max(slow_seconds(), err.retry_after_seconds)
        self._until = asyncio.get_running_loop().time() + pause

    def succeeded(self) -> None:
        """Reset the pause, so that the next failure counts as the first."""
        self.failures, self._until = 0, 0.0


class FailureLog:
    """The log of a writer's failures: each failure and its end once, for any number of tries.

    Failures are told apart by a key that the writer chooses.
    """

    def __init__(self, journal: Journal, writer: str) -> None:
        self._journal = journal
        self._writer = writer  # the beginning of the names of its events in the journal
        self._changes = ChangeFilter()  # by key, of what was recorded last as being wrong

    def failed(self, key: str, err: ClusterError, permission: str, /, **facts: Any) -> None:
        """Record that the write ``key`` has failed.

        Args:
            key: the writer's name of the write.
            err: the failure.
            permission: the RBAC permission that the write needs, e.g. ``patch nodes/status``.
            facts: further fields of the log line.
        """
        if err.status == 403:
            verb, _, resource = permission.partition(" ")
            text = (
                f"the API server forbids this agent to {permission}: {err}; grant its service "
                f"account the verb {verb!r} on {resource!r} (manifests/{granted_by(permission)} "
                "has it)"
            )
            self.record(
                key,
                f"{self._writer}.forbidden",
                "forbidden",
                level="error",
                error=text,
                permission=permission,
                **facts,
            )
        elif is_permanent(err):
            self.record(
                key,
                f"{self._writer}.refused",
                str(err),
                level="error",
                error=str(err),
                status=err.status,
                **facts,
            )
        else:
            self.record(
                key,
                f"{self._writer}.failed",
                "away",
                level="warning",
                error=str(err),
                status=err.status,
                **facts,
            )

    def record(self, key: str, event: str, trouble: str, /, *, level: str, **facts: Any) -> None:
        """Record ``event``, unless ``trouble`` is what was last recorded about ``key``.

        ``trouble`` says what is wrong. It is only compared: a failure whose text is the same, or
        for which the caller always passes one word, is recorded once.
        """
        if self._changes.is_new(key, trouble):
            self._journal.record(event, level=level, **facts)

    def recovered(self, key: str) -> None:
        """Record once that the writes of ``key`` work again."""
        if self._changes.forget(key):
            self._journal.record(f"{self._writer}.recovered", key=key)

    def forget(self, part: str) -> None:
        """Forget the failures of all keys that contain ``part``, e.g. the UID of a deleted pod.

        Their recovery is not recorded.
        """
        self._changes.keep_only([key for key in self._changes if part not in str(key)])
