"""The family volcano-gpushare on a real node, with the stand-in scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.real_node.agents import NodeAgent, allocatable, wait_allocatable
from tests.real_node.rig import Rig
from tests.real_node.rig.manifests import quantity
from tests.real_node.volcano import VolcanoScheduler, annotations_of, volcano_pod, wait_bound
from tests.real_node.volcano_node import GPUSHARE_CONFIG, MEMORY_MIB, seen, showing, volcano_agent

MEMORY, NUMBER = "volcano.sh/gpu-memory", "volcano.sh/gpu-number"
INDEX, TIME, ASSIGNED = (
    "volcano.sh/gpu-index",
    "volcano.sh/predicate-time",
    "volcano.sh/gpu-assigned",
)
TOLD = ("NVIDIA_VISIBLE_DEVICES", "VOLCANO_GPU_ALLOCATED", "VOLCANO_GPU_MEMORY_TOTAL")
Start = Callable[[str], NodeAgent]


@pytest.fixture
def start_agent(volcano_rig: Rig) -> Iterator[Start]:
    """Starts the agent with more configuration."""
    agents: list[NodeAgent] = []

    def start(more: str) -> NodeAgent:
        agents.append(volcano_agent(volcano_rig, GPUSHARE_CONFIG + more))
        agents[-1].start()
        return agents[-1]

    yield start
    for agent in agents:
        agent.close()


def _told(rig: Rig, pod: str, container: str = "main") -> tuple[str, ...]:
    environment = seen(rig, pod, container).environment
    return tuple(environment[name] for name in TOLD)


def _wait_assigned(rig: Rig, pod: str) -> dict[str, str]:
    return rig.wait_for(
        lambda: found if ASSIGNED in (found := annotations_of(rig, pod)) else None,
        what=f"{pod} to be called assigned",
    )


def test_share_mode(volcano_rig: Rig, start_agent: Start) -> None:
    """volcano-gpushare:S1, volcano-gpushare:S2, volcano-gpushare:S3, volcano-gpushare:S7: from the
    node's status to the containers.
    """
    rig = volcano_rig
    start_agent("")
    wait_allocatable(rig, 2 * MEMORY_MIB, resource=MEMORY)
    wait_allocatable(rig, 2, resource=NUMBER)
    capacity = rig.node()["status"]["capacity"]
    assert (quantity(capacity[MEMORY]), quantity(capacity[NUMBER])) == (2 * MEMORY_MIB, 2)
    assert "volcano.sh/gpu-unhealthy-ids" not in rig.node()["metadata"]["annotations"]
    with VolcanoScheduler(rig, gpushare="share"):
        rig.create_pod(volcano_pod("one", containers=[showing(limits={MEMORY: 3000})]))
        bound = wait_bound(rig, "one")
        assert bound[INDEX] == "0"
        assert abs(int(bound[TIME]) / 1e9 - time.time()) < 30
        assert _told(rig, "one") == ("0", "3000", str(MEMORY_MIB))
        assert _wait_assigned(rig, "one")[ASSIGNED] == "true"
        assert seen(rig, "one").mounts.keys().isdisjoint({"/etc/ld.so.preload", "/tmp/vgpu"})

        large = [
            showing(name, {MEMORY: amount})
            for name, amount in {"first": 10500, "second": 11000}.items()
        ]
        rig.create_pod(volcano_pod("two", containers=large))
        assert wait_bound(rig, "two")[INDEX] == "1"  # as a whole it does not fit beside the other
        assert _told(rig, "two", "first") == ("1", "10500", str(MEMORY_MIB))
        assert _told(rig, "two", "second") == ("1", "11000", str(MEMORY_MIB))
        _wait_assigned(rig, "two")


def test_number_mode(volcano_rig: Rig, start_agent: Start) -> None:
    """volcano-gpushare:S5, volcano-gpushare:D3:
    whole cards, on a node that has never offered memory.
    """
    rig = volcano_rig
    start_agent("volcanoGpushare: {strategy: number}\n")
    wait_allocatable(rig, 2, resource=NUMBER)
    rig.wait_for(lambda: allocatable(rig, MEMORY) == 0 or None, what="no memory to be offered")
    with VolcanoScheduler(rig, gpushare="number"):
        rig.create_pod(volcano_pod("whole", containers=[showing(limits={NUMBER: 2})]))
        assert sorted(wait_bound(rig, "whole")[INDEX]) == [",", "0", "1"]
        visible, allocated, total = _told(rig, "whole")
        assert (sorted(visible), allocated, total) == ([",", "0", "1"], "2", str(MEMORY_MIB))
        _wait_assigned(rig, "whole")
