"""Answers for any client on the network, made at a bounded cost.

Any pod can ask for ``/metrics`` in a loop. An answer is made anew while that takes no more than a small part of the
event loop's time. Clients that ask more often get the last answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Answer = TypeVar("Answer")

_PART_OF_TIME = 0.05
_SPARE_SECONDS = 0.5  # of computing at once: dozens of answers
_KEPT_SECONDS = 5.0
_MOST_KEPT = 16


class KeptAnswers:
    """The last answers by question.

    State: the last answer to each question, for a few seconds; the computing time that may be spent.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last: dict[Hashable, tuple[float, Any]] = {}
        self._spare, self._counted_at = _SPARE_SECONDS, clock()

    def answer(self, question: Hashable, make: Callable[[], Answer]) -> Answer:
        """Return what ``make`` returns, or returned a moment ago; ``question`` names it."""
        began = self._clock()
        self._spare = min(_SPARE_SECONDS, self._spare + (began - self._counted_at) * _PART_OF_TIME)
        self._counted_at = began
        made_at, last = self._last.get(question, (float("-inf"), None))
        if self._spare <= 0 and began - made_at < _KEPT_SECONDS:
            return last  # type: ignore[no-any-return]  # what is kept under a question is what its `make` returned
        made = make()
        self._spare -= self._clock() - began
        if question not in self._last and len(self._last) >= _MOST_KEPT:
            self._last.clear()
        self._last[question] = (began, made)
        return made
