"""The composition root: builds the packages, wires them, and starts and stops them in order.

`composition` starts and stops everything. Among its parts are `offers` (families and plugin
servers), `records` (the ledger against the kubelet's records), `devices` (MPS daemons, MIG
division, services for libraries), `api_server` (watches and writers), `reload` (a changed
configuration), `report` (the status for `web`) and `lag` (the delay of the event loop).
"""

from vgpu_agent.agent.composition import run

__all__ = ["run"]
