"""The family vgpu-manager on a real node while something is away: the kubelet, the agent, the API
server, the Node object.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.real_node.agents import NodeAgent, wait_allocatable
from tests.real_node.rig import Rig
from tests.real_node.vgpu_manager_node import (
    NUMBER,
    PATIENCE_SECONDS,
    REGISTER,
    SPLIT,
    Extender,
    asking,
    asks,
    check_pods,
    extender_pod,
    showing,
    start,
    unequal_pods,
    vgpu_manager_agent,
    wait_done,
    wait_served,
)


@pytest.fixture
def agent(extender_rig: Rig) -> Iterator[NodeAgent]:
    """An agent that the test may kill."""
    running = vgpu_manager_agent(extender_rig)
    try:
        yield start(running)
    finally:
        running.close()


def _storm(rig: Rig, prefix: str, number: int, seed: int) -> list[str]:
    pods = list(unequal_pods(prefix, number, random.Random(seed)))
    for made in pods:
        rig.create_pod(made)
    return [made["metadata"]["name"] for made in pods]


def test_the_agent_is_killed_in_the_middle_of_a_storm(extender_rig: Rig, agent: NodeAgent) -> None:
    """kill -9, twice: what was admitted waits with the reason, and once the agent is back every
    container has its own claim, and every pod is marked as served.
    """
    rig = extender_rig
    with Extender(rig, policy="spread"):
        names = _storm(rig, "torn", 12, 1)
        for _ in range(2):
            rig.wait_for(lambda: "start.bound" in agent.events() or None, PATIENCE_SECONDS)
            agent.run(agent.process.kill())
            time.sleep(0.5)  # the kubelet meets no server
            agent.start()
        # Pods being admitted at that moment have failed for good, as with every device plugin.
        failed = wait_done(rig, names, 120)
        messages = {name: (rig.pod(name) or {})["status"].get("message", "") for name in failed}
        assert all("Allocate failed" in text for text in messages.values()), messages
        running = [name for name in names if name not in failed]
        assert len(running) >= 2
        assert check_pods(rig, running) >= len(running)
        for name in running:
            wait_served(rig, name)


def test_the_kubelet_restarts_under_running_pods(extender_rig: Rig, agent: NodeAgent) -> None:
    """Running pods keep what they have; later ones get their own."""
    rig = extender_rig
    with Extender(rig):
        before = _storm(rig, "before", 5, 2)
        assert wait_done(rig, before) == set()
        registrations = agent.events().count("plugin.registered")
        rig.restart_kubelet()
        rig.wait_for(
            lambda: agent.events().count("plugin.registered") > registrations or None,
            PATIENCE_SECONDS,
            what="a new registration",
        )
        agent.run(agent.process.until_ready())  # the Node may still show the count of before
        wait_allocatable(rig, 2 * SPLIT, PATIENCE_SECONDS, resource=NUMBER)
        after = _storm(rig, "after", 5, 3)
        assert wait_done(rig, after, 90) == set()
        assert check_pods(rig, [*before, *after]) >= 10


def test_the_api_server_goes_away_in_the_middle_of_a_storm(
    extender_rig: Rig, agent: NodeAgent
) -> None:
    """Pods that the kubelet has start with their own claims; the rest, and all annotations, follow
    the outage.
    """
    rig = extender_rig
    with Extender(rig, policy="spread"):
        pods = list(unequal_pods("cut", 8, random.Random(4)))
        for made in pods:
            rig.create_pod(made)
        names = [made["metadata"]["name"] for made in pods]
        rig.wait_for(
            lambda: "allocate.reserved" in agent.events() or None,
            PATIENCE_SECONDS,
            what="the first Allocate",
        )
        rig.stop_component("apiserver")
        rig.wait_for(
            lambda: "start.bound" in agent.events() or None,
            PATIENCE_SECONDS,
            what="a start without the API server",
        )
        time.sleep(2)
        rig.start_component("apiserver")
        rig.wait_for(rig.api.is_ready, PATIENCE_SECONDS, what="the API server")
        assert wait_done(rig, names, 2 * PATIENCE_SECONDS) == set()
        assert check_pods(rig, names) == sum(len(asking(made)) for made in pods)
        for name in names:
            wait_served(rig, name)


def test_a_node_that_is_created_again_is_described_again(
    extender_rig: Rig, agent: NodeAgent
) -> None:
    """The whole Node is deleted: its annotations come back, and a pod runs."""
    rig = extender_rig
    path = f"/api/v1/nodes/{rig.node_name()}"
    described = rig.node()["metadata"]["annotations"][REGISTER]

    def is_described() -> bool | None:
        found = rig.api.find(path)
        annotations = found["metadata"].get("annotations", {}) if found else {}
        return True if annotations.get(REGISTER) == described else None

    rig.api.delete(path)
    rig.restart_kubelet()  # which makes its Node at its start
    rig.wait_for(is_described, PATIENCE_SECONDS, what="the annotations of the new Node")
    wait_allocatable(rig, 2 * SPLIT, PATIENCE_SECONDS, resource=NUMBER)
    with Extender(rig):
        rig.create_pod(extender_pod("reborn", [showing(limits=asks(1, 5, 300))]))
        assert wait_done(rig, ["reborn"]) == set()
        assert check_pods(rig, ["reborn"]) == 1
