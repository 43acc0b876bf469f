"""The node of volcano-vgpu:G12: A100-40GB cards in the operating mode mig,
with the geometries that are shipped for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tests.families.volcano_vgpu.golden import NODE, NUMBER, U0, U1
from vgpu_agent.families.family import Question
from vgpu_agent.families.volcano_vgpu.files import read_device_config
from vgpu_agent.families.volcano_vgpu.mig.family import VolcanoVgpuMigFamily
from vgpu_agent.families.volcano_vgpu.offer import VolcanoVgpuOptions
from vgpu_agent.families.volcano_vgpu.settings import MIG
from vgpu_agent.model import DeviceRoom, Gpu, Grant, Inventory, MigInstance, Owner, Share
from vgpu_agent.pods import Pod

DEVICE_CONFIG = """
nvidia:
  resourceCountName: volcano.sh/vgpu-number
  resourceMemoryName: volcano.sh/vgpu-memory
  resourceCoreName: volcano.sh/vgpu-cores
  resourceMemoryPercentageName: volcano.sh/vgpu-memory-percentage
  deviceSplitCount: 10
  deviceCoreScaling: 1
  gpuMemoryFactor: 1
  knownMigGeometries:
  - models: [A100-SXM4-40GB, A100-40GB-PCIe]
    allowedGeometries:
    - group: group1
      geometries: [{name: 1g.5gb, memory: 5120, count: 7}]
    - group: group2
      geometries: [{name: 2g.10gb, memory: 10240, count: 3}, {name: 1g.5gb, memory: 5120, count: 1}]
    - group: group3
      geometries: [{name: 3g.20gb, memory: 20480, count: 2}]
    - group: group4
      geometries: [{name: 7g.40gb, memory: 40960, count: 1}]
"""
GEOMETRIES = read_device_config(DEVICE_CONFIG).geometries
# as the driver shows them
MEMORY_MIB = {"1g.5gb": 4864, "2g.10gb": 9856, "3g.20gb": 19968, "7g.40gb": 40192}
GROUP2 = ("2g.10gb", "2g.10gb", "2g.10gb", "1g.5gb")


def instance(gpu: str, number: int, profile: str) -> MigInstance:
    """The instance of that number below the GPU ``gpu``, with the UUID
    ``MIG-<last digit of the GPU>-<number>``.
    """
    slices = int(profile[0])
    return MigInstance(
        f"MIG-{gpu[-1]}-{number}",
        number,
        number + 1,
        0,
        profile,
        MEMORY_MIB[profile],
        slices,
        slices,
    )


def a_gpu(uuid: str = U0, *profiles: str, index: int = 0) -> Gpu:
    """An A100 that is divided into these profiles, in the driver's order."""
    instances = tuple(instance(uuid, number, profile) for number, profile in enumerate(profiles))
    name = "NVIDIA A100-SXM4-40GB"
    return Gpu(
        uuid,
        index,
        index,
        name,
        40960,
        f"0000:0{index}:00.0",
        mig_enabled=bool(profiles),
        mig_instances=instances,
    )


def node(*of_u0: str, of_u1: Sequence[str] = ()) -> Inventory:
    """Two cards, divided so."""
    return Inventory(version=1, gpus=(a_gpu(U0, *of_u0), a_gpu(U1, *of_u1, index=1)))


def mig_family(**options: Any) -> VolcanoVgpuMigFamily:
    """The family on that node, with every MiB as an id."""
    known = VolcanoVgpuOptions(factor=1, mode=MIG, geometries=GEOMETRIES)
    return VolcanoVgpuMigFamily(msgspec.structs.replace(known, **options))


def taken(**by: str) -> Mapping[str, Grant]:
    """``MIG_1_0="other"``: that instance is in the hands of the pod ``team/other``;
    ``U0`` and ``U1`` are the cards.
    """
    cards = {"U0": U0, "U1": U1}
    devices = {cards.get(name, name.replace("_", "-")): pod for name, pod in by.items()}
    return {
        device: Grant(
            number,
            "volcano-vgpu",
            NUMBER,
            (f"{U0}-{number}",),
            (Share(device),),
            owner=Owner("main", f"uid-{pod}", "team", pod),
        )
        for number, (device, pod) in enumerate(devices.items(), 1)
    }


def ask(
    about: Pod,
    inventory: Inventory,
    *,
    container: str = "main",
    ids: int = 1,
    held: Mapping[str, Grant] | None = None,
    of: VolcanoVgpuMigFamily | None = None,
) -> Question:
    """Return the question about ``container``, which holds ``ids`` ids,
    while others hold ``held``.
    """
    resource = next(
        entry for entry in (of or mig_family()).resources(inventory) if entry.name == NUMBER
    )
    rooms = tuple(DeviceRoom(gpu.uuid, "", 40960, 40960, 100, 0, 10) for gpu in inventory.gpus)
    chosen = tuple(f"{U0}-{number}" for number in range(ids))
    return Question(resource, about, container, chosen, NODE, inventory, rooms, taken=held or {})
