"""Choose the devices of a container when no GPU scheduler has decided:
the fullest that fit, or the emptiest.

Called by the families whose pods ask for amounts (`volcano-vgpu`, …) under the plain
kube-scheduler, which only counts. The rules of fit and of order are those of Volcano's scheduler
(volcano-vgpu §8), so that a pod lands where that scheduler would have put it. Pure functions of the
ledger's rest of each device.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.errors import CapacityError, listed, quoted
from vgpu_agent.placement.mixing import ALONE, OTHERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.model import DeviceRoom
    from vgpu_agent.placement.mixing import Neighbours

BINPACK = "binpack"
SPREAD = "spread"

_MAX_QUOTED = 60  # characters of a pod's demand, which may be quoted for each GPU
_MAX_DEVICES = 4  # that are named for one reason

_WHOLE_PERCENT = 100  # a container that asks for all compute of a device gets it alone


@dataclasses.dataclass(frozen=True, slots=True)
class Want:
    """The demand of a container on each of its devices.

    Attributes:
        count: how many different devices.
        memory_mib: of a device with this room, how much; it may depend on the device (a percentage,
            all of it).
        cores_percent: compute, 0 for no claim.
        text: the demand in the pod's own words, for the error.
    """

    count: int
    memory_mib: Callable[[DeviceRoom], int]
    cores_percent: int
    text: str


def choose_rooms(
    rooms: Sequence[DeviceRoom],
    want: Want,
    *,
    policy: str,
    refused: Mapping[str, str] | None = None,
    neighbours: Neighbours = ALONE,
) -> tuple[DeviceRoom, ...]:
    """Choose ``want.count`` different devices that have room, in order of preference.

    Args:
        rooms: in the order of the devices' minor numbers, which breaks ties.
        want: what is asked of each.
        policy: `BINPACK` takes the device with the most booked memory first, `SPREAD` the one with
            the fewest holders.
        refused: device → why this container must not have it, regardless of room.
        neighbours: of the family. With `BINPACK` their ranks come first. With `SPREAD`, which an
            operator has to ask for, only a GPU that another family has or waits for comes after all
            others.

    Raises:
        CapacityError: too few fit; the text names what was asked and what each device lacks.
    """
    lacks = {room.device: (refused or {}).get(room.device) or lack(room, want) for room in rooms}
    fitting = [room for room in rooms if not lacks[room.device]]
    if len(fitting) < want.count:
        raise CapacityError(
            f"{want.text} cannot be placed on this node: {_explained(rooms, lacks)}"
        )

    def order(room: DeviceRoom) -> tuple[int, int]:
        rank = neighbours.rank(room.device)
        return (
            (rank, _fullest_first(room))
            if policy == BINPACK
            else (rank == OTHERS, _fewest_holders_first(room))
        )

    # sorted() is stable, so devices on equal terms stay in their order.
    return tuple(sorted(fitting, key=order)[: want.count])


def lack(room: DeviceRoom, want: Want) -> str:
    """Explain why ``want`` does not fit into ``room``, as a half sentence; empty when it does."""
    memory_mib, cores = want.memory_mib(room), want.cores_percent
    reasons = (
        (bool(room.trouble), room.trouble),
        (room.exclusive, "a container holds all of it"),
        (room.holders_free < 1, f"{room.holders} containers share it already, no more may"),
        (
            memory_mib > room.memory_free_mib,
            f"{room.memory_free_mib} MiB free of {room.memory_mib}, {memory_mib} wanted",
        ),
        (
            cores >= _WHOLE_PERCENT and room.holders > 0,
            f"{cores} % of the compute needs it alone, and {room.holders} share it",
        ),
        (
            cores > room.cores_free_percent,
            f"{room.cores_free_percent} % of the compute free, {cores} wanted",
        ),
        (room.cores_free_percent <= 0, "all of its compute is in use"),
    )
    return next((text for applies, text in reasons if applies), "")


def by_reason(reasons: Iterable[tuple[str, str]]) -> str:
    """Pairs of a device and its reason as half sentences, one for each different reason;
    16 devices must not fill a message.
    """
    devices: dict[str, list[str]] = {}
    for device, reason in reasons:
        devices.setdefault(reason, []).append(device)
    return "; ".join(
        f"{listed(found, _MAX_DEVICES)}: {reason}" for reason, found in devices.items()
    )


def type_refusal(name: str, *, wanted: str | None, unwanted: str | None) -> str:
    """Explain why a GPU of that type name must not be chosen; empty when it may.

    Each list is separated by commas; an entry matches where it is part of the name, in any case
    (``A10`` also matches ``A100``). When types are wanted, the unwanted ones are not looked at
    (volcano-vgpu §3.1).
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
    """Explain why the GPU of that UUID must not be chosen; empty when it may. Exact matches;
    unwanted wins (volcano-vgpu §3.1).
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


def _explained(rooms: Iterable[DeviceRoom], lacks: Mapping[str, str]) -> str:
    return (
        by_reason((room.device, lacks[room.device] or "fits") for room in rooms)
        or "it has no GPU to share"
    )
