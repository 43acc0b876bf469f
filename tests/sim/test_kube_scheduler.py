"""The stand-in for kube-scheduler, against an extender that answers as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from tests.patience import eventually
from vgpu_agent.sim.api.objects import ObjectStore
from vgpu_agent.sim.kube_scheduler import KubeScheduler

pytestmark = pytest.mark.component

_NUMBER = "nvidia.com/vgpu-number"
Answer = Callable[[str, dict[str, Any]], dict[str, Any]]


def _cluster() -> ObjectStore:
    """Two Nodes with ids, one without, and one that is cordoned."""
    objects = ObjectStore()
    for name, ids in (("a", "10"), ("b", "10"), ("none", "0"), ("off", "10")):
        node: dict[str, Any] = {"metadata": {"name": name}}
        node["status"] = {"allocatable": {_NUMBER: ids}}
        node["spec"] = {"unschedulable": name == "off"}
        objects.create("nodes", node)
    return objects


def _create(objects: ObjectStore, name: str, scheduler: str = "vgpu-scheduler") -> None:
    limits = {_NUMBER: "1", "nvidia.com/vgpu-cores": "10"}
    spec = {
        "schedulerName": scheduler,
        "containers": [{"name": "main", "resources": {"limits": limits}}],
    }
    objects.create("pods", {"metadata": {"name": name}, "spec": spec}, "default")


def _node(objects: ObjectStore, name: str) -> str:
    return str(objects.get("pods", name, "default")["spec"].get("nodeName", ""))


def _message(objects: ObjectStore, name: str) -> str:
    """The message of the pod's condition, empty without one."""
    conditions = objects.get("pods", name, "default")["status"].get("conditions") or ()
    return "".join(one.get("message", "") for one in conditions)


@contextlib.asynccontextmanager
async def _scheduling(objects: ObjectStore, answer: Answer) -> AsyncIterator[KubeScheduler]:
    """A stand-in at work, whose extender answers so."""

    async def serve(request: web.Request) -> web.Response:
        verb = request.match_info["verb"]
        return web.json_response(answer(verb, json.loads(await request.read())))

    application = web.Application()
    application.router.add_post("/scheduler/{verb}", serve)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    scheduler = KubeScheduler(objects, f"http://127.0.0.1:{runner.addresses[0][1]}/scheduler")
    running = asyncio.ensure_future(scheduler.run())
    try:
        yield scheduler
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await runner.cleanup()


async def test_a_pod_is_filtered_on_nodes_with_ids_and_bound_where_the_extender_says() -> None:
    """And no pod of another scheduler is."""
    objects, calls = _cluster(), list[tuple[str, dict[str, Any]]]()

    def answer(verb: str, body: dict[str, Any]) -> dict[str, Any]:
        calls.append((verb, body))
        if verb == "bind":
            binding = {"metadata": {"uid": body["PodUID"]}, "target": {"name": body["Node"]}}
            objects.bind(body["PodName"], body["PodNamespace"], binding)
            return {}
        return {"NodeNames": ["b"], "FailedNodes": {"a": "another one is better"}}

    _create(objects, "mine")
    _create(objects, "other", "default-scheduler")
    async with _scheduling(objects, answer) as scheduler:
        await eventually(lambda: _node(objects, "mine") == "b")
        assert scheduler.refusals == {}
    assert [verb for verb, _ in calls] == ["filter", "bind"]
    assert calls[0][1]["NodeNames"] == ["a", "b"]
    assert _node(objects, "other") == ""


async def test_a_pod_that_fits_nowhere_has_the_reasons_in_its_condition() -> None:
    """Those of the extender, and its own; counted as kube-scheduler counts them."""
    objects = _cluster()
    _create(objects, "big")
    refused = {"NodeNames": [], "FailedNodes": {"a": "too small", "b": "too small"}}
    async with _scheduling(objects, lambda *_: refused) as scheduler:
        await eventually(lambda: "default/big" in scheduler.refusals)
        await eventually(lambda: _message(objects, "big"))
    assert _message(objects, "big") == (
        f"0/4 nodes are available: 1 Insufficient {_NUMBER}, 1 node(s) were unschedulable, "
        "2 too small."
    )
    assert scheduler.refusals["default/big"]["none"] == f"Insufficient {_NUMBER}"


async def test_a_call_that_fails_is_made_again() -> None:
    """Nothing else changes in the cluster meanwhile, so no change can be waited for."""
    objects, failures = _cluster(), ["not ready", "still not"]

    def answer(verb: str, body: dict[str, Any]) -> dict[str, Any]:
        if failures:
            return {"Error": failures.pop()}
        if verb == "bind":
            objects.bind("late", "default", {"metadata": {}, "target": {"name": body["Node"]}})
        return {"NodeNames": ["a"]}

    _create(objects, "late")
    async with _scheduling(objects, answer):
        await eventually(lambda: _node(objects, "late") == "a")
    assert failures == []
