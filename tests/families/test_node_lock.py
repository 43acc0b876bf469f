"""When the lock of Volcano's schedulers is given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.families.node_lock import taken, unlocked
from vgpu_agent.nodes import NodeWishes

TAKEN = 1795192591.0
TEXT = "2026-11-20T16:36:31Z"


def test_a_lock_goes_after_the_allocate_that_it_was_taken_for() -> None:
    """volcano-vgpu:D19: an Allocate after the lock was taken releases it, and only if it still is the same one when it is removed."""
    assert unlocked(TEXT, "hamivgpu", TAKEN + 1) == NodeWishes(annotations={"hamivgpu": None}, guarded=frozenset({"hamivgpu"}))


@pytest.mark.parametrize(
    ("text", "allocated_at"),
    [(None, TAKEN), (TEXT, None), (TEXT, TAKEN - 1), ("a100", TAKEN + 1)],
    ids=["no lock", "no Allocate", "taken for a later pod", "somebody's own annotation"],
)
def test_a_lock_that_is_not_ours_to_give_back_stays(text: str | None, allocated_at: float | None) -> None:
    """volcano-vgpu:D19: a lock of a pod that is still on its way, and whatever is no lock, is not touched."""
    assert unlocked(text, "gpu", allocated_at) == NodeWishes()


@pytest.mark.parametrize("text", [TEXT, "2026-11-20T17:36:31+01:00", "2026-11-20T16:36:31.000000000Z"])
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


@given(st.one_of(st.text(max_size=40), st.from_regex(r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)\Z")))
def test_no_text_is_an_exception(text: str) -> None:
    """Whatever stands there: a time or None."""
    assert isinstance(taken(text), float | None)
