"""The turns of families at a GPU whose last share was returned:
one after the other, each alone, and then all.

Families have schedulers that know nothing of each other. Shown the same free GPU at the same
moment, each would send a pod, and the kubelet fails those that come too late. So a returned GPU
goes through a *round*: it is offered to one family after the other, to each alone for one turn. In
the pause between two turns, of `WITHDRAWAL_SECONDS` or more, it is offered to none, until
schedulers have seen that the turn is over and the pods that they have bound by then are known. The
family that had the GPU comes last. The others are ordered by the time at which each last came
first, the longest ago in front. A family whose pods cannot start now has no turn.

`arbitration` holds one `Turns` and reports every change to it. A node with one family has no turns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.ledger.withdrawals import WITHDRAWAL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TURN_SECONDS = 1.0
"""Longer than most schedulers need from a changed Node to a bound pod,
and short compared with the start of a container.
"""

_TURN_AND_PAUSE_SECONDS = TURN_SECONDS + WITHDRAWAL_SECONDS


def round_seconds(families: int) -> float:
    """Return the time from a GPU's return until it is offered to all of that many families."""
    return families * _TURN_AND_PAUSE_SECONDS - WITHDRAWAL_SECONDS


class _Round(msgspec.Struct):
    """The turns of one GPU.

    Attributes:
        families: the families that have turns, in order.
        until: the clock's time at which the turn or the pause after it ends.
        turn: the place of the family whose turn it is, or was before the pause.
        pausing: the turn is over, and the next has not begun.
    """

    families: list[str]
    until: float
    turn: int = 0
    pausing: bool = False

    @property
    def left_after(self) -> float:
        """The seconds of the round after `until`, if no pause takes longer than planned."""
        later_turns = len(self.families) - 1 - self.turn
        seconds = later_turns * _TURN_AND_PAUSE_SECONDS
        return max(0.0, seconds - WITHDRAWAL_SECONDS if self.pausing else seconds)


class Turns:
    """The rounds of all GPUs.

    State: the GPUs in use, by UUID, with their families, the round of each that was returned, and
    when each family last was the first of a round. Turns begin and end in `move_on` only. So a turn
    that ends late does not shorten the pause that schedulers need.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        withdrawn_for_seconds: Callable[[str], float] = lambda _gpu: 0.0,
    ) -> None:
        """Begin without rounds.

        Args:
            clock: returns the seconds of a monotonic clock.
            withdrawn_for_seconds: UUID of a GPU → how long the kubelet may still give it to a
                family that is not offered it any more; the next turn does not begin before that.
        """
        self._clock, self._withdrawn_for_seconds = clock, withdrawn_for_seconds
        self._in_use: Mapping[str, str] = {}
        self._rounds: dict[str, _Round] = {}
        self._was_first: dict[str, float] = {}

    def follow(self, in_use: Mapping[str, str], candidates: Callable[[str], Sequence[str]]) -> None:
        """Take note of which GPUs are in use now, and begin a round of those that were returned.

        Args:
            in_use: UUID of a GPU → the family that has it or claims it.
            candidates: UUID of a GPU → the families that could grant something of it now.
        """
        now = self._clock()
        for gpu in self._rounds.keys() & in_use.keys():
            del self._rounds[gpu]
        for gpu, round_ in list(self._rounds.items()):
            self._leave_out(gpu, round_, candidates(gpu), now)
        for gpu in sorted(self._in_use.keys() - in_use.keys()):
            families, before = candidates(gpu), self._in_use[gpu]
            if len(families) < 2:
                continue
            order = sorted(
                families,
                key=lambda family: (family == before, self._was_first.get(family, -math.inf)),
            )
            self._was_first[order[0]] = now
            self._rounds[gpu] = _Round(order, now + TURN_SECONDS)
        self._in_use = in_use

    def _leave_out(self, gpu: str, round_: _Round, able: Sequence[str], now: float) -> None:
        """Give the turns of the families that can grant nothing (any more) to those after them, so
        that no turn is wasted. ``able`` are the families that can.
        """
        gone = round_.turn + round_.pausing  # how many turns are over
        past, coming = round_.families[:gone], round_.families[gone:]
        if all(family in able for family in coming):
            return
        if not round_.pausing and coming[0] not in able:
            past, round_.turn, round_.until = [], 0, now + TURN_SECONDS
        coming = [family for family in coming if family in able]
        round_.families = past + coming
        if not coming or len(round_.families) < 2:
            del self._rounds[gpu]

    def why_waits(self, gpu: str, family: str) -> str:
        """Explain why ``family`` is not offered ``gpu`` at this moment; empty when it is."""
        known = self._rounds.get(gpu)
        if known is None:
            return ""
        if known.pausing:
            return (
                "the GPU was returned a moment ago, and is about to be offered to one family "
                "before the others"
            )
        first = known.families[known.turn]
        return (
            ""
            if first == family
            else f"the GPU was returned a moment ago, and {first} is offered it before the others"
        )

    def is_first(self, gpu: str, family: str) -> bool:
        """Tell whether ``family`` alone is offered ``gpu`` now."""
        return gpu in self._rounds and not self.why_waits(gpu, family)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next turn begins or ends, 0 if that is due; None without a round."""
        return min(
            (self._seconds_left(gpu, each) for gpu, each in self._rounds.items()), default=None
        )

    def _seconds_left(self, gpu: str, each: _Round) -> float:
        left = max(0.0, each.until - self._clock())
        return max(left, self._withdrawn_for_seconds(gpu)) if each.pausing else left

    @property
    def over_in_seconds(self) -> float | None:
        """Seconds until all GPUs returned so far are offered to all; None when they are."""
        return max(
            (self._seconds_left(gpu, each) + each.left_after for gpu, each in self._rounds.items()),
            default=None,
        )

    def move_on(self) -> bool:
        """Begin and end the turns whose time has come, one step of each GPU's round;
        tell whether there were any.
        """
        now, moved = self._clock(), False
        for gpu, each in list(self._rounds.items()):
            if self._seconds_left(gpu, each) > 0.0:
                continue
            moved = True
            if each.pausing:
                each.turn, each.pausing, each.until = each.turn + 1, False, now + TURN_SECONDS
            elif each.turn + 1 < len(each.families):
                each.pausing, each.until = True, now + WITHDRAWAL_SECONDS
            else:
                del self._rounds[gpu]
        return moved
