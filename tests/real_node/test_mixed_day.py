"""Mixed days on a real node: all five families, and three of them, share four GPUs, one of them
floods; an independent checker reads what containers wrote.

Kubelet has its defaults, once without and once with a NUMA policy. ``MIXED_DAY_PODS=500`` makes the
days as long as a release needs. Each prints its figures; ``pytest -rP`` shows them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.real_node.mixed.checker import Report
from tests.real_node.mixed.day import mixed_agent, node_options, play
from tests.real_node.mixed.jobs import AWS, FAMILIES, NVIDIA, VGPU_FAMILY, draw
from tests.real_node.rig import Options, Rig

pytestmark = pytest.mark.timeout(1800)

_PODS = int(os.environ.get("MIXED_DAY_PODS", "36"))
DAYS = {
    "all-families": ("none", FAMILIES, NVIDIA, 1),
    "single-numa-node": ("single-numa-node", (NVIDIA, AWS, VGPU_FAMILY), VGPU_FAMILY, 2),
}
each_day = pytest.mark.parametrize("day", DAYS)


@pytest.fixture(scope="module")
def played() -> dict[str, Report]:
    """The days that were played already."""
    return {}


def _played(day: str, played: dict[str, Report], start_rig: Callable[[Options], Rig]) -> Report:
    """Return the report of the day, which is played once for all tests."""
    if day not in played:
        topology_manager_policy, families, flooding, seed = DAYS[day]
        rig = start_rig(node_options(topology_manager_policy))
        with mixed_agent(rig, families) as agent:
            jobs = tuple(draw(seed, _PODS, families=families, flooding=flooding))
            played[day] = play(rig, agent, jobs, families)
    report = played[day]
    for what, figure in report.figures().items():
        print(f"{day}: {what}: {figure}")  # noqa: T201 - what the test is for
    return report


@each_day
def test_no_container_of_a_mixed_day_has_a_wrong_share(
    day: str, played: dict[str, Report], start_rig: Callable[[Options], Rig]
) -> None:
    """Each has what its ids or its scheduler's annotations say, no GPU serves two families, no
    memory is given twice, and each family's scheduler and tools read what its contract says.
    """
    report = _played(day, played, start_rig)
    assert not report.faults
    assert report.started > _PODS / 2
    assert set(report.by_family) == set(DAYS[day][1])


@each_day
def test_no_pod_of_a_mixed_day_waits_in_vain(
    day: str, played: dict[str, Report], start_rig: Callable[[Options], Rig]
) -> None:
    """Schedulers that know nothing of each other lose no pods to races, and no GPU is idle while a
    pod that it could serve waits.
    """
    assert not _played(day, played, start_rig).violations
