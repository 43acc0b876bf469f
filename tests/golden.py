"""The node of the contracts' golden vectors (nvidia §17, kubelet §17):
two A100-40GB, NUMA 0 and 1.
"""

from __future__ import annotations

import msgspec

from vgpu_agent.model import Gpu, Health, Inventory, MigInstance

U0 = "GPU-aaaaaaaa-0000-4000-8000-000000000000"
U1 = "GPU-bbbbbbbb-0000-4000-8000-000000000001"


def golden_inventory(**health: Health) -> Inventory:
    """The golden node; ``U0=Health(ok=False)`` makes a card ill."""
    gpus = (
        Gpu(U0, 0, 0, "NVIDIA A100-SXM4-40GB", 40960, "0000:07:00.0", 0, (8, 0)),
        Gpu(U1, 1, 1, "NVIDIA A100-SXM4-40GB", 40960, "0000:0f:00.0", 1, (8, 0)),
    )
    named = {"U0": U0, "U1": U1}
    ill = {named[name]: value for name, value in health.items()}
    return Inventory(
        version=1,
        gpus=tuple(
            msgspec.structs.replace(gpu, health=ill.get(gpu.uuid, gpu.health)) for gpu in gpus
        ),
    )


# The seven 1g.5gb slices of GPU 1, M0…M6 of the contracts.
SLICES = tuple(f"MIG-cccccccc-0000-5000-8000-00000000000{number}" for number in range(7))


def golden_slices(
    profile: str = "1g.5gb", memory_mib: int = 4864, count: int = 7, *, letter: str = "c"
) -> tuple[MigInstance, ...]:
    """``count`` slices, GI 7…13, CI 0; ``letter`` tells their UUIDs apart from those of others."""
    gpu_slices = int(profile[0])
    return tuple(
        MigInstance(
            SLICES[number].replace("cccccccc", letter * 8),
            number,
            7 + number,
            0,
            profile,
            memory_mib,
            gpu_slices,
            gpu_slices,
            # Nine for each GPU instance: its own and those of up to eight compute instances.
            (
                f"/dev/nvidia-caps/nvidia-cap{201 + 9 * number}",
                f"/dev/nvidia-caps/nvidia-cap{202 + 9 * number}",
            ),
        )
        for number in range(count)
    )


def with_slices(inventory: Inventory, **slices: tuple[MigInstance, ...]) -> Inventory:
    """``inventory`` with GPUs in MIG mode: ``U1=golden_slices()``."""
    named = {U0: "U0", U1: "U1"}
    gpus = (
        msgspec.structs.replace(gpu, mig_enabled=True, mig_instances=slices[named[gpu.uuid]])
        if named[gpu.uuid] in slices
        else gpu
        for gpu in inventory.gpus
    )
    return msgspec.structs.replace(inventory, gpus=tuple(gpus))
