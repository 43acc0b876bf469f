"""An API server of a few lines, for the tests of what is written: objects in memory, merge patches,
preconditions, faults on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from vgpu_agent.concurrency import Latest
from vgpu_agent.errors import ClusterError
from vgpu_agent.nodes import Node
from vgpu_agent.pods import Pod, PodCache

Fault = Callable[[str, str, Mapping[str, Any]], ClusterError | None]

NODE = "/api/v1/nodes/n1"


@dataclasses.dataclass
class Request:
    """One request as it arrived."""

    at: float
    verb: str
    path: str
    body: Mapping[str, Any]


class FakeApi:
    """Objects by path; `watchers` receive each change, as a watch would."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: list[Request] = []
        self.fault: Fault | None = None
        self.request_seconds = 0.02
        self.grace_seconds = 0.0  # of deletions
        self.under_way = 0
        self.most_under_way = 0
        self.watchers: list[Callable[[str, dict[str, Any] | None], None]] = []
        self._version = 100

    def put(self, path: str, thing: dict[str, Any]) -> None:
        """Create or replace an object, as another client would."""
        self._version += 1
        self.objects[path] = {
            **thing,
            "metadata": {**thing.get("metadata", {}), "resourceVersion": str(self._version)},
        }
        self._tell(path)

    def change(self, path: str, patch: Mapping[str, Any]) -> None:
        """Change an object by a merge patch, as another client would."""
        self.put(path, _merged(self.objects[path], patch))

    def remove(self, path: str) -> None:
        """Delete an object, as another client would."""
        del self.objects[path]
        self._tell(path)

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        async with self._request("get", path, params or {}):
            return json.dumps(self._found(path)).encode()

    async def chunks(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """See `Api`; in two pieces."""
        answer = await self.get(path, params)
        for piece in (answer[:100], answer[100:]):
            yield piece

    async def patch(
        self, path: str, body: Mapping[str, Any], *, params: Mapping[str, str] | None = None
    ) -> bytes:
        async with self._request("patch", path, body):
            target, changes = path.removesuffix("/status"), body
            standing = self._found(target)
            for precondition in ("uid", "resourceVersion"):
                asked = body.get("metadata", {}).get(precondition)
                if asked is not None and asked != standing["metadata"].get(precondition):
                    # As the real one: a UID is immutable, a version in a patch is a precondition.
                    raise ClusterError(
                        f"PATCH {path}: {precondition} is another one",
                        status=422 if precondition == "uid" else 409,
                    )
            if target != path:
                changes = {"status": body.get("status", {})}
            changed = _merged(standing, changes)
            if changed != standing:
                self.put(target, changed)
            return json.dumps(self.objects[target]).encode()

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        async with self._request("post", path, body):
            if path.endswith("/eviction"):
                pod = path.removesuffix("/eviction")
                if (
                    body["deleteOptions"]["preconditions"]["uid"]
                    != self._found(pod)["metadata"]["uid"]
                ):
                    raise ClusterError(f"POST {path}: uid is another one", status=409)
                self.remove(pod)
                return b"{}"
            name = f"{path}/{body['metadata']['name']}"
            if name in self.objects:
                raise ClusterError(f"POST {path}: exists", status=409)
            self.put(name, copy.deepcopy(dict(body)))
            return json.dumps(self.objects[name]).encode()

    async def delete(self, path: str, *, uid: str) -> bytes:
        async with self._request("delete", path, {"uid": uid}):
            pod = self._found(path)
            if pod["metadata"]["uid"] != uid:
                raise ClusterError(f"DELETE {path}: uid is another one", status=409)
            if self.grace_seconds:  # until then it is there, with a time of its deletion
                self.change(path, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
                asyncio.get_running_loop().call_later(self.grace_seconds, self.remove, path)
            else:
                self.remove(path)
            return b"{}"

    def below(self, path: str) -> list[dict[str, Any]]:
        """The objects of a collection, oldest first."""
        return [thing for name, thing in self.objects.items() if name.startswith(path + "/")]

    @contextlib.asynccontextmanager
    async def _request(self, verb: str, path: str, body: Mapping[str, Any]) -> AsyncIterator[None]:
        self.requests.append(
            Request(asyncio.get_running_loop().time(), verb, path, copy.deepcopy(dict(body)))
        )
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.request_seconds)
            err = self.fault(verb, path, body) if self.fault else None
            if err is not None:
                raise err
            yield
        finally:
            self.under_way -= 1

    def _found(self, path: str) -> dict[str, Any]:
        if path not in self.objects:
            raise ClusterError(f"{path} not found", status=404)
        return self.objects[path]

    def _tell(self, path: str) -> None:
        for watcher in self.watchers:
            watcher(path, copy.deepcopy(self.objects.get(path)))


class WatchedNode:
    """The Node n1 as a watch with some delay shows it."""

    def __init__(self, api: FakeApi, *, delay_seconds: float = 0.05) -> None:
        self.latest: Latest[Node | None] = Latest(None)
        self.delay_seconds = delay_seconds
        api.watchers.append(self._changed)

    def _changed(self, path: str, thing: dict[str, Any] | None) -> None:
        if path == NODE:
            node = None if thing is None else node_of(thing)
            asyncio.get_running_loop().call_later(self.delay_seconds, self.latest.publish, node)


class WatchedPods:
    """All pods as a watch with some delay shows them."""

    def __init__(self, api: FakeApi, *, delay_seconds: float = 0.05) -> None:
        self.book = PodCache()
        self.delay_seconds = delay_seconds
        self._last: dict[str, Pod] = {}
        api.watchers.append(self._changed)

    def _changed(self, path: str, thing: dict[str, Any] | None) -> None:
        if "/pods/" in path:
            asyncio.get_running_loop().call_later(self.delay_seconds, self._show, path, thing)

    def _show(self, path: str, thing: dict[str, Any] | None) -> None:
        before = self._last.pop(path, None)
        if before is not None and (thing is None or thing["metadata"]["uid"] != before.uid):
            self.book.remove(before)
        if thing is not None:
            self._last[path] = pod_of(thing)
            self.book.put(self._last[path])


def node(uid: str = "node-uid", **annotations: str) -> dict[str, Any]:
    """A Node n1 as kubelet makes it."""
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "ok",
        "lastHeartbeatTime": "2026-01-01T00:00:00Z",
    }
    return {
        "metadata": {"name": "n1", "uid": uid, "annotations": annotations},
        "status": {"conditions": [ready]},
    }


def pod(name: str, uid: str = "", **annotations: str) -> dict[str, Any]:
    """A pod in the namespace default."""
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or f"uid-{name}",
            "annotations": annotations,
        }
    }


def pod_at(name: str) -> str:
    """Return the path of `pod`."""
    return f"/api/v1/namespaces/default/pods/{name}"


def node_of(thing: Mapping[str, Any]) -> Node:
    """Return the Node as the watch would decode it."""
    metadata, status = thing["metadata"], thing.get("status", {})
    return Node(
        metadata["name"],
        metadata["uid"],
        metadata.get("annotations", {}),
        metadata.get("labels", {}),
        capacity=status.get("capacity", {}),
        allocatable=status.get("allocatable", {}),
        conditions={
            one["type"]: (one["status"], one["reason"], one["message"])
            for one in status.get("conditions", [])
        },
        resource_version=metadata["resourceVersion"],
        taints={taint["key"]: taint["effect"] for taint in thing.get("spec", {}).get("taints", ())},
    )


def pod_of(thing: Mapping[str, Any]) -> Pod:
    """Return the pod as the watch would decode it."""
    metadata = thing["metadata"]
    reported = "startTime" in thing.get("status", {})
    annotations, labels = metadata.get("annotations", {}), metadata.get("labels", {})
    return Pod(
        metadata["uid"],
        metadata["namespace"],
        metadata["name"],
        annotations=annotations,
        labels=labels,
        reported=reported,
    )


@contextlib.asynccontextmanager
async def running(*loops: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``loops`` while the block lasts; their errors fail the test."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        yield
        for task in tasks:
            task.cancel()


def unavailable(verb: str, path: str, body: Mapping[str, Any]) -> ClusterError:
    """The server does not answer."""
    return ClusterError(f"{verb.upper()} {path}: connection refused", status=0)


def _merged(standing: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    merged = dict(standing) if isinstance(standing, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged
