"""The state file of a simulated node, as Python sees it: the mirror of native/state.h.

Python writes the file and the C library reads it, so both must agree on every byte;
tests/sim/test_layout.py checks that they do. `state` maps the file with these structures.
"""

from __future__ import annotations

import ctypes
from typing import Final

MAGIC: Final = 0x314D495355504756
LAYOUT: Final = 1  # the version of this layout
# SIM_NONE: any GPU, no NUMA node, no MIG instance, no return code, not supported
NONE: Final = 0xFFFFFFFF
# Offset of the byte by which the first process slot is locked; it lies beyond the end of the file.
LOCK_BASE: Final = 0x40000000

# The lengths of the arrays in the file: the most GPUs, events (a ring) and faults of the node; the
# most processes, NVLinks, MIG devices, MIG profiles and retired pages of each kind of one GPU; the
# most placements of one MIG profile.
GPUS: Final = 16
PROCESSES: Final = 64
LINKS: Final = 18
MIG_DEVICES: Final = 8
PROFILES: Final = 16
PLACEMENTS: Final = 8
RETIRED_PAGES: Final = 16
EVENTS: Final = 256
FAULTS: Final = 32
CPU_WORDS: Final = 16  # of 64 bits, one for each CPU near a GPU

_u32, _u64, _i32, _char = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_char


class Link(ctypes.Structure):
    """``struct sim_link``: one NVLink of a GPU and its other end."""

    _fields_ = (
        ("up", _u32),
        ("version", _u32),
        ("remote_type", _u32),
        ("capabilities", _u32),
        ("remote_domain", _u32),
        ("remote_bus", _u32),
        ("remote_device", _u32),
        ("remote_pci_device_id", _u32),
    )


class MigProfile(ctypes.Structure):
    """``struct sim_mig_profile``: one row of a model's MIG table."""

    _fields_ = (
        ("valid", _u32),
        ("id", _u32),
        ("slices", _u32),
        ("instances", _u32),
        ("multiprocessors", _u32),
        ("copy_engines", _u32),
        ("decoders", _u32),
        ("encoders", _u32),
        ("jpegs", _u32),
        ("ofas", _u32),
        ("placement_count", _u32),
        ("placement_size", _u32),
        ("placement_start", _u32 * PLACEMENTS),
        ("memory_mib", _u64),
        ("name", _char * 96),
    )


class MigDevice(ctypes.Structure):
    """``struct sim_mig_device``: one GPU instance with its one compute instance."""

    _fields_ = (
        ("used", _u32),
        ("gpu_instance", _u32),
        ("compute_instance", _u32),
        ("gpu_instance_profile", _u32),
        ("compute_instance_profile", _u32),
        ("gpu_instance_slices", _u32),
        ("compute_instance_slices", _u32),
        ("multiprocessors", _u32),
        ("copy_engines", _u32),
        ("decoders", _u32),
        ("encoders", _u32),
        ("jpegs", _u32),
        ("ofas", _u32),
        ("placement_start", _u32),
        ("placement_size", _u32),
        ("padding", _u32),
        ("memory_mib", _u64),
        ("uuid", _char * 96),
        ("name", _char * 96),
    )


class Process(ctypes.Structure):
    """``struct sim_process``: one slot for a process that uses a GPU."""

    # the values of `kind`
    FREE: Final = 0
    FIXED: Final = 1  # shown under a pid given as a number, whether or not such a process exists
    LIVE: Final = 2  # shown while a process holds the lock of the slot

    _fields_ = (
        ("kind", _u32),
        ("pid", _u32),
        ("type", _u32),  # 0 compute, 1 graphics, 2 MPS
        ("gpu_instance", _u32),
        ("compute_instance", _u32),
        ("sm_percent", _u32),
        ("memory_percent", _u32),
        ("encoder_percent", _u32),
        ("decoder_percent", _u32),
        ("padding", _u32),
        ("pid_namespace", _u64),
        ("memory_bytes", _u64),
        ("name", _char * 64),
    )


class Gpu(ctypes.Structure):
    """``struct sim_gpu``: everything NVML can be asked about one GPU."""

    # the values of `lost`
    ANSWERS: Final = 0
    LOST_BUT_KNOWN: Final = 1  # only its identity (UUID, index…) can still be queried
    LOST_ENTIRELY: Final = 2

    _fields_ = (
        ("present", _u32),  # 0: unplugged
        ("lost", _u32),
        ("minor", _u32),
        ("numa_node", _u32),
        ("domain", _u32),
        ("bus", _u32),
        ("device", _u32),
        ("pci_device_id", _u32),
        ("pci_subsystem_id", _u32),
        ("brand", _u32),
        ("architecture", _u32),
        ("compute_major", _u32),
        ("compute_minor", _u32),
        ("multiprocessors", _u32),
        ("cores_per_multiprocessor", _u32),
        ("module_id", _u32),
        ("uuid", _char * 96),
        ("name", _char * 96),
        ("serial", _char * 32),
        ("vbios", _char * 32),
        ("board_part", _char * 32),
        ("memory_total", _u64),
        ("memory_reserved", _u64),
        ("memory_unaccounted", _u64),  # in use, by no process that is shown
        ("bar1_total", _u64),
        ("bar1_used", _u64),
        ("utilisation", _u32),
        ("memory_utilisation", _u32),
        ("encoder_utilisation", _u32),
        ("decoder_utilisation", _u32),
        ("temperature", _u32),
        ("temperature_shutdown", _u32),
        ("temperature_slowdown", _u32),
        ("temperature_memory_max", _u32),
        ("temperature_gpu_max", _u32),
        ("fan_percent", _u32),
        ("power_idle_mw", _u32),
        ("power_limit_mw", _u32),
        ("power_min_mw", _u32),
        ("power_max_mw", _u32),
        ("clock_mhz", _u32 * 4),
        ("clock_max_mhz", _u32 * 4),
        ("persistence_mode", _u32),
        ("compute_mode", _u32),
        ("energy_mj", _u64),
        ("ecc_supported", _u32),
        ("ecc_current", _u32),
        ("ecc_pending", _u32),
        ("remap_supported", _u32),
        ("ecc_volatile_corrected", _u64),
        ("ecc_volatile_uncorrected", _u64),
        ("ecc_aggregate_corrected", _u64),
        ("ecc_aggregate_uncorrected", _u64),
        ("remap_corrected", _u32),
        ("remap_uncorrected", _u32),
        ("remap_pending", _u32),
        ("remap_failed", _u32),
        ("remap_histogram", _u32 * 5),
        ("recovery_action", _u32),
        ("retired_pending", _u32),
        ("retired_count", _u32 * 2),
        ("padding", _u32),
        ("retired_address", (_u64 * RETIRED_PAGES) * 2),
        ("pcie_generation", _u32),
        ("pcie_generation_max", _u32),
        ("pcie_width", _u32),
        ("pcie_width_max", _u32),
        ("cpus", _u64 * CPU_WORDS),
        ("fabric_state", _u32),
        ("fabric_clique", _u32),
        ("fabric_status", _u32),
        ("fabric_health_mask", _u32),
        ("fabric_uuid", ctypes.c_uint8 * 16),
        ("link_count", _u32),
        ("mig_capable", _u32),
        ("mig_current", _u32),
        ("mig_pending", _u32),
        ("event_types", _u64),
        ("links", Link * LINKS),
        ("profiles", MigProfile * PROFILES),
        ("mig_devices", MigDevice * MIG_DEVICES),
        ("processes", Process * PROCESSES),
    )


class Event(ctypes.Structure):
    """``struct sim_event``: one thing that happened to a GPU."""

    _fields_ = (
        ("sequence", _u64),
        ("type", _u64),
        ("payload", _u64),  # of an XID event: the XID
        ("gpu", _u32),
        ("gpu_instance", _u32),
        ("compute_instance", _u32),
        ("padding", _u32),
    )


class Fault(ctypes.Structure):
    """``struct sim_fault``: how some NVML calls are made to fail."""

    _fields_ = (
        ("function", _char * 64),  # an NVML function, or the beginning of names and "*"
        ("gpu", _u32),  # by number; NONE: any, and calls that are about no GPU
        ("code", _u32),
        ("times_left", _i32),  # -1: for ever
        ("delay_ms", _u32),
    )


class Node(ctypes.Structure):
    """``struct sim_node``: the whole file."""

    _fields_ = (
        ("magic", _u64),
        ("layout", _u32),
        ("bytes", _u32),
        ("gpu_count", _u32),
        ("cuda_version", _u32),
        ("driver_version", _char * 80),
        ("nvml_version", _char * 80),
        ("model", _char * 64),
        ("event_head", _u64),  # events ever posted; the next one goes to event_head % EVENTS
        ("events", Event * EVENTS),
        ("faults", Fault * FAULTS),
        ("common_ancestor", (_u32 * GPUS) * GPUS),  # NVML_TOPOLOGY_* of each pair
        ("gpus", Gpu * GPUS),
    )


def description() -> str:
    """Return the layout as Python sees it, in the form of the library's ``vgpusim_layout()``."""
    sizes = {
        "node": Node,
        "gpu": Gpu,
        "process": Process,
        "mig_device": MigDevice,
        "mig_profile": MigProfile,
        "link": Link,
        "event": Event,
        "fault": Fault,
    }
    words = [f"layout={LAYOUT}"]
    words += [f"{name}={ctypes.sizeof(structure)}" for name, structure in sizes.items()]
    words += [f"{name}@{getattr(Node, name).offset}" for name in ("events", "faults", "gpus")]
    words += [
        f"{name}@{getattr(Gpu, name).offset}" for name in ("profiles", "mig_devices", "processes")
    ]
    return " ".join(words)
