"""The HTTP servers' view of the rest of the agent: one snapshot on request.

`agent` implements it. A test passes a plain `AgentStatus`. Everything that `web` shows comes through here, so a
request can neither block nor change another package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vgpu_agent.status import AgentStatus


class Source(Protocol):
    """The source of `web`'s answers. The snapshot does not change while it is rendered: rendering has no await."""

    def status(self) -> AgentStatus:
        """Everything at this moment; cheap, never blocks."""
        ...
