"""Sets of devices with good links to each other (vgpu-manager §5.6)."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.placement.linked import (
    EXHAUSTIVE,
    GREEDY,
    MAX_SETS,
    best_set,
    components,
    quality,
    searches_seen_by,
)

DEVICES = tuple("abcdefgh")


def pairs(*linked: str, worth: int = 100) -> dict[frozenset[str], int]:
    """Scores of pairs such as ``ab``; all others are 1."""
    return {frozenset(pair): worth for pair in linked}


def test_devices_hang_together_through_others() -> None:
    """In the order in which they are given."""
    scores = pairs("ac", "ce", "bd")

    def linked(one: str, other: str) -> bool:
        return frozenset((one, other)) in scores

    assert components(DEVICES[:6], linked) == (("a", "c", "e"), ("b", "d"), ("f",))
    assert components((), linked) == ()


def test_the_best_set_has_the_most_links() -> None:
    """Not the first ones."""
    scores = pairs("bd", "bf", "df")

    def score(one: str, other: str) -> int:
        return scores.get(frozenset((one, other)), 1)

    assert best_set(DEVICES[:6], 3, score) == ("b", "d", "f")
    assert best_set(DEVICES[:6], 6, score) == DEVICES[:6]
    assert best_set(DEVICES[:6], 0, score) == ()
    assert quality(("b", "d", "f"), score) == 300


def test_what_is_chosen_already_counts() -> None:
    """The rest of a set joins those before it."""
    scores = pairs("ad")

    def score(one: str, other: str) -> int:
        return scores.get(frozenset((one, other)), 1)

    assert best_set(("b", "c", "d"), 1, score, beside=("a",)) == ("d",)


def test_of_equal_sets_the_one_that_leaves_more() -> None:
    """The next pod gets the better links of the others."""
    scores = pairs("ab", "bc", "cd")

    def score(one: str, other: str) -> int:
        return scores.get(frozenset((one, other)), 1)

    assert best_set(DEVICES[:4], 2, score) == ("a", "b")  # leaves cd; bc would leave ad


def test_equal_links_need_no_search() -> None:
    """Eight cards behind one NVSwitch are alike."""
    assert best_set(DEVICES, 3, lambda _one, _other: 900) == ("a", "b", "c")


def test_a_search_over_very_many_sets_takes_one_after_the_other() -> None:
    """Bounded work, whatever a node has."""
    many = [f"{number:02}" for number in range(32)]

    def score(one: str, other: str) -> int:
        return 100 if int(one) % 4 == int(other) % 4 else (int(one) * int(other)) % 7

    began = time.process_time()
    chosen = best_set(many, 8, score)
    assert time.process_time() - began < 1
    assert len({int(device) % 4 for device in chosen}) == 1
    assert MAX_SETS == 50_000


@given(st.integers(1, 5), st.lists(st.integers(0, 5), min_size=15, max_size=15))
def test_no_other_set_is_better(count: int, worth: list[int]) -> None:
    """The search is complete where it is said to be."""
    devices = DEVICES[:6]
    by_pair = dict(zip(map(frozenset, itertools.combinations(devices, 2)), worth, strict=True))

    def score(one: str, other: str) -> int:
        return by_pair[frozenset((one, other))]

    best = quality(best_set(devices, count, score), score)
    assert best == max(quality(each, score) for each in itertools.combinations(devices, count))


def test_searches_are_reported_and_foregone_ones_are_not() -> None:
    """vgpu-manager §5.10: each search by its algorithm, with the number of devices. Where all links
    are equal, or all devices are taken, nothing is searched.
    """
    scores = pairs("ad")

    def score(one: str, other: str) -> int:
        return scores.get(frozenset((one, other)), 1)

    seen: list[tuple[str, int]] = []
    many = [str(number) for number in range(32)]
    with searches_seen_by(lambda algorithm, devices: seen.append((algorithm, devices))):
        best_set(DEVICES[:6], 3, score)
        best_set(DEVICES[:6], 3, lambda _one, _other: 900)
        best_set(DEVICES[:6], 6, score)
        best_set(many, 8, lambda one, other: (int(one) + int(other)) % 5)
    best_set(DEVICES[:6], 3, score)
    assert seen == [(EXHAUSTIVE, 6), (GREEDY, 32)]
