"""Choose the devices of a container when no GPU scheduler has decided.

A *room* is the part of a device that is still free for new containers (`DeviceRoom`); the ledger
computes it. Families whose pods ask for amounts of memory and compute (`volcano-vgpu`, …) call this
module under the plain kube-scheduler, which only counts ids. The choice follows the rules of
Volcano's scheduler (volcano-vgpu §8), so a pod gets the devices that it would have got from that
scheduler. Pure functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import CapacityError, listed, quoted
from vgpu_agent.placement.mixing import ALONE, OTHERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.model import DeviceRoom
    from vgpu_agent.placement.mixing import GpuUses

BINPACK = "binpack"
SPREAD = "spread"

_MAX_QUOTED = 60  # characters of an annotation, which a message may quote once for each GPU
_MAX_DEVICES = 4  # the most devices that a message names for one reason

_WHOLE_PERCENT = 100  # a container that asks for all compute of a device shares it with no other


class DeviceDemand(msgspec.Struct, frozen=True):
    """The demand of a container on each of its devices.

    Attributes:
        count: the number of different devices.
        memory_mib: returns the memory that is asked of a device, which may depend on the device (a
            percentage, all of it).
        cores_percent: the compute that is asked of a device; 0 for none.
        text: the demand as the pod states it, for the message when too few devices have room.
        all_compute_is_exclusive: a container that asks for all compute of a device shares it with
            no other, even if the others ask for no compute.
    """

    count: int
    memory_mib: Callable[[DeviceRoom], int]
    cores_percent: int
    text: str
    all_compute_is_exclusive: bool = True


def choose_rooms(
    rooms: Sequence[DeviceRoom],
    demand: DeviceDemand,
    *,
    policy: str,
    refused: Mapping[str, str] | None = None,
    gpu_uses: GpuUses = ALONE,
) -> tuple[DeviceRoom, ...]:
    """Choose ``demand.count`` different devices that have room, in order of preference.

    Args:
        rooms: in the order of the devices' minor numbers, which breaks ties.
        demand: what is asked of each.
        policy: `BINPACK` takes the device with the most booked memory first, `SPREAD` the one with
            the fewest containers.
        refused: device → the reason why this container must not get it, however much is free.
        gpu_uses: the GPUs by the families that use them (`ALONE`: no other family does), so that
            each has a rank, from the best: this family has the GPU, or no other family may use it;
            no family has it; another family has it or waits for it (`OTHERS`). `BINPACK` orders by
            rank first. An operator chooses `SPREAD` on purpose, so there the rank only puts the
            GPUs of `OTHERS` last.

    Raises:
        CapacityError: too few fit; the text names the demand and what each device lacks.
    """

    def order(room: DeviceRoom) -> tuple[int, int]:
        rank = gpu_uses.rank(room.device)
        return (
            (rank, _fullest_first(room))
            if policy == BINPACK
            else (rank == OTHERS, _fewest_holders_first(room))
        )

    # sorted() is stable, so equal devices stay in the order of their minor numbers.
    fitting = fitting_rooms(rooms, demand, refused=refused)
    return tuple(sorted(fitting, key=order)[: demand.count])


def fitting_rooms(
    rooms: Sequence[DeviceRoom], demand: DeviceDemand, *, refused: Mapping[str, str] | None = None
) -> list[DeviceRoom]:
    """Return the devices that have room, at least ``demand.count``.

    Raises:
        CapacityError: too few fit; the text names the demand and what each device lacks.
    """
    # device → why it does not fit, empty if it does
    lacks = {room.device: (refused or {}).get(room.device) or lack(room, demand) for room in rooms}
    fitting = [room for room in rooms if not lacks[room.device]]
    if len(fitting) < demand.count:
        large_enough = sum(demand.memory_mib(room) <= room.memory_mib for room in rooms)
        ever = "" if large_enough >= demand.count else ", even when it is empty"
        raise CapacityError(
            f"{demand.text} cannot be placed on this node{ever}: {_reasons(rooms, lacks)}"
        )
    return fitting


def lack(room: DeviceRoom, demand: DeviceDemand) -> str:
    """Explain in a clause why ``demand`` does not fit into ``room``; empty when it does."""
    memory_mib, cores = demand.memory_mib(room), demand.cores_percent
    reasons = (
        (bool(room.trouble), room.trouble),  # why no container may get anything of it
        (room.exclusive, "a container holds all of it"),
        (room.holders_free < 1, f"{room.holders} containers share it already, the most allowed"),
        (
            memory_mib > room.memory_free_mib,
            f"{room.memory_free_mib} MiB free of {room.memory_mib}, {memory_mib} wanted",
        ),
        (
            demand.all_compute_is_exclusive and cores >= _WHOLE_PERCENT and room.holders > 0,
            f"{cores} % of the compute needs the whole GPU; containers on it: {room.holders}",
        ),
        (
            cores > room.cores_free_percent,
            f"{room.cores_free_percent} % of the compute free, {cores} wanted",
        ),
        (room.cores_free_percent <= 0, "all of its compute is in use"),
    )
    return next((text for applies, text in reasons if applies), "")


def by_reason(reasons: Iterable[tuple[str, str]]) -> str:
    """Join the pairs of a device and its reason to one text.
    Devices with the same reason are named together, so that 16 devices do not fill a message.
    """
    devices: dict[str, list[str]] = {}
    for device, reason in reasons:
        devices.setdefault(reason, []).append(device)
    return "; ".join(
        f"{listed(found, _MAX_DEVICES)}: {reason}" for reason, found in devices.items()
    )


def type_refusal(name: str, *, wanted: str | None, unwanted: str | None) -> str:
    """Explain why a GPU of that type name must not be chosen; empty when it may.

    ``wanted`` and ``unwanted`` are lists separated by commas. An entry matches each name that
    contains it, in upper or lower case (``A10`` also matches ``A100``). When types are wanted, the
    unwanted ones are ignored (volcano-vgpu §3.1).
    """
    if wanted is not None:
        return (
            ""
            if _is_named(name, wanted)
            else f"its type {name} is none of {quoted(wanted, _MAX_QUOTED)}"
        )
    if unwanted is not None and _is_named(name, unwanted):
        return f"its type {name} is among the unwanted {quoted(unwanted, _MAX_QUOTED)}"
    return ""


def uuid_refusal(uuid: str, *, wanted: str | None, unwanted: str | None) -> str:
    """Explain why the GPU of that UUID must not be chosen; empty when it may.

    Both are lists separated by commas. Entries match exactly, and a GPU on both lists is unwanted
    (volcano-vgpu §3.1).
    """
    if unwanted is not None and uuid in _entries(unwanted):
        return "the pod excludes this GPU"
    if wanted is not None and uuid not in _entries(wanted):
        return "the pod names other GPUs"
    return ""


def _is_named(name: str, entries: str) -> bool:
    return any(entry.lower() in name.lower() for entry in _entries(entries))


def _entries(text: str) -> tuple[str, ...]:
    """Return the entries between the commas, stripped; empty entries match nothing."""
    return tuple(stripped for entry in text.split(",") if (stripped := entry.strip()))


def _fullest_first(room: DeviceRoom) -> int:
    return -(room.memory_mib - room.memory_free_mib)


def _fewest_holders_first(room: DeviceRoom) -> int:
    return room.holders


def _reasons(rooms: Iterable[DeviceRoom], lacks: Mapping[str, str]) -> str:
    return (
        by_reason((room.device, lacks[room.device] or "fits") for room in rooms)
        or "it has no GPU to share"
    )
