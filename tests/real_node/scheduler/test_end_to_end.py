"""From `kubectl apply` to a running container: real kube-scheduler, ``vgpu-agent scheduler``, real
kubelet, and the agent on simulated GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.real_node.agents import NodeAgent
from tests.real_node.rig import Rig
from tests.real_node.scheduler.checker import judge
from tests.real_node.scheduler.processes import BIND, PORT, Extender, Forwarder, KubeScheduler
from tests.real_node.vgpu_manager_node import (
    PRE,
    REAL,
    asking,
    asks,
    check_pods,
    environment,
    extender_pod,
    showing,
    start,
    unequal_pods,
    vgpu_manager_agent,
    wait_done,
    wait_served,
)
from tests.real_node.volcano_node import U0, U1

_STORM = 10


@pytest.fixture
def agent(extender_rig: Rig) -> Iterator[NodeAgent]:
    """The agent of the node, which has registered."""
    running = vgpu_manager_agent(extender_rig)
    try:
        yield start(running)
    finally:
        running.close()


def test_from_apply_to_running(extender_rig: Rig, agent: NodeAgent) -> None:
    """vgpu-manager §13.3: the pod's annotations through all its states, and what its container
    finds. Then pods of all shapes at once: each container has its own claim.
    """
    rig = extender_rig
    with Extender(rig), KubeScheduler(rig):
        rig.create_pod(extender_pod("golden", [showing("default", asks(1, 10, 1024))]))
        found = environment(rig, "golden", "default")
        after = wait_served(rig, "golden")["metadata"]["annotations"]
        text = f"default[0_{U0}_10_1024]"
        assert (after[PRE], after[REAL]) == (text, text)
        assert (found["CUDA_MEM_LIMIT_0"], found["CUDA_CORE_LIMIT_0"]) == ("1024m", "10")
        pods = list(unequal_pods("storm", _STORM, random.Random(16)))
        for made in pods:
            rig.create_pod(made)
        names = [made["metadata"]["name"] for made in pods]
        assert wait_done(rig, names) == set()
    assert check_pods(rig, names) == sum(len(asking(made)) for made in pods)
    assert judge([rig.node()], rig.pods()).problems == []
    assert "start.refused" not in agent.events()


def test_a_card_that_falls_ill_while_its_pod_is_bound(extender_rig: Rig, agent: NodeAgent) -> None:
    """From the driver to the container: the agent says on the Node that the card is ill, the
    extender refuses the bind, and the pod gets the other card. Where the Node shows it too late,
    the start waits (`test_vgpu_manager.test_a_claim_for_an_ill_card_waits`).
    """
    rig = extender_rig
    with Extender(rig) as extender, Forwarder(rig, PORT) as calls, KubeScheduler(rig, calls.port):
        with calls.holding(BIND):
            rig.create_pod(extender_pod("pod", [showing(limits=asks(1, 10, 1024))]))
            calls.wait("a bind", lambda: calls.held(BIND) == 1)
            agent.simulated.lose(U0)
            extender.wait("the ill card", lambda: extender.unhealthy_cards() == 1)
        assert environment(rig, "pod")["NVIDIA_VISIBLE_DEVICES"] == U1
    assert check_pods(rig, ["pod"]) == 1
    assert judge([rig.node()], rig.pods()).problems == []
