"""The limits in a ``vgpu.config``, read back (vgpu-manager §7.7)."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.isolation.hami_usage import Unreadable
from vgpu_agent.isolation.vgpu_config import (
    MAX_CARDS,
    SIZE,
    Owner,
    ReadConfig,
    SlotLimit,
    config_parts,
    is_looser,
    read_config,
)

OWNER = Owner("uid", "pod", "ns", "main", "", 200, sm_watcher=True, tracks_virtual_memory=False)
HEAD = struct.pack("<4I", 0x56474346, 1, 2560, 16)

LIMITS = st.dictionaries(
    st.integers(0, MAX_CARDS - 1),
    st.builds(
        SlotLimit,
        st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=40),
        st.integers(0, 1 << 50),
        st.integers(0, 1 << 50),
        st.integers(0, 1000),
        st.integers(0, 1000),
        *[st.booleans()] * 4,
    ),
)


def read(content: bytes) -> ReadConfig | Unreadable:
    """The limits in a file with this content."""
    return read_config(len(content), lambda offset, length: content[offset : offset + length])


def written(limits: dict[int, SlotLimit]) -> bytes:
    """A whole file."""
    whole = bytearray(SIZE)
    for offset, part in config_parts(OWNER, limits):
        whole[offset : offset + len(part)] = part
    return bytes(whole)


@given(LIMITS)
def test_what_was_written_is_read(limits: dict[int, SlotLimit]) -> None:
    """Every field of every card, and whose file it is."""
    found = read(written(limits))
    assert found == ReadConfig("uid", "main", 200, limits)
    assert not is_looser(limits, limits)


@given(st.binary(max_size=SIZE), st.booleans())
def test_whatever_a_file_contains_the_answer_is_a_reading_or_a_reason(
    content: bytes,
    whole: bool,
) -> None:
    """A privileged container may have written it."""
    read(content)
    if whole:
        assert isinstance(read((HEAD + content).ljust(SIZE, b"\0")[:SIZE]), ReadConfig)


def test_a_file_that_becomes_shorter_while_it_is_read_is_no_reading() -> None:
    """Its size was asked for before."""
    assert read_config(SIZE, lambda _offset, _length: HEAD) == Unreadable(
        "it became shorter while it was read"
    )


@pytest.mark.parametrize("more", [True, False])
def test_another_set_of_cards_is_looser(more: bool) -> None:
    """A card that has come was never given out; one that has gone is no longer limited."""
    one = SlotLimit("GPU-a", 1, 1, 1, 1, True, True, True, False)
    both = {0: one, 1: msgspec.structs.replace(one, uuid="GPU-b")}
    assert is_looser(both, {0: one}) if more else is_looser({0: one}, both)
