"""The process of the extender, against a simulated API server over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests import constants
from tests.cluster.scripted import QUICK
from tests.families.vgpu_manager.scheduling.nodes import KEYS, entry, node_texts, uuid
from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.cluster.credentials import Access, Credentials
from vgpu_agent.errors import ListenError
from vgpu_agent.families.vgpu_manager.scheduling.family import VgpuManagerScheduling
from vgpu_agent.scheduler.service import MAX_BODY_BYTES, Options, Service
from vgpu_agent.sim.api.server import ApiServer

pytestmark = pytest.mark.component

WHOLE = {"nvidia.com/vgpu-number": "2"}
_LOOK_SECONDS = 0.05


class Extender:
    """A running service, as kube-scheduler calls it, and its API server."""

    def __init__(self, server: ApiServer, http: aiohttp.ClientSession, address: str) -> None:
        self.server, self._http, self.address = server, http, address

    async def get(self, path: str) -> int:
        """The status of an answer."""
        async with self._http.get(f"http://{self.address}{path}") as answer:
            return answer.status

    async def post(self, verb: str, body: bytes) -> tuple[int, Any]:
        """The status and the answer of a verb."""
        url = f"http://{self.address}/scheduler/{verb}"
        async with self._http.post(url, data=io.BytesIO(body)) as answer:
            return answer.status, await answer.read()

    async def filter(self, name: str, *nodes: str) -> Any:
        """The answer of a filter for a pod of the API server."""
        pod = self.server.objects.get("pods", name, "default")
        arguments = {"Pod": pod, "NodeNames": nodes or ["n0", "n1"]}
        _, answer = await self.post("filter", json.dumps(arguments).encode())
        return json.loads(answer)

    async def bind(self, name: str, node: str) -> str:
        """The error of a bind."""
        uid = self.server.objects.get("pods", name, "default")["metadata"]["uid"]
        arguments = {"PodName": name, "PodNamespace": "default", "PodUID": uid, "Node": node}
        _, answer = await self.post("bind", json.dumps(arguments).encode())
        return str(json.loads(answer)["Error"])

    async def situation(self, name: str) -> tuple[str, int]:
        """The situation of a pod as ``/explain`` gives it, and the number of such pods that fit."""
        url = f"http://{self.address}/explain?pod=default/{name}"
        async with self._http.get(url) as answer:
            found = json.loads(await answer.read())
            return found["situation"], found["fitting_pods"]

    async def until_placed(self, name: str, nodes: list[str]) -> None:
        """Wait until a filter for the pod names these Nodes; the watch is a moment behind."""
        for _ in range(round(PATIENCE_SECONDS / _LOOK_SECONDS)):
            if (await self.filter(name))["NodeNames"] == nodes:
                return
            await asyncio.sleep(_LOOK_SECONDS)
        raise AssertionError(f"{name} is not placed on {nodes}")


def a_pod(server: ApiServer, name: str, **spec: Any) -> None:
    """Create a pod that asks for both cards of a Node."""
    spec = {"containers": [{"name": "main", "resources": {"limits": WHOLE}}], **spec}
    server.objects.create("pods", {"metadata": {"name": name}, "spec": spec}, "default")


@contextlib.asynccontextmanager
async def serving(url: str, port: int = 0, *, ready: bool = True) -> AsyncIterator[Service]:
    """A service that runs until the context ends, and, if ``ready``, has read its cluster."""
    credentials = Credentials(lambda: Access(url), "test")
    service = Service(Options(port=port), VgpuManagerScheduling(KEYS), credentials)
    running = asyncio.ensure_future(service.run())
    try:
        await eventually(
            lambda: running.done() or (service.address and (service.is_ready or not ready))
        )
        if running.done():
            await running
        yield service
    finally:
        service.stop()
        if not running.done():
            await asyncio.wait_for(running, PATIENCE_SECONDS)


@pytest.fixture
async def extender(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Extender]:
    """A service that has read a cluster of two Nodes with two cards each."""
    constants.use(monkeypatch, QUICK)
    async with ApiServer() as server, aiohttp.ClientSession() as http:
        for node in range(2):
            texts = node_texts([entry(card, uuid=uuid(node, card)) for card in range(2)])
            server.objects.create(
                "nodes",
                {
                    "metadata": {"name": f"n{node}", "annotations": texts},
                    "status": {"allocatable": {KEYS.number: "20"}},
                },
            )
        async with serving(server.url) as service:
            yield Extender(server, http, service.address)


async def test_a_pod_is_filtered_and_bound_and_its_cards_return(extender: Extender) -> None:
    """From the question of kube-scheduler to the pod at the API server, and to its end."""
    for name in ("a", "b", "c"):
        a_pod(extender.server, name)
    assert (await extender.filter("a"))["NodeNames"] == ["n0"]
    assert await extender.bind("a", "n0") == ""
    pod = extender.server.objects.get("pods", "a", "default")
    assert pod["spec"]["nodeName"] == "n0"
    assert pod["metadata"]["annotations"][KEYS.pre_allocated] == (
        f"main[0_{uuid(0, 0)}_100_24576,1_{uuid(0, 1)}_100_24576]"
    )
    assert pod["metadata"]["labels"][KEYS.phase] == "allocating"
    assert (await extender.filter("b"))["NodeNames"] == ["n1"]
    assert await extender.bind("b", "n1") == ""
    assert (await extender.filter("c"))["NodeNames"] == []
    extender.server.objects.delete("pods", "a", "default", grace_seconds=0)
    await extender.until_placed("c", ["n0"])


async def test_no_flood_of_changes_leaves_the_extender_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node follows a thousand changes a second at most. An extender that did would give cards
    away that a bind six thousand changes later has taken; the reflector's own test has the times.
    """
    constants.use(monkeypatch, QUICK)
    async with ApiServer() as server, serving(server.url) as service:
        assert (service._pods._burst_seconds, service._nodes._burst_seconds) == (0, 0)


async def test_a_restarted_extender_knows_what_bound_pods_hold(extender: Extender) -> None:
    """It reads their annotations before it is ready, so nothing is given twice."""
    for name in ("a", "b"):
        a_pod(extender.server, name)
    await extender.filter("a", "n0")
    assert await extender.bind("a", "n0") == ""
    async with serving(extender.server.url) as service, aiohttp.ClientSession() as http:
        after = Extender(extender.server, http, service.address)
        assert await after.get("/readyz") == 200
        assert (await after.filter("b", "n0"))["NodeNames"] == []
        assert "no cards are kept" in await after.bind("b", "n0")
        assert (await after.filter("b", "n0", "n1"))["NodeNames"] == ["n1"]


async def test_a_pod_is_explained_from_filter_to_bind(extender: Extender) -> None:
    """The watch, the promises and the API server together; see `test_explain` for the sentences."""
    for name in ("a", "b"):
        a_pod(extender.server, name)
    assert await extender.situation("a") == ("fits", 2)
    await extender.filter("a", "n0")
    assert await extender.situation("a") == ("kept", 1)
    assert await extender.bind("a", "n0") == ""
    assert (await extender.situation("a"))[0] == "bound"
    await extender.filter("b", "n1")
    a_pod(extender.server, "c")
    assert await extender.situation("c") == ("no-room", 0)
    assert await extender.get("/explain?pod=default/nobody") == 404
    assert await extender.get("/capacity") == 200


async def test_before_everything_is_read_nothing_is_promised(extender: Extender) -> None:
    """The cards of running pods would look free."""
    a_pod(extender.server, "a")
    nowhere = serving("http://127.0.0.1:1", ready=False)
    async with nowhere as service, aiohttp.ClientSession() as http:
        starting = Extender(extender.server, http, service.address)
        assert await starting.get("/readyz") == 503
        assert await starting.get("/healthz") == 200
        assert "has not read all" in (await starting.filter("a"))["Error"]
        assert "has not read all" in await starting.bind("a", "n0")


async def test_a_body_that_is_too_large_is_refused(extender: Extender) -> None:
    """vgpu-manager §5.1; the extender goes on."""
    body = json.dumps({"Pod": "x" * MAX_BODY_BYTES}).encode()
    assert (await extender.post("filter", body))[0] == 413
    assert await extender.get("/version") == 200


async def test_a_port_in_use_is_named(extender: Extender) -> None:
    """With the flag that chooses another one."""
    port = int(extender.address.rpartition(":")[2])
    with pytest.raises(ListenError, match=f"127.0.0.1:{port}: .*--server-bind-port"):
        async with serving(extender.server.url, port):
            pass


async def test_a_dry_run_names_all_nodes_and_keeps_none(extender: Extender) -> None:
    """For the Cluster Autoscaler (vgpu-manager §5.1)."""
    a_pod(extender.server, "a")
    pod = extender.server.objects.get("pods", "a", "default")
    body = json.dumps({"Pod": pod, "NodeNames": ["n0", "n1"]}).encode()
    for _ in range(2):
        status, answer = await extender.post("filter-dryrun", body)
        assert (status, json.loads(answer)["NodeNames"]) == (200, ["n0", "n1"])


async def test_victims_are_named_within_budgets(extender: Extender) -> None:
    """From the watches of pods and of PodDisruptionBudgets to the answer of preempt."""
    server = extender.server
    a_pod(server, "low", priority=1)
    a_pod(server, "high", priority=100)
    await extender.filter("low", "n0")
    assert await extender.bind("low", "n0") == ""
    high = server.objects.get("pods", "high", "default")
    uid = server.objects.get("pods", "low", "default")["metadata"]["uid"]
    body = json.dumps({"Pod": high, "NodeNameToMetaVictims": {"n0": {"Pods": []}}}).encode()

    async def until_victims(expected: dict[str, Any]) -> None:
        for _ in range(round(PATIENCE_SECONDS / _LOOK_SECONDS)):
            status, answer = await extender.post("preempt", body)
            if status == 200 and json.loads(answer) == {"NodeNameToMetaVictims": expected}:
                return
            await asyncio.sleep(_LOOK_SECONDS)
        raise AssertionError(f"{status} {answer}")

    victims = {"n0": {"Pods": [{"UID": uid}], "NumPDBViolations": 0}}
    await until_victims(victims)
    server.objects.create(
        "poddisruptionbudgets",
        {
            "metadata": {"name": "b"},
            "spec": {"selector": {}},
            "status": {"disruptionsAllowed": 0},
        },
        "default",
    )
    await until_victims({})
    server.objects.delete("poddisruptionbudgets", "b", "default", grace_seconds=0)
    await until_victims(victims)


async def test_a_bad_preemption_has_a_status(extender: Extender) -> None:
    """Its answer has no field for an error (vgpu-manager §5.1)."""
    assert await extender.post("preempt", b"{}") == (400, b"no Pod\n")
    nowhere = serving("http://127.0.0.1:1", ready=False)
    async with nowhere as service, aiohttp.ClientSession() as http:
        starting = Extender(extender.server, http, service.address)
        assert (await starting.post("preempt", b"{}"))[0] == 503
