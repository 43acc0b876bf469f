"""Filling the state of a new simulated node from a model: identity, place in the machine, limits,
links, MIG table.

`SimulatedNode.create` calls it once on zeroed memory; afterwards a GPU changes only through
`SimulatedNode`.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import TYPE_CHECKING, Final

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import layout, links

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.sim.models import Model

_MIB: Final = 1 << 20
_VENDOR: Final = 0x10DE  # NVIDIA's PCI vendor ID
_CPUS_PER_NUMA_NODE: Final = 32
_FABRIC_COMPLETED: Final = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
_LINK_CAPABILITIES: Final = 0x3F  # every NVML_NVLINK_CAP_*
_SPARE_ROW_BANKS: Final = 640  # banks of memory that have all of their spare rows left
# nvmlEventType*: ECC single and double bit, P-state, XID, clock, power source, MIG configuration
_EVENT_TYPES: Final = 0x1F | 0x80 | 0x100


def fill(
    node: layout.Node,
    model: Model,
    *,
    numa_nodes: Sequence[int],
    uuids: Sequence[str],
    driver_version: str,
    cuda_version: int,
) -> None:
    """Describe ``len(uuids)`` GPUs of ``model``; the caller makes the file visible afterwards.

    Args:
        node: zeroed memory, that of the node's file.
        model: the GPUs' model.
        numa_nodes: one for each GPU, -1 for none.
        uuids: one for each GPU.
        driver_version: as NVML shows it, e.g. ``580.95.05``.
        cuda_version: 1000 × major + 10 × minor, as NVML encodes it.
    """
    # `LAYOUT` is the version of the file's layout
    node.layout, node.bytes, node.gpu_count = layout.LAYOUT, ctypes.sizeof(layout.Node), len(uuids)
    node.cuda_version, node.model = cuda_version, model.key.encode()
    node.driver_version = driver_version.encode()
    node.nvml_version = f"{cuda_version // 1000}.{driver_version}".encode()
    wiring = links.wires(model, len(uuids))
    for number, gpu_uuid in enumerate(uuids):
        for other in range(len(uuids)):
            node.common_ancestor[number][other] = links.common_ancestor(number, other, numa_nodes)
        gpu = node.gpus[number]
        _identify(gpu, model, number, gpu_uuid)
        _place(gpu, model, numa_nodes[number])
        _limit(gpu, model)
        _link(gpu, model, wiring[number])
        _mig_table(gpu, model)
    node.magic = layout.MAGIC  # last: readers refuse a file without it


def default_uuids(model: Model, count: int, seed: str) -> list[str]:
    """UUIDs that are the same for the same model, number and ``seed``, a text in which nodes differ
    that must not share UUIDs.
    """
    return [
        f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{seed}/{model.key}/{number}')}"
        for number in range(count)
    ]


def check_uuids(uuids: Sequence[str]) -> None:
    """Refuse what no driver would show: a form other than ``GPU-<uuid>``, or the same twice.

    Raises:
        SimulationError: the message names the wrong UUID, or all of them.
    """
    for each in uuids:
        try:
            well_formed = each.startswith("GPU-") and str(uuid.UUID(each[4:])) == each[4:]
        except ValueError:
            well_formed = False
        if not well_formed:
            raise SimulationError(
                f"{each!r} is no GPU UUID; expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx in "
                "lower case"
            )
    if len(set(uuids)) != len(uuids):
        raise SimulationError(f"two GPUs cannot share a UUID: {', '.join(uuids)}")


def _identify(gpu: layout.Gpu, model: Model, number: int, gpu_uuid: str) -> None:
    gpu.present, gpu.minor, gpu.module_id = 1, number, number + 1
    gpu.uuid, gpu.name = gpu_uuid.encode(), model.name.encode()
    gpu.serial = f"16{uuid.UUID(gpu_uuid[4:]).int % 10**11:011d}".encode()
    gpu.vbios, gpu.board_part = b"00.00.00.00.01", b"900-00000-0000-000"
    gpu.brand, gpu.architecture = model.brand, model.architecture
    gpu.compute_major, gpu.compute_minor = model.compute_capability
    gpu.multiprocessors, gpu.cores_per_multiprocessor = (
        model.multiprocessors,
        model.cores_per_multiprocessor,
    )
    gpu.bus, gpu.pci_device_id, gpu.pci_subsystem_id = (
        links.bus_of(number),
        model.pci_device_id << 16 | _VENDOR,
        1 << 16 | _VENDOR,
    )
    gpu.memory_total, gpu.memory_reserved = model.memory_mib * _MIB, model.reserved_mib * _MIB
    gpu.bar1_total, gpu.bar1_used = model.bar1_mib * _MIB, _MIB
    gpu.utilisation = gpu.memory_utilisation = layout.NONE  # they follow from the processes
    gpu.persistence_mode = 1
    gpu.event_types = _EVENT_TYPES


def _place(gpu: layout.Gpu, model: Model, numa_node: int) -> None:
    gpu.numa_node = layout.NONE if numa_node < 0 else numa_node
    for cpu in range(
        max(numa_node, 0) * _CPUS_PER_NUMA_NODE, (max(numa_node, 0) + 1) * _CPUS_PER_NUMA_NODE
    ):
        gpu.cpus[cpu // 64] |= 1 << (cpu % 64)
    gpu.pcie_generation = gpu.pcie_generation_max = model.pcie_generation
    gpu.pcie_width = gpu.pcie_width_max = 16


def _limit(gpu: layout.Gpu, model: Model) -> None:
    limits, power = model.temperature_limits, model.power_watts
    gpu.temperature, gpu.fan_percent = 34, layout.NONE
    gpu.temperature_shutdown, gpu.temperature_slowdown = limits["shutdown"], limits["slowdown"]
    gpu.temperature_gpu_max, gpu.temperature_memory_max = limits["gpu_max"], limits["memory_max"]
    gpu.power_idle_mw, gpu.power_min_mw = power["idle"] * 1000, power["minimum"] * 1000
    gpu.power_limit_mw = gpu.power_max_mw = power["maximum"] * 1000
    gpu.clock_mhz[:], gpu.clock_max_mhz[:] = model.clocks_idle, model.clocks_max
    gpu.ecc_supported = gpu.ecc_current = gpu.ecc_pending = 1
    gpu.remap_supported = int(model.row_remapping)
    gpu.remap_histogram[0] = _SPARE_ROW_BANKS if model.row_remapping else 0
    gpu.fabric_state = _FABRIC_COMPLETED if model.fabric else 0


def _link(gpu: layout.Gpu, model: Model, wires: Sequence[links.Wire]) -> None:
    gpu.link_count = model.nvlink_count
    for number in range(model.nvlink_count):
        gpu.links[number].version = model.nvlink_version
        gpu.links[number].remote_type = 0xFF  # NVML_NVLINK_DEVICE_TYPE_UNKNOWN
    for link, wire in zip(gpu.links, wires, strict=False):  # the rest of the links leads nowhere
        link.up, link.capabilities, link.remote_type = 1, _LINK_CAPABILITIES, wire.remote_type
        to_gpu = wire.remote_type == links.TO_GPU
        # `peer` is the number of the other GPU, or the bus of the switch
        link.remote_bus = links.bus_of(wire.peer) if to_gpu else wire.peer
        # otherwise an NVSwitch
        link.remote_pci_device_id = gpu.pci_device_id if to_gpu else 0x1AF1 << 16 | _VENDOR


def _mig_table(gpu: layout.Gpu, model: Model) -> None:
    gpu.mig_capable = int(bool(model.mig))
    for profile in model.mig:
        row = gpu.profiles[profile.profile]  # NVML_GPU_INSTANCE_PROFILE_*
        row.valid, row.id, row.name = 1, profile.id, profile.name.encode()
        # `starts` and `size` count memory slices
        row.placement_count, row.placement_size = len(profile.starts), profile.size
        row.placement_start[: len(profile.starts)] = profile.starts
        for field in (
            "slices",
            "instances",
            "multiprocessors",
            "memory_mib",
            "copy_engines",
            "decoders",
            "encoders",
            "jpegs",
            "ofas",
        ):
            setattr(row, field, getattr(profile, field))
