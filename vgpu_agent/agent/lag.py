"""The delay of the event loop: everything this agent promises rests on it being in time.

Run by `composition` as a supervised loop; `report` shows the figures. The measure is the delay of a
short sleep, so it counts whatever held the loop: a blocking call, a long computation, or a machine
without a free processor.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERVAL_SECONDS = 0.1
_SAMPLES = 600  # one minute


class LoopLag:
    """The lateness of the last minute."""

    def __init__(self) -> None:
        self._samples: collections.deque[float] = collections.deque(maxlen=_SAMPLES)

    @property
    def percentile_99_seconds(self) -> float:
        """99 of 100 wake-ups of the last minute were at most this late."""
        ordered = sorted(self._samples)
        return ordered[(len(ordered) * 99 - 1) // 100] if ordered else 0.0

    @property
    def max_seconds(self) -> float:
        """The latest wake-up of the last minute."""
        return max(self._samples, default=0.0)

    async def run(self, beat: Callable[[], None]) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_SECONDS
            await asyncio.sleep(_INTERVAL_SECONDS)
            self._samples.append(max(0.0, loop.time() - due))
            beat()
