"""Mixed days on a real node: three families share four GPUs, one of them floods; an independent
checker reads what containers wrote.

Kubelet has its defaults, once without and once with a NUMA policy. ``MIXED_DAY_PODS=300`` makes the
days as long as a release needs. Each prints its figures; ``pytest -rP`` shows them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.real_node.mixed.checker import Report
from tests.real_node.mixed.day import mixed_agent, node_options, play
from tests.real_node.mixed.jobs import GPUSHARE, NVIDIA, VGPU_FAMILY, draw
from tests.real_node.rig import Options, Rig

pytestmark = [pytest.mark.timeout(1800), pytest.mark.alone]

_PODS = int(os.environ.get("MIXED_DAY_PODS", "36"))
DAYS = {
    "defaults": ("none", VGPU_FAMILY, NVIDIA, 1),
    "single-numa-node": ("single-numa-node", VGPU_FAMILY, VGPU_FAMILY, 2),
    "gpushare": ("none", GPUSHARE, NVIDIA, 3),
}


@pytest.fixture(scope="module")
def played() -> dict[str, Report]:
    """The days that were played already."""
    return {}


def _played(day: str, played: dict[str, Report], start_rig: Callable[[Options], Rig]) -> Report:
    """Return the report of the day, which is played once for all tests."""
    if day not in played:
        topology_manager_policy, volcano, flooding, seed = DAYS[day]
        rig = start_rig(node_options(topology_manager_policy))
        with mixed_agent(rig, volcano) as agent:
            jobs = tuple(draw(seed, _PODS, volcano=volcano, flooding=flooding))
            played[day] = play(rig, agent, jobs, volcano=volcano)
    report = played[day]
    for what, figure in report.figures().items():
        print(f"{day}: {what}: {figure}")  # noqa: T201 - what the test is for
    return report


@pytest.mark.parametrize("day", DAYS)
def test_no_container_of_a_mixed_day_has_a_wrong_share(
    day: str, played: dict[str, Report], start_rig: Callable[[Options], Rig]
) -> None:
    """Each has what its ids or its scheduler's annotations say, no GPU serves two families,
    and no memory is given twice.
    """
    report = _played(day, played, start_rig)
    assert not report.faults
    assert report.started > _PODS / 2


@pytest.mark.parametrize("day", DAYS)
def test_no_pod_of_a_mixed_day_waits_in_vain(
    day: str, played: dict[str, Report], start_rig: Callable[[Options], Rig]
) -> None:
    """Schedulers that know nothing of each other lose no pods to races, and no GPU is idle while a
    pod that it could serve waits.
    """
    assert not _played(day, played, start_rig).violations
