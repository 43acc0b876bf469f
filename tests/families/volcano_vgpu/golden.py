"""The node of the golden vectors in volcano-vgpu §10, and questions about pods on it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vgpu_agent.families.family import Question
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.isolation.backend import NoIsolation
from vgpu_agent.model import DeviceRoom, Gpu, Grant, Inventory, Share
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

U0 = "GPU-11111111-aaaa-bbbb-cccc-000000000001"
U1 = "GPU-22222222-aaaa-bbbb-cccc-000000000002"
NODE = "node-a"
NUMBER, MEMORY, CORES = "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores"
PERCENTAGE = "volcano.sh/vgpu-memory-percentage"

INVENTORY = Inventory(
    version=1,
    gpus=(
        Gpu(U0, 0, 0, "NVIDIA A10", 24576, "0000:07:00.0"),
        Gpu(U1, 1, 1, "NVIDIA A10", 24576, "0000:0f:00.0"),
    ),
)
ROOMS = tuple(DeviceRoom(uuid, "", 24576, 24576, 100, 0, 10) for uuid in (U0, U1))
G3 = f"{U1},NVIDIA,3000,50:"


def family(**options: object) -> VolcanoVgpuFamily:
    """The family on the golden node: split 10, factor 1, unless ``options`` say otherwise;
    nothing is limited.
    """
    return VolcanoVgpuFamily(
        msgspec.structs.replace(VolcanoVgpuOptions(factor=1), **options),
        NoIsolation(),
    )


def main(
    name: str = "main", kind: ContainerKind = ContainerKind.MAIN, **limits: int
) -> PodContainer:
    """A container with limits ``number``, ``memory``, ``cores``, ``percentage``."""
    names = {"number": NUMBER, "memory": MEMORY, "cores": CORES, "percentage": PERCENTAGE}
    return PodContainer(name, kind, {names[key]: value for key, value in limits.items()})


def decided(ids_new: str, **more: str) -> dict[str, str]:
    """The six annotations that a scheduler writes (volcano-vgpu G3); ``more`` by the last part of
    their keys, with ``_`` for ``-``.
    """
    written = {
        "volcano.sh/vgpu-node": NODE,
        "volcano.sh/vgpu-time": "1795200692",
        "volcano.sh/bind-time": "1795200692",
        "volcano.sh/bind-phase": "allocating",
        "volcano.sh/vgpu-ids-new": ids_new,
        "volcano.sh/devices-to-allocate": ids_new,
    }
    return written | {f"volcano.sh/{key.replace('_', '-')}": value for key, value in more.items()}


def pod(*containers: PodContainer, annotations: Mapping[str, str] | None = None) -> Pod:
    """Pod ``team/p1`` with UID ``uid-p1``, bound to the golden node."""
    return Pod(
        "uid-p1", "team", "p1", node=NODE, annotations=annotations or {}, containers=containers
    )


def question(
    about: Pod,
    container: str = "main",
    *,
    ids: int = 1,
    rooms: tuple[DeviceRoom, ...] = ROOMS,
    inventory: Inventory = INVENTORY,
    of: VolcanoVgpuFamily | None = None,
) -> Question:
    """Return the question about ``container``, which holds ``ids`` ids of the count resource."""
    resource = next(
        entry for entry in (of or family()).resources(inventory) if entry.name == NUMBER
    )
    return Question(
        resource,
        about,
        container,
        tuple(f"{U0}-{number}" for number in range(ids)),
        NODE,
        inventory,
        rooms,
    )


def grants(**shares: tuple[Share, ...]) -> dict[str, Grant]:
    """Decided grants by container."""
    return {
        name: Grant(
            number, "volcano-vgpu", NUMBER, (f"{U0}-{number}",), each, decided_for=("uid-p1", name)
        )
        for number, (name, each) in enumerate(shares.items(), 1)
    }
