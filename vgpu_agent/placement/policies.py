"""The allocation policies by name, which choose the best ids of a resource for a container,
one entry each.

Families whose ids name devices name the entry that fits a resource and ask it for
GetPreferredAllocation. None of them ever fails because of a device that is not among the available
ones (nvidia D4), and each gives the same answer to the same question (nvidia D5). On a node that
several families share, the ranks of `mixing` come first.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.errors import CapacityError
from vgpu_agent.placement.aligned import choose_group
from vgpu_agent.placement.mixing import OWN
from vgpu_agent.placement.one_gpu import choose_on_one
from vgpu_agent.placement.sharing import DISTRIBUTED, PACKED, choose_replicas
from vgpu_agent.placement.spreading import choose_spread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.model import Link

ALIGNED = "aligned"
SPREAD = "spread"
ONE_GPU = "one-gpu"


@dataclasses.dataclass(frozen=True, slots=True)
class IdRequest:
    """The kubelet's request, and what is known of the ids.

    Attributes:
        available: ids that may be chosen, the required ones among them, in the order in which they
            are used on equal terms.
        required: ids that must be in the answer.
        size: how many ids the container wants.
        device_of: id → its device, of every id above.
        totals: how many ids each device has, held or not; in the order in which devices are taken
            on equal terms.
        links: how close each pair of GPUs is.
        ranks: device → its rank in `mixing`, the lowest first; a device that is missing has `OWN`.
    """

    available: Sequence[str]
    required: Sequence[str]
    size: int
    device_of: Mapping[str, str]
    totals: Mapping[str, int]
    links: Mapping[tuple[str, str], Link] = dataclasses.field(default_factory=dict)
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def rank(self, device: str) -> int:
        """The rank of a device."""
        return self.ranks.get(device, OWN)


def choose(policy: str, request: IdRequest) -> list[str]:
    """The ids that ``policy`` (a name in `POLICIES`) takes.

    Raises:
        CapacityError: there are not enough, or a required id is unknown; the caller answers with a
            simple pick.
    """
    if unknown := [id_ for id_ in request.required if id_ not in request.device_of]:
        raise CapacityError(f"not available: {', '.join(unknown)}")
    return POLICIES[policy](request)


def _aligned(request: IdRequest) -> list[str]:
    """Devices with one id each, of the lowest ranks that have enough of them."""
    id_of = {request.device_of[id_]: id_ for id_ in _of_lowest_ranks(request)}
    chosen = choose_group(
        available=list(id_of),
        required=[request.device_of[id_] for id_ in request.required],
        size=request.size,
        links=request.links,
    )
    return [id_of[device] for device in chosen]


def _of_lowest_ranks(request: IdRequest) -> list[str]:
    """The available ids up to the lowest rank with which there are enough,
    and the required ones.
    """
    required = set(request.required)
    for most in sorted({request.rank(request.device_of[id_]) for id_ in request.available}):
        ids = [
            id_
            for id_ in request.available
            if id_ in required or request.rank(request.device_of[id_]) <= most
        ]
        if len(ids) >= request.size:
            return ids
    return list(request.available)


def _greedy(policy: str) -> Callable[[IdRequest], list[str]]:
    def chosen(request: IdRequest) -> list[str]:
        # Ties are broken by key, and the node's order is what an operator expects to see: GPU 0
        # before GPU 1.
        order = {device: f"{place:08d}" for place, device in enumerate(request.totals)}
        return choose_replicas(
            totals={order[device]: count for device, count in request.totals.items()},
            device_of=lambda id_: order[request.device_of[id_]],
            available=request.available,
            required=request.required,
            size=request.size,
            policy=policy,
            ranks={order[device]: request.rank(device) for device in order},
        )

    return chosen


def _spread(request: IdRequest) -> list[str]:
    return choose_spread(
        device_of=request.device_of.__getitem__,
        available=request.available,
        required=request.required,
        size=request.size,
        rank=request.rank,
    )


def _on_one(request: IdRequest) -> list[str]:
    return choose_on_one(
        device_of=request.device_of.__getitem__,
        available=request.available,
        required=request.required,
        size=request.size,
        rank=request.rank,
    )


POLICIES: Mapping[str, Callable[[IdRequest], list[str]]] = {
    ALIGNED: _aligned,
    DISTRIBUTED: _greedy(DISTRIBUTED),
    PACKED: _greedy(PACKED),
    SPREAD: _spread,
    ONE_GPU: _on_one,
}
