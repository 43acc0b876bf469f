"""The composition root: builds the packages, wires them, and starts and stops them in order.

`composition` starts and stops everything. The others are its parts: `offers` (families and plugin
servers), `records` (the ledger against the kubelet's records), `devices` (CDI names, MPS daemons,
MIG division), `reload` (a changed configuration), `status` (one report for `web`) and `lag` (the
delay of the event loop).
"""

from vgpu_agent.agent.composition import run

__all__ = ["run"]
