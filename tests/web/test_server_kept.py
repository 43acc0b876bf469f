"""Answers that are made anew only while that costs little of the event loop's time."""

from __future__ import annotations

from vgpu_agent.web.server import KeptAnswers


class _Computing:
    """A clock that advances by what an answer costs."""

    def __init__(self, cost_seconds: float) -> None:
        self.now, self.made = 0.0, 0
        self._cost_seconds = cost_seconds

    def clock(self) -> float:
        return self.now

    def make(self) -> int:
        self.now += self._cost_seconds
        self.made += 1
        return self.made


def test_who_asks_now_and_then_gets_the_newest() -> None:
    """A scrape each 15 s, a probe each 5 s, and a reader of the page:
    none of them gets old values.
    """
    computing = _Computing(0.02)
    kept = KeptAnswers(computing.clock)
    for number in range(1, 200):
        assert kept.answer("metrics", computing.make) == number
        computing.now += 1


def test_who_asks_in_a_loop_takes_a_bounded_part_of_the_time() -> None:
    """A thousand questions a second for a minute:
    5 % of it goes into answers, and none is older than a few seconds.
    """
    computing = _Computing(0.02)
    kept = KeptAnswers(computing.clock)
    newest = 0.0
    while computing.now < 60:
        before = computing.made
        kept.answer("metrics", computing.make)
        newest = computing.now if computing.made != before else newest
        assert computing.now - newest < 5.1
        computing.now += 0.001
    assert computing.made * 0.02 < 0.05 * 60 + 0.6


def test_each_question_has_its_own_answer() -> None:
    """A probe is never answered with a page, however little may be computed."""
    computing = _Computing(10.0)
    kept = KeptAnswers(computing.clock)
    assert [kept.answer(question, computing.make) for question in ("a", "b", "c", "a")] == [
        1,
        2,
        3,
        4,
    ]
    kept = KeptAnswers(lambda: 0.0)
    assert [
        kept.answer(question, lambda question=question: question)  # type: ignore[misc]  # mypy does not infer a lambda with a default
        for question in "abab"
    ] == list("abab")
