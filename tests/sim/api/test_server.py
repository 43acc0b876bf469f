"""The simulated API server keeps the rules of the real one that agents and schedulers live by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from vgpu_agent.sim.api.faults import Fault, FaultKind, Request
from vgpu_agent.sim.api.objects import ApiRefusalError, ObjectStore
from vgpu_agent.sim.api.server import ApiServer

_PODS = "/api/v1/namespaces/default/pods"
_MERGE = {"Content-Type": "application/merge-patch+json"}


class Caller:
    """A plain HTTP client of one server."""

    def __init__(self, server: ApiServer, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    async def ask(
        self, method: str, path: str, body: object = None, **more: Any
    ) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        data = None if body is None else msgspec.json.encode(body)
        async with self.session.request(
            method, self.server.url + path, data=data, **more
        ) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def patch(self, path: str, body: object) -> tuple[int, Any]:
        """A merge patch."""
        return await self.ask("PATCH", path, body, headers=_MERGE)

    async def watch(self, path: str, **params: str) -> AsyncIterator[tuple[str, Any]]:
        """Type and object of each event."""
        async with self.session.get(
            self.server.url + path, params={"watch": "true", **params}
        ) as response:
            async for line in response.content:
                event = msgspec.json.decode(line)
                yield event["type"], event["object"]


@pytest.fixture
async def api() -> AsyncIterator[Caller]:
    """A running server and its client."""
    async with ApiServer() as server, aiohttp.ClientSession() as session:
        yield Caller(server, session)


def _pod(name: str, node: str = "", **annotations: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"nodeName": node} if node else {},
    }


async def test_a_created_pod_is_there_with_uid_version_and_phase(api: Caller) -> None:
    """The stand-in fills in what the API server fills in."""
    assert (await api.ask("POST", _PODS, _pod("train")))[0] == 201
    _, pod = await api.ask("GET", f"{_PODS}/train")
    assert pod["metadata"]["namespace"] == "default"
    assert pod["metadata"]["uid"]
    assert pod["metadata"]["resourceVersion"] == "2"
    assert pod["status"]["phase"] == "Pending"
    assert (await api.ask("POST", _PODS, _pod("train")))[0] == 409


async def test_a_binding_sets_node_and_annotations_at_once(api: Caller) -> None:
    """One event shows both, the pod's own annotations stay, and a second Binding is refused."""
    api.server.objects.create("pods", _pod("train", kept="yes"))
    version = str(api.server.objects.version)
    binding = {
        "metadata": {"annotations": {"volcano.sh/vgpu-node": "n1"}},
        "target": {"kind": "Node", "name": "n1"},
    }
    assert (await api.ask("POST", f"{_PODS}/train/binding", binding))[0] == 201
    events = api.watch("/api/v1/pods", resourceVersion=version, fieldSelector="spec.nodeName=n1")
    kind, pod = await anext(events)
    assert kind == "ADDED"  # to a watch of that node the pod is new
    assert pod["spec"]["nodeName"] == "n1"
    assert pod["metadata"]["annotations"] == {"kept": "yes", "volcano.sh/vgpu-node": "n1"}
    assert (await api.ask("POST", f"{_PODS}/train/binding", binding))[0] == 409


async def test_a_merge_patch_removes_what_is_null_and_makes_no_version_of_nothing(
    api: Caller,
) -> None:
    """An annotation goes; the same patch again changes nothing, not even the version."""
    api.server.objects.create(
        "nodes", {"metadata": {"name": "n1", "annotations": {"a": "1", "b": "2"}}}
    )
    patch = {"metadata": {"annotations": {"a": None, "c": "3"}}}
    _, first = await api.patch("/api/v1/nodes/n1", patch)
    _, second = await api.patch("/api/v1/nodes/n1", patch)
    assert first["metadata"]["annotations"] == {"b": "2", "c": "3"}
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    ("precondition", "code", "reason"),
    [
        ({"resourceVersion": "1"}, 409, "Conflict"),
        ({"uid": "another"}, 422, "Invalid"),
        ({"uid": "another", "resourceVersion": "1"}, 409, "Conflict"),
    ],
)
async def test_a_patch_whose_precondition_does_not_hold_is_refused(
    api: Caller, precondition: dict[str, str], code: int, reason: str
) -> None:
    """A kube-apiserver 1.36 does so: another version is a conflict,
    another UID a field that cannot change.
    """
    before = api.server.objects.create("pods", _pod("train"))
    status, answer = await api.patch(
        f"{_PODS}/train", {"metadata": {**precondition, "annotations": {"a": "1"}}}
    )
    assert (status, answer["reason"]) == (code, reason)
    assert api.server.objects.get("pods", "train", "default") == before


async def test_status_changes_only_through_its_subresource(api: Caller) -> None:
    """A patch of the Node leaves its status alone,
    one of nodes/status changes it and may change annotations.
    """
    api.server.objects.create(
        "nodes", {"metadata": {"name": "n1"}, "status": {"capacity": {"cpu": "4"}}}
    )
    _, main = await api.patch(
        "/api/v1/nodes/n1", {"status": {"capacity": {"volcano.sh/gpu-number": "2"}}}
    )
    _, status = await api.patch(
        "/api/v1/nodes/n1/status", {"status": {"capacity": {"volcano.sh/gpu-number": "2"}}}
    )
    assert main["status"]["capacity"] == {"cpu": "4"}
    assert status["status"]["capacity"] == {"cpu": "4", "volcano.sh/gpu-number": "2"}


async def test_strategic_patches_merge_conditions_by_type_and_merge_patches_replace_them(
    api: Caller,
) -> None:
    """The difference that costs other conditions when it is forgotten."""
    ready, pressure = {"type": "Ready", "status": "True"}, {"type": "GpuHealthy", "status": "True"}
    api.server.objects.create(
        "nodes", {"metadata": {"name": "n1"}, "status": {"conditions": [ready]}}
    )
    headers = {"Content-Type": "application/strategic-merge-patch+json"}
    body = {"status": {"conditions": [pressure]}}
    _, strategic = await api.ask("PATCH", "/api/v1/nodes/n1/status", body, headers=headers)
    _, merged = await api.patch("/api/v1/nodes/n1/status", body)
    assert strategic["status"]["conditions"] == [ready, pressure]
    assert merged["status"]["conditions"] == [pressure]


async def test_a_pod_spec_does_not_change(api: Caller) -> None:
    """The node of a pod is set by a Binding and by nothing else."""
    api.server.objects.create("pods", _pod("train"))
    assert (await api.patch(f"{_PODS}/train", {"spec": {"nodeName": "n1"}}))[0] == 422


async def test_a_json_patch_is_refused(api: Caller) -> None:
    """A request that we never send must not work by accident."""
    api.server.objects.create("pods", _pod("train"))
    status, _ = await api.ask(
        "PATCH", f"{_PODS}/train", {}, headers={"Content-Type": "application/json-patch+json"}
    )
    assert status == 415


async def test_pages_show_what_the_first_one_saw(api: Caller) -> None:
    """A pod that comes between two pages is in neither, and a token that was used is gone."""
    for number in range(5):
        api.server.objects.create("pods", _pod(f"p{number}", "n1"))
    _, first = await api.ask("GET", "/api/v1/pods", params={"limit": "3"})
    api.server.objects.create("pods", _pod("p9", "n1"))
    rest = {"limit": "3", "continue": first["metadata"]["continue"]}
    _, second = await api.ask("GET", "/api/v1/pods", params=rest)
    names = [pod["metadata"]["name"] for pod in first["items"] + second["items"]]
    assert names == ["p0", "p1", "p2", "p3", "p4"]
    assert "continue" not in second["metadata"]
    assert (await api.ask("GET", "/api/v1/pods", params=rest))[0] == 410


async def test_a_watch_shows_changes_of_its_own_pods_only_and_in_order(api: Caller) -> None:
    """Added, modified, deleted; another node's pod is never seen."""
    version = str(api.server.objects.version)
    events = api.watch("/api/v1/pods", resourceVersion=version, fieldSelector="spec.nodeName=n1")
    api.server.objects.create("pods", _pod("other", "n2"))
    api.server.objects.create("pods", _pod("mine", "n1"))
    api.server.objects.patch("pods", "mine", {"metadata": {"labels": {"a": "b"}}}, "default")
    api.server.objects.delete("pods", "mine", "default", grace_seconds=0)
    seen = [await anext(events) for _ in range(3)]
    assert [(kind, thing["metadata"]["name"]) for kind, thing in seen] == [
        ("ADDED", "mine"),
        ("MODIFIED", "mine"),
        ("DELETED", "mine"),
    ]
    assert seen[2][1]["metadata"]["resourceVersion"] == str(api.server.objects.version)


async def test_a_watch_of_a_version_that_was_compacted_is_told_410(api: Caller) -> None:
    """The real server reports it as an ERROR event too."""
    version = str(api.server.objects.version)
    api.server.objects.create("pods", _pod("train"))
    api.server.objects.compact()
    kind, status = await anext(api.watch("/api/v1/pods", resourceVersion=version))
    assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")


async def test_a_quiet_watch_gets_bookmarks() -> None:
    """With the newest version, although nothing of it was for this watch."""
    async with ApiServer(bookmark_seconds=0.02) as server, aiohttp.ClientSession() as session:
        events = Caller(server, session).watch(
            "/api/v1/nodes", resourceVersion="1", allowWatchBookmarks="true"
        )
        server.objects.create("pods", _pod("train"))
        kind, thing = await anext(events)
        assert (kind, thing["metadata"]["resourceVersion"]) == ("BOOKMARK", "2")
        await events.aclose()  # type: ignore[attr-defined]  # an async generator


async def test_a_bound_pod_is_deleted_in_two_steps(api: Caller) -> None:
    """First it gets a deletion time, then kubelet removes it. An unbound one is gone at once."""
    api.server.objects.create("pods", _pod("bound", "n1"))
    api.server.objects.create("pods", _pod("pending"))
    _, dying = await api.ask("DELETE", f"{_PODS}/bound")
    await api.ask("DELETE", f"{_PODS}/pending")
    assert dying["metadata"]["deletionTimestamp"]
    assert (await api.ask("GET", f"{_PODS}/pending"))[0] == 404
    await api.ask("DELETE", f"{_PODS}/bound", {"gracePeriodSeconds": 0})
    assert (await api.ask("GET", f"{_PODS}/bound"))[0] == 404


async def test_an_eviction_deletes_the_pod_it_names_and_no_other_of_that_name(api: Caller) -> None:
    """A wrong UID is a conflict."""
    pod = api.server.objects.create("pods", _pod("train", "n1"))

    def eviction(uid: str) -> dict[str, Any]:
        return {
            "kind": "Eviction",
            "metadata": {"name": "train"},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }

    assert (await api.ask("POST", f"{_PODS}/train/eviction", eviction("another")))[0] == 409
    assert (await api.ask("POST", f"{_PODS}/train/eviction", eviction(pod["metadata"]["uid"])))[
        0
    ] == 201
    assert api.server.objects.get("pods", "train", "default")["metadata"]["deletionTimestamp"]


async def test_without_the_token_nothing_is_shown(api: Caller) -> None:
    """401 until the right one comes; more than one may be right, as while a token is rotated."""
    api.server.tokens = {"old", "new"}
    assert (await api.ask("GET", "/api/v1/nodes"))[0] == 401
    assert (await api.ask("GET", "/api/v1/nodes", headers={"Authorization": "Bearer new"}))[
        0
    ] == 200


async def test_the_log_says_what_was_asked_and_answered(api: Caller) -> None:
    """Verb, resource, body and status of each request, in order."""
    await api.ask("POST", _PODS, _pod("train"))
    await api.ask("GET", "/api/v1/nodes/none")
    written, read = api.server.requests
    assert (written.verb, written.resource, written.body["metadata"]["name"], written.status) == (
        "create",
        "pods",
        "train",
        201,
    )
    assert (read.verb, read.resource, read.name, read.status) == ("get", "nodes", "none", 404)
    assert api.server.writes == [written]


async def test_hooks_are_called_around_a_write(api: Caller) -> None:
    """Before: not yet there; after: there, and not yet answered."""
    seen: list[tuple[str, int]] = []

    async def before(request: Request) -> None:
        seen.append((request.verb, len(api.server.objects.list("pods"))))

    def after(request: Request) -> None:
        seen.append((request.verb, len(api.server.objects.list("pods"))))

    api.server.before_write, api.server.after_write = before, after
    await api.ask("POST", _PODS, _pod("train"))
    await api.ask("GET", _PODS)
    assert seen == [("create", 0), ("create", 1)]


async def test_an_outage_resets_and_refuses_and_ends_on_the_same_port(api: Caller) -> None:
    """Watches end, new requests are refused, and afterwards everything is as before."""
    api.server.objects.create("pods", _pod("train"))
    await api.server.down()
    with pytest.raises(aiohttp.ClientConnectionError):
        await api.ask("GET", f"{_PODS}/train")
    await api.server.up()
    assert (await api.ask("GET", f"{_PODS}/train"))[0] == 200


async def test_a_fault_hits_what_it_was_meant_for_and_as_often(api: Caller) -> None:
    """One list is spared, one fails, the next works again. Other verbs never notice."""
    api.server.faults = [
        Fault(
            FaultKind.STATUS,
            verb="list",
            resource="pods",
            code=429,
            times=1,
            skip=1,
            retry_after_seconds=7,
        )
    ]
    answers = [(await api.ask("GET", path))[0] for path in (_PODS, "/api/v1/nodes", _PODS, _PODS)]
    assert answers == [200, 200, 429, 200]


async def test_a_lost_answer_is_a_write_that_was_done(api: Caller) -> None:
    """The client sees a reset, the cluster has the object."""
    api.server.faults = [Fault(FaultKind.LOST_ANSWER, verb="create", times=1)]
    with pytest.raises(aiohttp.ClientError):
        await api.ask("POST", _PODS, _pod("train"))
    assert api.server.objects.get("pods", "train", "default")


@pytest.mark.parametrize(
    "path",
    ["/api/v1/pods?fieldSelector=spec.hostNetwork%3Dtrue", "/api/v1/pods?labelSelector=a%3Db"],
)
async def test_a_selector_that_is_not_known_is_refused(api: Caller, path: str) -> None:
    """It is never ignored: a test would see pods that a real server hides."""
    assert (await api.ask("GET", path))[0] == 400


async def test_latency_is_part_of_every_answer(api: Caller) -> None:
    """Twenty milliseconds each."""
    api.server.latency_seconds = 0.02
    began = asyncio.get_running_loop().time()
    await api.ask("GET", _PODS)
    assert asyncio.get_running_loop().time() - began >= 0.02


async def test_a_kubeconfig_names_server_and_token(api: Caller, tmp_path: Path) -> None:
    """It can be handed to kubectl as it is."""
    path = await asyncio.to_thread(api.server.kubeconfig, tmp_path / "kubeconfig", token="secret")
    config = msgspec.json.decode(await asyncio.to_thread(path.read_bytes))
    assert config["clusters"][0]["cluster"] == {"server": api.server.url}
    assert config["users"][0]["user"] == {"token": "secret"}


def test_the_history_is_bounded() -> None:
    """A watch that is too far behind has to list anew. Others get every change."""
    store = ObjectStore(history=10)
    for number in range(100):
        store.create("pods", _pod(f"p{number}"))
    with pytest.raises(ApiRefusalError, match="too old resource version"):
        store.changes_after(2)
    assert [change.version for change in store.changes_after(store.version - 3)] == [99, 100, 101]
