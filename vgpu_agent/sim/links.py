"""The links between the GPUs of a simulated node: NVLinks and the PCIe distance of each pair.

`creation` calls these functions when it makes a node. A GPU is given by its number, from 0. The
wiring follows the boards on which a model is sold, so that a placement policy tested on simulated
GPUs sees links as uneven as real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.sim.models import Model

# NVML_TOPOLOGY_*: nearest common ancestor of two GPUs
SAME_GPU: Final = 0
SAME_PCIE_SWITCHES: Final = 20
SAME_NUMA_NODE: Final = 40
ACROSS_NUMA_NODES: Final = 50

# NVML_NVLINK_DEVICE_TYPE_*: what is at the other end of a link
TO_GPU: Final = 0
TO_SWITCH: Final = 2

_FIRST_SWITCH_BUS: Final = 0xC1  # the PCI bus of the first NVSwitch
_BOARD: Final = 4  # the most GPUs of a board without NVSwitch, each linked to each other one

# Number of links between each pair of the eight V100 of a DGX-1: rings of four with doubled edges,
# and one neighbour in the other four.
_CUBE_MESH: Final = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)


@dataclass(frozen=True, slots=True)
class Wire:
    """One NVLink: ``remote_type`` is `TO_GPU` or `TO_SWITCH`, and ``peer`` is the number of that
    GPU or the PCI bus of that switch.
    """

    remote_type: int
    peer: int


def bus_of(gpu: int) -> int:
    """PCI bus of a simulated GPU; the first ones lie where a DGX A100 has them."""
    return 0x07 + 8 * gpu


def common_ancestor(first: int, second: int, numa_nodes: Sequence[int]) -> int:
    """Return NVML_TOPOLOGY_* of two GPUs: numbers 2n and 2n + 1 share PCIe switches, others a NUMA
    node or nothing. ``numa_nodes`` has the NUMA node of each GPU.
    """
    if first == second:
        return SAME_GPU
    if numa_nodes[first] != numa_nodes[second]:
        return ACROSS_NUMA_NODES
    return SAME_PCIE_SWITCHES if first // 2 == second // 2 else SAME_NUMA_NODE


def wires(model: Model, gpus: int) -> list[list[Wire]]:
    """Return the connected NVLinks of each of a node's ``gpus`` GPUs, in order; the caller adds
    those that are unconnected.
    """
    if model.nvlink == "none" or gpus == 1:
        return [[] for _ in range(gpus)]
    if model.nvlink == "switch" and gpus > _BOARD:
        switched = [
            Wire(TO_SWITCH, _FIRST_SWITCH_BUS + link % model.nvswitches)
            for link in range(model.nvlink_count)
        ]
        return [list(switched) for _ in range(gpus)]
    if gpus <= _BOARD:
        return [_to_each_peer(model.nvlink_count, gpu, gpus) for gpu in range(gpus)]
    return [_cube_mesh(gpu, gpus) for gpu in range(gpus)]


def _to_each_peer(count: int, gpu: int, gpus: int) -> list[Wire]:
    """Divide the ``count`` NVLinks of ``gpu`` equally among the other GPUs."""
    peers = [peer for peer in range(gpus) if peer != gpu]
    return [Wire(TO_GPU, peer) for peer in peers for _ in range(count // len(peers))]


def _cube_mesh(gpu: int, gpus: int) -> list[Wire]:
    first = gpu - gpu % len(_CUBE_MESH)  # the first GPU of the same board
    row = _CUBE_MESH[gpu % len(_CUBE_MESH)]
    return [
        Wire(TO_GPU, first + peer)
        for peer, links in enumerate(row)
        if first + peer < gpus
        for _ in range(links)
    ]
