"""Quoting foreign values in messages."""

from __future__ import annotations

from vgpu_agent.errors import MAX_QUOTED, quoted


def test_a_short_value_is_quoted_whole_and_on_one_line() -> None:
    """A line break in a tenant's annotation must not begin a new line of the log."""
    assert quoted("a\nb") == r"'a\nb'"


def test_a_long_value_is_cut_and_its_length_given() -> None:
    """A pod may carry an annotation of 256 KiB, and each refusal quotes it."""
    text = quoted("x" * 255_000)
    assert len(text) < MAX_QUOTED + 50
    assert text.endswith("… (255000 characters)")
