"""The MPS control daemons that this node's resources need.

The ledger has the resources and their holders, and `vgpu_agent.mps` runs the daemons. This module
connects the two: it derives the desired daemons from the ledger, and withholds a resource until its
daemon is ready: no plugin server offers it to the kubelet. Built by `composition`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.concurrency import Revision
from vgpu_agent.config import collisions
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.isolation import mps as isolation
from vgpu_agent.isolation.mps import daemon_plan, why_not_by_mps
from vgpu_agent.model import SharingMode
from vgpu_agent.mps import daemon, directories
from vgpu_agent.mps.host_daemon import HostDaemon
from vgpu_agent.mps.supervision import Supervision
from vgpu_agent.status import Withheld

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vgpu_agent.agent.offers.servers import Offering
    from vgpu_agent.concurrency import Supervisor
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.isolation.mps import DaemonPlan, MpsOptions, MpsView
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Inventory, Resource
    from vgpu_agent.status import MpsStatus

_logger = log.get(__name__)


class MpsController:
    """The controller of the MPS daemons.

    State: that of `Supervision`, which starts, checks and ends the daemons, and the settings in
    force. The daemons outlive the agent; a new agent adopts them.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ledger: Ledger,
        offering: Offering,
        inventory: Callable[[], Inventory],
        supervisor: Supervisor,
        journal: Journal,
        view: MpsView = isolation.IN_CONTAINER,
    ) -> None:
        """Build it, without a daemon; ``supervisor`` runs the loops. ``view`` is where this
        process sees the daemons' files, by default where they are mounted in the agent's container.
        """
        self._view = view
        self._ledger, self._offering, self._inventory, self._supervisor = (
            ledger,
            offering,
            inventory,
            supervisor,
        )
        self._journal = journal
        self._withheld_changes = Revision()  # advances when `_withheld` may answer differently
        self._started = False
        self._supervision = Supervision(
            settings.mps,
            supervisor,
            journal,
            holders=self._holders,
            on_change=lambda: self._withheld_changes.publish(self._withheld_changes.version + 1),
            # of an ended daemon's GPUs, those present get their default compute mode back
            gpus=lambda: [gpu.uuid for gpu in inventory().gpus],
            view=view,
            sysfs_root=settings.sysfs_root,
            proc_root=settings.gpu.proc_root,
            share_memory=_skip_shared_memory if settings.simulate else directories.share_memory,
        )
        self.apply(settings)
        offering.gates.append(self._withheld)  # asked before a resource is offered

    @property
    def statuses(self) -> tuple[MpsStatus, ...]:
        """Return the status of each daemon, in the order of their resources."""
        return self._supervision.statuses

    def apply(self, settings: Settings) -> None:
        """Put ``settings`` in force."""
        # family → the directories and limits of its daemons
        self._options: dict[str, MpsOptions] = {
            family.name: family.mps(settings, self._view) for family in FAMILIES if family.mps
        }
        # a setting that puts the daemons' files where containers could change them, and why
        self._exposed_directory = collisions.exposed_mps_directory(settings)
        self._host_daemon = HostDaemon(isolation.DEFAULT_PIPE_DIRECTORY)
        if self._started:  # the ledger may stay the same, so `_follow` may not be woken
            self._refresh()

    def start(self) -> None:
        """Start the loops. Call this once the ledger is rebuilt, because a daemon with outdated
        limits is replaced when its GPUs have no holder.
        """
        self._started = True
        self._refresh()
        self._supervisor.start("mps", self._follow)
        self._supervisor.start("mps offering", self._sync_offering)
        self._supervisor.start("mps of the host", self._watch_host)

    async def stop(self, seconds: float) -> None:
        """End the daemons without clients within ``seconds``. Daemons with clients keep running."""
        self._started = False
        await self._supervisor.stop("mps")
        await self._supervisor.stop("mps offering")
        await self._supervisor.stop("mps of the host")
        try:
            async with asyncio.timeout(seconds):
                await self._supervision.stop()
        except TimeoutError:
            _logger.warning("mps.stop_incomplete", after_seconds=seconds)

    def _refresh(self) -> None:
        """Set the desired daemons, and for each its GPUs that containers hold through other
        resources or with ids of earlier settings.
        """
        resources = list(self._shared())
        if resources or self._supervision.statuses:
            self._supervision.want(
                {
                    resource.name: (self._plan(resource), self._in_use_by_others(resource))
                    for resource in resources
                    if not self._why_unsupported(resource)
                }
            )

    async def _follow(self) -> None:
        """Set the desired daemons after each change of the ledger."""
        # ends daemons of an earlier agent that no resource needs any more
        await self._supervision.end_former_daemons()
        async for _ in self._ledger.revision.changes():
            self._refresh()

    async def _sync_offering(self) -> None:
        async for _ in self._withheld_changes.changes():
            await self._offering.sync()

    async def _watch_host(self) -> None:
        """Check every few seconds, while a resource depends on the host's daemon, which others run,
        whether that runs. If not, a caution says so, and the resource is offered all the same.
        """
        found: set[str] = set()  # resources whose daemon was last seen running, as the journal says
        while True:
            version = self._ledger.revision.version
            # resource → family
            names = {
                resource.name: resource.family
                for resource in self._ledger.resources
                if resource.sharing is SharingMode.MPS_OF_HOST
            }
            reason = await self._host_daemon.why_missing() if names else ""
            for name in names.keys() | self._offering.cautions.keys():
                self._offering.caution(
                    name,
                    f"{name}: {_without_host(reason, names[name])}"
                    if reason and name in names
                    else "",
                )
            for name in set() if reason else names.keys() - found:
                self._journal.record(
                    "mps.host_daemon_found", resource=name, pipe=isolation.DEFAULT_PIPE_DIRECTORY
                )
            found = set() if reason else set(names)
            if names:
                await asyncio.sleep(daemon.PROBE_SECONDS)
            else:
                await self._ledger.revision.newer_than(version)

    def _withheld(self, resource: Resource) -> Withheld | None:
        if resource.sharing is not SharingMode.MPS:
            return None
        if reason := self._why_unsupported(resource):
            return Withheld(reason)
        return self._supervision.withheld(self._plan(resource))

    def _why_unsupported(self, resource: Resource) -> str:
        """Explain why no daemon can run for the resource, regardless of the other resources."""
        if not self._options[resource.family].root:
            return (
                "mps.root is empty, so there is no place for an MPS control daemon; set it, or "
                "share by time-slicing"
            )
        if self._exposed_directory:
            return ": ".join(self._exposed_directory)
        if reason := why_not_by_mps(resource, self._inventory()):
            return reason
        devices = {entry.device for entry in resource.ids}
        for other in self._shared():
            if other.name == resource.name:
                break
            if common := devices.intersection(entry.device for entry in other.ids):
                return (
                    f"{min(common)} has an MPS control daemon for {other.name} already, and can "
                    f"have only one; {collisions.two_daemons_remedy()}"
                )
        return ""

    def _shared(self) -> Iterator[Resource]:
        """Return the resources that are shared by MPS daemons of this agent."""
        return (
            resource for resource in self._ledger.resources if resource.sharing is SharingMode.MPS
        )

    def _plan(self, resource: Resource) -> DaemonPlan:
        return daemon_plan(resource, self._inventory(), self._options[resource.family])

    def _holders(self, resource: str) -> tuple[str, ...]:
        """Return the pods that hold ids of ``resource``, because of which its daemon must not end.
        Before the ledger is rebuilt they are not known, and the answer says that there may be some.
        """
        if not self._ledger.rebuilt:
            return ("pods that the kubelet has not reported yet",)
        grants = (grant for grant in self._ledger.grants if grant.resource == resource)
        return tuple(
            dict.fromkeys(
                grant.owner.pod_name if grant.owner else "a starting pod" for grant in grants
            )
        )

    def _in_use_by_others(self, resource: Resource) -> frozenset[str]:
        """Return the GPUs of ``resource`` that containers hold through another resource, or with
        ids of earlier settings.
        """
        ids, inventory = {entry.id for entry in resource.ids}, self._inventory()
        others = (
            grant
            for grant in self._ledger.grants
            if grant.resource != resource.name or not ids.issuperset(grant.ids)
        )
        held = {
            found[0].uuid
            for grant in others
            for share in grant.shares
            if (found := inventory.device(share.device))
        }
        return frozenset(held.intersection(entry.device for entry in resource.ids))


def _without_host(reason: str, family: str) -> str:
    key = next(each.settings.mps_key for each in FAMILIES if each.name == family)
    return (
        f"{reason}, so its containers may take turns without limits although {key} is host; run "
        "the daemon on this node and mount its pipe into the agent (components/mps-host), or set "
        f"{key} to supervised, or to none"
    )


def _skip_shared_memory(root: str, *, size_mib: int, proc_root: str) -> None:
    """Log the mount of shared memory instead of making it. Simulated GPUs run no CUDA program that
    needs it, and a mount would need root.
    """

    def log_only(target: str, options: str) -> None:
        _logger.info(
            "mps.shared_memory_left_out",
            target=target,
            options=options,
            reason="the GPUs are simulated",
        )

    directories.share_memory(root, size_mib=size_mib, proc_root=proc_root, mount=log_only)
