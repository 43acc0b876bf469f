"""Regions of HAMi-core as a library would leave them, for tests of their readers.

Written from the offsets in hami-core §2.2 and §2.3 (and volcano-vgpu §6), with nothing taken from
the agent's own code.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence

MAGIC = 0x012FF74E
V1_BYTES, V0_BYTES = 2_008_953, 1_197_897


@dataclasses.dataclass(frozen=True)
class Slot:
    """One process: ``used`` and ``sm`` by device, in bytes and percent;
    status 0 is free, 1 running, 2 suspended.
    """

    used: Mapping[int, int] = dataclasses.field(default_factory=dict)
    sm: Mapping[int, int] = dataclasses.field(default_factory=dict)
    pid: int = 1
    hostpid: int = 0
    status: int = 1


@dataclasses.dataclass(frozen=True)
class Device:
    """One device: bytes (0: no limit) and percent."""

    uuid: str | bytes
    limit: int = 0
    sm_limit: int = 100


def v1(
    devices: Sequence[Device],
    slots: Sequence[Slot] = (),
    *,
    minor: int = 2,
    last_kernel: int = 0,
    in_use: int | None = None,
) -> bytearray:
    """Layouts 1.1 and 1.2; ``in_use`` is what proc_num says, if not the number of slots."""
    file = bytearray(V1_BYTES)
    struct.pack_into("<iII", file, 0, MAGIC, 1, minor)
    _head(file, devices, number=56, uuids=64, limits=1_600, sm_limits=1_728)
    for place, slot in enumerate(slots):
        _slot(file, 1_856 + 1_960 * place, slot, used=(8, 64), sm=(1_160, 48), status=1_928)
    struct.pack_into("<iiii", file, 2_008_896, len(slots) if in_use is None else in_use, 1, 2, 1)
    struct.pack_into("<Q", file, 2_008_912, last_kernel)
    return file


def v0(devices: Sequence[Device], slots: Sequence[Slot] = ()) -> bytearray:
    """The layout of 2024, without versions and without a time of the last kernel."""
    file = bytearray(V0_BYTES)
    struct.pack_into("<i", file, 0, MAGIC)
    _head(file, devices, number=48, uuids=56, limits=1_592, sm_limits=1_720)
    for place, slot in enumerate(slots):
        _slot(file, 1_848 + 1_168 * place, slot, used=(8, 40), sm=(776, 24), status=1_160)
    struct.pack_into("<i", file, 1_197_880, len(slots))
    return file


def _head(
    file: bytearray,
    devices: Sequence[Device],
    *,
    number: int,
    uuids: int,
    limits: int,
    sm_limits: int,
) -> None:
    struct.pack_into("<Q", file, number, len(devices))
    for index, device in enumerate(devices):
        uuid = device.uuid if isinstance(device.uuid, bytes) else device.uuid.encode()
        struct.pack_into("<96s", file, uuids + 96 * index, uuid)
        struct.pack_into("<Q", file, limits + 8 * index, device.limit)
        struct.pack_into("<Q", file, sm_limits + 8 * index, device.sm_limit)


def _slot(
    file: bytearray, at: int, slot: Slot, *, used: tuple[int, int], sm: tuple[int, int], status: int
) -> None:
    struct.pack_into("<ii", file, at, slot.pid, slot.hostpid)
    for index, total in slot.used.items():  # context, module, data, offset, total
        struct.pack_into(
            "<QQQQQ",
            file,
            at + used[0] + used[1] * index,
            total // 4,
            0,
            total - total // 4,
            0,
            total,
        )
    for index, percent in slot.sm.items():  # dec, enc, sm
        struct.pack_into("<QQQ", file, at + sm[0] + sm[1] * index, 0, 0, percent)
    struct.pack_into("<i", file, at + status, slot.status)
