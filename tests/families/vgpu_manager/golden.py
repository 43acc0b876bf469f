"""Pods on the node of the golden vectors (vgpu-manager §13.3), and questions about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tests.families.vgpu_manager.node import CORES, INVENTORY, MEMORY, NUMBER, U0, U1
from vgpu_agent.families.family import Question
from vgpu_agent.families.vgpu_manager.family import VgpuManagerFamily
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.isolation.edits import Provision
from vgpu_agent.isolation.vgpu_control import ControlTarget
from vgpu_agent.model import DeviceRoom, Grant, Inventory, Share
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

KEYS = Keys()
NODE = "gpu-node-1"
UID = "6d0f1c3e-52a4-4c0b-9f2c-1f6f2b3a4d5e"
CLAIM = f"default[0_{U0}_10_1024]"
TIME = "1787331600123456789"
ROOMS = tuple(DeviceRoom(uuid, "", 24576, 24576, 100, 0, 10) for uuid in (U0, U1))


class Targets:
    """A backend that keeps what it was asked for."""

    name = "targets"

    def __init__(self) -> None:
        self.asked: list[ControlTarget] = []

    def provision(self, target: ControlTarget) -> Provision:
        self.asked.append(target)
        return Provision()


def family(backend: Targets | None = None, **options: Any) -> VgpuManagerFamily:
    """The family with other options than the default ones."""
    return VgpuManagerFamily(
        msgspec.structs.replace(VgpuManagerOptions(), **options), backend or Targets()
    )


def container(
    name: str = "default",
    kind: ContainerKind = ContainerKind.MAIN,
    *,
    values: Mapping[str, str] | None = None,
    **limits: int,
) -> PodContainer:
    """A container with limits ``number``, ``cores`` and ``memory``."""
    names = {"number": NUMBER, "cores": CORES, "memory": MEMORY}
    wanted = {names[key]: value for key, value in limits.items()}
    return PodContainer(name, kind, wanted, values=values or {})


ONE = container(number=1, cores=10, memory=1024)


def written(claims: str = CLAIM, **more: str) -> dict[str, str]:
    """The annotations that the extender's filter leaves (vgpu-manager §13.3); ``more`` by the last
    part of their keys, with ``_`` for ``-``.
    """
    annotations = {
        KEYS.pre_allocated: claims,
        KEYS.predicate_node: NODE,
        KEYS.predicate_time: TIME,
        KEYS.real_allocated: "",
    }
    return annotations | {f"nvidia.com/{key.replace('_', '-')}": text for key, text in more.items()}


def pod(
    *containers: PodContainer,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    node: str = NODE,
) -> Pod:
    """Pod ``default/gpu-pod``, bound to the golden node."""
    return Pod(
        UID,
        "default",
        "gpu-pod",
        node=node,
        annotations=annotations or {},
        labels=labels or {},
        containers=containers or (ONE,),
        scheduled=True,
    )


def question(
    about: Pod,
    name: str = "default",
    *,
    of: VgpuManagerFamily | None = None,
    inventory: Inventory = INVENTORY,
    rooms: tuple[DeviceRoom, ...] = ROOMS,
    **more: Any,
) -> Question:
    """Return the question about a container, which holds as many ids as it asks for."""
    resource = (of or family()).resources(inventory)[0]
    asked = about.container(name)
    count = asked.limits.get(NUMBER, 1) if asked else 1
    ids = tuple(f"{U0}::{number}" for number in range(count))
    return Question(resource, about, name, ids, NODE, inventory, rooms, **more)


def grants(**shares: tuple[Share, ...]) -> dict[str, Grant]:
    """Decided grants by container."""
    return {
        name: Grant(
            number, "vgpu-manager", NUMBER, (f"{U0}::{number}",), each, decided_for=(UID, name)
        )
        for number, (name, each) in enumerate(shares.items(), 1)
    }
