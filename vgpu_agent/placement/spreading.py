"""Choose replicas of different GPUs for a container:
the rule of the fork that first offered replicas.

One of `policies`, for resources that are configured in iktos's words (iktos §I.4). It differs from
`sharing`'s DISTRIBUTED in two points: a GPU that the container has nothing of yet always comes
first, and of several it takes the one with the most free replicas, not the one with the fewest
held. Two details differ from the fork: replicas are counted 0, 1, 2, … 10 instead of in the order
of their text (iktos D14), and taking a required id does not change the order of the others.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from vgpu_agent.errors import CapacityError
from vgpu_agent.placement.mixing import OTHERS, OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def choose_spread(
    *,
    device_of: Callable[[str], str],
    available: Sequence[str],
    required: Sequence[str],
    size: int,
    rank: Callable[[str], int] = lambda _: OWN,
) -> list[str]:
    """Choose ``size`` of the ``available`` ids, all ``required`` ones among them;
    in the order of ``available``.

    Args:
        device_of: the device behind an id.
        available: ids that may be chosen, those that must be in among them, in the order in which
            they are used on equal terms.
        required: ids that must be in the answer.
        size: how many ids the container wants.
        rank: of a device, as in `mixing`. Another family's GPU comes last of all. Otherwise a GPU
            that the container has nothing of yet comes first, whatever its rank, because that is
            what a container with several replicas has asked for.

    Raises:
        CapacityError: fewer are available than wanted, or a required one is not.
    """
    order = {id_: place for place, id_ in enumerate(available)}
    if missing := [id_ for id_ in required if id_ not in order]:
        raise CapacityError(f"not available: {', '.join(missing)}")
    if not len(required) <= size <= len(order):
        raise CapacityError(
            f"{size} ids are requested, {len(required)} of them by name, {len(order)} available"
        )
    free: dict[str, collections.deque[str]] = {}
    for id_ in order:
        queue = free.setdefault(device_of(id_), collections.deque())
        if id_ not in required:
            queue.append(id_)
    chosen = set(required)
    used = {device_of(id_) for id_ in required}
    for _ in range(size - len(chosen)):
        device = max(
            (name for name in free if free[name]),
            key=lambda name: (rank(name) != OTHERS, name not in used, -rank(name), len(free[name])),
        )
        used.add(device)
        chosen.add(free[device].popleft())
    return sorted(chosen, key=order.__getitem__)
