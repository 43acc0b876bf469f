"""The sizes of device lists that are never made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.device_ids import IdBlock, NumberedIds
from vgpu_agent.families.memory_units import list_bytes, smallest_fitting_factor
from vgpu_agent.kubelet.codec import list_size_bytes


@given(st.lists(st.tuples(st.text(max_size=150), st.integers(0, 1200)), max_size=3))
def test_the_size_is_that_of_the_real_list(blocks: list[tuple[str, int]]) -> None:
    """To the byte, for any prefix and count."""
    ids = NumberedIds(tuple(IdBlock(prefix, count, "GPU-1") for prefix, count in blocks))
    assert list_bytes(ids) == list_size_bytes(ids)


def test_the_smallest_power_of_two_is_found() -> None:
    """One where it fits, the next power where it does not, None where nothing does."""
    assert smallest_fitting_factor(lambda factor: 4000 // factor, 4000) == 1
    assert smallest_fitting_factor(lambda factor: 4000 // factor, 999) == 8
    assert smallest_fitting_factor(lambda _: 2, 1) is None
