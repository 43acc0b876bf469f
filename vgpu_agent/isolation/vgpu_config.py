"""The file ``vgpu.config`` of vgpu-manager's libvgpu-control.so, as bytes:
the file that decides a container's limits. It has one slot for each card.

The library maps it read-only and obeys it; from the environment it builds limits only where there
is no file with the right magic, version and size (vgpu-manager §8.2). So the agent writes the file
before any process exists. The layout is that of v1.0.0, which is the first with a magic
(vgpu-manager §7.7). Called by `vgpu_control`; `runtime.live_limits` changes a slot of a file that
containers have mapped.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.isolation.hami_usage import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SIZE = 8192
MAX_CARDS = 16

MAGIC = 0x56474346
VERSION = 1
_USED = 2560  # bytes of the file that have a meaning

_SLOTS_AT = 512
SLOT_SIZE = 128
SLOT_SEQUENCE = struct.Struct("<I")  # at the start of a slot; odd while the rest is changed

_HEAD = struct.Struct("<4I2i32s")
_OWNER = struct.Struct("<48s64s64s64s48s3i")  # from `_OWNER_AT` on
_OWNER_AT = 128
# From `_LIMITS_AT` of a slot on: UUID, total and real bytes, then hard_core, soft_core, core_limit,
# hard_limit, memory_limit, memory_oversold, activate.
_LIMITS = struct.Struct("<48s2Q7i")
_LIMITS_AT = 8


class SlotLimit(msgspec.Struct, frozen=True):
    """The limits of one card, as the library obeys them.

    Attributes:
        uuid: of the card.
        total_bytes: what the container may allocate.
        real_bytes: what of that may lie in the card's own memory; more spills into the host's.
        hard_core: percent of compute that it always has.
        soft_core: percent that it may reach while others leave the card idle.
        core_limit: compute is limited at all.
        hard_limit: it is limited to ``hard_core``, even on an idle card.
        memory_limit: memory is limited.
        oversold: allocations may spill.
    """

    uuid: str
    total_bytes: int
    real_bytes: int
    hard_core: int
    soft_core: int
    core_limit: bool
    hard_limit: bool
    memory_limit: bool
    oversold: bool

    def packed(self) -> bytes:
        """Return the slot without its sequence number, as in the file from `limits_offset` on."""
        return _LIMITS.pack(
            _text(self.uuid, 48),
            self.total_bytes,
            self.real_bytes,
            self.hard_core,
            self.soft_core,
            self.core_limit,
            self.hard_limit,
            self.memory_limit,
            self.oversold,
            1,  # activate: the slot is in use
        )


class Owner(msgspec.Struct, frozen=True):
    """The facts in the file about its container.

    Attributes:
        pod_uid: of its pod.
        pod: the pod's name.
        namespace: the pod's namespace.
        container: the container's name.
        register_uuid: a UUID of the pod's own for registering processes with the agent
            (vgpu-manager §9); empty here: the names above identify the container.
        compatibility: how the library tells its processes from others (vgpu-manager §7.6).
        sm_watcher: the library takes the use of compute from the agent's samples.
        tracks_virtual_memory: the library keeps a record of spilled memory.
        driver_version: e.g. ``570.86.10``.
        cuda_version: e.g. ``12.8``; empty when it is not known.
    """

    pod_uid: str
    pod: str
    namespace: str
    container: str
    register_uuid: str
    compatibility: int
    sm_watcher: bool
    tracks_virtual_memory: bool
    driver_version: str = ""
    cuda_version: str = ""


class ReadConfig(msgspec.Struct, frozen=True):
    """The content of a ``vgpu.config``, as far as `runtime.control_usage` needs it to check limits.

    Attributes:
        pod_uid: of its container's pod.
        container: the container's name.
        compatibility: as for `Owner`.
        limits: those of the slots in use, by the card's index.
    """

    pod_uid: str
    container: str
    compatibility: int
    limits: Mapping[int, SlotLimit]

    def is_of(self, pod_uid: str, container: str) -> bool:
        """Tell whether the file is that container's; long names are cut in the file."""
        return (self.pod_uid.encode(), self.container.encode()) == (
            _text(pod_uid, 48),
            _text(container, 64),
        )


def read_config(size: int, read: Callable[[int, int], bytes]) -> ReadConfig | Unreadable:
    """Read the limits back out of a file;
    whatever it contains, the answer is a reading or a reason.

    Args:
        size: of the file.
        read: returns the bytes at (offset, length); fewer, when the file has become shorter.
    """
    if size != SIZE:
        return Unreadable(f"it has {size} bytes instead of {SIZE}")
    content = read(0, _USED)
    if len(content) != _USED:
        return Unreadable("it became shorter while it was read")
    if content[:16] != struct.pack("<4I", MAGIC, VERSION, _USED, MAX_CARDS):
        return Unreadable("it does not begin like one")
    uid, _, _, container, _, compatibility, _, _ = _OWNER.unpack_from(content, _OWNER_AT)
    limits = {}
    for index in range(MAX_CARDS):
        uuid, total, real, *numbers, active = _LIMITS.unpack_from(content, limits_offset(index))
        if active:
            hard, soft, *switches = numbers
            limits[index] = SlotLimit(
                _read_text(uuid), total, real, hard, soft, *(bool(switch) for switch in switches)
            )
    return ReadConfig(_read_text(uid), _read_text(container), compatibility, limits)


def is_looser(now: Mapping[int, SlotLimit], before: Mapping[int, SlotLimit]) -> bool:
    """Tell whether the limits ``now`` allow a container anything more than those ``before``;
    limits of other cards, more or fewer, count as looser.
    """
    return now.keys() != before.keys() or any(
        one.uuid != was.uuid
        or one.total_bytes > was.total_bytes
        or one.real_bytes > was.real_bytes
        or one.hard_core > was.hard_core
        or one.soft_core > was.soft_core
        or was.core_limit > one.core_limit
        or was.hard_limit > one.hard_limit
        or was.memory_limit > one.memory_limit
        or one.oversold > was.oversold
        for one, was in ((now[index], before[index]) for index in now)
    )


def config_parts(owner: Owner, limits: Mapping[int, SlotLimit]) -> tuple[tuple[int, bytes], ...]:
    """Return the (offset, bytes) pairs of the whole file; what they leave out is zero.

    Args:
        owner: the container.
        limits: by the card's index on the host, below `MAX_CARDS`.
    """
    major, minor = _version(owner.cuda_version)
    return (
        (
            0,
            _HEAD.pack(
                MAGIC,
                VERSION,
                _USED,
                MAX_CARDS,
                major,
                minor,
                _text(owner.driver_version, 32),
            ),
        ),
        (
            _OWNER_AT,
            _OWNER.pack(
                _text(owner.pod_uid, 48),
                _text(owner.pod, 64),
                _text(owner.namespace, 64),
                _text(owner.container, 64),
                _text(owner.register_uuid, 48),
                owner.compatibility,
                owner.sm_watcher,
                owner.tracks_virtual_memory,
            ),
        ),
        *((limits_offset(index), limit.packed()) for index, limit in sorted(limits.items())),
    )


def slot_offset(index: int) -> int:
    """Return the offset in the file of that card's slot, which begins with its sequence number."""
    if not 0 <= index < MAX_CARDS:
        raise ValueError(f"there is no slot {index}")
    return _SLOTS_AT + index * SLOT_SIZE


def limits_offset(index: int) -> int:
    """Return the offset in the file of the limits in that slot."""
    return slot_offset(index) + _LIMITS_AT


def devices_json(ids: Sequence[str]) -> bytes:
    """Return the file ``devices.json``: the kubelet's ids of the container, with which
    vgpu-manager's plugin compares those of a start.
    """
    return json.dumps(list(ids), separators=(",", ":"), ensure_ascii=False).encode()


def _text(text: str, size: int) -> bytes:
    """Return the text, cut between two characters so that it fits with a zero after it."""
    return text.encode()[: size - 1].decode(errors="ignore").encode()


def _read_text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("ascii", "replace")


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if _is_number(major) and _is_number(minor) else (0, 0)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 4
