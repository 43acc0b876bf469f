"""One Allocate of volcano-vgpu-device-plugin as a process of its own:
the comparison of the benchmark's second part.

Five requests, one after the other: all pods of the cluster, the pod's annotation, the pod, its
annotations again, the node's lock (volcano-vgpu §4). It is given every advantage: no gRPC around
it, one connection that stays open, no limit on requests (the reference's client sends five a
second), and a cluster that consists of one node.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

NODE = "volcano.sh/vgpu-node"
TIME = "volcano.sh/vgpu-time"
PHASE = "volcano.sh/bind-phase"
LEFT = "volcano.sh/devices-to-allocate"
SERVED_TIME = str(2**64 - 1)


class Reference:
    """One node's plugin with its connection to the API server."""

    def __init__(self, address: str, node: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=10)
        self._node = node

    def allocate(self, count: int) -> str:
        """Serve the oldest pod on our node that has ``count`` devices left,
        and return what was written for it.
        """
        pods = self._ask("GET", "/api/v1/pods")["items"]
        waiting = [pod for pod in pods if self._waits(pod, count)]
        if not waiting:
            raise RuntimeError(
                f"no pod on {self._node} waits for {count} devices; the benchmark must bind one "
                "for each call"
            )
        pod = min(
            waiting, key=lambda pod: int(pod["metadata"]["annotations"].get(TIME, SERVED_TIME))
        )
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        first, *others = pod["metadata"]["annotations"][LEFT].split(";")
        self._annotate(path, {LEFT: ";".join(["", *others])})
        if "GPU" not in self._ask("GET", path)["metadata"]["annotations"][LEFT]:
            self._annotate(path, {PHASE: "success", TIME: SERVED_TIME})
            self._ask("GET", f"/api/v1/nodes/{self._node}")
        return str(first)

    def _waits(self, pod: dict[str, Any], count: int) -> bool:
        annotations = pod["metadata"].get("annotations") or {}
        return annotations.get(NODE) == self._node and annotations.get(LEFT, "").count(":") == count

    def _annotate(self, path: str, annotations: dict[str, str]) -> None:
        self._ask("PATCH", path, {"metadata": {"annotations": annotations}})

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/strategic-merge-patch+json"} if body else {}
        self._connection.request(method, path, json.dumps(body) if body else None, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{method} {path} answered {response.status}: {answer[:200]!r}")
        return json.loads(answer)


def main() -> None:
    """``python -m tests.bench.reference URL NODE CALLS``:
    print the seconds of each call as a JSON list.
    """
    url, node, calls = sys.argv[1:]
    plugin = Reference(urlsplit(url).netloc, node)
    times = []
    for _ in range(int(calls)):
        began = time.perf_counter()
        plugin.allocate(1)
        times.append(time.perf_counter() - began)
    json.dump(times, sys.stdout)


if __name__ == "__main__":
    main()
