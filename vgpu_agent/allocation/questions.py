"""How a family is asked about one container; the same for a start, an early Allocate and a recollection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.allocation.holdings import ended_before
from vgpu_agent.families.family import Question
from vgpu_agent.model import Owner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Inventory, Resource
    from vgpu_agent.pods import Pod


def question(
    ledger: Ledger, offered: Resource, pod: Pod, container: str, ids: Sequence[str], *, node: str, inventory: Inventory
) -> Question:
    """What to ask a family about one container; what it or its ids hold now is not counted against it."""
    uid, wanted = pod.kubelet_uid, set(ids)
    mine = [grant for grant in ledger.grants if grant.resource == offered.name]
    besides = [grant.number for grant in mine if grant.decided_for == (uid, container) or not wanted.isdisjoint(grant.ids)]
    siblings = {
        grant.decided_for[1]: grant.shares
        for grant in mine
        if grant.decided_for and grant.decided_for[0] == uid and grant.decided_for[1] != container and grant.shares
    }
    rooms = ledger.rooms(offered.name, besides=besides)
    gone = {*besides, *(ended_before(mine, pod, Owner(container, uid)) if pod.container(container) else ())}
    taken = {share.device: grant for grant in ledger.grants if grant.number not in gone for share in grant.shares}
    return Question(offered, pod, container, tuple(ids), node, inventory, rooms, siblings, taken)
