"""The simulated extender on the simulated API server: what it writes, when, and what happens when
it or the server goes away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.sim.vgpu_manager.objects import U0, U1, asking, container, node, pod
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.sim.api.faults import Fault, FaultKind
from vgpu_agent.sim.api.server import ApiServer
from vgpu_agent.sim.vgpu_manager.extender import ExtenderSettings, VgpuExtender, main
from vgpu_agent.sim.volcano.api import ApiAccess

Object = dict[str, Any]
D = "nvidia.com/"


class Cluster:
    """An API server, and a scheduler that runs beside it until the test ends."""

    def __init__(self, server: ApiServer, supervisor: Supervisor) -> None:
        self.server, self.supervisor = server, supervisor

    def start(self, **settings: Any) -> None:
        """Run a scheduler."""
        quick = ExtenderSettings(retry_seconds=0.02, **settings)
        self.supervisor.start("extender", VgpuExtender(ApiAccess(self.server.url), quick).run)

    async def stop(self) -> None:
        """End it."""
        await self.supervisor.stop("extender")

    def pod(self, name: str) -> Object:
        """The pod as it is now."""
        found: Object = self.server.objects.get("pods", name, "default")
        return found

    def add(self, *pods: Object) -> None:
        """Create pods."""
        for each in pods:
            self.server.objects.create("pods", each)

    def annotation(self, name: str, key: str) -> str:
        """The pod's annotation, with short names of cards; empty without it."""
        found = str(self.pod(name)["metadata"]["annotations"].get(D + key, ""))
        return found.replace(U0, "U0").replace(U1, "U1")

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a change of the cluster that makes the condition true."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for _ in self.server.objects.revision.changes():
                if condition():
                    return

    async def bound(self, *names: str) -> None:
        """Wait until these pods have a node."""
        await self.until(lambda: all(self.pod(name)["spec"].get("nodeName") for name in names))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """An API server with the golden node."""
    async with (
        ApiServer() as server,
        Supervisor(backoff_min_seconds=0.02, backoff_max_seconds=0.02) as supervisor,
    ):
        server.objects.create("nodes", node())
        yield Cluster(server, supervisor)


def _asking(name: str, *limits: dict[str, str]) -> Object:
    return pod(name, [container(f"c{place}", each) for place, each in enumerate(limits)])


async def test_a_pod_is_filtered_and_then_bound(cluster: Cluster) -> None:
    """vgpu-manager §13.3: the patch of the filter, the patch before the Binding, the Binding."""
    began = time.time_ns()
    cluster.add(pod("gpu-pod", [container("default", asking(1, 10, 1024))]))
    cluster.start()
    await cluster.bound("gpu-pod")
    first, second, third = [request for request in cluster.server.requests if request.is_write]
    patched = first.body["metadata"]
    stamp = patched["annotations"].pop(D + "predicate-time")
    assert began <= int(stamp) <= time.time_ns()
    assert patched["annotations"] == {
        D + "pre-allocated": f"default[0_{U0}_10_1024]",
        D + "predicate-node": "gpu-node-1",
        D + "real-allocated": "",
    }
    assert patched["labels"] == {
        D + "assigned-phase": "filtering",
        D + "metrics-node": "gpu-node-1",
    }
    again = second.body["metadata"]
    assert int(again["annotations"][D + "predicate-time"]) > int(stamp)
    assert again["labels"] == {D + "assigned-phase": "allocating", D + "metrics-node": "gpu-node-1"}
    assert third.path.endswith("/gpu-pod/binding")


async def test_a_storm_never_gives_a_card_beyond_its_size(cluster: Cluster) -> None:
    """Own writes count at once, before the watch shows them."""
    names = [f"p{number}" for number in range(10)]
    cluster.add(*(_asking(name, asking(1, 20, 4000)) for name in names))
    cluster.start()
    await cluster.bound(*names)
    claims = [cluster.annotation(name, "pre-allocated") for name in names]
    assert sorted(claims) == ["c0[0_U0_20_4000]"] * 5 + ["c0[1_U1_20_4000]"] * 5
    cluster.add(_asking("late", asking(1, 20, 4000)))
    await cluster.until(lambda: cluster.pod("late")["status"].get("conditions"))
    (condition,) = cluster.pod("late")["status"]["conditions"]
    assert (condition["reason"], condition["message"]) == (
        "Unschedulable",
        "0/1 nodes are available: 1 Insufficient GPU resources",
    )
    cluster.server.objects.delete("pods", "p0", "default", grace_seconds=0)
    await cluster.bound("late")


async def test_ids_are_counted_as_kube_scheduler_does(cluster: Cluster) -> None:
    """The number of ids limits pods although cards have room."""
    cluster.server.objects.set_status(
        "nodes", "gpu-node-1", {"allocatable": {D + "vgpu-number": "2"}}
    )
    cluster.add(_asking("a", asking(1, 1, 1)), _asking("b", asking(1, 1, 1), asking(1, 1, 1)))
    cluster.start()
    await cluster.bound("a")
    await cluster.until(lambda: cluster.pod("b")["status"].get("conditions"))
    assert "nodeName" not in cluster.pod("b")["spec"]


async def test_one_that_was_killed_between_patch_and_binding(cluster: Cluster) -> None:
    """vgpu-manager §5.2: the next one binds to the claim that is written."""
    cluster.add(_asking("a", asking(1, 10, 100)))
    planned = f"c0[1_{U1}_10_100]"
    cluster.server.objects.patch(
        "pods",
        "a",
        {
            "metadata": {
                "annotations": {
                    D + "pre-allocated": planned,
                    D + "predicate-node": "gpu-node-1",
                    D + "predicate-time": str(time.time_ns()),
                },
                "labels": {D + "assigned-phase": "filtering"},
            }
        },
        "default",
    )
    cluster.start()
    await cluster.bound("a")
    assert cluster.annotation("a", "pre-allocated") == "c0[1_U1_10_100]"


async def test_a_binding_that_fails_is_marked_and_tried_again(cluster: Cluster) -> None:
    """vgpu-manager §4.3: phase `failed`, the claim stays written; then it is filtered anew."""
    cluster.server.faults.append(Fault(FaultKind.STATUS, verb="create", code=500, times=1))
    phases: list[str] = []

    def seen() -> bool:
        labels = cluster.pod("a")["metadata"].get("labels") or {}
        if (phase := labels.get(D + "assigned-phase", "")) and phase not in phases[-1:]:
            phases.append(phase)
        return bool(cluster.pod("a")["spec"].get("nodeName"))

    cluster.add(_asking("a", asking(1, 10, 100)))
    watching = asyncio.ensure_future(cluster.until(seen))
    cluster.start()
    await watching
    assert phases == ["filtering", "allocating", "failed", "filtering", "allocating"]


async def test_an_outage(cluster: Cluster) -> None:
    """Nothing is taken for true until it was listed anew; pods are bound afterwards."""
    cluster.start()
    cluster.add(_asking("a", asking(1, 10, 100)))
    await cluster.bound("a")
    await cluster.server.down()
    await asyncio.sleep(0.1)
    await cluster.server.up()
    cluster.add(_asking("b", asking(1, 10, 100)))
    await cluster.bound("b")


async def test_a_request_that_no_node_can_have(cluster: Cluster) -> None:
    """vgpu-manager §5.2: more than 100 cores is said to the pod, and others go on."""
    cluster.add(_asking("much", asking(1, 101, 100)), _asking("plain", {}))
    cluster.start()
    await cluster.bound("plain")
    assert cluster.annotation("plain", "pre-allocated") == ""
    await cluster.until(lambda: cluster.pod("much")["status"].get("conditions"))


def test_a_kubeconfig_that_cannot_be_read_ends_it(tmp_path: Path) -> None:
    """One sentence names the file."""
    with pytest.raises(SystemExit, match=r"none\.yaml"):
        main(["--kubeconfig", str(tmp_path / "none.yaml")])
