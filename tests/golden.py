"""The node of the contracts' golden vectors (nvidia contract §17, kubelet contract §17): two A100-40GB, NUMA 0 and 1."""

from __future__ import annotations

import dataclasses

from vgpu_agent.model import Gpu, Health, Inventory

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
    return Inventory(version=1, gpus=tuple(dataclasses.replace(gpu, health=ill.get(gpu.uuid, gpu.health)) for gpu in gpus))
