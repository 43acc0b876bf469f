"""The start delay of pods that ask for vGPU on a real node, all kinds of pods in one run;
see `start_times`.

The limit of 20 % is the benchmark's (``scripts/bench --only node``), which wants a machine of its
own. A test has to give the same verdict on a shared machine, where the same code was measured
between 13 and 24 % later. So the limit here is one that no noise explains. A plugin that asks the
API server within Allocate, as the reference does, makes such pods several times as late.

The agent counts memory in MiB by itself on small nodes. There, kubelet and API server need far
longer for such pods than for others, with any plugin: at each change the kubelet writes each id
into its checkpoint and, with its feature ResourceHealthStatus, into the pod's status. So there the
agent is compared with a plugin that does nothing (`idle_plugin`) with the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from tests.real_node.rig import Rig
from tests.real_node.start_times import (
    NOTHING,
    WITH,
    WITHOUT,
    with_coarse_units,
    with_units_of_a_mib,
)

pytestmark = [pytest.mark.timeout(1200), pytest.mark.alone]
Report = Callable[[str, object], None]

_MUCH_LATER = 1.5
_LEAST_ROUNDS, _AT_ONCE = 2, 1.2
"""One is enough where it is clearly good, and more follow while the verdict is bad.
`scripts/bench` plays at least five, for its closer limit.
"""


def _tell(figures: Mapping[str, str], record_property: Report) -> None:
    """Print the figures; `pytest -rP` shows them."""
    for name, value in figures.items():
        record_property(name, value)
        print(f"{name}: {value}")  # noqa: T201 - what the test is for


def test_twenty_unequal_pods_run_about_as_soon_as_pods_without_a_gpu(
    volcano_rig: Rig, record_property: Report
) -> None:
    """With units of 64 MiB the last of 20 runs little later than without vGPU.
    Every container has its own limit.
    """
    rounds = with_coarse_units(
        volcano_rig, most_later=_MUCH_LATER, least_rounds=_LEAST_ROUNDS, at_once=_AT_ONCE
    )
    _tell(rounds.told, record_property)
    assert rounds.later(WITH, WITHOUT) <= _MUCH_LATER, rounds.told


def test_with_memory_in_mib_they_run_about_as_soon_as_with_a_plugin_that_does_nothing(
    volcano_rig: Rig, record_property: Report
) -> None:
    """By default, the agent makes the last of 20 little later than a plugin does that does nothing
    with the same ids.
    """
    rounds = with_units_of_a_mib(
        volcano_rig,
        most_later=_MUCH_LATER,
        least_rounds=_LEAST_ROUNDS,
        at_once=_AT_ONCE,
        without=False,
    )
    _tell(rounds.told, record_property)
    assert rounds.later(WITH, NOTHING) <= _MUCH_LATER, rounds.told
