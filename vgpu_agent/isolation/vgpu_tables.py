"""The tables by which vgpu-manager's libvgpu-control.so and the agent tell each other how much
containers use:
``vmem_node.config``, ``sm_node.config`` and ``sm_util.config`` (vgpu-manager §7.7).

The first two belong to a container, which may write anything into them, or cut them short while
they are read. So nothing here trusts a byte: whatever the content, the answer is a reading or a
reason, and no count leads beyond its table. The third belongs to the agent, and containers only
read it. All are little endian.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.isolation.hami_usage import Unreadable
from vgpu_agent.isolation.vgpu_config import MAX_CARDS

if TYPE_CHECKING:
    from collections.abc import Callable

# magic, version, used bytes, slots: the beginning of both tables of a container
_HEAD = struct.Struct("<4I")
_SLOTS_OFFSET = 128  # where the slots begin, one for each card
MAX_PROCESSES = 1024  # for which a table of a slot has rows

# -- vmem_node.config: memory that has spilled ----------------------------------------------------

VMEM_SIZE = 327_680
VMEM_MAGIC, VMEM_VERSION, VMEM_USED = 0x564D4E44, 1, 262_400
VMEM_SLOT_SIZE = 16_392
VMEM_ROW = struct.Struct("<i4xQ")  # pid, bytes
# offsets within a slot: of the number of rows, and of the byte that an OFD lock covers
VMEM_COUNT, VMEM_LOCK = 16_384, 16_388

# -- sm_node.config: the token bucket of kernel launches that a container's processes share --------

SM_NODE_SIZE = 8192
SM_NODE_MAGIC, SM_NODE_VERSION, SM_NODE_USED = 0x534D4E44, 3, 2176
SM_NODE_SLOT_SIZE = 128
# tokens, total, last refill (ns), share, last sample (ns); limit, cycle, free, others before,
# cooldown, exclusive, streak, lost, throttled, own use, all use, processes, others, leader,
# interval. The agent reads only last sample, limit, own use, all use and processes; the others are
# for the library's own control of launches.
SM_NODE_SLOT = struct.Struct("<5q15i")

# -- sm_util.config: the agent's samples of the use of compute ------------------------------------

SM_UTIL_SIZE = 1_311_232
SM_UTIL_SLOT_SIZE = 81_952
# The other numbers are offsets within a slot: of the samples and of their number, and of the
# processes with a compute or a graphics context and of their numbers. At "last seen" stands a
# time: readers leave out the samples from before it.
SM_UTIL_SAMPLE = struct.Struct("<I4xQ4I")  # pid, time, compute, memory, encoder, decoder
SM_UTIL_SAMPLES, SM_UTIL_SAMPLE_COUNT, SM_UTIL_LAST_SEEN = 0, 32_768, 32_776
SM_UTIL_PROCESS = struct.Struct("<I4xQ2I")  # pid, bytes, GPU instance, compute instance
SM_UTIL_COMPUTE, SM_UTIL_COMPUTE_COUNT = 32_784, 57_360
SM_UTIL_GRAPHICS, SM_UTIL_GRAPHICS_COUNT = 57_368, 81_944
SM_UTIL_LOCK = 81_948  # an OFD lock of that byte


class Spilled(msgspec.Struct, frozen=True):
    """Memory of one process that lies in the host's instead of the card's.

    Attributes:
        index: of the card on its host.
        pid: of the process, as the table has it.
        used_bytes: the amount.
    """

    index: int
    pid: int
    used_bytes: int


class SmUse(msgspec.Struct, frozen=True):
    """The use of one card's compute, as the container's own processes have last sampled it.

    Attributes:
        index: of the card on its host.
        own_percent: that of the container.
        all_percent: that of all processes on the card.
        limit_percent: what the container may have just now.
        processes: the number of processes on the card, as the library has counted them.
        sampled_ns: the time of the sample, in ns by the clock of the container's library.
    """

    index: int
    own_percent: int
    all_percent: int
    limit_percent: int
    processes: int
    sampled_ns: int


def vmem_head() -> bytes:
    """Return the beginning of an empty ``vmem_node.config``."""
    return _HEAD.pack(VMEM_MAGIC, VMEM_VERSION, VMEM_USED, MAX_CARDS)


def sm_node_head() -> bytes:
    """Return the beginning of an empty ``sm_node.config``."""
    return _HEAD.pack(SM_NODE_MAGIC, SM_NODE_VERSION, SM_NODE_USED, MAX_CARDS)


def read_vmem(size: int, read: Callable[[int, int], bytes]) -> tuple[Spilled, ...] | Unreadable:
    """Return what a container's processes have spilled, as its ``vmem_node.config`` says.

    A process that was killed leaves its row behind; the caller knows which live.

    Args:
        size: of the file.
        read: returns the bytes at (offset, length); fewer, when the file has become shorter.
    """
    try:
        if reason := _why_unreadable(size, read, VMEM_SIZE, vmem_head()):
            return Unreadable(reason)
        found: list[Spilled] = []
        for index in range(MAX_CARDS):
            slot = _SLOTS_OFFSET + index * VMEM_SLOT_SIZE
            (count,) = struct.unpack("<I", read(slot + VMEM_COUNT, 4))
            if not count:
                continue
            if count > MAX_PROCESSES:
                return Unreadable(
                    f"it says that card {index} has {count} rows, and a table has {MAX_PROCESSES}"
                )
            rows = read(slot, count * VMEM_ROW.size)
            found += [
                Spilled(index, pid, used) for pid, used in VMEM_ROW.iter_unpack(rows) if pid > 0
            ]
        return tuple(found)
    except struct.error:
        return Unreadable("it became shorter while it was read")


def read_sm_node(size: int, read: Callable[[int, int], bytes]) -> tuple[SmUse, ...] | Unreadable:
    """Return the use of compute that a container's processes have sampled themselves;
    the arguments are those of `read_vmem`.
    """
    try:
        if reason := _why_unreadable(size, read, SM_NODE_SIZE, sm_node_head()):
            return Unreadable(reason)
        found: list[SmUse] = []
        for index in range(MAX_CARDS):
            offset = _SLOTS_OFFSET + index * SM_NODE_SLOT_SIZE
            fields = SM_NODE_SLOT.unpack(read(offset, SM_NODE_SLOT.size))
            sampled, limit, own, total, processes = (
                fields[4],
                fields[5],
                fields[14],
                fields[15],
                fields[16],
            )
            if sampled > 0:
                found.append(
                    SmUse(
                        index=index,
                        own_percent=_percent(own),
                        all_percent=_percent(total),
                        limit_percent=_percent(limit),
                        processes=min(max(processes, 0), MAX_PROCESSES),
                        sampled_ns=sampled,
                    )
                )
        return tuple(found)
    except struct.error:
        return Unreadable("it became shorter while it was read")


def _why_unreadable(size: int, read: Callable[[int, int], bytes], wanted: int, head: bytes) -> str:
    """Explain why a file is no table of the layout: ``wanted`` bytes long, with the magic, version
    and used bytes of ``head``; empty when it is one.
    """
    if size != wanted:
        return f"it has {size} bytes instead of {wanted}"
    found, expected = _HEAD.unpack(read(0, _HEAD.size)), _HEAD.unpack(head)
    if found[0] != expected[0]:
        return f"it begins with {found[0]:#x} instead of {expected[0]:#x}"
    if found[1:3] != expected[1:3]:
        return (
            f"it says version {found[1]} of {found[2]} bytes; this agent reads version "
            f"{expected[1]} of {expected[2]}"
        )
    return ""


def _percent(value: int) -> int:
    return min(max(value, 0), 100)
