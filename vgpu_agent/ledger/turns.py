"""Which family a GPU is offered to first when its last share was returned; the others follow a moment later.

Families have schedulers that know nothing of each other. Shown the same free GPU at the same moment, each would send a pod, and kubelet
fails those that come too late. So one family is told a moment before the others. The families take turns, whether they use them or not,
so that none is first for ever and none waits for one that has no pods: with n families each is first at least once in n returns.

`book` holds one of these and tells it of every change. A node with one family has no turns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TURN_SECONDS = 0.25
"""Longer than a scheduler needs from a changed Node to a bound pod, and short beside the start of a container."""


class Turns:
    """State: which GPUs are in use and by whom, whose turn each free one is, and when each family was first for the last time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_use: Mapping[str, str] = {}
        self._first: dict[str, tuple[str, float]] = {}  # GPU → the family, and the clock's time at which the others follow
        self._was_first: dict[str, float] = {}

    def follow(self, in_use: Mapping[str, str], candidates: Callable[[str], Sequence[str]]) -> None:
        """Take note of which GPUs are in use now, and give those that were returned to one family first.

        Args:
            in_use: GPU → the family that has it or claims it.
            candidates: GPU → the families that could give out something of it now.
        """
        for gpu in self._first.keys() & in_use.keys():
            del self._first[gpu]
        for gpu in sorted(self._in_use.keys() - in_use.keys()):
            families = candidates(gpu)
            if len(families) < 2:
                continue
            before, now = self._in_use[gpu], self._clock()
            first = min(families, key=lambda family: (self._was_first.get(family, -math.inf), family == before))
            self._was_first[first] = now
            self._first[gpu] = first, now + TURN_SECONDS
        self._in_use = in_use

    def first(self, gpu: str) -> str:
        """The family that alone is offered ``gpu`` at this moment; empty when all are."""
        family, until = self._first.get(gpu, ("", 0.0))
        return family if self._clock() < until else ""

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next turn is over, 0 for one that is; None when there is none."""
        if not self._first:
            return None
        return max(0.0, min(until for _, until in self._first.values()) - self._clock())

    def end(self) -> bool:
        """Forget the turns that are over; whether there were any."""
        now = self._clock()
        over = [gpu for gpu, (_, until) in self._first.items() if until <= now]
        for gpu in over:
            del self._first[gpu]
        return bool(over)
