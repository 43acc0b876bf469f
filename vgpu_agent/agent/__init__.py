"""The composition root: builds the rooms, wires them, and starts and stops them in order.

`composition` is the whole story in one file; the others are its chapters: `offering` (which plugin servers run), `verification` (the ledger
against kubelet's records), `reload` (a changed configuration), `report` (one status for web) and `lag` (is the loop itself in time).
"""

from vgpu_agent.agent.composition import run

__all__ = ["run"]
