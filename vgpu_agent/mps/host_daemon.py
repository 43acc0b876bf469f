"""The check for an MPS control daemon that runs on the host, as far as the agent can tell.

Without that daemon a container that should use it works all the same, as it did with AWS's plugin:
its GPU is time-sliced, and nothing limits it. So a missing daemon is reported and withholds
nothing. Polled by `agent.devices.mps`, where ``aws.mps`` is ``host``.
"""

from __future__ import annotations

import asyncio
import os
import shutil

from vgpu_agent.errors import MpsDaemonGoneError, MpsError
from vgpu_agent.isolation.mps import PROBE, DaemonPlan
from vgpu_agent.mps import host_tools
from vgpu_agent.mps.control import Control
from vgpu_agent.mps.host_tools import HostTool


class HostDaemon:
    """The daemon whose control pipe lies in the directory ``pipe``;
    the agent does not own it, and only asks whether it answers.
    """

    def __init__(self, pipe: str) -> None:
        self._pipe = pipe
        seconds = host_tools.COMMAND_TIMEOUT_SECONDS
        tool = HostTool(host_tools.CONTROL_BINARY, timeout_seconds=seconds)
        # A question to the daemon needs only its pipe; the other fields are not used.
        plan = DaemonPlan(resource="", directory=pipe, pipe=pipe, devices=(), thread_percentage=0)
        self._control = Control(plan, tool, timeout_seconds=seconds)

    async def why_missing(self) -> str:
        """Explain why the daemon seems missing; empty when it answers.

        Where the agent has no control binary, the text is empty when the daemon's pipe exists.
        """
        missing, can_ask = await asyncio.to_thread(self._look)
        if missing or not can_ask:
            return missing
        try:
            await self._control.send(PROBE)  # asks for the compute limit, as a sign of life
        except MpsDaemonGoneError as err:
            return str(err)
        except MpsError as err:
            return f"the MPS control daemon at {self._pipe} does not answer: {err}"
        return ""

    def _look(self) -> tuple[str, bool]:
        """Look at the file system; return what is missing, and whether there is a control
        binary.
        """
        if not os.path.isdir(self._pipe):
            return f"the agent sees no directory {self._pipe}", False
        if not os.path.exists(os.path.join(self._pipe, "control")):
            return f"there is no control pipe in {self._pipe}", False
        return "", shutil.which(host_tools.CONTROL_BINARY) is not None
