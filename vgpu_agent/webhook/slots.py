"""Slots: a semaphore that is fair between client addresses.

A slot is the right to send the webhook a large body (`bodies`).

Any client that reaches the webhook's port can take all slots and then be silent. So a free slot
goes to the address that has the fewest. If none is free, an address that has several loses its
oldest slot to an address that has at least two fewer. A fixed limit per address would not work: all
calls may come from one API server.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# A large body of the API server arrives in much less time; no slot is taken away sooner.
UNDISTURBED_SECONDS = 0.5


class _Held(msgspec.Struct, eq=False):
    """A slot that a client has: since when (loop time), and the timeout that ends its work."""

    host: str
    since: float
    deadline: asyncio.Timeout


class _Waiting(msgspec.Struct, eq=False):
    """A client that waits for a slot, which ``got`` receives."""

    host: str
    deadline: asyncio.Timeout
    got: asyncio.Future[_Held]


class Slots:
    """A set of ``most`` slots; use `held` to have one.

    State: the holders and the waiting clients, both oldest first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: list[_Held] = []
        self._cancelled: list[_Held] = []  # taken away, but their work has not ended yet
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def held(self, host: str, deadline: asyncio.Timeout) -> AsyncIterator[None]:
        """Wait for a slot, and hold it until the context ends.

        Args:
            host: the client's address.
            deadline: the caller's timeout around this; it is moved to now when the slot is taken
                away.
        """
        waiting = _Waiting(host, deadline, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            self._distribute()
            await waiting.got
            yield
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif (held := waiting.got.result()) in self._held:
                self._held.remove(held)
            else:
                self._cancelled.remove(held)
            self._distribute()

    def _distribute(self) -> None:
        """Give free slots to waiting clients. If none is free, take one from an address that has at
        least two more than the address of a waiting client.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        while len(self._held) + len(self._cancelled) < self._most and (first := self._first()):
            self._waiting.remove(first)
            held = _Held(first.host, now, first.deadline)
            self._held.append(held)
            first.got.set_result(held)
        first = self._first()
        if first and not self._cancelled and (oldest := self._surplus(first.host)):
            if (wait := oldest.since + UNDISTURBED_SECONDS - now) > 0:
                self._timer = loop.call_later(wait, self._distribute)
            elif not oldest.deadline.expired():
                self._held.remove(oldest)
                self._cancelled.append(oldest)
                oldest.deadline.reschedule(now)

    def _first(self) -> _Waiting | None:
        """Return the waiting client whose address has the fewest slots, leaving out
        those whose `held` was cancelled: they stay in the list for a moment.
        """
        counts = collections.Counter(held.host for held in self._held)
        waiting = [one for one in self._waiting if not one.got.done()]
        return min(waiting, key=lambda one: counts[one.host], default=None)

    def _surplus(self, host: str) -> _Held | None:
        """Return the slot to take away for ``host``; None if no address has at least two more."""
        counts = collections.Counter(held.host for held in self._held)
        ((most_host, most),) = counts.most_common(1) or [(host, 0)]
        if most - counts[host] < 2:
            return None
        return next(held for held in self._held if held.host == most_host)
