"""The family volcano-vgpu on a real node while something is away:
kubelet, the agent, the API server, the Node object.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.real_node.agents import NodeAgent, wait_allocatable
from tests.real_node.rig import Rig
from tests.real_node.volcano import VolcanoScheduler, annotations_of, vgpu, volcano_pod
from tests.real_node.volcano_node import (
    COARSE_CONFIG,
    REGISTER,
    UNIT_MIB,
    restarted,
    seen,
    showing,
    start_vgpu,
    volcano_agent,
    wait_running,
    wait_served,
)


@pytest.fixture
def agent(volcano_rig: Rig) -> Iterator[NodeAgent]:
    """An agent that the test may kill."""
    running = volcano_agent(volcano_rig, COARSE_CONFIG)
    try:
        yield start_vgpu(running, UNIT_MIB)
    finally:
        running.close()


def _asking(name: str, memory: int, **more: Any) -> dict[str, Any]:
    return volcano_pod(name, containers=[showing(limits=vgpu(1, memory))], **more)


def _limits(rig: Rig, names: Mapping[str, int]) -> dict[str, str]:
    return {name: seen(rig, name).limit for name in names}


def _as_asked(names: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{memory * UNIT_MIB}m" for name, memory in names.items()}


def _burst(prefix: str, number: int) -> dict[str, int]:
    return {f"{prefix}-{each}": 20 + each for each in range(number)}


def _started_at(rig: Rig, name: str) -> str:
    found = rig.pod(name)
    assert found is not None
    return str(found["status"]["containerStatuses"][0]["state"]["running"]["startedAt"])


def test_kubelet_restarts_under_running_pods(volcano_rig: Rig, agent: NodeAgent) -> None:
    """Running pods are untouched and stay booked. Later pods get their own shares."""
    rig, before, after = volcano_rig, _burst("before", 3), {"after-1": 31, "after-2": 32}
    with VolcanoScheduler(rig, policy="binpack"):
        for name, memory in before.items():
            rig.create_pod(_asking(name, memory))
        wait_running(rig, before)
        started = {name: _started_at(rig, name) for name in before}
        registrations = agent.events().count("plugin.registered")
        rig.restart_kubelet()
        rig.wait_for(
            lambda: agent.events().count("plugin.registered") >= registrations + 3 or None,
            what="new registrations",
        )
        agent.run(agent.process.until_ready())  # the Node may still show the count of before
        wait_allocatable(rig, 20, resource="volcano.sh/vgpu-number")
        for name, memory in after.items():
            rig.create_pod(_asking(name, memory))
        wait_running(rig, after)
        assert _limits(rig, before | after) == _as_asked(before | after)
    assert {name: _started_at(rig, name) for name in before} == started


def test_the_agent_is_killed_in_the_middle_of_a_burst(volcano_rig: Rig, agent: NodeAgent) -> None:
    """kill -9: pods that were admitted wait with the reason,
    and once it is back all have their own limits and annotations.
    """
    rig, pods = volcano_rig, _burst("burst", 10)
    with VolcanoScheduler(rig, policy="spread"):
        for name, memory in pods.items():
            rig.create_pod(_asking(name, memory))
        rig.wait_for(lambda: "start.bound" in agent.events() or None, what="the first start")
        agent.run(agent.process.kill())
        time.sleep(1)  # the kubelet meets no server
        agent.start()
        wait_running_or_failed(rig, pods)
        failed = {
            pod["metadata"]["name"]: pod["status"].get("message", "")
            for pod in rig.pods()
            if pod["status"]["phase"] == "Failed"
        }
        # Pods being admitted at that moment have failed for good, as with every device plugin.
        # Those that run, run right.
        assert all("Allocate failed" in message for message in failed.values()), failed
        running = {name: memory for name, memory in pods.items() if name not in failed}
        assert len(running) >= 2
        assert _limits(rig, running) == _as_asked(running)
        for name in running:
            wait_served(rig, name)


def wait_running_or_failed(rig: Rig, names: Mapping[str, int]) -> None:
    """Wait until kubelet is done with each of these pods."""

    def done() -> bool | None:
        phases = {pod["metadata"]["name"]: pod["status"].get("phase") for pod in rig.pods()}
        return True if all(phases.get(name) in ("Running", "Failed") for name in names) else None

    rig.wait_for(done, 90, what="all pods to run or to fail")


def test_a_crashed_container_restarts_while_the_agent_is_away(
    volcano_rig: Rig, agent: NodeAgent
) -> None:
    """After a graceful stop the kubelet asks no server, and the container starts again from the
    spec that is there, with the same limit.
    """
    rig = volcano_rig
    with VolcanoScheduler(rig):
        rig.create_pod(_asking("alone", 40, restartPolicy="Always"))
        first = seen(rig, "alone")
        wait_served(rig, "alone")
    assert agent.run(agent.process.terminate()) == 0
    wait_allocatable(rig, 0, resource="volcano.sh/vgpu-number")
    # A moment later, so that the exec itself does not die with the container.
    rig.exec("alone", "sh", "-c", "(sleep 0.5; kill 1) </dev/null >/dev/null 2>&1 &")
    restarted(rig, "alone")
    again = seen(rig, "alone")
    assert (
        (again.limit, again.gpus, again.region)
        == (first.limit, first.gpus, first.region)
        == ("2560m", first.gpus, first.region)
    )
    agent.start()
    (grant,) = agent.get("/debug/ledger")["grants"]
    assert (grant["pod"], grant["shares"][0]["memory_mib"]) == ("alone", 2560)


def test_the_api_server_goes_away_in_the_middle_of_a_burst(
    volcano_rig: Rig, agent: NodeAgent
) -> None:
    """Pods that the kubelet received before start with their own limits. The rest, and all
    annotations, follow the outage.
    """
    rig, pods = volcano_rig, _burst("cut", 8)
    with VolcanoScheduler(rig, policy="spread"):
        for name, memory in pods.items():
            rig.create_pod(_asking(name, memory))
        rig.wait_for(
            lambda: "allocate.reserved" in agent.events() or None, what="the first Allocate"
        )
        rig.stop_component("apiserver")
        rig.wait_for(
            lambda: "start.bound" in agent.events() or None, what="a start without the API server"
        )
        time.sleep(2)
        rig.start_component("apiserver")
        rig.wait_for(rig.api.is_ready, 60, what="the API server")
        wait_running(rig, pods, 90)
        assert _limits(rig, pods) == _as_asked(pods)
        for name in pods:
            wait_served(rig, name, 40)


def test_a_node_that_was_deleted_is_announced_again(volcano_rig: Rig, agent: NodeAgent) -> None:
    """Our annotation is removed, then the whole Node: both come back, and a pod runs."""
    rig = volcano_rig
    path = f"/api/v1/nodes/{rig.node_name()}"
    announced = rig.node()["metadata"]["annotations"][REGISTER]

    def is_announced() -> bool | None:
        found = rig.api.find(path)
        return (
            True
            if found and found["metadata"].get("annotations", {}).get(REGISTER) == announced
            else None
        )

    rig.api.patch(path, {"metadata": {"annotations": {REGISTER: None}}})
    rig.wait_for(is_announced, what="the removed annotation")
    rig.api.delete(path)
    rig.restart_kubelet()  # which makes its Node at its start
    rig.wait_for(is_announced, what="the annotation of the new Node")
    wait_allocatable(rig, 20, resource="volcano.sh/vgpu-number")
    with VolcanoScheduler(rig):
        rig.create_pod(_asking("reborn", 30))
        assert seen(rig, "reborn").limit == "1920m"
        assert annotations_of(rig, "reborn")["volcano.sh/vgpu-node"] == rig.node_name()
