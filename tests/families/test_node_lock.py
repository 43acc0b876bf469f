"""The release of the lock of Volcano's schedulers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.families.node_lock import LONGEST_HELD_SECONDS, NodeLocks, taken
from vgpu_agent.nodes import DesiredNode, Node

TAKEN = 1795192591.0
TEXT = "2026-11-20T16:36:31Z"
LOCK = "hamivgpu"
GONE = DesiredNode(annotations={LOCK: None}, guarded=frozenset({LOCK}))


def _node(text: str | None = TEXT, *, seen_at: float | None = None) -> Node:
    annotations = {} if text is None else {LOCK: text}
    return Node(
        "node-a",
        annotations=annotations,
        seen_at={} if text is None or seen_at is None else {LOCK: seen_at},
    )


def test_a_lock_goes_after_the_allocate_that_it_was_taken_for() -> None:
    """volcano-vgpu:D19: an Allocate after the lock was seen releases it, and only if it still is
    the same one when it is removed.
    """
    locks = NodeLocks()
    assert (
        locks.desired_state(
            _node(seen_at=TAKEN + 0.1), LOCK, allocated_at=TAKEN - 60, now=TAKEN + 0.1
        )
        == DesiredNode()
    )
    assert (
        locks.desired_state(
            _node(seen_at=TAKEN + 0.1), LOCK, allocated_at=TAKEN + 0.4, now=TAKEN + 0.4
        )
        == GONE
    )


@pytest.mark.parametrize(
    "text", [None, "a100", "gpu"], ids=["no lock", "somebody's own annotation", "a word"]
)
def test_what_is_no_lock_stays(text: str | None) -> None:
    """volcano-vgpu:D19: the keys are bare words that others may use."""
    assert (
        NodeLocks().desired_state(
            _node(text, seen_at=TAKEN), LOCK, allocated_at=TAKEN + 1, now=TAKEN + 600
        )
        == DesiredNode()
    )


def test_the_next_lock_of_the_same_second_waits_for_its_own_pod() -> None:
    """Two locks within a second have the same text:
    the second one's pod has not been admitted when the watch shows it.
    """
    locks = NodeLocks()
    assert (
        locks.desired_state(
            _node(seen_at=TAKEN + 0.1), LOCK, allocated_at=TAKEN + 0.2, now=TAKEN + 0.2
        )
        == GONE
    )
    assert (
        locks.desired_state(_node(None), LOCK, allocated_at=TAKEN + 0.2, now=TAKEN + 0.3)
        == DesiredNode()
    )
    second = _node(seen_at=TAKEN + 0.4)
    assert (
        locks.desired_state(second, LOCK, allocated_at=TAKEN + 0.2, now=TAKEN + 0.4)
        == DesiredNode()
    )
    assert locks.desired_state(second, LOCK, allocated_at=TAKEN + 0.5, now=TAKEN + 0.5) == GONE


def test_the_next_lock_is_told_apart_when_nobody_looked_in_between() -> None:
    """The publisher looks ten times a second.
    The scheduler may release and take within that time.
    """
    locks = NodeLocks()
    assert (
        locks.desired_state(
            _node(seen_at=TAKEN + 0.1), LOCK, allocated_at=TAKEN + 0.2, now=TAKEN + 0.2
        )
        == GONE
    )
    assert (
        locks.desired_state(
            _node(seen_at=TAKEN + 0.25), LOCK, allocated_at=TAKEN + 0.2, now=TAKEN + 0.3
        )
        == DesiredNode()
    )


def test_a_lock_that_the_watch_shows_late_goes_at_once() -> None:
    """The Allocate came first, because the watch was behind:
    no lock stood then, so this one was taken for it.
    """
    locks = NodeLocks()
    locks.desired_state(_node(None), LOCK, allocated_at=TAKEN - 5, now=TAKEN)
    assert (
        locks.desired_state(
            _node(seen_at=TAKEN + 0.5), LOCK, allocated_at=TAKEN + 0.4, now=TAKEN + 0.5
        )
        == GONE
    )


def test_a_scheduler_whose_clock_is_ahead_gets_its_lock_back() -> None:
    """An hour ahead: its text says nothing, the order of what was seen does."""
    assert (
        NodeLocks().desired_state(
            _node(seen_at=TAKEN - 3600), LOCK, allocated_at=TAKEN - 3599, now=TAKEN - 3599
        )
        == GONE
    )


def test_the_lock_of_a_pod_that_never_comes_is_given_back() -> None:
    """The kubelet refused it before any Allocate, or it was deleted: other pods need not wait for
    the five minutes of the scheduler.
    """
    locks, node = NodeLocks(), _node(seen_at=TAKEN)
    assert (
        locks.desired_state(node, LOCK, allocated_at=None, now=TAKEN + LONGEST_HELD_SECONDS - 0.1)
        == DesiredNode()
    )
    assert (
        locks.desired_state(node, LOCK, allocated_at=None, now=TAKEN + LONGEST_HELD_SECONDS) == GONE
    )


def test_a_lock_that_somebody_restores_is_removed_no_more_often_than_a_lost_one() -> None:
    """A controller that writes its copy of the Node back:
    one removal for each Allocate, and then one in ten seconds.
    """
    locks, removals, seen_at = NodeLocks(), 0, TAKEN
    for tenths in range(600):
        now = TAKEN + tenths / 10
        standing = now >= seen_at
        if (
            locks.desired_state(
                _node(seen_at=seen_at) if standing else _node(None),
                LOCK,
                allocated_at=TAKEN,
                now=now,
            )
            == GONE
        ):
            removals, seen_at = removals + 1, now + 0.5
    assert 2 <= removals <= 7


@pytest.mark.parametrize(
    "text", [TEXT, "2026-11-20T17:36:31+01:00", "2026-11-20T16:36:31.000000000Z"]
)
def test_every_form_of_the_time_is_read(text: str) -> None:
    """RFC 3339 with any offset and with fractions of a second."""
    assert taken(text) == TAKEN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpu",
        "2026-11-20",
        "2026-11-20T16:36:31",
        "2026-02-31T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "2026-11-20T16:36:31Z\n",
        "9" * 10_000,
    ],
)
def test_what_is_no_time_is_nothing(text: str) -> None:
    """Malformed and huge values are no lock, and no exception."""
    assert taken(text) is None


@given(
    st.one_of(
        st.text(max_size=40),
        st.from_regex(r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)\Z"),
    )
)
def test_no_text_is_an_exception(text: str) -> None:
    """The result of any text is a time or None."""
    assert isinstance(taken(text), float | None)
