"""The choice of the unit of memory."""

from __future__ import annotations

import pytest

from tests import constants
from vgpu_agent.families.memory_units import smallest_fitting_factor


@pytest.mark.parametrize(("budget", "factor"), [(4000, 1), (999, 8), (0, None)])
def test_the_smallest_power_of_two_is_found(
    monkeypatch: pytest.MonkeyPatch, budget: int, factor: int | None
) -> None:
    """One where it fits, the next power where it does not, None where nothing does."""
    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: budget})
    assert smallest_fitting_factor(lambda factor: max(1, 4000 // factor)) == factor
