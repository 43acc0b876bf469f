"""Nodes and pods as the API server has them, for the tests of the simulated extender: the golden
node of the contract.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

U0, U1 = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28", "GPU-7f1c2a90-5b64-4d1e-9c3f-2f8e6d7b1a45"
DOMAIN = "nvidia.com"
# vgpu-manager §13.1
REGISTER = (
    f'[{{"id":0,"type":"NVIDIA A10","uuid":"{U0}","core":100,"memory":24576,"number":10,"numa":0,'
    '"mig":false,"busId":"0000:3b:00.0","capability":8.6,"healthy":true},'
    f'{{"id":1,"type":"NVIDIA A10","uuid":"{U1}","core":100,"memory":24576,"number":10,"numa":1,'
    '"mig":false,"busId":"0000:af:00.0","capability":8.6,"healthy":true}]'
)
CONFIG = '{"deviceSplit":10,"coresScaling":1,"memoryFactor":1,"memoryScaling":1}'

Object = dict[str, Any]


def register(**changes: Any) -> str:
    """The golden register, with changes to its second card."""
    cards = json.loads(REGISTER)
    cards[1] |= changes
    return json.dumps(cards)


def node(
    name: str = "gpu-node-1",
    *,
    annotations: Mapping[str, str] | None = None,
    number: str = "20",
) -> Object:
    """A Node, ready; with the golden annotations unless others are given."""
    written = {"node-device-register": REGISTER, "node-config-info": CONFIG}
    named = {
        f"{DOMAIN}/{key}": text
        for key, text in (written if annotations is None else annotations).items()
    }
    resources = {f"{DOMAIN}/vgpu-number": number}
    return {
        "metadata": {"name": name, "annotations": named},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def asking(number: int = 1, cores: int = 0, memory: int = 0) -> dict[str, str]:
    """The limits of one container; what is 0 is not mentioned."""
    named = {"vgpu-number": number, "vgpu-cores": cores, "vgpu-memory": memory}
    return {f"{DOMAIN}/{name}": str(value) for name, value in named.items() if value}


def container(name: str, limits: Mapping[str, str], *, sidecar: bool = False) -> Object:
    """One container."""
    made: Object = {"name": name, "image": "example", "resources": {"limits": dict(limits)}}
    return made | ({"restartPolicy": "Always"} if sidecar else {})


def pod(
    name: str,
    containers: Sequence[Object],
    *,
    init: Sequence[Object] = (),
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    node_name: str = "",
) -> Object:
    """A pod for the simulated extender; keys of annotations and labels without their domain."""
    spec: Object = {"schedulerName": "vgpu-scheduler", "containers": list(containers)}
    if init:
        spec["initContainers"] = list(init)
    if node_name:
        spec["nodeName"] = node_name
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, name)),
            "annotations": {f"{DOMAIN}/{key}": text for key, text in (annotations or {}).items()},
            "labels": {f"{DOMAIN}/{key}": text for key, text in (labels or {}).items()},
        },
        "spec": spec,
        "status": {},
    }
