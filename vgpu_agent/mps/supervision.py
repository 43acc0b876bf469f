"""All MPS control daemons of the node: one for each resource that is shared with MPS,
and no unneeded ones.

After each change `agent` sets the desired daemons (`want`). `withheld` tells it whether a resource
may be offered. At the agent's end, `stop` ends the daemons that no pod holds a share of and no
process uses.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.errors import MpsError
from vgpu_agent.isolation.mps import IN_CONTAINER
from vgpu_agent.mps import directories
from vgpu_agent.mps.compute_mode import ModeOwners
from vgpu_agent.mps.daemon import Daemon
from vgpu_agent.status import MpsState, Withheld

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from vgpu_agent.concurrency import Supervisor
    from vgpu_agent.config.mps import Mps
    from vgpu_agent.isolation.mps import DaemonPlan, MpsView
    from vgpu_agent.journal import Journal
    from vgpu_agent.status import MpsStatus

_logger = log.get(__name__)


class Supervision:
    """The daemons, and their common parts.

    State: for each resource one `Daemon` and one supervised task, from the first `want` or
    `end_former_daemons` of it until the first `want` after its end.

    Args:
        settings: paths and times.
        supervisor: runs the loops.
        journal: gets every start, loss and end.
        holders: lists the pods with a share through a resource, ``namespace/pod`` each.
        on_change: called when `withheld` may have another answer.
        gpus: the UUIDs of the node's GPUs; a daemon that ends sets the compute mode of these back,
            and not of GPUs that are gone.
        view: where the daemons have their files, by default where the agent's container has
            ``mps.root`` mounted.
        sysfs_root: the directory with the state of SELinux.
        proc_root: the directory with the node's ``meminfo``, which bounds the shared memory.
        share_memory: mounts the shared memory; replaced where the process must not mount.
    """

    def __init__(
        self,
        settings: Mps,
        supervisor: Supervisor,
        journal: Journal,
        *,
        holders: Callable[[str], tuple[str, ...]],
        on_change: Callable[[], None],
        gpus: Callable[[], Collection[str]],
        view: MpsView = IN_CONTAINER,
        sysfs_root: str = "/sys",
        proc_root: str = "/proc",
        share_memory: Callable[..., None] = directories.share_memory,
    ) -> None:
        self._settings, self._supervisor, self._journal = settings, supervisor, journal
        self.holders, self.gpus = holders, gpus
        self._on_change = on_change
        self._view = view
        self._sysfs_root, self._proc_root, self._share_memory = sysfs_root, proc_root, share_memory
        self._daemons: dict[str, Daemon] = {}
        self._preparing = asyncio.Lock()
        self.mode_owners = ModeOwners()  # which daemon sets the compute mode of each GPU

    @property
    def statuses(self) -> tuple[MpsStatus, ...]:
        """The status of each daemon, in the order of their resources."""
        return tuple(self._daemons[name].status for name in sorted(self._daemons))

    def want(self, wanted: Mapping[str, tuple[DaemonPlan, frozenset[str]]]) -> None:
        """Set the desired daemons: resource → plan (the daemon's GPUs, limits and directories), and
        those of its GPUs that containers hold through another resource, or with ids of earlier
        settings.

        A daemon that is no longer desired ends when its last holder has ended.
        """
        for resource, daemon in list(self._daemons.items()):
            if daemon.status.state is MpsState.STOPPED:
                # `not_given_back`: why a GPU of it could not be set back to the default compute
                # mode; then the daemon stays here, as the record of a problem
                if resource in wanted or not daemon.status.not_given_back:
                    del self._daemons[resource]
            elif resource not in wanted:
                daemon.want(None)
        for resource, (plan, in_use_by_others) in wanted.items():
            if known := self._daemons.get(resource):
                known.want(plan, in_use_by_others)
            else:
                self._begin(plan, wanted=plan, in_use_by_others=in_use_by_others)

    async def end_former_daemons(self) -> None:
        """End daemons of a previous agent that are not desired any more. The previous agent may
        have been killed, and sharing switched off before this start.
        """
        for plan in await asyncio.to_thread(directories.remembered, self._view.directory):
            if plan.resource not in self._daemons:
                _logger.info(
                    "mps.daemon_recalled", resource=plan.resource, directory=plan.directory
                )
                self._begin(plan, wanted=None)

    def _begin(
        self,
        plan: DaemonPlan,
        *,
        wanted: DaemonPlan | None,
        in_use_by_others: frozenset[str] = frozenset(),
    ) -> None:
        """Start the task of a daemon; ``wanted`` is None for one that is only to be ended."""
        daemon = self._daemons[plan.resource] = Daemon(plan, self._journal, self)
        daemon.want(wanted, in_use_by_others)
        self._supervisor.start(_task(plan.resource), daemon.run)

    def withheld(self, plan: DaemonPlan) -> Withheld | None:
        """Explain why the plan's resource must not be offered now; None when it may."""
        if daemon := self._daemons.get(plan.resource):
            return daemon.withheld(plan)
        # temporary: an error only if it lasts
        return Withheld("its MPS control daemon is about to be started", temporary=True)

    async def stop(self) -> None:
        """Stop all tasks, and end the daemons that no pod holds a share of and no process uses. The
        next agent adopts the others.
        """
        for resource, daemon in self._daemons.items():
            await self._supervisor.stop(_task(resource))
            if daemon.status.state is MpsState.STOPPED:
                continue
            if daemon.idle:
                try:
                    await daemon.retire()
                    daemon.status.state = MpsState.STOPPED
                except MpsError as err:
                    _logger.warning("mps.stop_failed", resource=resource, error=str(err))
            else:
                _logger.info(
                    "mps.daemon_left_running", resource=resource, pods=list(self.holders(resource))
                )

    async def prepare(self, plan: DaemonPlan) -> None:
        """Make a daemon's directories and the shared memory,
        which two daemons must not mount twice.

        Raises:
            MpsError: they cannot be made.
        """
        async with self._preparing:
            # Daemons that run on the node itself use its own shared memory.
            if not self._view.has_host_memory:
                await asyncio.to_thread(
                    self._share_memory,
                    self._view.directory,
                    size_mib=self._settings.shm_size_mib,
                    proc_root=self._proc_root,
                )
            await asyncio.to_thread(
                functools.partial(directories.prepare, plan, sysfs_root=self._sysfs_root)
            )

    async def report_change(self) -> None:
        """Report that a daemon has started, failed or ended, and set or remove the mark for which
        other programs wait (`directories.mark`).
        """
        states = [daemon.status.state for daemon in self._daemons.values() if daemon.is_wanted]
        up = bool(states) and all(state is MpsState.RUNNING for state in states)
        put = directories.mark if up else directories.unmark
        await asyncio.to_thread(put, self._view.directory, directories.READY)
        self._on_change()


def _task(resource: str) -> str:
    return f"mps {resource}"
