"""What the HTTP servers need from the rest of the agent: one snapshot whenever somebody asks.

`agent` implements it; a test passes a plain `AgentStatus`. Everything that `web` shows comes through here, so that a request can neither
block on another room nor change anything in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vgpu_agent.status import AgentStatus


class Source(Protocol):
    """Where `web` reads from. The answer is not changed while it is rendered: rendering has no await."""

    def status(self) -> AgentStatus:
        """Everything at this moment; cheap, never blocks."""
        ...
