"""What should stand on our Node and our pods, from the ledger and the families; `allocator` is asked by the publishers of `cluster`.

Nothing here remembers what was written: a publisher compares the wishes with what its watch shows, so a restart loses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.family import NodeView
from vgpu_agent.nodes import NodeWishes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vgpu_agent.allocation.allocator import Families
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Grant, Inventory
    from vgpu_agent.nodes import Node
    from vgpu_agent.pods import PodBook


def node_wishes(
    families: Families, ledger: Ledger, node: Node, inventory: Inventory, allocated_at: Mapping[str, float], now: float
) -> NodeWishes:
    """What should stand on our Node; of a family that nobody is served by now, that nothing is free."""
    wishes = NodeWishes()
    unserved = {family.name for family in families.unserved}
    for name, family in {family.name: family for family in (*families.unserved, *families.by_pod)}.items():
        offers = [offer.name for offer in ledger.resources if offer.family == name and name not in unserved]
        rooms = {offer: ledger.rooms(offer) for offer in offers}
        wishes = wishes.joined(family.node_wishes(NodeView(node, inventory, rooms, allocated_at, now)))
    return wishes


def farewell(families: Families, now: float) -> NodeWishes:
    """What should stand on our Node when the agent leaves it for good."""
    wishes = NodeWishes()
    for family in (*families.unserved, *families.by_pod):
        wishes = wishes.joined(family.farewell(now))
    return wishes


def pod_wishes(
    families: Families, ledger: Ledger, book: PodBook, served_before: Collection[Grant], failed: Collection[str]
) -> dict[str, Mapping[str, str | None]]:
    """What should stand on our pods, by kubelet's UID; only pods with something to be said about.

    Args:
        families: whose vocabularies they are.
        ledger: who has what.
        book: the pods.
        served_before: grants that were put in force since the start; some of their pods ended before it was written.
        failed: UIDs of pods that will never start here.
    """
    served: dict[str, dict[str, dict[str, Grant]]] = {}
    for grant in (*served_before, *(grant for grant in ledger.grants if grant.proven and grant.shares)):
        if grant.decided_for:
            uid, container = grant.decided_for
            served.setdefault(uid, {}).setdefault(grant.family, {})[container] = grant
    wishes: dict[str, Mapping[str, str | None]] = {}
    for uid in served.keys() | set(failed):
        if (pod := book.get(uid)) is None:
            continue
        for family in families.by_pod:
            grants = served.get(uid, {}).get(family.name, {})
            if grants or uid in failed:
                wishes[uid] = {**wishes.get(uid, {}), **family.pod_wishes(pod, grants, failed=uid in failed)}
    return wishes
