"""The list of GPUs that no container gets (vgpu-manager §1.2, §1.6)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.families.vgpu_manager.exclusion import PATTERN, Excluded, read_excluded

UUID = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28"


@pytest.mark.parametrize("word", ["0-2", "0..2"])
def test_a_range_is_a_range_in_either_spelling(word: str) -> None:
    """vgpu-manager:D1: the spelling of the plugin's own help text excluded nothing there, so that
    GPUs were given out which the operator had taken away.
    """
    assert read_excluded([word]) == Excluded(indices=frozenset({0, 1, 2}))


def test_indices_ranges_and_uuids_may_be_mixed() -> None:
    """Together they are one list."""
    assert read_excluded(["7", "0-0", UUID]) == Excluded(frozenset({UUID}), frozenset({0, 7}), ())


def test_a_range_without_a_member_is_named() -> None:
    """Nothing would be excluded, silently."""
    assert read_excluded(["7..4"]).problems == (
        "7..4: expected the smaller index first, as in 4-7",
    )


def test_a_mig_instance_is_named() -> None:
    """It would be given out all the same, silently."""
    word = UUID.replace("GPU", "MIG")
    sentence = (
        f"{word}: a single MIG instance cannot be excluded; give its GPU (GPU-…), which excludes "
        "all instances of it, or leave it out"
    )
    assert read_excluded([word]) == Excluded(problems=(sentence,))


@pytest.mark.parametrize(
    "word", ["", "-1", "0-", "..2", "0...2", "0-2-4", "1.5", "GPU-1", "GPU-*", "a", "99999", "²"]
)
def test_what_is_none_of_them_is_refused(word: str) -> None:
    """By the settings and by the node configuration, which both go by the pattern."""
    assert not re.match(PATTERN, word)


@given(st.lists(st.from_regex(PATTERN), max_size=4))
def test_everything_that_the_pattern_takes_can_be_read(words: list[str]) -> None:
    """With bounded memory: an index has four digits at most."""
    excluded = read_excluded(words)
    assert len(excluded.indices) <= 40_000
