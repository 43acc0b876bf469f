"""Choose the replicas of shared GPUs for a container: spread over the GPUs, or packed onto few. A
*replica* is one of several ids of a GPU.

Called through the `nvidia` family for GetPreferredAllocation. The rules are NVIDIA's greedy ones
(nvidia §6.2), with two differences: ties are broken by id, so equal requests get equal
answers, and the search uses a heap, so that 100,000 ids are answered within a second (kubelet
V9).
"""

from __future__ import annotations

import collections
import heapq
from typing import TYPE_CHECKING

from vgpu_agent.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DISTRIBUTED = "distributed"
PACKED = "packed"


def choose_replicas(
    *,
    totals: Mapping[str, int],
    device_of: Callable[[str], str],
    available: Sequence[str],
    required: Sequence[str],
    size: int,
    policy: str,
    ranks: Mapping[str, int] | None = None,
) -> list[str]:
    """Choose ``size`` of the ``available`` ids, the ``required`` ones first.

    Args:
        totals: how many replicas each device has, held or not.
        device_of: id → its device.
        available: ids that may be chosen, in the order in which a device's replicas are to be used.
        required: ids that must be in the answer; they count as held.
        size: how many ids the container wants.
        policy: `DISTRIBUTED` takes the device with the fewest held replicas, `PACKED` the one with
            the most; on equal terms the device that gave the fewest in this answer, then the one
            whose id sorts first.
        ranks: device → its rank by the families that use its GPU (`mixing`); devices of a lower
            rank are used up first. Without it all are alike.

    Raises:
        CapacityError: fewer are available than wanted.
    """
    wanted = size - len(required)
    taken = set(required)
    free: dict[str, collections.deque[str]] = collections.defaultdict(collections.deque)
    for id_ in available:
        if id_ not in taken:
            free[device_of(id_)].append(id_)
    if sum(map(len, free.values())) < wanted:
        raise CapacityError(
            f"{size} ids are requested, {sum(map(len, free.values())) + len(required)} available"
        )

    # The least entry is taken first: the device's rank, the number of its held replicas (negated
    # for `PACKED`), the number of its ids that were chosen here, and the device.
    sign = 1 if policy == DISTRIBUTED else -1
    held = {device: max(totals.get(device, 0), len(ids)) - len(ids) for device, ids in free.items()}
    heap = [((ranks or {}).get(device, 0), sign * held[device], 0, device) for device in free]
    heapq.heapify(heap)
    chosen = list(required)
    for _ in range(wanted):
        rank, held_key, given, device = heapq.heappop(heap)
        chosen.append(free[device].popleft())
        if free[device]:
            heapq.heappush(heap, (rank, held_key + sign, given + 1, device))
    return chosen
