"""The extender's endpoints for people, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Generator, Mapping
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tests.families.vgpu_manager.scheduling.nodes import KEYS, uuid
from tests.scheduler.test_extender import SMALL, WHOLE, Cluster, a_pod
from vgpu_agent.cluster import decode
from vgpu_agent.errors import ClusterError
from vgpu_agent.families.vgpu_manager.scheduling.family import VgpuManagerScheduling
from vgpu_agent.scheduler import web as endpoints
from vgpu_agent.scheduler.capacity import Capacity
from vgpu_agent.scheduler.explain import Explanation, Waiting
from vgpu_agent.scheduler.web import OperatorEndpoints, read_waiting
from vgpu_agent.status import WatchStatus

PATH = "/api/v1/namespaces/default/pods/train"


class Site:
    """The endpoints of a cluster. State: whether the extender is ready and leads, and one of its
    watches.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.watch, self.leads = WatchStatus("all pods"), True
        self.cluster, self.ready, self.address = cluster, True, ""

    async def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        """Status, content type and body of an answer."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://{self.address}{path}", headers=headers) as answer,
        ):
            return answer.status, answer.content_type, await answer.text()

    async def error(self, path: str) -> tuple[int, str]:
        """Status and sentence of a failure."""
        status, kind, body = await self.get(path)
        assert kind == "application/json"
        found = json.loads(body)
        assert list(found) == ["error"]
        return status, found["error"]


@contextlib.asynccontextmanager
async def serving(cluster: Cluster) -> AsyncIterator[Site]:
    """A server with nothing but these endpoints."""
    site = Site(cluster)
    people = OperatorEndpoints(
        extender=cluster.extender,
        book=cluster.book,
        family=VgpuManagerScheduling(KEYS),
        read_pod=decode.pod,
        api=cluster.server,
        is_ready=lambda: site.ready,
        leads=lambda: site.leads,
        watches=lambda: (WatchStatus("all Nodes"), site.watch),
        clock=lambda: 1787331600.0,
    )
    application = web.Application()
    people.add_routes(application.router)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site.address = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield site
    finally:
        await runner.cleanup()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """The endpoints of two Nodes, and a pod of the API server."""
    cluster = Cluster()
    cluster.server.pods[PATH] = a_pod(**SMALL)
    async with serving(cluster) as found:
        yield found


async def test_a_pod_is_explained_in_json_and_in_text(site: Site) -> None:
    """The header or the parameter decides, and the parameter wins."""
    for path, accept, kind in (
        ("/explain?pod=default/train", "*/*", "application/json"),
        ("/explain?pod=default/train", "text/plain", "text/plain"),
        ("/explain?pod=default/train&format=text", "application/json", "text/plain"),
        ("/explain?pod=default/train&format=json", "text/plain", "application/json"),
    ):
        status, found, body = await site.get(path, Accept=accept)
        assert (status, found) == (200, kind)
        if kind == "text/plain":
            assert body.startswith("pod default/train: fits\n  Pod default/train is not bound")
        else:
            assert msgspec.json.decode(body, type=Explanation).fitting_pods == 40
    assert site.cluster.server.requests == []  # nothing is written


async def test_every_node_is_shown_on_demand(site: Site) -> None:
    """Two Nodes that are alike are one row otherwise."""
    for query, rows in (("", 1), ("&all=1", 2), ("&all", 2), ("&all=0", 1)):
        _, _, body = await site.get(f"/explain?pod=default/train{query}")
        assert len(json.loads(body)["table"]) == rows


async def test_a_pod_that_does_not_exist(site: Site) -> None:
    """The status tells scripts, the sentence tells people."""
    status, _, body = await site.get("/explain?pod=ml/nobody")
    assert (status, json.loads(body)["situation"]) == (404, "unknown")
    assert "There is no pod ml/nobody." in json.loads(body)["answer"][0]
    status, _, body = await site.get("/explain?pod=ml/nobody&format=text")
    assert (status, body.splitlines()[0]) == (404, "pod ml/nobody: unknown")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ClusterError("GET x: 401 Unauthorized; look at its service account", status=401), "401"),
        (ClusterError("GET x: the API server cannot be reached"), "cannot be reached"),
    ],
)
async def test_an_api_server_that_does_not_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: ClusterError, sentence: str
) -> None:
    """The error names the request and the cause."""

    async def fail(path: str, params: Mapping[str, str] | None = None) -> bytes:
        raise error

    monkeypatch.setattr(site.cluster.server, "get", fail)
    status, text = await site.error("/explain?pod=default/train")
    assert status == 502
    assert text.startswith("pod default/train cannot be read: GET x: ")
    assert sentence in text


async def test_a_slow_api_server_ends_in_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody waits before a terminal."""

    async def hang(path: str, params: Mapping[str, str] | None = None) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    monkeypatch.setattr(site.cluster.server, "get", hang)
    monkeypatch.setattr(endpoints, "_GET_SECONDS", 0.02)
    assert await site.error("/explain?pod=default/train") == (
        504,
        "the API server did not send pod default/train within 0.02 s",
    )


async def test_a_pod_that_cannot_be_read(site: Site) -> None:
    """It is the API server's answer that is wrong, and not the question."""
    site.cluster.server.pods[PATH] = {"metadata": 5}
    status, text = await site.error("/explain?pod=default/train")
    assert (status, text[:43]) == (502, "pod default/train cannot be read: the API s")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/explain", "name the pod: /explain?pod=NAMESPACE/NAME"),
        ("/explain?pod=train", "name the pod"),
        ("/explain?pod=../nodes", "name the pod"),
        ("/explain?pod=a/b/c", "name the pod"),
        ("/explain?pod=a/..%2F..%2Fnodes", "name the pod"),
        ("/explain?pod=a/b&all=perhaps", "all is 1 or 0"),
        ("/explain?pod=a/b&format=xml", "format is json or text"),
        ("/explain?pod=a/b&verbose", "unknown parameter 'verbose'; there are pod, all, format"),
        ("/capacity?pod=a/b", "unknown parameter 'pod'; there are format"),
    ],
)
async def test_a_wrong_question_is_answered_with_the_right_one(
    site: Site, path: str, sentence: str
) -> None:
    """Nothing is asked of the API server."""
    status, text = await site.error(path)
    assert status == 400
    assert sentence in text


async def test_before_everything_is_read_nothing_is_explained(site: Site) -> None:
    """All cards would look free."""
    site.ready = False
    for path in ("/explain?pod=default/train", "/capacity"):
        status, text = await site.error(path)
        assert status == 503
        assert "has not read all Nodes and pods yet" in text


async def test_a_watch_that_fails_is_said_first(site: Site) -> None:
    """Pods that have ended meanwhile still count."""
    site.watch.failing_since, site.watch.last_error = 1787331600.0 - 95, "GET x: no"
    sentence = (
        "The watch of all pods has been failing for 95 s, so this may be out of date: GET x: no"
    )
    _, _, body = await site.get("/explain?pod=default/train")
    assert json.loads(body)["answer"][0] == sentence
    _, _, body = await site.get("/capacity?format=text")
    assert body.splitlines()[0] == sentence


async def test_a_follower_sends_to_the_leader(site: Site) -> None:
    """A port forward leads to any of them, and only the leader knows what is kept."""
    site.leads = False
    label = VgpuManagerScheduling(KEYS).role_label
    for path in ("/explain?pod=default/train", "/capacity"):
        _, _, body = await site.get(f"{path}{'&' if '?' in path else '?'}format=text")
        assert "This extender does not lead." in body
        assert f"Ask the leader: kubectl get pods -A -l {label}=leader\n" in body


async def test_a_pod_that_was_bound_since_the_api_server_sent_it(site: Site) -> None:
    """The watch is quicker now and then."""
    pod = a_pod(node="n1", **SMALL)
    pod["metadata"]["annotations"] = {KEYS.pre_allocated: f"default[0_{uuid(1, 0)}_10_1024]"}
    site.cluster.extender.see_pod(decode.pod(json.dumps(pod).encode()))
    _, _, body = await site.get("/explain?pod=default/train")
    assert json.loads(body)["answer"][0].startswith("Pod default/train is bound to Node n1;")


async def test_capacity_in_json_and_in_text(site: Site) -> None:
    """The same cards."""
    _, kind, body = await site.get("/capacity")
    assert kind == "application/json"
    assert msgspec.json.decode(body, type=Capacity).cards.untouched == 4
    _, kind, body = await site.get("/capacity?format=text")
    assert kind == "text/plain"
    assert body.startswith("2 Nodes, 0 of them unfit; 0 pods hold cards\n")


async def test_capacity_is_counted_once_a_second(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that asks in a loop must not slow kube-scheduler down."""
    await site.get("/capacity")
    site.cluster.filter(a_pod(**WHOLE))
    _, _, body = await site.get("/capacity")
    assert json.loads(body)["cards"]["untouched"] == 4
    monkeypatch.setattr(endpoints, "_KEPT_SECONDS", 0.0)
    _, _, body = await site.get("/capacity")
    assert json.loads(body)["cards"]["untouched"] == 2


async def test_many_questions_at_once_are_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs computing time that kube-scheduler waits for."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def wait(path: str, params: Mapping[str, str] | None = None) -> bytes:
        asked.set()
        await go_on.wait()
        return json.dumps(a_pod(**SMALL)).encode()

    monkeypatch.setattr(site.cluster.server, "get", wait)
    monkeypatch.setattr(endpoints, "_MAX_WAITING", 1)
    first = asyncio.ensure_future(site.get("/explain?pod=default/train"))
    await asked.wait()
    assert (await site.error("/capacity"))[0] == 503
    go_on.set()
    assert (await first)[0] == 200
    assert (await site.get("/capacity"))[0] == 200


async def test_filters_are_answered_during_a_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work gives the event loop back after each slice, and stops when its time is over."""
    monkeypatch.setattr(endpoints, "_SLICE_SECONDS", 0.0)
    turns = 0

    def work() -> Generator[None, None, str]:
        for _ in range(10):
            yield
        return "done"

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(others())
    now = iter(range(1000))
    slices = endpoints._Slices(0.0, lambda: float(next(now)) / 1e6)
    monkeypatch.setattr(endpoints, "_SLICE_SECONDS", 2e-6)
    assert await slices.result(work()) == "done"
    assert turns >= 5
    beside.cancel()


@pytest.mark.parametrize(
    ("pod", "waiting"),
    [
        ({}, Waiting()),
        ({"spec": None, "status": None}, Waiting()),
        ({"spec": {"schedulingGates": 5}}, Waiting()),
        (
            {
                "spec": {"schedulingGates": [{"name": "a"}, {"name": "b"}]},
                "status": {
                    "conditions": [
                        {"type": "Ready", "status": "False"},
                        {
                            "type": "PodScheduled",
                            "status": "False",
                            "reason": "SchedulingGated",
                            "message": "text",
                        },
                    ]
                },
            },
            Waiting(("a", "b"), "SchedulingGated", "text"),
        ),
        (
            {"status": {"conditions": [{"type": "PodScheduled", "status": "True"}]}},
            Waiting(),
        ),
    ],
)
def test_a_pod_says_why_it_waits(pod: Any, waiting: Waiting) -> None:
    """Whatever the API server sends, the pod is explained."""
    assert read_waiting(json.dumps(pod).encode()) == waiting


def test_a_pod_that_is_no_json_says_nothing() -> None:
    """Nor one that is nested without end."""
    assert read_waiting(b"<html>") == read_waiting(b"[" * 100_000) == Waiting()
