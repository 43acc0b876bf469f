"""Views made of what they show."""

from __future__ import annotations

import msgspec
import pytest

from vgpu_agent.web.shapes import When, shown, view

NOW = 1_800_000_000.0


class Loop(msgspec.Struct):
    """A status as the parts keep it."""

    name: str
    started_at: float
    failing_since: float = 0.0
    secret: str = "kept inside"

    @property
    def late(self) -> bool:
        """Return what is computed."""
        return True


class LoopView(msgspec.Struct):
    """The part of it that is shown."""

    name: str
    late: bool
    started: When = When()
    failing: When = When()
    rounds: int = 0


STARTED = When("2027-01-15T07:59:50.000Z", 10.0)


def test_a_view_takes_its_fields_and_no_others() -> None:
    """By name, properties as well; a moment that never was is null."""
    assert view(LoopView, Loop("a", NOW - 10), NOW, rounds=3) == LoopView(
        "a", late=True, started=STARTED, rounds=3
    )


def test_what_is_given_goes_before_what_is_found() -> None:
    """Some fields are more than a copy."""
    assert view(LoopView, Loop("a", NOW), NOW, name="b", rounds=0).name == "b"


def test_a_field_of_nothing_is_a_mistake() -> None:
    """A default would look like a value."""
    with pytest.raises(AttributeError, match="rounds"):
        view(LoopView, Loop("a", NOW), NOW)


def test_a_whole_status_is_shown_with_its_moments() -> None:
    """Without the endings of our names."""
    assert shown(Loop("a", NOW - 10), NOW) == {
        "name": "a",
        "started": STARTED,
        "failing": When(),
        "secret": "kept inside",
    }
