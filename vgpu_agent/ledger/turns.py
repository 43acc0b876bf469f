"""The turns of families at a GPU whose last share was returned:
one after the other, each alone, and then all.

Families have schedulers that know nothing of each other. Shown the same free GPU at the same
moment, each would send a pod, and the kubelet fails those that come too late. So the GPU has a
round: each family is offered it alone for a turn. Between two turns it is offered to none, until
schedulers have seen that the turn is over and the pods that they have bound by then are known. The
family that had the GPU last comes last, and the others in the order in which they were first
before. A family that is not served at the moment has no turn.

`book` holds one of these and reports every change to it. A node with one family has no turns.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from vgpu_agent.ledger.withdrawals import WITHDRAWAL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TURN_SECONDS = 1.0
"""Longer than most schedulers need from a changed Node to a bound pod,
and short beside the start of a container.
"""

_SLOT_SECONDS = TURN_SECONDS + WITHDRAWAL_SECONDS


def round_seconds(families: int) -> float:
    """Return how long after its return a GPU is offered to all of so many families."""
    return families * _SLOT_SECONDS - WITHDRAWAL_SECONDS


@dataclasses.dataclass(slots=True)
class _Round:
    """The turns of one GPU.

    Attributes:
        families: the families that have turns, in order.
        began: the clock's time at which the first turn began.
        seen: the step of the round at the last look.
    """

    families: list[str]
    began: float
    seen: int = 0

    def step(self, now: float) -> int:
        """Twice the number of turns that are over, and one more between two turns."""
        turns, seconds = divmod(now - self.began, _SLOT_SECONDS)
        return 2 * int(turns) + (seconds >= TURN_SECONDS)

    def is_over(self, now: float) -> bool:
        """Tell whether all have had their turn."""
        return self.step(now) >= 2 * len(self.families) - 1

    def next_step_at(self, now: float) -> float:
        """The time at which the step ends that was seen last."""
        turns, between = divmod(self.seen, 2)
        return min(
            self.began + turns * _SLOT_SECONDS + (_SLOT_SECONDS if between else TURN_SECONDS),
            now + _SLOT_SECONDS,
        )


class Turns:
    """The rounds of all GPUs.

    State: the GPUs in use with their families, the round of each that was returned, and when each
    family was first for the last time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_use: Mapping[str, str] = {}
        self._rounds: dict[str, _Round] = {}
        self._was_first: dict[str, float] = {}

    def follow(self, in_use: Mapping[str, str], candidates: Callable[[str], Sequence[str]]) -> None:
        """Take note of which GPUs are in use now, and begin a round of those that were returned.

        Args:
            in_use: GPU → the family that has it or claims it.
            candidates: GPU → the families that could give out something of it now.
        """
        now = self._clock()
        for gpu in self._rounds.keys() & in_use.keys():
            del self._rounds[gpu]
        for gpu, waiting in list(self._rounds.items()):
            self._leave_out(gpu, waiting, candidates(gpu), now)
        for gpu in sorted(self._in_use.keys() - in_use.keys()):
            families, before = candidates(gpu), self._in_use[gpu]
            if len(families) < 2:
                continue
            order = sorted(
                families,
                key=lambda family: (family == before, self._was_first.get(family, -math.inf)),
            )
            self._was_first[order[0]] = now
            self._rounds[gpu] = _Round(order, now)
        self._in_use = in_use

    def _leave_out(self, gpu: str, waiting: _Round, able: Sequence[str], now: float) -> None:
        """Give the turns of families that can give out nothing (any more) to those after them;
        so none is lost.
        """
        gone = min(waiting.step(now) // 2, len(waiting.families))
        past, coming = waiting.families[:gone], waiting.families[gone:]
        if all(family in able for family in coming):
            return
        if coming and coming[0] not in able:
            past, waiting.began, waiting.seen = [], now, 0
        waiting.families = past + [family for family in coming if family in able]
        if len(waiting.families) < 2 and not past:
            del self._rounds[gpu]

    def why_waits(self, gpu: str, family: str) -> str:
        """Explain why ``family`` is not offered ``gpu`` at this moment; empty when it is."""
        known, now = self._rounds.get(gpu), self._clock()
        if known is None or known.is_over(now):
            return ""
        turn, between = divmod(known.step(now), 2)
        if between:
            return (
                "the GPU was returned a moment ago, and is about to be offered to one family "
                "before the others"
            )
        first = known.families[turn]
        return (
            ""
            if first == family
            else f"the GPU was returned a moment ago, and {first} is offered it before the others"
        )

    def is_first(self, gpu: str, family: str) -> bool:
        """Tell whether ``family`` alone is offered ``gpu`` now."""
        known, now = self._rounds.get(gpu), self._clock()
        return known is not None and not known.is_over(now) and not self.why_waits(gpu, family)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next turn begins or ends, 0 where one has; None when there is none."""
        if not self._rounds:
            return None
        now = self._clock()
        return max(0.0, min(each.next_step_at(now) for each in self._rounds.values()) - now)

    @property
    def over_in_seconds(self) -> float | None:
        """Seconds until all that was returned by now is offered to all; None when it is."""
        if not self._rounds:
            return None
        return max(
            0.0,
            max(each.began + round_seconds(len(each.families)) for each in self._rounds.values())
            - self._clock(),
        )

    def move_on(self) -> bool:
        """Take note of the turns that have begun or ended, and forget rounds that are over;
        whether there were any.
        """
        now, moved = self._clock(), False
        for gpu, each in list(self._rounds.items()):
            step = each.step(now)
            moved = moved or step != each.seen
            each.seen = step
            if each.is_over(now):
                del self._rounds[gpu]
        return moved
