"""The packed ids of cores and memory (vgpu-manager §2.2)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.families.vgpu_manager.ids import CARDS, PackedIds


@pytest.mark.parametrize(
    ("card", "number", "text"),
    [
        (0, 0, "AA"),
        (1, 0, "AQ"),
        (0, 1, "gAI"),
        (1, 1, "gQI"),
        (0, 99, "gMYB"),
        (1, 99, "gcYB"),
        (0, 24575, "gP7_Ag"),
        (1, 24575, "gf7_Ag"),
    ],
)
def test_ids_are_those_of_the_contract(card: int, number: int, text: str) -> None:
    """``vgpu-manager:§13.2``: the kubelet's checkpoint may hold them for running pods."""
    assert PackedIds(card).text(number) == text
    assert PackedIds(card).number(text) == number
    assert PackedIds(card + 1).number(text) is None


@given(st.integers(0, CARDS - 1), st.integers(0, 1 << 40))
def test_each_number_has_one_text(card: int, number: int) -> None:
    """And a greater number has none that is shorter, which lists rely on."""
    codec = PackedIds(card)
    assert codec.number(codec.text(number)) == number
    assert len(codec.text(number)) <= len(codec.text(number + 1))


@given(st.integers(0, CARDS - 1), st.text(max_size=20))
def test_any_other_text_is_no_number_or_the_one_of_its_text(card: int, text: str) -> None:
    """The kubelet's records may hold anything: nothing raises, and no id has two texts."""
    number = PackedIds(card).number(text)
    assert number is None or PackedIds(card).text(number) == text


@pytest.mark.parametrize(
    "text",
    ["", "A", "AB", "AA==", "gAA", "AAA", "ä", "A" * 10**6, "/w", "+w", "A A", "AA\n", "\0"],
)
def test_texts_in_another_form_stand_for_no_number(text: str) -> None:
    """Another form of a number would be a second id for one unit, and a long one costs nothing."""
    began = time.perf_counter()
    assert PackedIds(0).number(text) is None
    assert time.perf_counter() - began < 1


def test_codecs_of_one_card_are_equal() -> None:
    """Lists are compared by them: an unchanged offer is no new message to the kubelet."""
    assert PackedIds(3) == PackedIds(3)
    assert PackedIds(3) != PackedIds(4)
