"""Measure how late the event loop wakes its tasks. A late loop delays every answer of the agent.

`composition` runs this as a supervised loop, and `report` shows the figures. The measure is how
much later than planned a short sleep ends. So it covers every cause: a blocking call, a long
computation or a machine without a free processor.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERVAL_SECONDS = 0.1
_SAMPLES = 600  # of one minute


class LoopLag:
    """The delays of the event loop in the last minute."""

    def __init__(self) -> None:
        self._samples: collections.deque[float] = collections.deque(maxlen=_SAMPLES)

    @property
    def percentile_99_seconds(self) -> float:
        """The delay that 99 % of the wake-ups of the last minute did not exceed."""
        ordered = sorted(self._samples)
        return ordered[(len(ordered) * 99 - 1) // 100] if ordered else 0.0

    @property
    def max_seconds(self) -> float:
        """The longest delay of the last minute."""
        return max(self._samples, default=0.0)

    async def run(self, beat: Callable[[], None]) -> None:
        """Measure until cancelled. ``beat`` tells the supervisor that the loop runs."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_SECONDS
            await asyncio.sleep(_INTERVAL_SECONDS)
            self._samples.append(max(0.0, loop.time() - due))
            beat()
