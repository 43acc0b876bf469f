"""Read a container's use of its devices from the bytes of its shared region, which `hami_region`
makes.

The region belongs to the container, which may write anything into it, or cut the file short while
it is read. So nothing here trusts a byte: whatever the content, the answer is a usage or a reason.
Only the head (all that stands before the slots), a few fields after the slots, and the slots in
use (one for each process) are read, through a function, so that the reader of the file copies a few
pages instead of keeping two megabytes mapped.
Layouts: hami-core §2.1 to §2.3. Called by `runtime.container_usage`.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.isolation.hami_region import MAGIC, MAX_DEVICES, SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# the layout of 2024, which has no version words (HAMi up to 2.4.0, volcano-vgpu up to 1.9.3)
SIZE_BEFORE_VERSIONS = 1_197_897

_VERSION = struct.Struct("<iII")  # magic, major, minor
_MAJOR, _MINORS = 1, (1, 2)
_MAX_SLOTS = 1024
_UUID_BYTES = 96
# The text comes from the container and becomes the value of a label. So only a UUID of the form
# that drivers use is accepted.
_UUID = re.compile(rb"(?:GPU|MIG)-[0-9A-Fa-f-]{36}\0")


class DeviceUse(msgspec.Struct, frozen=True):
    """One device of a container, with what all its processes use of it together.

    Attributes:
        index: the device's place in the container's own order, from 0.
        uuid: ``GPU-…`` or ``MIG-…``.
        used_bytes: memory in use.
        limit_bytes: the limit of memory; 0: not limited.
        cores_percent: compute in use, in percent of the device.
        cores_limit_percent: the limit of compute; 100: not limited.
    """

    index: int
    uuid: str
    used_bytes: int
    limit_bytes: int
    cores_percent: int
    cores_limit_percent: int


class RegionUse(msgspec.Struct, frozen=True):
    """The content of a region.

    Attributes:
        last_kernel_at: unix seconds of the last kernel launch; 0 when there was none, or the layout
            does not say.
        processes: how many live processes have the library and this region open.
        limits_cores: the library enforces the limits of compute: the region's
            ``utilization_switch``, with which HAMi's monitor turns the limiter off.
    """

    devices: tuple[DeviceUse, ...]
    last_kernel_at: int = 0
    processes: int = 0
    limits_cores: bool = True


class Unreadable(msgspec.Struct, frozen=True):
    """The reason why the file cannot be read: what was found, and what would be understood."""

    reason: str


class _Layout(msgspec.Struct, frozen=True):
    """Offsets and sizes of what is read, in bytes.

    Attributes:
        device_num: the number of devices.
        uuids: their UUIDs, `_UUID_BYTES` each.
        limits: their limits of memory.
        sm_limits: their limits of compute.
        slots: the first slot.
        slot_size: of one slot.
        used_total: within a slot: the process's use of memory of the first device.
        used_size: from there to the same of the next device.
        sm_used: within a slot: its use of compute of the first device, in percent.
        sm_size: from there to the same of the next device.
        status: within a slot: 0 when the slot's process has ended normally.
        proc_num: the number of slots in use, followed by ``utilization_switch``.
        last_kernel_time: of the last kernel launch; None where the layout has none.
    """

    device_num: int
    uuids: int
    limits: int
    sm_limits: int
    slots: int
    slot_size: int
    used_total: int
    used_size: int
    sm_used: int
    sm_size: int
    status: int
    proc_num: int
    last_kernel_time: int | None


_VERSION_1 = _Layout(
    device_num=56,
    uuids=64,
    limits=1_600,
    sm_limits=1_728,
    slots=1_856,
    slot_size=1_960,
    used_total=8 + 32,
    used_size=64,
    sm_used=1_160 + 16,
    sm_size=48,
    status=1_928,
    proc_num=2_008_896,
    last_kernel_time=2_008_912,
)
_BEFORE_VERSIONS = _Layout(
    device_num=48,
    uuids=56,
    limits=1_592,
    sm_limits=1_720,
    slots=1_848,
    slot_size=1_168,
    used_total=8 + 32,
    used_size=40,
    sm_used=776 + 16,
    sm_size=24,
    status=1_160,
    proc_num=1_197_880,
    last_kernel_time=None,
)


def read_region(
    size: int,
    read: Callable[[int, int], bytes],
    *,
    is_alive: Callable[[int, int], bool] = lambda _hostpid, _pid: True,
) -> RegionUse | Unreadable | None:
    """Return the present content of the region.

    Args:
        size: of the file; together with the version words it identifies the layout.
        read: returns the bytes at (offset, length); fewer, when the file has become shorter.
        is_alive: tells whether a slot's process (pid on the host, pid in its container) still
            exists. A process that was killed leaves its slot behind with all that it used
            (hami-core §2.4).

    Returns:
        None while there is no content: no process has initialised the file, or it has become
            shorter while it was read.
    """
    try:
        layout = _layout(size, read)
        return _use(layout, read, is_alive) if isinstance(layout, _Layout) else layout
    except struct.error:  # fewer bytes than the size says
        return None


def _layout(size: int, read: Callable[[int, int], bytes]) -> _Layout | Unreadable | None:
    if 0 < size < _VERSION.size:
        return Unreadable(f"it has {size} bytes, so it is not a region of HAMi-core")
    magic, major, minor = _VERSION.unpack(read(0, _VERSION.size)) if size else (0, 0, 0)
    if magic not in {0, MAGIC}:
        return Unreadable(
            f"it begins with {magic} instead of {MAGIC}, so it is not a region of HAMi-core"
        )
    layout = _BEFORE_VERSIONS if size == SIZE_BEFORE_VERSIONS else None
    if size == SIZE and major == _MAJOR and minor in _MINORS:
        layout = _VERSION_1
    if magic and layout is None:
        known = f"{SIZE_BEFORE_VERSIONS} bytes, or {SIZE} bytes and version 1.1 or 1.2"
        return Unreadable(
            f"it has {size} bytes and says version {major}.{minor}; this agent reads {known}"
        )
    return layout if magic else None  # the magic is written last


def _use(
    layout: _Layout, read: Callable[[int, int], bytes], is_alive: Callable[[int, int], bool]
) -> RegionUse:
    head = read(0, layout.slots)
    (device_num,) = struct.unpack_from("<Q", head, layout.device_num)
    proc_num, switch = struct.unpack("<ii", read(layout.proc_num, 8))
    limits = struct.unpack_from(f"<{MAX_DEVICES}Q", head, layout.limits)
    sm_limits = struct.unpack_from(f"<{MAX_DEVICES}Q", head, layout.sm_limits)
    devices = min(device_num, MAX_DEVICES)
    used, sm, processes = [0] * devices, [0] * devices, 0
    for slot in _slots(layout, read, min(max(proc_num, 0), _MAX_SLOTS)):
        pid, hostpid = struct.unpack_from("<ii", slot)
        (status,) = struct.unpack_from("<i", slot, layout.status)
        if not status or not is_alive(hostpid, pid):
            continue
        processes += 1
        for index in range(devices):
            used[index] += struct.unpack_from(
                "<Q", slot, layout.used_total + index * layout.used_size
            )[0]
            sm[index] += struct.unpack_from("<Q", slot, layout.sm_used + index * layout.sm_size)[0]
    last_kernel_at = 0
    if layout.last_kernel_time is not None:
        (last_kernel_at,) = struct.unpack("<Q", read(layout.last_kernel_time, 8))
    return RegionUse(
        tuple(
            DeviceUse(
                index=index,
                uuid=uuid,
                used_bytes=used[index],
                limit_bytes=limits[index],
                cores_percent=sm[index],
                cores_limit_percent=sm_limits[index],
            )
            for index in range(devices)
            if (uuid := _uuid(head, layout.uuids + index * _UUID_BYTES))
        ),
        last_kernel_at=last_kernel_at,
        processes=processes,
        limits_cores=bool(switch),
    )


def _slots(layout: _Layout, read: Callable[[int, int], bytes], number: int) -> Iterator[bytes]:
    """Yield the slots in use, each copied by itself: usually there is one, and a file that claims
    to have a thousand does not cost two megabytes at once.
    """
    for place in range(number):
        yield read(layout.slots + place * layout.slot_size, layout.slot_size)


def _uuid(head: bytes, offset: int) -> str:
    """Return the device's UUID; empty when no driver would have written that."""
    found = _UUID.match(head, offset, offset + _UUID_BYTES)
    return found[0][:-1].decode() if found else ""
