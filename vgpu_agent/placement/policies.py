"""The allocation policies by name, which choose the best ids of a resource for a container,
one entry each.

Families whose ids name devices choose the entry that fits a resource and call it for
GetPreferredAllocation. No policy fails because of a device that the request does not name
(nvidia D4), and each gives equal answers to equal requests (nvidia D5). On a node that several
families share, the ranks of `mixing` come first.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import CapacityError
from vgpu_agent.placement.aligned import choose_group
from vgpu_agent.placement.mixing import OTHERS, OWN
from vgpu_agent.placement.sharing import DISTRIBUTED, PACKED, choose_replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.model import Link

ALIGNED = "aligned"  # whole devices with good links to each other
# a replica is one of several ids of a GPU
SPREAD = "spread"  # replicas of different GPUs
ONE_GPU = "one-gpu"  # ids of one device only


class IdRequest(msgspec.Struct, frozen=True):
    """The kubelet's request, and what is known of the ids.

    Attributes:
        available: ids that may be chosen; of equally good ones, those that come first are used.
        required: ids that must be in the answer.
        size: how many ids the container wants.
        device_of: id → its device, for the available ids; `choose` refuses a required id that is
            not among them.
        totals: how many ids each device has, held or not; of equally good devices, those that come
            first are taken.
        links: how close each pair of GPUs is.
        ranks: device → its rank in `mixing`, of which the lowest is the best: `OWN` where the GPU
            serves the family already or is offered to no other, `FREE` where no family has it and
            others could use it, `OTHERS` where another family has it or waits for it; a device
            that is missing has `OWN`.
    """

    available: Sequence[str]
    required: Sequence[str]
    size: int
    device_of: Mapping[str, str]
    totals: Mapping[str, int]
    links: Mapping[tuple[str, str], Link] = msgspec.field(default_factory=dict)
    ranks: Mapping[str, int] = msgspec.field(default_factory=dict)

    def rank(self, device: str) -> int:
        """Return the rank of a device."""
        return self.ranks.get(device, OWN)


def choose(policy: str, request: IdRequest) -> list[str]:
    """Return the ids that ``policy`` (a name in `POLICIES`) takes.

    Raises:
        CapacityError: there are not enough, or a required id is unknown. The caller then chooses
            without a policy.
    """
    if unknown := [id_ for id_ in request.required if id_ not in request.device_of]:
        raise CapacityError(f"not available: {', '.join(unknown)}")
    return POLICIES[policy](request)


def _aligned(request: IdRequest) -> list[str]:
    """Choose well linked devices, which have one id each, of the lowest ranks that have enough of
    them.
    """
    id_of = {request.device_of[id_]: id_ for id_ in _of_lowest_ranks(request)}
    chosen = choose_group(
        available=list(id_of),
        required=[request.device_of[id_] for id_ in request.required],
        size=request.size,
        links=request.links,
    )
    return [id_of[device] for device in chosen]


def _of_lowest_ranks(request: IdRequest) -> list[str]:
    """Return the available ids up to the lowest rank with which there are enough,
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
        # `choose_replicas` breaks ties by the text that stands for a device. So that is the place
        # of the device in the node's order, which an operator expects: GPU 0 before GPU 1.
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
    """Choose replicas of different GPUs, in the order of the available ones:
    the rule of iktos's fork of NVIDIA's plugin, for resources configured as there (iktos §I.4).

    It differs from `sharing`'s DISTRIBUTED in two points: of the GPUs that no other family has, one
    of which the container has no id yet comes first, because that is what a container with several
    replicas has asked for; and of several GPUs it takes the one with the most free replicas, not
    the one with the fewest held. Another family's GPU comes last of all. Two details differ from
    the fork: replicas are counted 0, 1, 2, … 10 instead of in the order of their text (iktos D14),
    and taking a required id does not change the order of the others.
    """
    order = {id_: place for place, id_ in enumerate(request.available)}
    if missing := [id_ for id_ in request.required if id_ not in order]:
        raise CapacityError(f"not available: {', '.join(missing)}")
    if not len(request.required) <= request.size <= len(order):
        raise CapacityError(
            f"{request.size} ids are requested, {len(request.required)} of them by name, "
            f"{len(order)} available"
        )
    free: dict[str, collections.deque[str]] = {}
    for id_ in order:
        queue = free.setdefault(request.device_of[id_], collections.deque())
        if id_ not in request.required:
            queue.append(id_)
    chosen = set(request.required)
    used = {request.device_of[id_] for id_ in request.required}
    for _ in range(request.size - len(chosen)):
        device = max(
            (name for name in free if free[name]),
            key=lambda name: (
                request.rank(name) != OTHERS,
                name not in used,
                -request.rank(name),
                len(free[name]),
            ),
        )
        used.add(device)
        chosen.add(free[device].popleft())
    return sorted(chosen, key=order.__getitem__)


def _on_one(request: IdRequest) -> list[str]:
    """Choose ids of one device only: where ids are units of memory, five of one GPU and three of
    another are not eight. The required ids come first in the answer.

    Of the lowest rank, the fullest device that still has enough is taken, so that large requests
    find room later (iktos D12).
    """
    free: dict[str, list[str]] = collections.defaultdict(list)
    for id_ in request.available:
        if id_ not in request.required:
            free[request.device_of[id_]].append(id_)
    wanted = request.size - len(request.required)
    of_required = {request.device_of[id_] for id_ in request.required}
    if len(of_required) > 1:
        raise CapacityError(
            f"{', '.join(request.required)} are of {len(of_required)} devices, and all must be of "
            "one"
        )
    fitting = [device for device in (of_required or free) if len(free[device]) >= wanted]
    if not fitting:
        most = max((len(free[device]) for device in (of_required or free)), default=0)
        which = f"the device of {', '.join(request.required)}" if of_required else "no device"
        raise CapacityError(
            f"{request.size} ids of one device are requested, {which} has "
            f"{'only' if of_required else 'more than'} {most + len(request.required)}"
        )
    fullest = min(fitting, key=lambda device: (request.rank(device), len(free[device])))
    return [*request.required, *free[fullest][:wanted]]


POLICIES: Mapping[str, Callable[[IdRequest], list[str]]] = {
    ALIGNED: _aligned,
    # replicas of the GPU of which the fewest are held, and of the one of which the most are
    DISTRIBUTED: _greedy(DISTRIBUTED),
    PACKED: _greedy(PACKED),
    SPREAD: _spread,
    ONE_GPU: _on_one,
}
