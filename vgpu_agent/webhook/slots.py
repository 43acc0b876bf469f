"""Places that few clients can have at a time, shared fairly by client address.

Any client that reaches the port can ask for all places and then be silent. So a free place goes to
the address that has the fewest, and where none is free, an address that has several loses its
oldest to one that has fewer. A limit per address would not do: all calls may come from the one
API server.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# A large body of the API server arrives in much less; until then nobody else takes its place.
UNDISTURBED_SECONDS = 0.5


class _Held(msgspec.Struct, eq=False):
    host: str
    since: float
    limit: asyncio.Timeout


class _Waiting(msgspec.Struct, eq=False):
    host: str
    limit: asyncio.Timeout
    got: asyncio.Future[_Held]


class Slots:
    """``most`` places; `held` gives one.

    State: who has one and who waits, both oldest first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: list[_Held] = []
        self._losing: list[_Held] = []  # told to go, and not gone yet
        self._waiting: list[_Waiting] = []
        self._looking: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def held(self, host: str, limit: asyncio.Timeout) -> AsyncIterator[None]:
        """Wait for a place and have it.

        Args:
            host: the client's address.
            limit: the caller's time limit around this; it ends early where the place is lost.
        """
        waiting = _Waiting(host, limit, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            self._share_out()
            await waiting.got
            yield
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif (held := waiting.got.result()) in self._held:
                self._held.remove(held)
            else:
                self._losing.remove(held)
            self._share_out()

    def _share_out(self) -> None:
        """Give free places to those who wait, and take some for them."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        while len(self._held) + len(self._losing) < self._most and (first := self._first()):
            self._waiting.remove(first)
            held = _Held(first.host, now, first.limit)
            self._held.append(held)
            first.got.set_result(held)
        first = self._first()
        if first and not self._losing and (oldest := self._surplus(first.host)):
            if (wait := oldest.since + UNDISTURBED_SECONDS - now) > 0:
                self._looking = loop.call_later(wait, self._share_out)
            elif not oldest.limit.expired():
                self._held.remove(oldest)
                self._losing.append(oldest)
                oldest.limit.reschedule(now)

    def _first(self) -> _Waiting | None:
        """Return whose turn it is. Whoever is cancelled still waits for a moment."""
        counts = collections.Counter(held.host for held in self._held)
        waiting = [one for one in self._waiting if not one.got.done()]
        return min(waiting, key=lambda one: counts[one.host], default=None)

    def _surplus(self, host: str) -> _Held | None:
        """Return the place that is taken for ``host``; None where it has its share."""
        counts = collections.Counter(held.host for held in self._held)
        ((most_host, most),) = counts.most_common(1) or [(host, 0)]
        if most - counts[host] < 2:
            return None
        return next(held for held in self._held if held.host == most_host)
