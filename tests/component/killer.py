"""A kill of the agent at one of its writes to the API server."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from vgpu_agent.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.component.volcano import VolcanoStage
    from vgpu_agent.sim.api.faults import Request


def by_agent(request: Request) -> bool:
    """The agent's writes, and not the scheduler's."""
    return request.is_write and request.user_agent.startswith("vgpu-agent")


class Killer:
    """Kills the agent at one of its writes, before or after it is done."""

    def __init__(self, stage: VolcanoStage) -> None:
        self._stage = stage
        self.counts: Callable[[Request], bool] = by_agent
        self.at = -1  # kill when so many writes have come; -1 never
        self.seen = 0
        self.killed = False

    def arm(self, at: int, *, before: bool) -> None:
        """Kill at the write number ``at`` from now, counted from 0."""
        self.at, self.seen, self.killed = at, 0, False
        self._stage.cluster.api.before_write = self._hook if before else None
        self._stage.cluster.api.after_write = None if before else self._hook
        self._before = before

    def _hook(self, request: Request) -> None:
        if self.killed or not self.counts(request):
            return
        self.killed = self.seen == self.at
        self.seen += 1
        if self.killed:
            os.kill(self._stage.agent.pid, signal.SIGKILL)
            if self._before:
                raise SimulationError("the connection is gone before anything was done")
