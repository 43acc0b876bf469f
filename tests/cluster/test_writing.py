"""Each writer of the room once over HTTP, with the real client and the real watches,
against the simulated API server.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.scripted import running, until
from vgpu_agent.allocation.notices import Notices
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.cluster import reschedule
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.events import Events
from vgpu_agent.cluster.node_publisher import NodePublisher
from vgpu_agent.cluster.pod_publisher import PodPublisher
from vgpu_agent.cluster.reschedule import Reschedule
from vgpu_agent.cluster.watching import NodeWatch, PodWatch
from vgpu_agent.concurrency import Revision
from vgpu_agent.config.binding import Binding
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import DesiredNode
from vgpu_agent.pods import DesiredPod, PodCache
from vgpu_agent.sim.api.server import ApiServer

REGISTER, LOCK, GPUS = "volcano.sh/node-vgpu-register", "hamivgpu", "volcano.sh/gpu-number"
READY: dict[str, Any] = {
    "type": "Ready",
    "status": "True",
    "reason": "KubeletReady",
    "message": "ok",
}


def _pod(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": "n1", "containers": [{"name": "main"}]},
    }


async def test_the_desired_state_outlives_a_deletion_of_the_node(
    server: ApiServer, client: ApiClient, journal: Journal
) -> None:
    """Annotations, label, quantities and condition beside the kubelet's, and a removed lock.
    All of it comes again on a new Node.
    """
    desired_state = DesiredNode(
        annotations={REGISTER: "U0,10:", LOCK: None},
        labels={"vgpu-agent.io/isolation": "none"},
        capacity={GPUS: "2"},
        conditions={"GpuReady": ("True", "AllGpus", "2 GPUs")},
        guarded=frozenset({LOCK}),
    )
    watch = NodeWatch(client, "n1", journal=journal)
    publisher = NodePublisher(
        client, "n1", watch.node, lambda _node, _now: desired_state, Revision(), journal
    )

    def stands() -> bool:
        node = watch.node.value
        return (
            node is not None
            and node.annotations == {REGISTER: "U0,10:"}
            and node.labels == desired_state.labels
            and node.capacity.get(GPUS) == node.allocatable.get(GPUS) == "2"
            and list(node.conditions) == ["Ready", "GpuReady"]
        )

    async with running(watch.run), running(publisher.run):
        server.objects.create(
            "nodes",
            {
                "metadata": {"name": "n1", "annotations": {LOCK: "x"}},
                "status": {"conditions": [READY]},
            },
        )
        await until(stands)
        await until(publisher.first.is_set)  # by the answer, and the watch may be quicker
        server.objects.delete("nodes", "n1")
        await until(lambda: watch.node.value is None)
        server.objects.create(
            "nodes", {"metadata": {"name": "n1"}, "status": {"conditions": [READY]}}
        )
        await until(stands)


async def test_a_resource_that_is_offered_no_more_leaves_the_node(
    server: ApiServer, client: ApiClient, journal: Journal
) -> None:
    """vgpu-manager §2.2: the patch removes it from capacity and allocatable, again when the kubelet
    writes it once more, and leaves the kubelet's other quantities alone.
    """
    stale, kept = "nvidia.com/vgpu-cores", {"cpu": "8", "nvidia.com/vgpu-number": "20"}
    quantities = {**kept, stale: "200"}
    server.objects.create(
        "nodes",
        {
            "metadata": {"name": "n1"},
            "status": {"capacity": quantities, "allocatable": quantities, "conditions": [READY]},
        },
    )
    watch = NodeWatch(client, "n1", journal=journal)
    desired_state = DesiredNode(capacity={stale: None})
    publisher = NodePublisher(
        client, "n1", watch.node, lambda _node, _now: desired_state, Revision(), journal
    )

    def is_gone() -> bool:
        status = server.objects.get("nodes", "n1")["status"]
        return bool(status["capacity"] == status["allocatable"] == kept)

    async with running(watch.run), running(publisher.run):
        await until(is_gone)
        zero = {"status": {"capacity": {stale: "0"}, "allocatable": {stale: "0"}}}
        await client.patch("/api/v1/nodes/n1/status", zero)
        await until(is_gone)


async def test_a_pods_annotations_stand_after_an_outage(
    server: ApiServer, client: ApiClient, journal: Journal
) -> None:
    """The container was let go while the API server was away.
    What is written later is one patch of this very pod.
    """
    book, wake = PodCache(), Revision()
    desired_state: dict[str, DesiredPod] = {}
    watch = PodWatch(client, "n1", book, journal=journal)
    publisher = PodPublisher(client, book, lambda: desired_state, wake, journal)
    pod = server.objects.create("pods", _pod("a"))
    async with running(watch.run), running(publisher.run):
        await until(lambda: len(book.pods) == 1)
        await server.down()
        desired_state[pod["metadata"]["uid"]] = DesiredPod(
            {"volcano.sh/bind-phase": "success", "volcano.sh/devices-to-allocate": None}
        )
        wake.publish(1)
        await until(lambda: publisher.counts.failed > 0)
        await server.up()
        await until(lambda: book.pods[0].annotations == {"volcano.sh/bind-phase": "success"})
    assert [request.verb for request in server.writes] == ["patch"]


async def test_a_refused_pod_is_told_of_and_evicted(
    server: ApiServer, client: ApiClient, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is the pod's, the eviction carries its UID."""
    book, refusals = PodCache(), Refusals()
    watch = PodWatch(client, "n1", book, journal=journal)
    events = Events(client, "vgpu-agent", "n1", journal)
    monkeypatch.setattr(reschedule, "REFUSED_EVENT_SECONDS", 0.05)
    binding = Binding(refused_evict_seconds=0.1)
    check = Reschedule(
        client,
        events,
        lambda: refusals.current,
        refusals.revision,
        binding,
        journal,
        notices=Notices(),
    )
    server.objects.create("pods", _pod("a"))
    async with running(watch.run), running(events.run), running(check.run):
        await until(lambda: len(book.pods) == 1)
        uid = book.pods[0].uid
        refusals.refuse(book.pods[0], "main", "volcano.sh/vgpu-number", "no GPU has 8000 MiB left")
        await until(
            lambda: (
                check.evictions["evicted"] == 1
                and len(server.objects.list("events", "default")) == 2
            )
        )
    told = {
        event["reason"]: event["involvedObject"]["uid"]
        for event in server.objects.list("events", "default")
    }
    assert told == {"VgpuStartRefused": uid, "VgpuEvicted": uid}


async def test_a_patch_of_another_pods_uid_changes_nothing(
    server: ApiServer, client: ApiClient
) -> None:
    """The precondition in the body of the merge patch protects a re-created pod of one name."""
    server.objects.create("pods", _pod("a"))
    with pytest.raises(ClusterError) as raised:
        await client.patch(
            "/api/v1/namespaces/default/pods/a",
            {"metadata": {"uid": "another", "annotations": {"a": "b"}}},
        )
    assert raised.value.status == 422
