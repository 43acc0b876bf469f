"""Choose ids of one device, because they are units of its memory:
five of one GPU and three of another are not eight.

One of `policies`. The fullest device that still has enough is taken, so that large requests find
room later (iktos D12).
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from vgpu_agent.errors import CapacityError
from vgpu_agent.placement.mixing import OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def choose_on_one(
    *,
    device_of: Callable[[str], str],
    available: Sequence[str],
    required: Sequence[str],
    size: int,
    rank: Callable[[str], int] = lambda _: OWN,
) -> list[str]:
    """Choose ``size`` of the ``available`` ids, all of one device, the ``required`` ones first.

    Args:
        device_of: the device behind an id.
        available: ids that may be chosen, in the order in which they are used on equal terms.
        required: ids that must be in the answer.
        size: how many ids the container wants.
        rank: of a device, as in `mixing`; of those with enough ids, the fullest of the lowest rank
            is taken.

    Raises:
        CapacityError: no device has so many, or the required ones are of several.
    """
    free: dict[str, list[str]] = collections.defaultdict(list)
    for id_ in available:
        if id_ not in required:
            free[device_of(id_)].append(id_)
    wanted = size - len(required)
    bound = {device_of(id_) for id_ in required}
    if len(bound) > 1:
        raise CapacityError(
            f"{', '.join(required)} are of {len(bound)} devices, and all must be of one"
        )
    fitting = [device for device in (bound or free) if len(free[device]) >= wanted]
    if not fitting:
        most = max((len(free[device]) for device in (bound or free)), default=0) + len(required)
        raise CapacityError(
            f"{size} ids of one device are requested, no device has more than {most}"
        )
    return [
        *required,
        *free[min(fitting, key=lambda device: (rank(device), len(free[device])))][:wanted],
    ]
