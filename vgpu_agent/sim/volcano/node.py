"""One node as the simulated Volcano scheduler sees it in one round:
its free room, by plain arithmetic and card by card.

Called by `scheduler`, which makes one of these for each node from its watches, tries pods on copies
of it, and keeps the chosen copy.
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
    """The free room of one node; ``devices`` is None for a node that the scheduler takes for one
    without GPUs to share.
    """

    node: Object
    left: Amounts
    devices: VgpuLedger | GpushareLedger | None

    @property
    def name(self) -> str:
        """The node's name."""
        return str(self.node["metadata"]["name"])

    def copy(self) -> NodeRoom:
        """Copy the room, to try something in it."""
        return NodeRoom(self.node, dict(self.left), self.devices.copy() if self.devices else None)

    def place(self, pod: Object, now: float) -> Placed | tuple[str, ...]:
        """Book the pod here; the reasons, in Volcano's words, when it cannot be.

        Where the node has no cards in the scheduler's eyes, cards are not asked about: such a pod
        goes by plain arithmetic and arrives without annotations (volcano-vgpu §2.2).
        """
        if not resources.may_hold(self.node, pod):
            return ("node(s) were unschedulable",)
        wanted = resources.requests(pod)
        if lacking := resources.lacking(self.left, wanted):
            return tuple(f"Insufficient {resource}" for resource in lacking)
        placed = Placed({})
        if self.devices is not None and self.devices.concerns(pod):
            found = self.devices.place(pod, now)
            if found is None:
                return (self.devices.complaint,)
            placed = found
        resources.take(self.left, wanted)
        return placed

    def lock_key(self, pod: Object) -> str:
        """The key of the lock that is taken on this node for the pod, where locks are on;
        empty for none.
        """
        return (
            self.devices.lock_key
            if self.devices is not None and self.devices.needs_lock(pod)
            else ""
        )
