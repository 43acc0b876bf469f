"""Something that is read for all who ask for it at the same time, because many ask at once and each reading costs.

`witness` reads kubelet's records this way. Whoever asks gets a reading that began after his question; so all who ask while one is under way
share the next.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

Read = TypeVar("Read")


class SharedReading(Generic[Read]):
    """Reads with ``read``.

    State: the last complete reading and its number, for those who asked before it began. One that was broken off counts for nobody.
    """

    def __init__(self, read: Callable[[], Awaitable[Read]]) -> None:
        self._read = read
        self._turn = asyncio.Lock()
        self._begun = 0
        self._last: tuple[int, Read] | None = None

    @property
    def last(self) -> Read | None:
        """What was read last, however long ago; None before the first time."""
        return self._last[1] if self._last else None

    async def __call__(self) -> Read:
        """What was read after this call began.

        Raises:
            Exception: whatever ``read`` raises.
        """
        wanted = self._begun + 1
        async with self._turn:
            if self._last is None or self._last[0] < wanted:
                self._begun += 1
                number = self._begun
                self._last = number, await self._read()
            return self._last[1]
