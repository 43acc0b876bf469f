"""All attacks at once, against the real process in the memory that the DaemonSet gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversary.memory_cgroup import memory_cgroup
from tests.adversary.storm import LIMIT_MIB, endure, storm_stage
from tests.bench.figures import percentile

pytestmark = [pytest.mark.component, pytest.mark.timeout(240)]

_PEAK_MIB = 200.0
_START_SECONDS = 2.0
"""Loose, because the API server and the kubelet of the test share two processors with the agent;
scripts/bench holds 0.5 s.
"""


async def test_no_storm_of_tenants_kills_the_agent_or_delays_a_start(folder: Path) -> None:
    """A node runs the pods of strangers. Whatever they do together, the agent lives within its
    memory and starts of others go on.
    """
    with memory_cgroup(LIMIT_MIB) as cgroup:
        async with storm_stage(folder, cgroup) as stage:
            endured = await endure(stage, files=100_000, starts=15)
    assert (endured.kills, endured.restarted) == (0, False)
    assert endured.peak_mib < _PEAK_MIB
    assert percentile(endured.starts, 99) < _START_SECONDS
    assert endured.alive < _START_SECONDS
