"""Scenes, checks and their numbering for the demo's stories.
Used by `demo`, `demo_volcano`, `demo_vgpu_manager`, `demo_scheduler` and `demo_mps`.
"""

from __future__ import annotations

from vgpu_agent.errors import SimulationError


class Narrator:
    """The demo's output on stdout; ``proofs`` counts the checks so far."""

    def __init__(self) -> None:
        self.proofs = 0

    def scene(self, title: str) -> None:
        """Begin a scene."""
        self.say(f"\n── {title}")

    def prove(self, holds: bool, what: str) -> None:
        """Count and tell something that must hold.

        Raises:
            SimulationError: it does not.
        """
        if not holds:
            raise SimulationError(what)
        self.proofs += 1
        self.say(f"   ✓ {what}")

    def say(self, line: str) -> None:
        """Tell a line at once, also into a pipe."""
        print(line, flush=True)
