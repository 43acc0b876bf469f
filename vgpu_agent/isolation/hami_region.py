"""The shared region of HAMi-core's libvgpu.so, layout 1.2, as bytes:
the file that decides a container's limits.

The first process that opens the region fills it from its environment, and every later one obeys the
file. So the agent writes it before any process exists, and the environment does not matter any more
(hami-core §0.3.1). Offsets and initial values are those of hami-core §2.2 and §2.3; they hold
for glibc on little-endian 64-bit machines. Libraries that accept it: those of layout 1.2 (HAMi from
2.8.2), and of 1.1 (2.4.1 to 2.8.0), which differ in nothing that is written here; not 2.8.1
(hami-core §2.1, §2.3, §0.3.10). Called by `hami_core`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 2_008_953  # the structure and the one byte that the library writes after it
MAX_DEVICES = 16
NO_CORES_LIMIT = 100

MAGIC = 19_920_718
_MAJOR, _MINOR = 1, 2
_UUID_BYTES = 96

# Offsets of the structure's fields, in bytes.
_INITIALIZED = 0  # i32, then major and minor as u32
_SEMAPHORE = 24
_DEVICE_NUM = 56
_UUIDS = 64
_LIMITS = 1_600
_SM_LIMITS = 1_728
_UTILIZATION_SWITCH = 2_008_900  # i32, then recent_kernel and priority
# locked by a process while it finds out its PID on the host
_SEMAPHORE_POSTINIT = 2_008_920

# glibc's sem_t with value 1: a 64-bit value and waiter count, then the mark of a semaphore that
# processes share.
_FREE_SEMAPHORE = struct.pack("<QI", 1, 128)
_RECENT_KERNEL = 2  # the library's own first value: kernels ran recently
_PRIORITY = 1  # CUDA_TASK_PRIORITY's default


class DeviceLimit(msgspec.Struct, frozen=True):
    """The limit of one device: memory in MiB, never 0, which the library takes for no limit;
    compute in percent, 100 for no limit.
    """

    uuid: str
    memory_mib: int
    cores_percent: int = NO_CORES_LIMIT


def region(
    limits: Sequence[DeviceLimit], *, limit_cores: bool = True
) -> tuple[tuple[int, bytes], ...]:
    """Return the (offset, bytes) pairs of a new region with these limits.

    Args:
        limits: at most `MAX_DEVICES`, in the order in which the container numbers its devices.
        limit_cores: the library's limiter of compute is on (``utilization_switch``). Some
            versions never switch it on again once it is off (hami-core §0.3.8), so it must be right
            from the start.
    """
    return (
        (_INITIALIZED, struct.pack("<iII", MAGIC, _MAJOR, _MINOR)),
        (_SEMAPHORE, _FREE_SEMAPHORE),
        (_DEVICE_NUM, struct.pack("<Q", len(limits))),
        (
            _UUIDS,
            b"".join(
                limit.uuid.encode()[: _UUID_BYTES - 1].ljust(_UUID_BYTES, b"\0") for limit in limits
            ),
        ),
        *limit_parts(limits),
        (_UTILIZATION_SWITCH, struct.pack("<iii", int(limit_cores), _RECENT_KERNEL, _PRIORITY)),
        (_SEMAPHORE_POSTINIT, _FREE_SEMAPHORE),
    )


def limit_parts(limits: Sequence[DeviceLimit]) -> tuple[tuple[int, bytes], ...]:
    """Return the (offset, bytes) pairs of the limits alone, for a region that is in use: the memory
    limit holds from the next allocation on (hami-core §0.3.3).
    """
    memory = [limit.memory_mib << 20 for limit in limits]
    cores = [limit.cores_percent for limit in limits]
    return (
        (_LIMITS, struct.pack(f"<{MAX_DEVICES}Q", *memory, *[0] * (MAX_DEVICES - len(memory)))),
        (
            _SM_LIMITS,
            struct.pack(f"<{MAX_DEVICES}Q", *cores, *[NO_CORES_LIMIT] * (MAX_DEVICES - len(cores))),
        ),
    )
