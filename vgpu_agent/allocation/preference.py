"""The ids that suit a container whose pod decides: one of each GPU that a scheduler has named.

They answer the kubelet's GetPreferredAllocation. The ids do not decide what the container gets. But
if they belong to the same GPUs, the kubelet's records and its NUMA alignment are right. The kubelet
does not say for which container it asks, so this is a guess, and a wrong one costs nothing.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from vgpu_agent.allocation.candidates import candidates
from vgpu_agent.device_ids import NumberedIds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.allocation.context import Context
    from vgpu_agent.families.family import PodFamily
    from vgpu_agent.model import Resource


def ids_of_named_gpus(
    context: Context,
    family: PodFamily,
    offered: Resource,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
) -> list[str]:
    """Return ``must_include`` and ids of the GPUs that a scheduler has named for the container that
    probably asks; fewer than ``size`` where it has named none or some have no id left.
    """
    wanted = collections.Counter(_likeliest(context, family, offered, size))
    device_of = _devices(offered)
    wanted.subtract(device_of(id_) for id_ in must_include)
    chosen = list(must_include)
    for id_ in available:
        device = device_of(id_)
        if wanted[device] > 0 and id_ not in must_include:
            wanted[device] -= 1
            chosen.append(id_)
    return chosen


def _likeliest(
    context: Context, family: PodFamily, offered: Resource, size: int
) -> tuple[str, ...]:
    """Return the GPUs that a scheduler has named for the container that waits for ``size`` ids;
    of several such containers, for the one whose pod was bound first.
    """
    grants = [grant for grant in context.ledger.grants if grant.resource == offered.name]
    # `decided_for`: the pod's UID and the container for which the shares were decided, perhaps by a
    # guess; `owner` is the container that the kubelet names.
    answered = {grant.decided_for for grant in grants if grant.decided_for}
    answered |= {(grant.owner.pod_uid, grant.owner.container) for grant in grants if grant.owner}
    inventory = context.inventory()
    waiting = [
        # the GPUs that a scheduler has given to the container
        family.named_gpus(candidate.pod, inventory).get(candidate.container.name, ())
        # `candidates`: the containers that may be asking for this many ids, the likeliest first
        for candidate in candidates(
            context.pods.pods,
            answered,
            offered.name,
            count=size,
            node=context.node,
            # a pod that wants more ids of a resource than there are is never admitted
            id_counts={offer.name: len(offer.ids) for offer in context.ledger.resources},
        )
    ]
    # Some of these containers have their ids already, but the kubelet's records do not show the
    # owner yet.
    device_of = _devices(offered)
    for grant in grants:
        if grant.owner is None and grant.decided_for is None and len(grant.ids) == size:
            given = collections.Counter(device_of(id_) for id_ in grant.ids)
            alike = (gpus for gpus in waiting if collections.Counter(gpus) == given)
            if waiting:
                waiting.remove(next(alike, waiting[0]))
    return waiting[0] if waiting else ()


def _devices(offered: Resource) -> Callable[[str], str]:
    """Return a function from an id to its device, "" for an id that is not offered."""
    if isinstance(offered.ids, NumberedIds):
        numbered = offered.ids
        return lambda id_: numbered.device(id_) or ""
    known = {entry.id: entry.device for entry in offered.ids}
    return lambda id_: known.get(id_, "")
