"""The life of one MPS control daemon: found or started, given its limits, checked, watched,
and ended after its last use.

A daemon that ends takes the CUDA programs of its clients with it (issue 669 of NVIDIA's device
plugin). So the main rule: no daemon is ended, replaced or killed while a container holds a share
through it. An agent that starts adopts the existing daemon. Anything that keeps the limits from
being in force is the daemon's *trouble*. As long as there is one, the resource is not offered. A
pod that started before the limits were set would have none (issue 1946 of that plugin).

Run by `supervision`, one loop for each resource, under the agent's supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Protocol

from vgpu_agent import log
from vgpu_agent.concurrency import Backoff
from vgpu_agent.errors import MpsDaemonGoneError, MpsError
from vgpu_agent.mps import directories, host_tools, processes
from vgpu_agent.mps.compute_mode import ComputeModes, ModeOwners
from vgpu_agent.mps.control import Control
from vgpu_agent.mps.host_tools import HostTool
from vgpu_agent.status import MpsState, MpsStatus, Withheld

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vgpu_agent.isolation.mps import DaemonPlan
    from vgpu_agent.journal import Journal

_logger = log.get(__name__)

# How often each control daemon is asked whether it lives.
PROBE_SECONDS = 5.0
# Pauses before a daemon that ended or hung is started again.
BACKOFF_MIN_SECONDS = 1.0
BACKOFF_MAX_SECONDS = 30.0
# The failed checks in a row after which the daemon counts as failed. One late answer on a busy node
# is no reason to keep new pods away.
_MAX_MISSES = 2
# Limits of the daemon's log: the bytes that are read at once (the next `LogTail.read` gets the
# rest), the characters of a line, and the allocated bytes of the file.
_LONGEST_READ, _LONGEST_LINE, _LARGEST_LOG = 65536, 500, 8 << 20
# The daemon's lines about a client that asks it something, and the beginning of a query's own line.
_ABOUT_QUERIES = ("Accepting connection...", "NEW UI", "UI closed")
_QUERY_PREFIX = "Cmd:get_"


class Dependencies(Protocol):
    """The dependencies of a daemon: facts about the node, and reports to the agent."""

    mode_owners: ModeOwners
    """The record of which daemon sets the compute mode of each GPU, shared by all daemons."""
    gpus: Callable[[], Collection[str]]
    """The UUIDs of the node's GPUs."""

    def holders(self, resource: str) -> tuple[str, ...]:
        """List the pods that hold a share through the resource, ``namespace/pod`` each."""
        ...

    async def prepare(self, plan: DaemonPlan) -> None:
        """Make the daemon's directories, and the shared memory of all daemons and clients; raises
        `MpsError`.
        """
        ...

    async def report_change(self) -> None:
        """Report that the resource may be offered now, or no longer."""
        ...


class Daemon:
    """One control daemon.

    State: that of the daemon itself. After a restart of the agent everything here is read again.
    `status` has the last result.
    """

    def __init__(self, plan: DaemonPlan, journal: Journal, dependencies: Dependencies) -> None:
        self._journal, self._dependencies = journal, dependencies
        self._plan = plan  # of the daemon that runs or is about to
        self._wanted: DaemonPlan | None = plan
        self._in_use_by_others: frozenset[str] = frozenset()
        self._wanted_changed = asyncio.Event()  # something else is wanted
        seconds = host_tools.COMMAND_TIMEOUT_SECONDS
        self._control_binary = HostTool(host_tools.CONTROL_BINARY, timeout_seconds=seconds)
        self._modes = ComputeModes(
            HostTool(host_tools.SMI_BINARY, timeout_seconds=seconds),
            plan.resource,
            dependencies.mode_owners,
        )
        self._tail: LogTail | None = None  # the new lines of the control daemon's log
        self._servers: tuple[int, ...] = ()  # process ids of its MPS servers at the last query
        self._changes = log.ChangeFilter()  # so that a repeated failure is logged once
        self.status = MpsStatus(plan.resource, trouble="its MPS control daemon is being started")

    def want(self, plan: DaemonPlan | None, in_use_by_others: frozenset[str] = frozenset()) -> None:
        """Set the desired daemon to that of ``plan`` (its directories, GPUs and limits), or none;
        ``in_use_by_others`` are those of its GPUs that containers hold through another resource
        now.
        """
        if (plan, in_use_by_others) != (self._wanted, self._in_use_by_others):
            self._wanted, self._in_use_by_others = plan, in_use_by_others
            self._wanted_changed.set()

    def withheld(self, plan: DaemonPlan) -> Withheld | None:
        """Explain why a resource with that plan must not be offered now; None when it may."""
        if trouble := self.status.trouble:
            # temporary: an error only if it lasts
            return Withheld(trouble, temporary=self.status.state is MpsState.STARTING)
        if self._plan.covers(plan):  # the same, or the same with more GPUs
            return None
        return Withheld("its MPS control daemon is about to receive other limits", temporary=True)

    async def run(self) -> None:
        """Keep a daemon as long as one is wanted;
        return when none is and the last holder is gone.
        """
        clock = asyncio.get_running_loop().time
        backoff = Backoff(BACKOFF_MIN_SECONDS, BACKOFF_MAX_SECONDS)
        while True:
            began = clock()
            try:
                if await self._clear_leftovers():
                    return
                if self._wanted is not None:
                    self._plan = self._wanted
                if self._wanted is not None or self._busy:
                    await self._bring_up()
                    await self._stay_up()
                if self._wanted is None and not self._busy:
                    await self.retire()
                    if self._wanted is None:
                        # done last: from now on another loop may begin for this resource
                        self.status.state = MpsState.STOPPED
                        return
            except MpsError as err:
                await self._fail(err)
                if clock() - began > BACKOFF_MAX_SECONDS:
                    backoff.reset()
                await self._pause(backoff.pause())

    async def retire(self) -> None:
        """End the daemon and give its GPUs back (set their default compute mode);
        only while no container holds a share.

        Raises:
            MpsError: one of these steps fails.
        """
        await self._control().quit()
        # `clear` removes the logs and the mark that the daemon runs, `forget` the plan on disk; the
        # directory of the pipe stays for a daemon that follows
        await asyncio.to_thread(directories.clear, self._plan)
        self._modes.forget()  # so that the modes are set again, whatever they were set to last
        # a plan names each of its GPUs together with the memory limit there
        await self._modes.release(limit.uuid for limit in self._plan.devices)
        self.status.not_given_back = ""  # no GPU is left exclusive
        await asyncio.to_thread(directories.forget, self._plan)
        if self._wanted is None:
            await asyncio.to_thread(directories.remove_pipe, self._plan)
        self.status.state, self.status.trouble, self.status.clients = (
            MpsState.STARTING,
            "its MPS control daemon has been stopped",
            (),
        )
        self._journal.record("mps.daemon_stopped", resource=self._plan.resource)
        await self._dependencies.report_change()

    async def _clear_leftovers(self) -> bool:
        """Clear away what a dead, unwanted daemon has left, where NVIDIA's programs are missing;
        tell whether that was done.

        It is needed when an agent with MPS was killed, or its node crashed, and this agent runs
        without MPS. Pods may hold shares of a resource of the same name, but not through that
        daemon. The plan stays on disk while a GPU of this node may still be exclusive, for an agent
        that can give it back.
        """
        plan = self._plan
        if (
            self._wanted is not None
            or self.status.state is MpsState.RUNNING
            or await self._control_binary.is_there()
        ):
            return False
        if await asyncio.to_thread(processes.any_of, plan.pipe):
            return False  # a process of that daemon still lives
        await asyncio.to_thread(directories.clear, plan)
        try:
            here = self._dependencies.gpus()
            await self._modes.release(limit.uuid for limit in plan.devices if limit.uuid in here)
        except MpsError as err:
            _logger.warning("mps.gpu_not_given_back", resource=plan.resource, error=str(err))
            self.status.not_given_back = str(err)
        else:
            await asyncio.to_thread(directories.forget, plan)
        if not self._dependencies.holders(plan.resource):
            await asyncio.to_thread(directories.remove_pipe, plan)
        self._journal.record("mps.leftovers_cleared", resource=plan.resource)
        self.status.trouble = "its MPS control daemon is gone"
        self.status.state = MpsState.STOPPED
        return True

    @property
    def is_wanted(self) -> bool:
        """Tell whether a resource is offered through it. Otherwise it ends with its last holder."""
        return self._wanted is not None

    @property
    def idle(self) -> bool:
        """Tell whether the daemon can be ended without harming a client."""
        return not self._busy

    @property
    def _busy(self) -> bool:
        """Tell whether a pod holds a share through the resource, or the daemon has a client."""
        return bool(self._dependencies.holders(self._plan.resource) or self.status.clients)

    def _control(self) -> Control:
        return Control(
            self._plan, self._control_binary, timeout_seconds=host_tools.COMMAND_TIMEOUT_SECONDS
        )

    # -- coming up ---------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Adopt, replace or start the daemon of the plan; then it runs with the plan's limits."""
        control = self._control()
        await self._dependencies.prepare(self._plan)
        # on disk, for an agent that finds this daemon without wanting it
        await asyncio.to_thread(directories.remember, self._plan)
        try:
            difference = await control.difference()
            await self._read_processes(control)
        except MpsDaemonGoneError:
            await self._start(control)
            return
        except MpsError as err:
            await self._replace_silent(control, err)
            return
        if not difference:
            self._modes.forget()
            await self._apply_modes()
            await self._note_running(adopted=True)
        elif self._busy:
            raise MpsError(
                f"its MPS control daemon has {difference}; it gets its new limits once "
                f"{self._holders()} have ended"
            )
        else:
            self._journal.record(
                "mps.daemon_replaced", resource=self._plan.resource, reason=difference
            )
            await control.quit()
            await self._start(control)

    async def _replace_silent(self, control: Control, err: MpsError) -> None:
        """Replace a daemon whose process lives and that answers nothing usable;
        raise ``err`` if there is no such process.
        """
        if not await asyncio.to_thread(control.has_process):
            raise err
        # The daemon does not name its clients now, so the pods count.
        if pods := self._dependencies.holders(self._plan.resource):
            raise MpsError(
                f"{err}; the daemon is left alone while these run: {', '.join(pods)}"
            ) from err
        self._journal.record(
            "mps.daemon_replaced", level="warning", resource=self._plan.resource, reason=str(err)
        )
        await control.quit()
        await self._start(control)

    async def _read_processes(self, control: Control) -> None:
        """Ask the daemon for the process ids of its servers and of their clients."""
        self._servers, self.status.clients = await control.process_ids()

    async def _start(self, control: Control) -> None:
        self.status.clients = ()
        await self._end_orphans()
        self._modes.forget()
        await self._apply_modes()
        await control.start()
        await self._tell_limits(control)
        if difference := await control.difference():
            raise MpsError(
                f"its MPS control daemon received its limits but has {difference}; see "
                f"{self._plan.log}/control.log"
            )
        await self._note_running(adopted=False)

    async def _tell_limits(self, control: Control) -> None:
        """Set the limits for servers to come, and separately for those that run already. Clients
        that are connected already run without these limits, so they are reported.
        """
        for command in self._plan.commands:
            await control.send(command)
        await self._read_processes(control)
        for server in self._servers:
            for command in self._plan.commands_for(server):
                await control.send(command)
        if clients := self.status.clients:
            self._journal.record(
                "mps.clients_without_limits",
                level="warning",
                resource=self._plan.resource,
                clients=list(clients),
                pods=list(self._dependencies.holders(self._plan.resource)),
            )

    async def _end_orphans(self) -> None:
        """End servers that outlived their daemon, once no pod holds a share:
        they keep their GPUs from the next daemon and cannot be adopted.
        """
        orphans = await asyncio.to_thread(processes.living, self._servers)
        if orphans and (pods := self._dependencies.holders(self._plan.resource)):
            raise MpsError(
                f"the MPS server of the lost daemon (process {orphans[0]}) still runs, and no "
                "other can be started beside it; a new daemon starts once these have ended: "
                f"{', '.join(pods)}"
            )
        if strangers := await asyncio.to_thread(processes.end, orphans, self._plan.pipe):
            raise MpsError(
                f"process {strangers[0]}, which the lost daemon has named as its MPS server, was "
                f"not started for {self._plan.pipe}; end it by hand if it is one"
            )
        self._servers = ()

    async def _apply_modes(self) -> None:
        """Make the resource's GPUs exclusive (EXCLUSIVE_PROCESS: they take the MPS server only),
        except those in use by others. GPUs that have left it, or all if no daemon is wanted, get
        the default mode, whatever still runs on them.
        """
        wanted = set() if self._wanted is None else {limit.uuid for limit in self._wanted.devices}
        known = [limit.uuid for limit in self._plan.devices]
        trouble = await self._modes.apply(
            [uuid for uuid in known if uuid in wanted],
            self._in_use_by_others,
            former=known,  # those that are still wanted are left out there
        )
        self.status.not_given_back = trouble
        if not trouble:
            self._changes.forget("modes")
        elif self._changes.is_new("modes", trouble):
            _logger.warning("mps.gpu_not_given_back", resource=self._plan.resource, error=trouble)

    async def _note_running(self, *, adopted: bool) -> None:
        plan, status = self._plan, self.status
        self._tail = LogTail(f"{plan.log}/control.log", from_the_end=adopted)
        status.state, status.trouble, status.adopted = MpsState.RUNNING, "", adopted
        status.running_since = status.limits_seen_at = time.time()
        status.thread_percentage = plan.thread_percentage
        status.memory_limit_mib = {limit.uuid: limit.memory_mib for limit in plan.devices}
        status.in_use_by_others = tuple(sorted(self._in_use_by_others))
        # an empty file, by which other programs see that the daemon runs with its limits
        await asyncio.to_thread(directories.mark, plan.directory, directories.STARTED)
        self._journal.record(
            "mps.daemon_adopted" if adopted else "mps.daemon_started",
            resource=plan.resource,
            gpus=len(plan.devices),
            thread_percentage=plan.thread_percentage,
            clients=list(status.clients),
        )
        await self._dependencies.report_change()

    # -- staying up --------------------------------------------------------------------------------

    async def _stay_up(self) -> None:
        """Check every few seconds that the limits are in force;
        return when the daemon must and can be ended or replaced.
        """
        misses = probes = 0
        while True:
            await self._pause(PROBE_SECONDS)
            try:
                await self._check_limits(probes)
                misses, probes = 0, probes + 1
            except MpsDaemonGoneError:
                raise
            except MpsError as err:
                misses += 1
                _logger.warning(
                    "mps.probe_failed", resource=self._plan.resource, misses=misses, error=str(err)
                )
                if misses >= _MAX_MISSES:
                    raise
            await self._admit_others()
            if await self._end_if_outdated():
                return

    async def _check_limits(self, probes: int) -> None:
        """Ask for the compute limit and the memory limit of one GPU; set the limits again if one
        has changed. ``probes`` is the number of earlier calls: each asks about another GPU.
        """
        control, devices = self._control(), self._plan.devices
        one = (devices[probes % len(devices)],) if devices else ()
        if difference := await control.difference(one):
            await self._tell_limits(control)
            if still := await control.difference():
                raise MpsError(
                    f"its MPS control daemon has {still} and does not take its limits again"
                )
            self._journal.record(
                "mps.limits_restored",
                level="warning",
                resource=self._plan.resource,
                previous=difference,
            )
        await self._read_processes(control)
        self.status.limits_seen_at = time.time()
        for line in await asyncio.to_thread(self._tail.read) if self._tail else ():
            _logger.info("mps.control_log", resource=self._plan.resource, line=line)

    async def _admit_others(self) -> None:
        """Let GPUs in use by others take any process.
        A mode that cannot be set ends no daemon, but is reported.
        """
        try:
            await self._apply_modes()
        except MpsError as err:
            _logger.warning("mps.compute_mode_failed", resource=self._plan.resource, error=str(err))
        self.status.in_use_by_others = tuple(sorted(self._in_use_by_others))

    async def _end_if_outdated(self) -> bool:
        """Tell whether this daemon must be replaced or ended now; end it for a replacement.
        While it has to wait for its holders, its status says so.
        """
        wanted, trouble = self._wanted, ""
        if wanted is None or not self._plan.covers(wanted):
            if not self._busy:
                if wanted is not None:
                    self._journal.record(
                        "mps.daemon_replaced",
                        resource=self._plan.resource,
                        reason="its limits have changed",
                    )
                    await self._control().quit()
                return True
            what = "ends" if wanted is None else "gets its new limits"
            trouble = f"its MPS control daemon {what} once {self._holders()} have ended"
        if trouble != self.status.trouble:
            self.status.trouble = trouble
            await self._dependencies.report_change()
        return False

    # -- failing -----------------------------------------------------------------------------------

    async def _fail(self, err: MpsError) -> None:
        """Record that the daemon ended, does not answer, or cannot be brought up."""
        status, resource = self.status, self._plan.resource
        holders = list(self._dependencies.holders(resource))
        if status.state is MpsState.RUNNING:
            status.restarts += 1
            gone = isinstance(err, MpsDaemonGoneError)
            if gone and not await asyncio.to_thread(processes.living, self._servers):
                status.clients_lost += len(status.clients)
            self._journal.record(
                "mps.daemon_lost" if gone else "mps.daemon_silent",
                level="error",
                resource=resource,
                reason=str(err),
                clients=list(status.clients),
                pods=holders,
            )
            if gone:
                status.clients = ()
        elif str(err) != status.trouble:
            self._journal.record(
                "mps.daemon_failed", level="error", resource=resource, reason=str(err), pods=holders
            )
        status.state, status.trouble = MpsState.FAILED, str(err)
        await asyncio.to_thread(directories.unmark, self._plan.directory, directories.STARTED)
        await self._dependencies.report_change()

    def _holders(self) -> str:
        """Name the pods that hold shares, or else the processes of the clients, in a message."""
        pods = self._dependencies.holders(self._plan.resource)
        return ", ".join(pods) if pods else f"processes {', '.join(map(str, self.status.clients))}"

    async def _pause(self, seconds: float) -> None:
        """Wait that long, or until something else is wanted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wanted_changed.wait()
        self._wanted_changed.clear()


class LogTail:
    """A reader of one daemon's ``control.log``, for the agent's log.

    The file is on a tmpfs (``/run``), the daemon never shortens it, and each of our own probes adds
    lines to it. So lines about mere queries are left out, and a file that has become large is
    emptied.

    State: the position in the file.

    Args:
        path: need not exist yet.
        from_the_end: skip the existing lines, which an earlier agent has reported.
    """

    def __init__(self, path: str, *, from_the_end: bool) -> None:
        self._path, self._skip = path, from_the_end
        self._inode, self._offset = 0, 0

    def read(self) -> list[str]:
        """Return the lines that are new, without those about queries;
        empty when there is no file or it cannot be read.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return []
        try:
            return self._read(descriptor)
        except OSError:
            return []
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int) -> list[str]:
        status = os.fstat(descriptor)
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, status.st_size if self._skip else 0
            self._skip = False
        chunk = os.pread(descriptor, _LONGEST_READ, self._offset)
        end = chunk.rfind(b"\n") + 1
        if not end and len(chunk) == _LONGEST_READ:
            end = len(chunk)  # one line without an end, too long to be read
        self._offset += end
        # By blocks, not by size: a daemon that goes on writing at its old offset after the file was
        # emptied leaves a hole, and the file looks as large as before.
        if status.st_blocks * 512 > _LARGEST_LOG and self._offset >= status.st_size:
            os.ftruncate(descriptor, 0)
            self._offset = 0
        lines = chunk[:end].replace(b"\0", b"").decode(errors="replace").splitlines()
        return [line[:_LONGEST_LINE] for line in lines if line and not _is_about_query(line)]


def _is_about_query(line: str) -> bool:
    text = line.partition("] ")[2]
    return text in _ABOUT_QUERIES or text.startswith(_QUERY_PREFIX)
