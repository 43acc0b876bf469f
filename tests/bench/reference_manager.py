"""One Allocate of vgpu-manager's device plugin as a process of its own: the comparison of the part
``vgpu-manager``.

Two requests: a live list of the node's pods, and a patch of the one that waits with the smallest
``predicate-time`` (vgpu-manager §7.1, §7.2). It has no gRPC around it, one connection that stays
open, no limit on requests, and no files to write. Its list is longer than the real one's, which
also selects by a label: the simulated API server selects by fields only.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from typing import Any
from urllib.parse import quote, urlsplit

_D = "nvidia.com/"
_FINISHED = str(2**63 - 1)


class Reference:
    """One node's plugin with its connection to the API server."""

    def __init__(self, address: str, node: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=10)
        self._node = node

    def allocate(self) -> str:
        """Serve the pod that was planned first, and return its claim.

        Raises:
            RuntimeError: none waits.
        """
        path = f"/api/v1/pods?fieldSelector={quote(f'spec.nodeName={self._node}')}"
        waiting = [pod for pod in self._ask("GET", path)["items"] if self._waits(pod)]
        if not waiting:
            raise RuntimeError(f"no pod on {self._node} waits; bind one for each call")
        pod = min(waiting, key=lambda pod: int(_annotations(pod)[_D + "predicate-time"]))
        claim = _annotations(pod)[_D + "pre-allocated"]
        metadata = pod["metadata"]
        body = {
            "metadata": {
                "annotations": {_D + "real-allocated": claim, _D + "predicate-time": _FINISHED},
                "labels": {_D + "assigned-phase": "succeed"},
            }
        }
        self._ask(
            "PATCH", f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}", body
        )
        return claim

    def _waits(self, pod: dict[str, Any]) -> bool:
        found = _annotations(pod)
        return (
            (pod["metadata"].get("labels") or {}).get(_D + "assigned-phase") == "allocating"
            and found.get(_D + "predicate-node") == self._node
            and found.get(_D + "predicate-time", _FINISHED) != _FINISHED
        )

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/merge-patch+json"} if body else {}
        self._connection.request(method, path, json.dumps(body) if body else None, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{method} {path} answered {response.status}: {answer[:200]!r}")
        return json.loads(answer)


def _annotations(pod: dict[str, Any]) -> dict[str, str]:
    return pod["metadata"].get("annotations") or {}


def main() -> None:
    """``python -m tests.bench.reference_manager URL NODE CALLS``:
    print the seconds of each call as a JSON list.
    """
    url, node, calls = sys.argv[1:]
    plugin = Reference(urlsplit(url).netloc, node)
    times = []
    for _ in range(int(calls)):
        began = time.perf_counter()
        plugin.allocate()
        times.append(time.perf_counter() - began)
    json.dump(times, sys.stdout)


if __name__ == "__main__":
    main()
