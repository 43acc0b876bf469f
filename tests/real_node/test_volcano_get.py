"""The container that is about to start, by a real kubelet's Get of one pod,
which answers like our stand-in's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real_node.agents import NodeAgent
from tests.real_node.rig import Rig
from tests.real_node.volcano import VolcanoScheduler, vgpu, volcano_pod
from tests.real_node.volcano_node import (
    COARSE_CONFIG,
    UNIT_MIB,
    seen,
    showing,
    start_vgpu,
    volcano_agent,
    wait_served,
)

PODS = {"get-1": 30, "get-2": 40, "get-3": 50}


@pytest.fixture
def agent(volcano_rig: Rig) -> Iterator[NodeAgent]:
    """An agent of its own."""
    running = volcano_agent(volcano_rig, COARSE_CONFIG)
    try:
        yield start_vgpu(running, UNIT_MIB)
    finally:
        running.close()


def test_kubelet_is_asked_about_the_starting_pod_only(volcano_rig: Rig, agent: NodeAgent) -> None:
    """Each start is proven by both kubelet records,
    and for none of them all pods of the node were listed.
    """
    rig = volcano_rig
    with VolcanoScheduler(rig):
        for name, memory in PODS.items():
            rig.create_pod(volcano_pod(name, containers=[showing(limits=vgpu(1, memory, 20))]))
            assert seen(rig, name).limit == f"{memory * UNIT_MIB}m"
            wait_served(rig, name)
    bound = {
        line["pod"]: line for line in agent.process.log_lines() if line["msg"] == "start.bound"
    }
    assert set(bound) == {f"default/{name}" for name in PODS}
    for pod, line in bound.items():
        assert line["all_pods_listed"] is False
        assert any(each.startswith("checkpoint: ") for each in line["evidence"])
        assert f"pod-resources: {pod} container main" in line["evidence"]
    assert not [
        line for line in agent.process.log_lines() if line["msg"] == "kubelet.records_incomplete"
    ]
