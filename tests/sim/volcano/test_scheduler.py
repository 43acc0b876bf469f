"""The simulated Volcano scheduler on the simulated API server: what it writes, when, and what
happens when it or the server goes away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.sim.volcano.objects import U0, U1, asking, gpushare_node, node, pod
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.api.faults import Fault, FaultKind
from vgpu_agent.sim.api.server import ApiServer
from vgpu_agent.sim.volcano.api import ApiAccess
from vgpu_agent.sim.volcano.scheduler import VolcanoScheduler, VolcanoSettings, main

Object = dict[str, Any]
IDS = "volcano.sh/vgpu-ids-new"
LOCK = "hamivgpu"


class Cluster:
    """An API server, and schedulers that run beside it until the test ends."""

    def __init__(self, server: ApiServer, supervisor: Supervisor) -> None:
        self.server = server
        self.supervisor = supervisor
        self.now = 0.0  # seconds by which the schedulers' clock is ahead

    def start(self, name: str = "scheduler", **settings: Any) -> None:
        """Run a scheduler."""
        quick = VolcanoSettings(retry_seconds=0.02, period_seconds=0.001, **settings)
        scheduler = VolcanoScheduler(
            ApiAccess(self.server.url), quick, clock=lambda: time.time() + self.now
        )
        self.supervisor.start(name, scheduler.run)

    def add(self, *pods: Object) -> None:
        """Create pods."""
        for each in pods:
            self.server.objects.create("pods", each)

    def pod(self, name: str) -> Object:
        """The pod as it is now."""
        return self.server.objects.get("pods", name, "default")

    def ids(self, *names: str) -> list[str | None]:
        """The pods' devices, with short names of cards; None for those that have none."""
        found = [self.pod(name)["metadata"]["annotations"].get(IDS) for name in names]
        return [each and each.replace(U0, "U0").replace(U1, "U1") for each in found]

    def nodes_of(self, *names: str) -> list[str | None]:
        """Return the nodes to which the pods are bound."""
        return [self.pod(name)["spec"].get("nodeName") for name in names]

    def why(self, name: str) -> str | None:
        """Return the message about scheduling in the pod's status."""
        conditions = self.pod(name)["status"].get("conditions", [])
        return next(
            (
                condition.get("message")
                for condition in conditions
                if condition["type"] == "PodScheduled"
            ),
            None,
        )

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a change of the cluster that makes the condition true."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for _ in self.server.objects.revision.changes():
                if condition():
                    return

    async def bound(self, *names: str) -> None:
        """Wait until these pods are bound."""
        await self.until(lambda: all(self.nodes_of(*names)))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """An API server with the golden node."""
    async with (
        ApiServer() as server,
        Supervisor(backoff_min_seconds=1, backoff_max_seconds=1) as supervisor,
    ):
        server.objects.create("nodes", node())
        yield Cluster(server, supervisor)


def _bindings(cluster: Cluster) -> list[Object]:
    return [request.body for request in cluster.server.writes if request.resource == "pods/binding"]


def _writes(cluster: Cluster) -> list[str]:
    return [f"{request.verb} {request.resource}" for request in cluster.server.writes]


async def test_g3_annotations_come_with_the_binding(cluster: Cluster) -> None:
    """volcano-vgpu:G3: one write, the Binding, carries the six annotations beside the pod's own.
    None is seen without the other.
    """
    cluster.start()
    cluster.add(pod("p", asking(1, 3000, 50), annotations={"mine": "stays"}))
    await cluster.bound("p")
    assert _writes(cluster) == ["create pods/binding"]
    seen = [
        change.after
        for change in cluster.server.objects.changes_after(1)
        if change.resource == "pods" and change.after
    ]
    assert [
        (bool(each["spec"].get("nodeName")), IDS in each["metadata"]["annotations"])
        for each in seen
    ] == [(False, False), (True, True)]
    annotations = cluster.pod("p")["metadata"]["annotations"]
    stamp = annotations["volcano.sh/vgpu-time"]
    assert abs(int(stamp) - time.time()) < 60
    assert annotations == {
        "mine": "stays",
        "volcano.sh/vgpu-node": "node-a",
        "volcano.sh/vgpu-time": stamp,
        "volcano.sh/bind-time": stamp,
        "volcano.sh/bind-phase": "allocating",
        IDS: f"{U1},NVIDIA,3000,50:",
        "volcano.sh/devices-to-allocate": f"{U1},NVIDIA,3000,50:",
    }


async def test_the_old_way_writes_the_annotations_before_it_binds(cluster: Cluster) -> None:
    """Up to 1.15 the live pod is patched, then bound without annotations.
    The node answers a ping in time.
    """
    cluster.server.objects.patch(
        "nodes",
        "node-a",
        {"metadata": {"annotations": {"volcano.sh/node-vgpu-handshake": "Reported now"}}},
    )
    cluster.start(old=True)
    cluster.add(pod("p", asking(1, 3000, 50)))
    await cluster.bound("p")
    assert _writes(cluster) == ["patch nodes", "patch pods", "create pods/binding"]
    assert cluster.ids("p") == ["U1,NVIDIA,3000,50:"]
    assert "annotations" not in _bindings(cluster)[0]["metadata"]


async def test_annotations_of_an_earlier_attempt_count_for_nothing(cluster: Cluster) -> None:
    """An old scheduler that died between patch and bind leaves them behind: no card is taken by
    them, and they are written anew.
    """
    cluster.server.objects.patch(
        "nodes",
        "node-a",
        {"metadata": {"annotations": {"volcano.sh/node-vgpu-handshake": "Reported now"}}},
    )
    stale = {
        "volcano.sh/vgpu-node": "elsewhere",
        "volcano.sh/vgpu-time": "1",
        IDS: f"{U1},NVIDIA,24576,0:",
    }
    cluster.add(
        pod("a", asking(1, 24576), annotations=stale), pod("b", asking(1, 24576), annotations=stale)
    )
    cluster.start(old=True)
    await cluster.bound("a", "b")
    assert cluster.ids("a", "b") == ["U1,NVIDIA,24576,0:", "U0,NVIDIA,24576,0:"]
    assert [
        cluster.pod(name)["metadata"]["annotations"]["volcano.sh/vgpu-node"] for name in ("a", "b")
    ] == ["node-a"] * 2


async def test_the_old_way_gives_a_node_up_that_does_not_answer(cluster: Cluster) -> None:
    """Requesting, and Deleted after 60 seconds; then pods arrive without annotations."""

    def handshake() -> str:
        return str(
            cluster.server.objects.get("nodes", "node-a")["metadata"]["annotations"][
                "volcano.sh/node-vgpu-handshake"
            ]
        )

    cluster.server.objects.patch(
        "nodes",
        "node-a",
        {"metadata": {"annotations": {"volcano.sh/node-vgpu-handshake": "Reported now"}}},
    )
    cluster.start(old=True)
    await cluster.until(lambda: handshake().startswith("Requesting_"))
    cluster.now = 62
    await cluster.until(lambda: handshake().startswith("Deleted_"))
    cluster.add(pod("p", asking(1, 3000)))
    await cluster.bound("p")
    assert cluster.ids("p") == [None]


async def test_a_node_that_is_no_gpu_node_to_it_gets_pods_without_annotations(
    cluster: Cluster,
) -> None:
    """The predicate is skipped, not failed, so plain arithmetic decides (volcano-vgpu §2.2)."""
    cluster.server.objects.patch(
        "nodes", "node-a", {"metadata": {"annotations": {"volcano.sh/node-vgpu-register": None}}}
    )
    cluster.start()
    cluster.add(pod("p", asking(1, 3000)))
    await cluster.bound("p")
    assert cluster.ids("p") == [None]


async def test_over_commit_is_refused_in_volcanos_words_and_only_once(cluster: Cluster) -> None:
    """The pod waits with the sentence of the real scheduler in its status and in one event,
    and is placed when there is room.
    """
    cluster.start(policy="binpack")
    cluster.add(pod("one", asking(2, 20000)))
    await cluster.bound("one")
    cluster.add(pod("two", asking(1, 5000)))
    await cluster.until(lambda: cluster.why("two"))
    assert cluster.why("two") == "0/1 nodes are unavailable: 1 hami-vgpuDeviceSharing error."
    await asyncio.sleep(0.2)  # ten rounds
    told = [event["message"] for event in cluster.server.objects.list("events")]
    assert told == ["0/1 nodes are unavailable: 1 hami-vgpuDeviceSharing error."]
    cluster.server.objects.delete("pods", "one", "default", grace_seconds=0)
    await cluster.bound("two")


async def test_a_percentage_waits_for_ever(cluster: Cluster) -> None:
    """Since 1.13 it is an ordinary resource that no node offers (volcano-vgpu §8)."""
    cluster.start()
    cluster.add(pod("p", asking(1, percentage=50)))
    await cluster.until(lambda: cluster.why("p"))
    assert (
        cluster.why("p")
        == "0/1 nodes are unavailable: 1 Insufficient volcano.sh/vgpu-memory-percentage."
    )


async def test_pods_of_others_are_left_alone(cluster: Cluster) -> None:
    """Other schedulers' pods, gated ones and those on their way are not touched."""
    cluster.start()
    cluster.add(
        pod("other", asking(1, 1), schedulerName="default-scheduler"),
        pod("gated", asking(1, 1), schedulingGates=[{"name": "x"}]),
        pod("ours", asking(1, 1)),
    )
    await cluster.bound("ours")
    assert cluster.nodes_of("other", "gated") == [None, None]


async def test_a_burst_is_placed_without_overlap(cluster: Cluster) -> None:
    """Twenty pods at once fill both cards exactly, in the order of their names,
    without waiting for the watch.
    """
    names = [f"p{number:02}" for number in range(20)]
    cluster.start(policy="spread")
    cluster.add(*(pod(name, asking(1, 2457)) for name in names))
    await cluster.bound(*names)
    assert cluster.ids(*names) == ["U0,NVIDIA,2457,0:", "U1,NVIDIA,2457,0:"] * 10


def _gang(count: int, *, needed: int, memory: int) -> Sequence[Object]:
    annotations = {
        "scheduling.k8s.io/group-name": "g",
        "scheduling.volcano.sh/group-min-member": str(needed),
    }
    return [
        pod(f"g{number}", asking(1, memory), annotations=annotations) for number in range(count)
    ]


async def test_a_gang_is_placed_as_a_whole_or_not_at_all(cluster: Cluster) -> None:
    """Three of four would fit: none is bound and nothing is written to them but why.
    With room for all, all are.
    """
    cluster.start()
    cluster.add(pod("holder", asking(1, 20000)))
    await cluster.bound("holder")
    cluster.add(*_gang(4, needed=4, memory=8000))
    await cluster.until(lambda: all(cluster.why(f"g{number}") for number in range(4)))
    assert cluster.nodes_of("g0", "g1", "g2", "g3") == [None] * 4
    assert cluster.ids("g0", "g1", "g2", "g3") == [None] * 4
    assert cluster.why("g0") == "pod group is not ready, 3 can be placed, 4 are needed."
    cluster.server.objects.delete("pods", "holder", "default", grace_seconds=0)
    await cluster.bound("g0", "g1", "g2", "g3")


async def test_a_gang_may_be_larger_than_it_must(cluster: Cluster) -> None:
    """With a smaller minimum, given as a setting,
    those that fit are bound and the others wait for themselves.
    """
    cluster.start(min_members={"default/g": 2})
    cluster.add(*_gang(3, needed=1, memory=16000))
    await cluster.bound("g0", "g1")
    await cluster.until(lambda: cluster.why("g2"))
    assert cluster.why("g2") == "0/1 nodes are unavailable: 1 hami-vgpuDeviceSharing error."


async def test_the_node_lock_admits_one_pod_at_a_time(cluster: Cluster) -> None:
    """The lock is taken before the bind. The next pod waits until the plugin has removed it,
    or for 5 minutes.
    """

    def lock() -> str | None:
        found: str | None = cluster.server.objects.get("nodes", "node-a")["metadata"][
            "annotations"
        ].get(LOCK)
        return found

    cluster.start(node_lock=True)
    cluster.add(*(pod(name, asking(1, 10)) for name in ("a", "b", "c")))
    await cluster.until(lambda: cluster.nodes_of("a")[0] and cluster.why("b") and cluster.why("c"))
    assert _writes(cluster)[:2] == ["patch nodes", "create pods/binding"]
    assert lock() is not None
    assert cluster.nodes_of("b", "c") == [None, None]
    cluster.server.objects.patch("nodes", "node-a", {"metadata": {"annotations": {LOCK: None}}})
    await cluster.bound("b")
    assert cluster.nodes_of("c") == [None]
    cluster.now = 301
    await cluster.bound("c")


async def test_s2_gpushare(cluster: Cluster) -> None:
    """volcano-gpushare:S2: index and time come with the Binding. A pod too large waits."""
    cluster.server.objects.delete("nodes", "node-a")
    cluster.server.objects.create("nodes", gpushare_node())
    cluster.start(gpushare="share", node_lock=True)
    cluster.add(pod("p", {"volcano.sh/gpu-memory": "3000"}))
    await cluster.bound("p")
    annotations = cluster.pod("p")["metadata"]["annotations"]
    assert annotations["volcano.sh/gpu-index"] == "0"
    assert len(annotations["volcano.sh/predicate-time"]) == 19
    assert "gpu" in cluster.server.objects.get("nodes", "node-a")["metadata"]["annotations"]
    cluster.add(pod("large", {"volcano.sh/gpu-memory": "24577"}))
    await cluster.until(lambda: cluster.why("large"))


async def test_a_scheduler_that_starts_anew_knows_what_was_given(cluster: Cluster) -> None:
    """All it knows is in the API."""
    cluster.start(policy="binpack")
    cluster.add(pod("one", asking(1, 20000)))
    await cluster.bound("one")
    await cluster.supervisor.stop("scheduler")
    cluster.add(pod("two", asking(1, 5000)), pod("three", asking(1, 4000)))
    cluster.start(policy="binpack")
    await cluster.bound("two", "three")
    assert cluster.ids("one", "two", "three") == [
        "U0,NVIDIA,20000,0:",
        "U1,NVIDIA,5000,0:",
        "U0,NVIDIA,4000,0:",
    ]


@pytest.mark.parametrize(
    "kind", [FaultKind.LOST_ANSWER, FaultKind.RESET, FaultKind.HTML, FaultKind.TRUNCATED]
)
async def test_a_binding_without_an_answer_is_looked_at_again(
    cluster: Cluster, kind: FaultKind
) -> None:
    """The outcome is read from a new list, so no card is given twice and no pod is forgotten."""
    cluster.server.faults.append(Fault(kind, resource="pods/binding", times=2))
    cluster.start(policy="binpack")
    cluster.add(*(pod(name, asking(1, 12288)) for name in ("a", "b", "c", "d")))
    await cluster.bound("a", "b", "c", "d")
    assert (
        sorted(filter(None, cluster.ids("a", "b", "c", "d")))
        == ["U0,NVIDIA,12288,0:"] * 2 + ["U1,NVIDIA,12288,0:"] * 2
    )


@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.CLOSE,
        FaultKind.ERROR_EVENT,
        FaultKind.TRUNCATED,
        FaultKind.RESET,
        FaultKind.STATUS,
    ],
)
async def test_a_broken_watch_is_begun_anew(cluster: Cluster, kind: FaultKind) -> None:
    """The scheduler goes on after any end of a watch."""
    cluster.server.faults.append(Fault(kind, verb="watch", times=3))
    cluster.start()
    await cluster.until(lambda: True)
    cluster.add(pod("p", asking(1, 1)))
    await cluster.bound("p")


async def test_a_refused_binding_does_not_hold_up_the_others(cluster: Cluster) -> None:
    """A binding that the server refuses for its content is tried again in the next round."""
    cluster.server.faults.append(
        Fault(
            FaultKind.STATUS,
            resource="pods/binding",
            name="a",
            code=409,
            reason="Conflict",
            times=2,
        )
    )
    cluster.start()
    cluster.add(pod("a", asking(1, 1)), pod("b", asking(1, 1)))
    await cluster.bound("a", "b")
    assert [body["metadata"]["name"] for body in _bindings(cluster)][:2] == ["a", "b"]


async def test_an_outage_is_waited_for(cluster: Cluster) -> None:
    """While the API server is away nothing is lost. Afterwards it goes on."""
    cluster.start()
    await cluster.server.down()
    cluster.add(pod("p", asking(1, 1)))
    await asyncio.sleep(0.1)
    await cluster.server.up()
    await cluster.bound("p")


async def test_nothing_is_asked_while_nothing_changes(cluster: Cluster) -> None:
    """Besides the watches, and with a pod that waits."""
    cluster.start()
    cluster.add(pod("p", asking(1, 99999)))
    await cluster.until(lambda: cluster.server.objects.list("events"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:  # what belongs to the event may still be on its way
            cluster.server.requests.clear()
            await asyncio.sleep(0.2)
            if not cluster.server.requests:
                break
    await asyncio.sleep(0.2)
    assert cluster.server.requests == []


async def test_a_kubeconfig_is_understood(cluster: Cluster, tmp_path: Path) -> None:
    """Server and token of the current context."""
    path = await asyncio.to_thread(cluster.server.kubeconfig, tmp_path / "config", token="secret")
    assert await asyncio.to_thread(ApiAccess.from_kubeconfig, path) == ApiAccess(
        cluster.server.url, "secret"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--kubeconfig", "/nowhere/config"], "kubeconfig /nowhere/config cannot be used"),
        (
            ["--kubeconfig", "/nowhere/config", "--min-member", "default/g=many"],
            "'default/g=many' has no number",
        ),
    ],
)
def test_the_command_refuses_what_it_cannot_use(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the value, and no traceback."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert expected in f"{ended.value}{capsys.readouterr().err}"


@pytest.mark.parametrize("content", ["", "{", "a: 1", "current-context: x\ncontexts: []", None])
def test_a_bad_kubeconfig_is_named(content: str | None, tmp_path: Path) -> None:
    """The message says which file cannot be used."""
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SimulationError, match=f"kubeconfig {path} cannot be used"):
        ApiAccess.from_kubeconfig(path)
