"""The commands to one MPS control daemon: through the control binary, one process each, as NVIDIA's
own plugin does (nvidia §11.2).

Called by `daemon`. The daemon's answers are checked, because a limit that was sent may not be in
force: NVIDIA's plugin offered resources whose daemon had no limit.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from vgpu_agent.errors import MpsDaemonGoneError, MpsError
from vgpu_agent.isolation.mps import PROBE, QUIT
from vgpu_agent.mps import processes
from vgpu_agent.mps.host_tools import quoted_output

if TYPE_CHECKING:
    from vgpu_agent.isolation.mps import DaemonPlan, DeviceLimit
    from vgpu_agent.mps.host_tools import HostTool

_NO_DAEMON = "Cannot find MPS control daemon process"
# 10240M; in some versions within a sentence
_MEMORY = re.compile(r"\b(\d{1,12}) ?([MG])(?:i?B)?\b", re.ASCII)
_GIB_MIB = 1024
# between two checks whether a daemon answers that was just started or told to end
_PAUSE_SECONDS = 0.05


class Control:
    """The MPS control daemon of one plan (its directories, GPUs and limits), running or not.
    State: none; the state is that of the daemon.
    """

    def __init__(self, plan: DaemonPlan, tool: HostTool, *, timeout_seconds: float) -> None:
        """Build it; ``tool`` runs the control binary, and ``timeout_seconds`` is the time that the
        daemon has to start, and to end.
        """
        self._plan, self._tool, self._timeout = plan, tool, timeout_seconds

    async def start(self) -> None:
        """Start the daemon and wait until it answers.

        Raises:
            MpsError: it does not start, or ends at once.
        """
        await self._tool.run("-d", environment=self._plan.environment)
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    try:
                        await self.send(PROBE)  # asks for the compute limit, as a sign of life
                    except MpsDaemonGoneError:
                        await asyncio.sleep(_PAUSE_SECONDS)
                    else:
                        return
        except TimeoutError as err:
            raise MpsError(
                "the daemon was started and does not answer; its messages are in "
                f"{self._plan.log}/control.log"
            ) from err

    async def send(self, command: str) -> str:
        """Send one command and return the answer.

        Raises:
            MpsDaemonGoneError: there is no daemon.
            MpsError: the control binary is missing, hangs or fails.
        """
        gone = f"there is no MPS control daemon at {self._plan.pipe}"
        try:
            answer = await self._tool.run(stdin=command + "\n", environment=self._plan.environment)
        except MpsError as err:
            if _NO_DAEMON in str(err):
                raise MpsDaemonGoneError(gone) from err
            raise
        if _NO_DAEMON in answer:  # although the exit status is a success
            raise MpsDaemonGoneError(gone)
        return answer

    async def difference(self, devices: tuple[DeviceLimit, ...] | None = None) -> str:
        """Describe how the daemon's limits differ from the plan's; empty when they are in force.

        Args:
            devices: those with a memory limit to check; None for all of the plan.

        Raises:
            MpsError: it does not answer, or its answer has another form.
        """
        differences: list[str] = []
        if (threads := await self._thread_percentage()) != self._plan.thread_percentage:
            differences.append(
                f"{threads:g} % of compute instead of {self._plan.thread_percentage} %"
            )
        differences += [
            f"{found} on GPU {limit.index} instead of {limit.memory_mib}M"
            for limit in (self._plan.devices if devices is None else devices)
            if limit.memory_mib and (found := await self._other_memory_limit(limit))
        ]
        return ", ".join(differences)

    async def process_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the process ids of the daemon's servers and of their clients, as the daemon sees
        them.

        Raises:
            MpsError: it does not answer, or its answer is no list of process ids.
        """
        servers, clients = await self._numbers("get_server_list"), list[int]()
        for server in servers:
            clients += await self._numbers(f"get_client_list {server}")
        return tuple(sorted(servers)), tuple(sorted(clients))

    async def quit(self) -> None:
        """End the daemon; do nothing if there is none. A daemon that does not answer is killed.

        Raises:
            MpsError: it cannot be ended.
        """
        try:
            await self.send(QUIT)
            async with asyncio.timeout(self._timeout):
                while True:
                    await self.send(PROBE)
                    await asyncio.sleep(_PAUSE_SECONDS)
        except MpsDaemonGoneError:
            return
        except (MpsError, TimeoutError):
            await asyncio.to_thread(self._kill)

    def has_process(self) -> bool:
        """Tell whether the process whose id is in the daemon's PID file is alive. Blocks, so call
        it in a thread.
        """
        return processes.written_pid(self._plan.pipe) is not None

    def _kill(self) -> None:
        pid = processes.written_pid(self._plan.pipe)
        if pid is None:
            path = processes.pid_path(self._plan.pipe)
            raise MpsError(
                f"the MPS control daemon does not listen, and {path} does not name its process; "
                "end it by hand"
            )
        # `end` kills it only if it belongs to the daemon at this pipe directory
        processes.end([pid], self._plan.pipe)

    async def _thread_percentage(self) -> float:
        """The compute limit of the daemon in percent, which is the answer to `PROBE`."""
        answer = await self.send(PROBE)
        try:
            percentage = float(answer)
        except ValueError as err:
            raise MpsError(self._unexpected(PROBE, answer, "a percentage")) from err
        if not 0 <= percentage <= 100:
            raise MpsError(self._unexpected(PROBE, answer, "a percentage"))
        return percentage

    async def _other_memory_limit(self, limit: DeviceLimit) -> str:
        """The memory limit that the daemon shows for a GPU, when it is not the plan's;
        otherwise empty.
        """
        command = f"get_default_device_pinned_mem_limit {limit.index}"
        answer = await self.send(command)
        found = _MEMORY.search(answer)
        if found is None:
            raise MpsError(self._unexpected(command, answer, "a limit such as 10240M"))
        # Many drivers show whole GiB, rounded down.
        as_shown = limit.memory_mib // _GIB_MIB if found[2] == "G" else limit.memory_mib
        return "" if int(found[1]) == as_shown else found[0]

    async def _numbers(self, command: str) -> list[int]:
        answer = await self.send(command)
        try:
            return [int(word) for word in answer.split()]
        except ValueError as err:
            raise MpsError(self._unexpected(command, answer, "process ids")) from err

    def _unexpected(self, command: str, answer: str, expected: str) -> str:
        return (
            f"the control binary answered {quoted_output(answer)} to {command}, expected "
            f"{expected}; check that it is NVIDIA's own and belongs to the installed driver"
        )
