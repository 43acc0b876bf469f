"""Quantities as the API server writes them, and the list of conditions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.cluster.node_difference import DesiredEntry, Section, same_quantity, with_conditions


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("8", "8", True),
        ("1000", "1k", True),
        ("81920", "80Ki", True),
        ("1", "1000m", True),
        ("1.5k", "1500", True),
        ("8", "9", False),
        ("", "8", False),
        ("many", "8", False),
        ("many", "plenty", False),
        ("1e3", "1000", True),
    ],
)
def test_quantities_are_compared_as_numbers(one: str, other: str, same: bool) -> None:
    """The API server writes 1000 as 1k. That is not a difference to be written again for ever."""
    assert same_quantity(one, other) is same


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_text_makes_the_comparison_fail(one: str, other: str) -> None:
    """Any client may have written the text on the Node."""
    assert same_quantity(one, other) == same_quantity(other, one)


def test_conditions_that_stand_need_no_write() -> None:
    """Times alone are no reason for one."""
    standing = [
        {
            "type": "GpuReady",
            "status": "True",
            "reason": "Ok",
            "message": "",
            "lastHeartbeatTime": "2026-01-01T00:00:00Z",
        }
    ]
    assert (
        with_conditions(
            standing,
            [DesiredEntry(Section.CONDITIONS, "GpuReady", None, ("True", "Ok", ""))],
            1000.0,
        )
        is None
    )


def test_the_list_that_was_read_is_not_changed() -> None:
    """A conflict reads it anew, but a holder of the old one must not see half a change."""
    standing = [{"type": "GpuReady", "status": "True"}]
    complete = with_conditions(
        standing,
        [DesiredEntry(Section.CONDITIONS, "GpuReady", None, ("False", "Lost", "GPU 1 is lost"))],
        1000.0,
    )
    assert standing == [{"type": "GpuReady", "status": "True"}]
    assert complete is not None
    assert complete[0]["lastTransitionTime"] == "1970-01-01T00:16:40Z"
