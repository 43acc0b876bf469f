"""The cards of a whole pod: which ones ``volcano.sh/gpu-index`` names, which of them each
container's units are on, and which ones a pod gets when no GPU scheduler has decided.

The annotation names the cards of a whole pod, so each container's part of it has to be found. A
*unit* is one of what the container's limit counts: a card with ``gpu-number``, an amount of memory
with ``gpu-memory``. The *place* of a card is that of its number in the annotation, from 0. The
agent's own choice follows the order of Volcano's scheduler (volcano-gpushare §8): no packing and no
spreading, the lowest number that fits. Pure functions, called by `family`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vgpu_agent.errors import CapacityError
from vgpu_agent.placement.rooms import by_reason
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.model import DeviceRoom
    from vgpu_agent.pods import Pod

# Decimal numbers joined by commas, without spaces, as the scheduler writes them; no node has a
# thousand cards.
_INDICES = re.compile(r"\A(0|[1-9][0-9]{0,2})(,(0|[1-9][0-9]{0,2})){0,999}\Z", re.ASCII)


def parse_indices(text: str) -> list[int] | None:
    """Return the numbers in the annotation, in its order;
    None when it is not a list of numbers (volcano-gpushare §3).
    """
    return [int(index) for index in text.split(",")] if _INDICES.match(text) else None


def first_units(pod: Pod, resource: str) -> dict[str, int]:
    """Map each container to the place of its first unit among the pod's: with ``gpu-number`` that
    of its first card in the annotation.

    Sidecars and main containers come one after the other. The places of an init container begin
    after those of the sidecars before it; main containers get the same places later.
    """
    places, running = {}, 0
    for container in pod.containers:
        places[container.name] = running
        if container.kind is not ContainerKind.INIT:
            running += container.limits.get(resource, 0)
    return places


def units(pod: Pod, resource: str) -> int:
    """Return the units that the whole pod needs at its peak."""
    first = first_units(pod, resource)
    return max(
        (first[container.name] + container.limits.get(resource, 0) for container in pod.containers),
        default=0,
    )


def first_with_room(rooms: Sequence[DeviceRoom], memory_mib: int) -> DeviceRoom:
    """Return the first device that alone has ``memory_mib`` left. Those that are held exclusively
    or have a trouble are passed over.

    Args:
        rooms: in the order of preference.
        memory_mib: what the pod needs, all its containers together.

    Raises:
        CapacityError: no device has that much; the text names what each of them has.
    """
    for room in rooms:
        # `trouble`: why no container may get anything of the device
        if not room.trouble and not room.exclusive and room.memory_free_mib >= memory_mib:
            return room
    raise CapacityError(
        f"no GPU has {memory_mib} MiB for the whole pod: {_explained(rooms, free_memory=True)}"
    )


def first_idle(rooms: Sequence[DeviceRoom], count: int) -> tuple[DeviceRoom, ...]:
    """Return the first ``count`` devices without any holder, of ``rooms`` in the order of
    preference.

    Raises:
        CapacityError: there are fewer; the text says of each device why not, or that it is idle.
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
