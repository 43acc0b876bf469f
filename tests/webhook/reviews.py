"""Reviews as the API server sends them, and an independent reader of its JSON Patches."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

UID = "705ab4f5-6393-11e8-b7cc-42010a800002"
V1 = "admission.k8s.io/v1"
NUMBER, CORES, MEMORY = (f"nvidia.com/vgpu-{name}" for name in ("number", "cores", "memory"))


def container(name: str = "main", **limits: Any) -> dict[str, Any]:
    """A container with limits such as ``number=1``."""
    return {
        "name": name,
        "image": "app",
        "resources": {"limits": {f"nvidia.com/vgpu-{key}": value for key, value in limits.items()}},
    }


def pod(*containers: Any, spec: Any = None, **metadata: Any) -> dict[str, Any]:
    """A pod as a user writes it."""
    found = {"name": "train", "namespace": "default", **metadata}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {key: value for key, value in found.items() if value is not None},
        "spec": {"containers": list(containers), **(spec or {})},
    }


def review(pod: Any, *, operation: Any = "CREATE", version: str = V1, **request: Any) -> bytes:
    """The review of a pod; ``request`` are more fields of the request."""
    whole = {
        "uid": UID,
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "default",
        "operation": operation,
        "userInfo": {"username": "tenant", "uid": "another-uid"},
        "object": pod,
        "oldObject": None,
        "dryRun": False,
        **request,
    }
    return json.dumps({"kind": "AdmissionReview", "apiVersion": version, "request": whole}).encode()


def response(answer: bytes, *, uid: str = UID, version: str = V1) -> dict[str, Any]:
    """The response in an answer, which must have the form of the contract."""
    read = json.loads(answer)
    assert set(read) == {"apiVersion", "kind", "response"}
    assert (read["apiVersion"], read["kind"]) == (version, "AdmissionReview")
    found: dict[str, Any] = read["response"]
    assert found["uid"] == uid
    assert isinstance(found["allowed"], bool)
    assert ("patch" in found) == ("patchType" in found)
    assert found.get("patchType", "JSONPatch") == "JSONPatch"
    assert found["allowed"] or found["status"]["message"]
    return found


def patched(pod: Any, answer: bytes) -> Any:
    """The pod after the patch of an answer."""
    found = response(answer)
    assert found["allowed"]
    after = copy.deepcopy(pod)
    for operation in json.loads(base64.b64decode(found.get("patch", "W10="))):
        _apply(after, operation)
    return after


def _apply(document: Any, operation: dict[str, Any]) -> None:
    """Apply one operation as RFC 6902 has it: a parent must exist, and so must what is removed."""
    *parents, last = [
        part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
    ]
    target = document
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    assert isinstance(target, dict)
    if operation["op"] == "remove":
        del target[last]
    else:
        assert operation["op"] == "add"
        target[last] = operation["value"]
