"""The free resources of one node in one round of the simulated Volcano scheduler, in which it tries
to place all waiting pods: the amounts of all resources, and the shares of each card.

Used by `scheduler`. It makes a `NodeRoom` for each node from its watches, places pods on copies,
and keeps the copy that it has chosen.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.sim.volcano import resources
from vgpu_agent.sim.volcano.ledger import Placed

if TYPE_CHECKING:
    from vgpu_agent.sim.volcano.gpushare import GpushareLedger
    from vgpu_agent.sim.volcano.ledger import VgpuLedger
    from vgpu_agent.sim.volcano.resources import Amounts, Object


@dataclasses.dataclass
class NodeRoom:
    """The free resources of one node, as the scheduler counts them.

    Attributes:
        node: the Node object.
        free: resource → allocatable amount, less the requests of the pods that have not ended.
        devices: the scheduler's own accounts of the node's cards; None where it finds no cards to
            share.
    """

    node: Object
    free: Amounts
    devices: VgpuLedger | GpushareLedger | None

    @property
    def name(self) -> str:
        """Return the node's name."""
        return str(self.node["metadata"]["name"])

    def copy(self) -> NodeRoom:
        """Return a copy, so that a placement can be tried."""
        return NodeRoom(self.node, dict(self.free), self.devices.copy() if self.devices else None)

    def place(self, pod: Object, now: float) -> Placed | tuple[str, ...]:
        """Book the pod on this node.

        Where the scheduler finds no cards on the node, no cards are checked or booked, and the pod
        gets no annotations (volcano-vgpu §2.2).

        Args:
            pod: the pod, not bound yet.
            now: Unix seconds, for the time stamps in the pod's annotations.

        Returns:
            the placement, or the reasons against it in the wording of Volcano.
        """
        if not resources.may_hold(self.node, pod):
            return ("node(s) were unschedulable",)
        requested = resources.requests(pod)
        # the resources of which too little is free
        if lacking := resources.lacking(self.free, requested):
            return tuple(f"Insufficient {resource}" for resource in lacking)
        placed = Placed({})
        if self.devices is not None and self.devices.has_request(pod):
            on_cards = self.devices.place(pod, now)
            if on_cards is None:
                return (self.devices.refusal,)
            placed = on_cards
        resources.take(self.free, requested)
        return placed

    def lock_key(self, pod: Object) -> str:
        """Return the key of the annotation with which the scheduler locks the Node while it binds
        the pod; empty if the pod needs no lock. The caller knows whether node locks are on.
        """
        return (
            self.devices.lock_key
            if self.devices is not None and self.devices.needs_lock(pod)
            else ""
        )
