"""The bounds of a mixed day hold: few pods are lost to races, no family starves,
and the kubelet receives little about it.

The days are those of three families of `tests.torture.test_mixed_days`, and so are the variables
that make them longer. A failure names the seed and tells the story of the pods that were lost;
``TORTURE_SEED=<n>`` plays that day again.
"""

from __future__ import annotations

import os

import pytest

from tests.torture.mixed import bounds
from tests.torture.mixed.day import QUIET, TROUBLED
from tests.torture.mixed.judge import Figures
from tests.torture.mixed.plan import FAMILIES
from tests.torture.test_mixed_days import days, many_days


def _check(problems: list[str], figures: Figures) -> None:
    stories = "\n\n".join(figures.stories[:3])
    assert not problems, f"{'; '.join(problems)}\n{figures.text()}\n{stories}"


@pytest.mark.torture
def test_the_bounds_hold_on_a_quiet_mixed_day() -> None:
    """The short run, which is too short for what is bounded of a thousand pods."""
    figures, _ = days(1, first_seed=0, faults=QUIET, on_all_cores=False, families=FAMILIES)
    _check([*figures.violations(), *figures.starvation()], figures)


@pytest.mark.torture
def test_nobody_starves_on_a_troubled_mixed_day() -> None:
    """Agent, kubelet and API server come and go.
    What waits is still served in a number of holders' ends.
    """
    figures, _ = days(1, first_seed=0, faults=TROUBLED, on_all_cores=False, families=FAMILIES)
    _check(figures.starvation(bounds.ENDS_BEFORE_A_FAMILY_IN_TROUBLE), figures)


@pytest.mark.torture
@pytest.mark.timeout(7200)
def test_the_bounds_hold_on_many_quiet_mixed_days() -> None:
    """The long run. It is long enough for what is bounded of a thousand pods."""
    figures, _ = many_days(QUIET)
    assert figures.pods >= bounds.PODS_OF_A_RATE or "TORTURE_SEED" in os.environ, (
        f"{figures.pods} pods are too few for what is bounded of a thousand"
    )
    _check([*figures.violations(), *figures.starvation()], figures)


@pytest.mark.torture
@pytest.mark.timeout(7200)
def test_nobody_starves_on_many_troubled_mixed_days() -> None:
    """The long run."""
    figures, _ = many_days(TROUBLED)
    _check(figures.starvation(bounds.ENDS_BEFORE_A_FAMILY_IN_TROUBLE), figures)
