"""An API server in memory that refuses what a real one refuses, and that can be slow or silent."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping
from typing import Any

from tests.scheduler.test_extender import Cluster, a_pod
from vgpu_agent.cluster import decode
from vgpu_agent.errors import ClusterError

_PODS = "/api/v1/namespaces/default/pods/"


class StrictServer:
    """Pods with UIDs, resource versions and Nodes, as the API server keeps them.

    State: the pods by path. ``silent`` has the verbs that are done but get no answer, ``away``
    those that are neither done nor answered, and ``slow`` those that wait for their event first.
    """

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str, Mapping[str, Any]]] = []
        self.silent: set[str] = set()
        self.away: set[str] = set()
        self.slow: dict[str, asyncio.Event] = {}
        self.failure: dict[str, ClusterError] = {}

    def create(self, pod: Mapping[str, Any]) -> None:
        """Create a pod."""
        self.pods[_PODS + pod["metadata"]["name"]] = copy.deepcopy(dict(pod))

    def remove(self, name: str) -> None:
        """Delete a pod."""
        del self.pods[_PODS + name]

    def pod(self, name: str) -> dict[str, Any]:
        """A pod, as a watch would show it."""
        return self.pods[_PODS + name]

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """The pod."""
        return await self._answer("GET", path, {})

    async def patch(
        self, path: str, body: Mapping[str, Any], *, params: Mapping[str, str] | None = None
    ) -> bytes:
        """Change the pod."""
        return await self._answer("PATCH", path, body)

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Bind the pod."""
        return await self._answer("POST", path, body)

    async def delete(self, path: str, *, uid: str) -> bytes:
        """Nobody deletes."""
        raise AssertionError("the extender deletes nothing")

    async def _answer(self, verb: str, path: str, body: Mapping[str, Any]) -> bytes:
        self.requests.append((verb, path, body))
        if (event := self.slow.get(verb)) is not None:
            await event.wait()
        if verb in self.away:
            raise ClusterError(f"{verb} {path}: no answer within 15 s")
        if verb in self.failure:
            raise self.failure[verb]
        pod = self.pods.get(path.removesuffix("/binding"))
        if pod is None:
            raise ClusterError(f"{verb} {path}: 404 not found", status=404)
        if verb != "GET":
            self._change(verb, pod, body)
        if verb in self.silent:
            raise ClusterError(f"{verb} {path}: no answer within 15 s")
        return json.dumps(pod).encode()

    @staticmethod
    def _change(verb: str, pod: dict[str, Any], body: Mapping[str, Any]) -> None:
        if body["metadata"]["uid"] != pod["metadata"]["uid"]:
            raise ClusterError(f"{verb}: another UID", status=422 if verb == "PATCH" else 409)
        if verb == "POST":
            if pod["spec"].get("nodeName"):
                raise ClusterError("409 Conflict: the pod is assigned already", status=409)
            pod["spec"]["nodeName"] = body["target"]["name"]
        annotations = body["metadata"].get("annotations", {})
        pod["metadata"].setdefault("annotations", {}).update(annotations)


class StrictCluster(Cluster):
    """A `Cluster` with a `StrictServer`; nothing is seen of a pod before `see` or `gone`."""

    def __init__(self, nodes: int = 2, **more: Any) -> None:
        self.strict = StrictServer()
        super().__init__(nodes, server=self.strict, **more)

    def create(self, name: str, **limits: str) -> dict[str, Any]:
        """Create a pod, and return it as kube-scheduler would send it."""
        pod = a_pod(name, **limits)
        self.strict.create(pod)
        return pod

    def see(self, name: str) -> None:
        """Let the watch show the pod as it is now."""
        self.extender.see_pod(decode.pod(json.dumps(self.strict.pod(name)).encode()))

    def gone(self, name: str) -> None:
        """Delete the pod, and let the watch show it."""
        uid = self.strict.pod(name)["metadata"]["uid"]
        self.strict.remove(name)
        self.extender.forget_pod(uid)

    def bound(self, name: str) -> str:
        """The Node to which the API server has bound the pod."""
        return str(self.strict.pod(name)["spec"].get("nodeName", ""))
