"""The question put to a family, what a container gets, with all facts that the answer needs.

The question is the same at a start, in an early Allocate, and when grants are restored after a
restart of the agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.allocation.holdings import ended_before
from vgpu_agent.families.family import Question
from vgpu_agent.model import Owner
from vgpu_agent.placement.mixing import ALONE, GpuUses, gpu_uses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vgpu_agent.allocation.context import Context
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Grant, Resource
    from vgpu_agent.pods import Pod


def question(
    context: Context, offered: Resource, pod: Pod, container: str, ids: Sequence[str]
) -> Question:
    """Return the question to a family about one container.

    Grants that the container or its ids already have count as free room.

    Args:
        context: the ledger and other facts that the parts of `allocation` share.
        offered: the resource whose ids the container has.
        pod: of the container.
        container: its name.
        ids: the device ids that the kubelet has chosen for it.
    """
    ledger = context.ledger
    # the kubelet's, because a static pod has another UID in the API server
    uid, wanted, name = pod.kubelet_uid, set(ids), offered.name
    holding, own, of_pod = [], [], []
    for grant in ledger.grants:  # hundreds, most of them of other pods
        if grant.shares:
            holding.append(grant)
        if grant.resource == name:
            decided_for = grant.decided_for  # (UID of the pod, container)
            if decided_for and decided_for[0] == uid:
                of_pod.append(grant)
            if decided_for == (uid, container) or not wanted.isdisjoint(grant.ids):
                own.append(grant.number)  # the number by which the ledger knows it
    # the pod's other containers → their shares, by which some families choose the devices of this
    # container
    siblings = {
        grant.decided_for[1]: grant.shares for grant in of_pod if grant.decided_for and grant.shares
    }
    siblings.pop(container, None)
    # `pod_uid`, because a pod that has a part of its shares gets the rest before others
    rooms = ledger.rooms(name, excluding=own, pod_uid=uid)
    # grants that hold nothing when the container runs: its own, which are decided anew, and those
    # of the pod's containers that cannot run then
    ended = {
        *own,
        *(ended_before(of_pod, pod, Owner(container, uid)) if pod.container(container) else ()),
    }
    # device → a grant that has a part of it then, so that a family sees which devices are in use,
    # and by whom
    taken = {
        share.device: grant
        for grant in holding
        if grant.number not in ended
        for share in grant.shares
    }
    uses = gpu_uses_of(ledger, offered.family, taken.values())
    if uses == ALONE:
        # The agent would find these GPUs empty, and the pods that schedulers have given them to
        # could not start for as long as this one runs. On a node of several families they count
        # like other GPUs of the family: a free GPU more would be one less for the others.
        awaited = (claim for claim in ledger.claims if claim.named and claim.pod_uid != uid)
        uses = GpuUses(
            others=frozenset(claim.gpu for claim in awaited if claim.family == offered.family)
        )
    return Question(
        resource=offered,
        pod=pod,
        container=container,
        ids=tuple(ids),
        node=context.node,
        inventory=context.inventory(),
        rooms=rooms,
        siblings=siblings,
        taken=taken,
        gpu_uses=uses,
        node_annotations=context.node_annotations(),
    )


def gpu_uses_of(ledger: Ledger, family: str, grants: Iterable[Grant]) -> GpuUses:
    """Return the GPUs that other families are offered, hold through ``grants`` or claim, and those
    that serve ``family`` itself, which considers all this when it chooses a GPU.
    """
    if not (shared := ledger.shared_gpus(family)):
        return ALONE  # no other family is offered a GPU of this one
    held = (
        (ledger.gpu_of(share.device), grant.family) for grant in grants for share in grant.shares
    )
    return gpu_uses(family, shared, held, ((claim.gpu, claim.family) for claim in ledger.claims))
