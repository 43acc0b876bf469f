"""The family vgpu-manager on a real node: the stand-in extender writes, the agent binds late, and
containers print what they found.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.real_node.agents import NodeAgent, wait_allocatable
from tests.real_node.rig import Rig
from tests.real_node.vgpu_manager_node import (
    NUMBER,
    PATIENCE_SECONDS,
    PLANNED,
    PRE,
    REAL,
    REGISTER,
    SPLIT,
    TIME,
    Extender,
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
from tests.real_node.volcano_node import U0
from vgpu_agent.sim.vgpu_manager.formats import parse_register

_STORM = 20
# 1,000 are the full proof, of about seven minutes.
_CONTAINERS = int(os.environ.get("VGPU_MANAGER_CONTAINERS", "24"))


@pytest.fixture(scope="module")
def shared_agent(extender_rig: Rig) -> Iterator[NodeAgent]:
    """One agent for all tests that leave it as it is."""
    running = vgpu_manager_agent(extender_rig)
    try:
        yield start(running)
    finally:
        running.close()


@pytest.fixture
def agent(extender_rig: Rig, shared_agent: NodeAgent) -> NodeAgent:
    """The agent, which runs and has registered, whatever was done to it before."""
    wait_allocatable(extender_rig, 2 * SPLIT, PATIENCE_SECONDS, resource=NUMBER)
    return shared_agent


def test_from_claim_to_container_and_back(extender_rig: Rig, agent: NodeAgent) -> None:
    """vgpu-manager §13.3: the claim, what the container finds, and how the pod ends; its files go
    with it.
    """
    rig = extender_rig
    with Extender(rig):
        rig.create_pod(extender_pod("golden", [showing("default", asks(1, 10, 1024))]))
        found = environment(rig, "golden", "default")
        after = wait_served(rig, "golden")["metadata"]
    assert check_pods(rig, ["golden"]) == 1
    text = f"default[0_{U0}_10_1024]"
    written = after["annotations"]
    assert (written[PRE], written[REAL]) == (text, text)
    assert (found["CUDA_MEM_LIMIT_0"], found["CUDA_CORE_LIMIT_0"]) == ("1024m", "10")
    directory = agent.folder / "control/containers" / f"{after['uid']}_default"
    assert directory.is_dir()
    rig.delete_pod("golden")
    rig.wait_for(
        lambda: not directory.exists() or None,
        PATIENCE_SECONDS,
        what="the container's files to be collected",
    )


@pytest.mark.timeout(300 + 4 * _CONTAINERS)
def test_storms_of_unequal_pods(extender_rig: Rig, agent: NodeAgent) -> None:
    """Twenty pods at once, of all shapes, until so many containers were looked at; each has exactly
    its own claim, none was refused, no pod has failed.
    """
    rig, rng, checked, storm = extender_rig, random.Random(15), 0, 0
    began = time.monotonic()
    with Extender(rig, policy="spread"):
        while checked < _CONTAINERS:
            storm += 1
            pods = list(unequal_pods(f"storm-{storm}", _STORM, rng))
            for made in pods:
                rig.create_pod(made)
            names = [made["metadata"]["name"] for made in pods]
            assert wait_done(rig, names, 90) == set()
            assert check_pods(rig, names) == sum(len(asking(made)) for made in pods)
            checked += sum(len(asking(made)) for made in pods)
            for name in names:
                wait_served(rig, name)
            rig.clean()
            print(f"storms: {storm}, containers: {checked}, {time.monotonic() - began:.0f} s")  # noqa: T201
    assert "start.refused" not in agent.events()


def test_a_gang_of_four(extender_rig: Rig, agent: NodeAgent) -> None:
    """The pods of a group come at once, and all of them run with their own limits."""
    rig = extender_rig
    names = [f"gang-{number}" for number in range(4)]
    with Extender(rig):
        for number, name in enumerate(names):
            made = extender_pod(name, [showing(limits=asks(1, 5, 500 + number))])
            made["metadata"]["annotations"] = {"scheduling.k8s.io/group-name": "gang"}
            rig.create_pod(made)
        assert wait_done(rig, names) == set()
        assert check_pods(rig, names) == len(names)


def test_a_claim_for_an_ill_card_waits(extender_rig: Rig, agent: NodeAgent) -> None:
    """A card falls ill between claim and start: the start is refused with the reason, and comes
    when the card is well, with the claim as it was.
    """
    rig = extender_rig
    agent.simulated.lose(U0)

    def health() -> list[bool]:
        cards = parse_register(rig.node()["metadata"]["annotations"][REGISTER])
        return [card.is_healthy for card in cards or ()]

    rig.wait_for(lambda: health() == [False, True] or None, PATIENCE_SECONDS, what="one ill card")
    made = extender_pod("waits", [showing(limits=asks(1, 5, 500))])
    made["metadata"]["annotations"] = {
        PRE: f"main[0_{U0}_5_500]",
        PLANNED: rig.node_name(),
        TIME: str(time.time_ns()),
    }
    made["spec"]["nodeName"] = rig.node_name()
    rig.create_pod(made)
    rig.wait_for(
        lambda: "start.refused" in agent.events() or None, PATIENCE_SECONDS, what="a refusal"
    )
    agent.simulated.restore(U0)
    assert wait_done(rig, ["waits"], 90) == set()
    assert check_pods(rig, ["waits"]) == 1
    rig.wait_for(lambda: health() == [True, True] or None, PATIENCE_SECONDS, what="no ill card")
