"""The choice of the unit of memory."""

from __future__ import annotations

from vgpu_agent.families.memory_units import smallest_fitting_factor


def test_the_smallest_power_of_two_is_found() -> None:
    """One where it fits, the next power where it does not, None where nothing does."""
    assert smallest_fitting_factor(lambda factor: 4000 // factor, 4000) == 1
    assert smallest_fitting_factor(lambda factor: 4000 // factor, 999) == 8
    assert smallest_fitting_factor(lambda _: 2, 1) is None
