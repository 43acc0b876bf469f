"""Nodes and pods as the API server has them, for the tests of the simulated Volcano scheduler: the
golden node of the Volcano contracts.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

U0, U1 = "GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002"
# volcano-vgpu G1
REGISTER = (
    f"{U0},10,24576,NVIDIA-NVIDIA A10,true,hami-core:{U1},10,24576,NVIDIA-NVIDIA "
    "A10,true,hami-core:"
)
# volcano-vgpu G2
ALLOCATABLE = {
    "volcano.sh/vgpu-number": "20",
    "volcano.sh/vgpu-cores": "200",
    "volcano.sh/vgpu-memory": "49152",
}

Object = dict[str, Any]


def node(
    name: str = "node-a",
    *,
    register: str | None = REGISTER,
    allocatable: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """A Node, ready, with the register annotation unless that is None."""
    written = {} if register is None else {"volcano.sh/node-vgpu-register": register}
    resources = dict(ALLOCATABLE if allocatable is None else allocatable)
    return {
        "metadata": {"name": name, "annotations": {**written, **(annotations or {})}},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def gpushare_node(
    *, number: str = "2", memory: str | None = "49152", annotations: Mapping[str, str] | None = None
) -> Object:
    """A Node of volcano-gpushare S1."""
    resources = {"volcano.sh/gpu-number": number} | (
        {"volcano.sh/gpu-memory": memory} if memory is not None else {}
    )
    return node(register=None, allocatable=resources, annotations=annotations)


def asking(
    number: int | None = None, memory: int | None = None, cores: int | None = None, **more: int
) -> dict[str, str]:
    """The limits of one container; ``percentage`` asks for memory-percentage."""
    named = {
        "number": number,
        "memory": memory,
        "cores": cores,
        "memory-percentage": more.get("percentage"),
    }
    return {
        f"volcano.sh/vgpu-{name}": str(value) for name, value in named.items() if value is not None
    }


def pod(
    name: str,
    *limits: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
    init: Sequence[Mapping[str, str]] = (),
    **spec: Any,
) -> Object:
    """A waiting pod with one container per ``limits``;
    ``init`` are the limits of its init containers.
    """

    def containers(of: Sequence[Mapping[str, str]]) -> list[Object]:
        return [
            {"name": f"c{number}", "image": "x", "resources": {"limits": dict(each)}}
            for number, each in enumerate(of)
        ]

    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": str(uuid.uuid4()),
            "annotations": dict(annotations or {}),
        },
        "spec": {
            "schedulerName": "volcano",
            "containers": containers(limits),
            "initContainers": containers(init),
            **spec,
        },
        "status": {"phase": "Pending"},
    }


def bound(thing: Object, annotations: Mapping[str, str], to: str = "node-a") -> Object:
    """The pod, on its node."""
    metadata = {
        **thing["metadata"],
        "annotations": {**thing["metadata"]["annotations"], **annotations},
    }
    return {**thing, "metadata": metadata, "spec": {**thing["spec"], "nodeName": to}}
