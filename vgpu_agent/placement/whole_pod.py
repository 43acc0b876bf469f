"""Place a whole pod when no GPU scheduler has decided:
on the first device that has room for all of it.

Called by `volcano-gpushare`, whose vocabulary names devices for the whole pod. The order is that of
Volcano's scheduler (volcano-gpushare §8): no packing and no spreading, the lowest number that fits.
Pure functions of the ledger's rest of each device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.errors import CapacityError
from vgpu_agent.placement.rooms import by_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.model import DeviceRoom


def first_with_room(rooms: Sequence[DeviceRoom], memory_mib: int) -> DeviceRoom:
    """Return the first device that has ``memory_mib`` left in one piece.

    Args:
        rooms: in the order of preference.
        memory_mib: what the pod needs, all its containers together.

    Raises:
        CapacityError: no device has; the text names what each of them has.
    """
    for room in rooms:
        if not room.trouble and not room.exclusive and room.memory_free_mib >= memory_mib:
            return room
    raise CapacityError(
        f"no GPU has {memory_mib} MiB for the whole pod: {_explained(rooms, free_memory=True)}"
    )


def first_idle(rooms: Sequence[DeviceRoom], count: int) -> tuple[DeviceRoom, ...]:
    """Return the first ``count`` devices without any holder.

    Raises:
        CapacityError: there are fewer; the text explains why each of the others is not available.
    """
    idle = [room for room in rooms if not room.trouble and not room.holders]
    if len(idle) < count:
        raise CapacityError(
            f"{count} idle GPUs are requested, {len(idle)} available: "
            f"{_explained(rooms, free_memory=False)}"
        )
    return tuple(idle[:count])


def _explained(rooms: Sequence[DeviceRoom], *, free_memory: bool) -> str:
    def state(room: DeviceRoom) -> str:
        if room.trouble:
            return room.trouble
        if room.exclusive:
            return "a container holds all of it"
        if free_memory:
            return f"{room.memory_free_mib} MiB free of {room.memory_mib}"
        return f"containers on it: {room.holders}" if room.holders else "idle"

    return by_reason((room.device, state(room)) for room in rooms) or "this node offers none"
