"""Settings of the MPS control daemons that the agent runs: the section ``mps``.

Part of the schema in `settings`. Which resources are shared with MPS is set in their family, and
how they are shared is set here. Paths: nvidia §11.1; number of clients: aws §II.1.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from typing import Annotated

import msgspec
from msgspec import Meta

from vgpu_agent.config.types import OptionalPath

# MPS serves at most this many clients on one GPU (nvidia §11.2; aws §II.1).
MAX_MPS_CLIENTS = 48


class Mps(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The MPS control daemons, one for each resource that is shared with MPS."""

    root: Annotated[
        OptionalPath,
        Meta(
            description=(
                "Directory on the node for pipes, logs and shared memory. Empty: none, and nothing "
                "can be shared with MPS."
            )
        ),
    ] = "/run/nvidia/mps"
    per_container_limits: Annotated[
        bool,
        Meta(
            description=(
                "Give a container with n replicas n times the memory and compute of one, through "
                "variables of its own. Needs failRequestsGreaterThanOne: false to be of use."
            )
        ),
    ] = False
    shm_size_mib: Annotated[
        int,
        Meta(
            ge=0,
            le=16777216,
            description=(
                "MiB of shared memory for all clients of the node. 0: half of the node's memory."
            ),
        ),
    ] = 0
