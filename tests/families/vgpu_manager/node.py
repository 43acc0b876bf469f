"""The node of the golden vectors (vgpu-manager §13): two A10 on two NUMA nodes."""

from __future__ import annotations

from vgpu_agent.model import Gpu, Inventory, Link

U0 = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28"
U1 = "GPU-7f1c2a90-5b64-4d1e-9c3f-2f8e6d7b1a45"
NUMBER = "nvidia.com/vgpu-number"
CORES = "nvidia.com/vgpu-cores"
MEMORY = "nvidia.com/vgpu-memory"

INVENTORY = Inventory(
    version=1,
    gpus=(
        Gpu(U0, 0, 0, "NVIDIA A10", 24576, "0000:3b:00.0", 0, (8, 6)),
        Gpu(U1, 1, 1, "NVIDIA A10", 24576, "0000:af:00.0", 1, (8, 6)),
    ),
    links={(U0, U1): Link(50), (U1, U0): Link(50)},
    driver_version="570.86.10",
    cuda_version="12.8",
)


def cards(count: int, memory_mib: int = 81920) -> Inventory:
    """A node with that many equal GPUs."""
    return Inventory(
        1,
        tuple(
            Gpu(f"GPU-{number:08d}-aaaa-bbbb-cccc-000000000000", number, number, "H", memory_mib)
            for number in range(count)
        ),
    )
