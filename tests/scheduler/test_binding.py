"""The labels of a pod: written by its Binding, or by a patch."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.scheduler.test_extender import SMALL, Cluster, a_pod
from vgpu_agent.cluster import decode
from vgpu_agent.errors import ClusterError

PHASE, NODE = "nvidia.com/assigned-phase", "nvidia.com/metrics-node"
BOTH = {PHASE: "allocating", NODE: "n0"}


async def _bound(cluster: Cluster, name: str, **labels: str) -> tuple[dict[str, Any], list[str]]:
    """Bind a pod, which has these labels; return it and the requests that this took."""
    pod = a_pod(name, **SMALL)
    pod["metadata"]["labels"] = labels
    assert cluster.filter(pod, "n0")["NodeNames"] == ["n0"]
    cluster.server.requests.clear()
    assert await cluster.bind(pod, "n0") == ""
    return pod, [verb for verb, _, _ in cluster.server.requests]


def _see(cluster: Cluster, pod: dict[str, Any], labels: dict[str, str]) -> None:
    """Let the watch show the pod, bound, with these labels."""
    _, _, binding = cluster.server.requests[-1]
    shown = {
        "metadata": {
            **pod["metadata"],
            "annotations": binding["metadata"]["annotations"],
            "labels": labels,
            "resourceVersion": "7",
        },
        "spec": {**pod["spec"], "nodeName": "n0"},
    }
    path = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"
    cluster.server.pods[path] = shown
    cluster.extender.see_pod(decode.pod(json.dumps(shown).encode()))


async def test_labels_that_come_with_the_binding_need_no_patch() -> None:
    """One request for each pod, once the watch has shown that."""
    cluster = Cluster(1)
    pod, requests = await _bound(cluster, "a")
    assert requests == ["PATCH", "POST"]
    _see(cluster, pod, BOTH)
    pod, requests = await _bound(cluster, "b")
    assert requests == ["POST"]
    assert cluster.server.requests[0][2]["metadata"]["labels"] == BOTH
    _see(cluster, pod, BOTH)
    assert (await _bound(cluster, "c"))[1] == ["POST"]


async def test_an_older_api_server_gets_a_patch_for_each_pod() -> None:
    """It drops the labels of Bindings. The one that the first pod lacks is written late."""
    cluster = Cluster(1)
    pod, _ = await _bound(cluster, "a")
    cluster.server.requests.clear()
    cluster.server.requests.append(("POST", "", {"metadata": {"annotations": {}}}))
    _see(cluster, pod, {PHASE: "allocating"})
    await asyncio.sleep(0)
    verb, _, body = cluster.server.requests[-1]
    assert (verb, body["metadata"]["labels"]) == ("PATCH", {NODE: "n0"})
    assert body["metadata"]["resourceVersion"] == "7"
    pod, requests = await _bound(cluster, "b")
    assert requests == ["PATCH", "POST"]
    assert cluster.server.requests[0][2]["metadata"]["labels"] == BOTH


async def test_another_api_server_that_drops_labels_is_noticed() -> None:
    """In the middle of an upgrade, each request may reach another version."""
    cluster = Cluster(1)
    pod, _ = await _bound(cluster, "a")
    _see(cluster, pod, BOTH)
    pod, _ = await _bound(cluster, "b")
    _see(cluster, pod, {})
    await asyncio.sleep(0)
    assert cluster.server.requests[-1][2]["metadata"]["labels"] == BOTH
    assert (await _bound(cluster, "c"))[1] == ["PATCH", "POST"]
    assert "scheduler.labels_not_bound" in [each.event for each in cluster.journal.entries]


async def test_late_labels_do_not_undo_what_the_node_has_written() -> None:
    """Its agent may have served the pod before the watch or the patch was there."""
    cluster = Cluster(1)
    pod, _ = await _bound(cluster, "a")
    _see(cluster, pod, {PHASE: "succeed"})
    await asyncio.sleep(0)
    assert [verb for verb, _, _ in cluster.server.requests] == ["PATCH", "POST"]
    pod, _ = await _bound(cluster, "b")
    cluster.server.failure["PATCH"] = ClusterError("409: the pod has changed", status=409)
    _see(cluster, pod, {PHASE: "allocating"})
    path = "/api/v1/namespaces/default/pods/b"
    cluster.server.pods[path]["metadata"]["labels"] = {PHASE: "succeed", NODE: "n0"}
    await asyncio.sleep(0)
    assert [verb for verb, _, _ in cluster.server.requests] == ["PATCH", "POST", "PATCH"]


async def test_a_late_label_that_meets_a_conflict_leaves_the_phase_alone() -> None:
    """The kubelet has changed the pod meanwhile, and the agent has written that it is served."""
    cluster = Cluster(1)
    pod, _ = await _bound(cluster, "a")
    cluster.server.failure["PATCH"] = ClusterError("409: the pod has changed", status=409)
    _see(cluster, pod, {PHASE: "allocating"})
    path = "/api/v1/namespaces/default/pods/a"
    cluster.server.pods[path]["metadata"]["labels"] = {PHASE: "succeed"}
    for _ in range(5):
        await asyncio.sleep(0)
    late = [
        body["metadata"]["labels"] for verb, _, body in cluster.server.requests if verb == "PATCH"
    ]
    assert late[1:]
    assert all(labels == {NODE: "n0"} for labels in late[1:])


async def test_a_pod_that_had_such_a_label_gets_a_patch() -> None:
    """Not every API server replaces a label with that of a Binding."""
    cluster = Cluster(1)
    pod, _ = await _bound(cluster, "a")
    _see(cluster, pod, BOTH)
    assert (await _bound(cluster, "b", **{PHASE: "failed"}))[1] == ["PATCH", "POST"]
