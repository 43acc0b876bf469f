"""Settings for the audit log of grants: the section ``audit``.

Part of the schema in `settings`.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from typing import Annotated

import msgspec
from msgspec import Meta

from vgpu_agent.config.types import OptionalPath


class Audit(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The audit log: which container held which devices, from when to when, and by whose
    decision.
    """

    file: Annotated[
        OptionalPath,
        Meta(
            description=(
                "The file of the audit log, one JSON object per line, in a directory that the "
                "agent can write, e.g. `/var/lib/vgpu-agent/audit.jsonl`. Empty: none is written."
            )
        ),
    ] = ""
    max_mib: Annotated[
        int,
        Meta(
            ge=1,
            le=10240,
            description=(
                "The size in MiB at which the file is renamed to `FILE.1` and a new one begins. "
                "Four earlier files are kept, so the log takes at most five times as much."
            ),
        ),
    ] = 20
