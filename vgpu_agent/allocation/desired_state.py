"""The desired state of our Node and our pods, from the ledger and the families,
for the publishers of `cluster`.

Nothing here remembers what was written: a publisher compares the desired state with what its watch
shows, so a restart loses nothing.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from vgpu_agent.families.family import NodeView
from vgpu_agent.nodes import DesiredNode
from vgpu_agent.pods import DesiredPod

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vgpu_agent.allocation.context import Context, Families
    from vgpu_agent.families.node_lock import NodeLocks
    from vgpu_agent.model import Grant
    from vgpu_agent.nodes import Node
    from vgpu_agent.pods import Pod


def desired_node(
    context: Context, node: Node, allocated_at: Mapping[str, float], now: float, locks: NodeLocks
) -> DesiredNode:
    """Return the desired state of our Node.
    A family that serves no container now announces that nothing is free.

    ``allocated_at`` has resource → unix seconds of its last Allocate, and ``now`` is in unix
    seconds, too. From them, ``locks`` tells which annotation of a scheduler, with which it keeps
    the Node for one pod, can be removed.
    """
    families, ledger, inventory = context.families, context.ledger, context.inventory()
    desired_state = DesiredNode()
    # their containers do not start now, and for their schedulers nothing is free
    paused = {family.name for family in families.paused}
    offered = frozenset(offer.name for offer in ledger.resources)
    for name, family in {
        family.name: family for family in (*families.paused, *families.pod_families)
    }.items():
        offers = [
            offer.name for offer in ledger.resources if offer.family == name and name not in paused
        ]
        rooms = {offer: ledger.rooms(offer) for offer in offers}
        desired_state = desired_state.joined(
            family.desired_node(
                NodeView(
                    node=node,
                    inventory=inventory,
                    rooms=rooms,
                    allocated_at=allocated_at,
                    now=now,
                    locks=locks,
                    offered=offered,
                )
            )
        )
    return desired_state


def cleanup(families: Families, now: float) -> DesiredNode:
    """Return the desired state of our Node after the agent has left it for good."""
    desired_state = DesiredNode()
    for family in (*families.paused, *families.pod_families):
        desired_state = desired_state.joined(family.cleanup(now))
    return desired_state


class DesiredPods:
    """The desired state of our pods. A change concerns one pod,
    so the results of the others are kept.
    """

    def __init__(self) -> None:
        # UID → the facts at the last call, and the desired state that follows from them
        self._known: dict[str, tuple[tuple[object, ...], DesiredPod]] = {}

    def __call__(
        self, context: Context, served_before: Collection[Grant], failed: Collection[str]
    ) -> dict[str, DesiredPod]:
        """Return the desired state by the UID under which the kubelet keeps the pod (a static pod
        has another one in the API server); only pods of which something is desired.

        Args:
            context: the families, the grants and the pods.
            served_before: grants that were put in force since the agent's start; some of their
                pods ended before their desired state was written.
            failed: the kubelet's UIDs of pods that will never start here, because a start was
                refused for good.
        """
        families = context.families
        started: dict[str, dict[tuple[str, str], Grant]] = {}
        for grant in (
            *served_before,
            # proven: the kubelet names the very container that the shares were decided for
            *(grant for grant in context.ledger.grants if grant.proven and grant.shares),
        ):
            if grant.decided_for:  # the UID and the container that its shares were decided for
                uid, container = grant.decided_for
                started.setdefault(uid, {})[grant.family, container] = grant
        desired: dict[str, tuple[tuple[object, ...], DesiredPod]] = {}
        for uid in started.keys() | set(failed):
            if (pod := context.pods.get(uid)) is None:
                continue
            grants = started.get(uid, {})
            facts: tuple[object, ...] = (families, pod, uid in failed, *grants.values())
            known = self._known.get(uid)
            desired[uid] = (
                known
                if known and _same(known[0], facts)
                else (facts, _desired_pod(families, pod, grants, failed=uid in failed))
            )
        self._known = desired
        return {uid: desired_state for uid, (_, desired_state) in desired.items()}


def _same(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    """Tell whether the facts are the same objects: pods and grants are replaced at each change."""
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _desired_pod(
    families: Families, pod: Pod, started: Mapping[tuple[str, str], Grant], *, failed: bool
) -> DesiredPod:
    desired_state = DesiredPod()
    for family in families.pod_families:
        grants = {
            container: grant for (name, container), grant in started.items() if name == family.name
        }
        if grants or failed:
            desired_state = desired_state.joined(family.desired_pod(pod, grants, failed=failed))
    return desired_state
