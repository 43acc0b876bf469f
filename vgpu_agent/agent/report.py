"""The status of the whole agent for `web`, and the results of ``/readyz`` and ``/livez``.

It is collected for every HTTP request, so it only reads values in memory. The agent is ready if
pods can be admitted to all resources that this node offers. It is alive as long as no loop hangs in
a way that only a restart of the process can end.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import __version__
from vgpu_agent.concurrency import Latest
from vgpu_agent.config import schema
from vgpu_agent.device_ids import NumberedIds
from vgpu_agent.model import Decider, Remedy
from vgpu_agent.status import (
    START_KUBELET,
    AgentStatus,
    BindingStatus,
    CdiStatus,
    FamilyStatus,
    LedgerStatus,
    NvmlState,
    PluginState,
    Problem,
    ProblemKind,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from vgpu_agent.agent.api_server import ClusterAccess
    from vgpu_agent.agent.lag import LoopLag
    from vgpu_agent.agent.offers.families import FamiliesInForce
    from vgpu_agent.agent.offers.servers import Offering
    from vgpu_agent.agent.records.verification import Verification
    from vgpu_agent.agent.reload import Reload
    from vgpu_agent.allocation.allocator import Allocator
    from vgpu_agent.allocation.overcommits import Overcommits
    from vgpu_agent.allocation.refusals import Refusals
    from vgpu_agent.concurrency import Supervisor
    from vgpu_agent.gpu.source import GpuSource
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import ContainerUsage, ControlledUse, Resource
    from vgpu_agent.runtime.grants import GrantDirectory
    from vgpu_agent.runtime.region_guard import RegionGuard
    from vgpu_agent.status import KubeletStatus, MpsStatus, PluginStatus, WriteFailure

_COMMIT_VARIABLE = "VGPU_AGENT_COMMIT"  # set by the Containerfile


@dataclasses.dataclass(eq=False)
class Report:
    """The status of all parts, collected on demand from the objects that own it. The module
    `vgpu_agent.status` explains each value.

    Attributes:
        gpu_watch: the inventory and the use of the GPUs, and the state of NVML.
        families: the families as they were built from the settings in force.
        offering: the plugin servers, one for each resource that is offered.
        overcommits: the starts on GPUs of which a scheduler has assigned more than they have.
        grants: the files of the grants.
        regions: cuts back files that containers have mounted writable and made grow.
        verification: compares the ledger with the kubelet's records.
        reload: the configuration in force, and its changes since the start.
        container_usage: the use by containers, as their regions showed it last.
        controlled_uses: the use by containers that are limited by vgpu-control.
        mps: returns the status of each MPS control daemon.
        cdi: returns the status of the CDI specs and names.
        write_failures: returns the files that could not be written at the last attempt.
        unreadable_regions: returns the file of a container → why it cannot be read.
        share_seconds: returns (namespace, pod, resource) → the seconds for which the pod has held
            shares, times their number.
        lag: the delays of the event loop.
        starting: why nothing is offered yet; empty once everything has been started.
    """

    ledger: Ledger
    gpu_watch: GpuSource
    kubelet_status: KubeletStatus
    allocator: Allocator
    families: FamiliesInForce
    offering: Offering
    refusals: Refusals
    overcommits: Overcommits
    grants: GrantDirectory
    regions: RegionGuard
    verification: Verification
    cluster: ClusterAccess
    reload: Reload
    supervisor: Supervisor
    journal: Journal
    lag: LoopLag
    container_usage: Latest[tuple[ContainerUsage, ...]]
    controlled_uses: Latest[tuple[ControlledUse, ...]] = dataclasses.field(
        default_factory=lambda: Latest(())
    )
    mps: Callable[[], tuple[MpsStatus, ...]] = tuple
    cdi: Callable[[], CdiStatus] = CdiStatus
    write_failures: Callable[[], tuple[WriteFailure, ...]] = tuple
    unreadable_regions: Callable[[], Mapping[str, str]] = dict
    share_seconds: Callable[[], Mapping[tuple[str, str, str], float]] = dict
    starting: str = "the agent is starting"

    def __post_init__(self) -> None:
        # the part of the ledger's status that depends on the ledger alone, and its revision
        self._ledger_part = LedgerStatus()
        self._ledger_part_version = -1
        self._started_at = time.time()

    def status(self) -> AgentStatus:
        """Collect the status of all parts at this moment."""
        loaded, tasks = self.reload.loaded, tuple(self.supervisor.reports)
        named_configuration = self.reload.named_configuration
        return AgentStatus(
            node=loaded.settings.node_name_or_hostname,
            version=__version__,
            commit=os.environ.get(_COMMIT_VARIABLE, ""),
            simulated=bool(loaded.settings.simulate) or self.gpu_watch.inventory.value.simulated,
            started_at=self._started_at,
            inventory=self.gpu_watch.inventory.value,
            inventory_at=self.gpu_watch.read_at,
            usage=self.gpu_watch.usage.value,
            usage_at=self.gpu_watch.measured_at,
            containers=self.container_usage.value,
            controlled=self.controlled_uses.value,
            nvml=self.gpu_watch.status,
            kubelet=self.kubelet_status,
            plugins=self.offering.statuses,
            ledger=self._ledger_status(),
            binding=self._binding_status(),
            cluster=self.cluster.status(),
            mps=self.mps(),
            cdi=self.cdi(),
            write_failures=self.write_failures(),
            unreadable_regions=self.unreadable_regions(),
            tasks=tasks,
            events=tuple(self.journal.entries),
            loop_lag_seconds=self.lag.percentile_99_seconds,
            loop_lag_max_seconds=self.lag.max_seconds,
            config={
                path: (value, loaded.origins[path])
                for path, value in schema.values(loaded.settings)
            },
            config_problems=self.reload.problems,
            config_needs_restart=self.reload.needs_restart,
            config_collisions=self.reload.loaded.collisions,  # of families that are switched on
            config_named=named_configuration.report if named_configuration else {},
            not_ready=tuple(self._not_ready()),
            not_alive=tuple(self._not_alive()),
        )

    def _binding_status(self) -> BindingStatus:
        allocator, families = self.allocator, self.families
        return BindingStatus(
            mode=allocator.mode,
            families=tuple(
                self._family(name, decided_by_pod=decided_by_pod)
                for name, decided_by_pod in families.switched_on
            ),
            refusals=self.refusals.current,
            # starts refused because the kubelet's records name several holders of the ids
            ambiguities=allocator.late_start.ambiguities,
            # answers to Allocate that were meant for another pod: starts refused for that reason,
            # and answers exchanged between two pods with equal shares
            wrong_guesses=allocator.early.wrong_guesses,
            exchanges=allocator.early.exchanges,
            overcommitted_starts=self.overcommits.total,
            # the families' settings, with the files of replaced plugins; which file set which
            in_force=families.in_force,
            origins=families.origins,
            limits=families.limits,  # what each family's library limits in containers
            file_problems=families.problems,  # of the configuration files of replaced plugins
            # problems that some pods will have with the offered resources
            cautions=(*families.cautions, *self.offering.cautions.values()),
            # directories of ended containers that cannot be removed, and why
            left_over=dict(self.grants.left_over),
            regions_cut=self.regions.cuts,  # how often one that had grown was truncated
        )

    def _family(self, name: str, *, decided_by_pod: bool) -> FamilyStatus:
        """Return the status of a family; it is idle where this node has no device for it."""
        offered = any(plugin.family == name for plugin in self.offering.statuses)
        trouble, idle = ("", False) if offered else self.families.why_not_offered(name)
        return FamilyStatus(
            name, decided_by_pod=decided_by_pod, offered=offered, trouble=trouble, idle=idle
        )

    def _ledger_status(self) -> LedgerStatus:
        return msgspec.structs.replace(
            self._cached_ledger_part(),
            grants=self.ledger.grants,
            drift_total=self.verification.drift_total,
            drift_last=self.verification.drift_last,
            verified_at=self.verification.verified_at,
            share_seconds=self.share_seconds(),
        )

    def _cached_ledger_part(self) -> LedgerStatus:
        """Return the part of the ledger's status that depends on the ledger alone. It is cached
        until the ledger changes, because counting tens of thousands of ids for every request would
        take too long.
        """
        ledger = self.ledger
        if self._ledger_part_version != ledger.revision.version:
            self._ledger_part_version = ledger.revision.version
            self._ledger_part = LedgerStatus(
                revision=ledger.revision.value,
                # ids that containers hold and that this node does not offer
                unknown_ids=ledger.foreign_ids,
                capacity=_max_holders(ledger.resources),
                free={
                    resource.name: ledger.free_ids(resource.name) for resource in ledger.resources
                },
                # `decided_by`: what decides on the share of a container: the ids of the resource
                # (IDS), the pod's limits and annotations (POD), or nothing, because the resource
                # exists only for schedulers to count (NOBODY)
                rooms={
                    resource.name: ledger.rooms(resource.name)
                    for resource in ledger.resources
                    if resource.decided_by is not Decider.NOBODY
                },
                only_counted=frozenset(
                    resource.name
                    for resource in ledger.resources
                    if resource.decided_by is Decider.NOBODY
                ),
                sharing={
                    # how containers share a device: not at all, by time-slicing, or by MPS
                    resource.name: resource.sharing.value
                    for resource in ledger.resources
                    if resource.decided_by is Decider.IDS
                },
                # devices with more compute or containers booked than they have room for
                overcommitted=ledger.overcommitted,
                uses=ledger.uses,  # which family each GPU serves, and which pods wait for it
                # ids that are not granted now, e.g. because their GPU serves another family
                held_back={
                    resource.name: held_back
                    for resource in ledger.resources
                    if (held_back := ledger.held_back(resource.name))
                },
                decided_by_pod=frozenset(
                    resource.name
                    for resource in ledger.resources
                    if resource.decided_by is Decider.POD
                ),
            )
        return self._ledger_part

    def _not_ready(self) -> Iterator[Problem]:
        if self.starting:
            yield Problem(ProblemKind.AGENT, subject="", text=self.starting)
        nvml = self.gpu_watch.status
        if nvml.state is NvmlState.HUNG:
            of_gpu = f" of {nvml.gpu}" if nvml.gpu else ""
            yield Problem(
                ProblemKind.NVML,
                subject="",
                text=f"{nvml.call}{of_gpu} has not returned for {time.time() - nvml.since:.0f} s",
                remedy=Remedy.CHECK_DRIVER.sentence(nvml.gpu),
            )
        # UNUSED: a Tegra GPU is used without NVML
        elif nvml.state not in {NvmlState.ANSWERING, NvmlState.UNUSED}:
            yield Problem(
                ProblemKind.NVML,
                subject="",
                text=nvml.last_error or f"the driver is {nvml.state.value}",
            )
        # withheld: not offered although it is configured, e.g. because its list of ids is too long
        for resource, reason in self.offering.withheld.items():
            yield Problem(ProblemKind.RESOURCE, subject=resource, text=reason)
        plugins = self.offering.statuses
        read = nvml.state in {NvmlState.ANSWERING, NvmlState.UNUSED}
        if read and not plugins and not self.offering.withheld and not self.starting:
            reason, remedy = self._why_nothing_is_offered()
            yield Problem(ProblemKind.GPUS, subject="", text=reason, remedy=remedy)
        for plugin in plugins:
            if not plugin.ready:
                reason, remedy = self._why_not_ready(plugin)
                yield Problem(
                    ProblemKind.RESOURCE, subject=plugin.resource, text=reason, remedy=remedy
                )

    def _why_nothing_is_offered(self) -> tuple[str, str]:
        """Return the reason why nothing is offered, and the remedy or where to find more."""
        families = self.reload.loaded.settings.families
        gpus = len(self.gpu_watch.inventory.value.gpus)
        if not any(msgspec.structs.astuple(families)):
            return (
                "no family of resources is on",
                f"set one of families.{', '.join(families.__struct_encode_fields__)} to true",
            )
        if gpus:
            remedy = "/debug/devices shows them, /debug/events?event=config.caution says why"
            return f"nothing of this node's {gpus} GPUs is offered", remedy
        return "this node has no GPU to offer", "/debug/devices says which cards did not answer"

    def _why_not_ready(self, plugin: PluginStatus) -> tuple[str, str]:
        """Return why pods cannot be admitted to a resource, and the remedy."""
        if plugin.state is PluginState.WAITING:
            if self.kubelet_status.directory_trouble:
                return f"waiting for the kubelet: {self.kubelet_status.directory_trouble}", ""
            if not self.kubelet_status.socket_present:
                socket = f"{self.kubelet_status.directory}/kubelet.sock"
                return f"waiting for the kubelet: there is no {socket}", START_KUBELET
        state = (
            "registered, but the kubelet has not opened the stream of the list"
            if plugin.state is PluginState.REGISTERED
            else plugin.state.value
        )
        return (f"{state}; {plugin.last_error}" if plugin.last_error else state), ""

    def _not_alive(self) -> Iterator[Problem]:
        now = time.time()
        for report in self.supervisor.reports:
            if report.stuck_for(now):
                silent_seconds = now - report.last_heartbeat_at
                yield Problem(
                    ProblemKind.TASK,
                    subject=report.name,
                    text=f"no heartbeat for {silent_seconds:.0f} s; it will not recover by itself",
                )


def _max_holders(resources: Iterable[Resource]) -> dict[str, int]:
    """Return the maximum number of holders of each device, by UUID; a holder is a container, or an
    id where the ids name the devices. A device serves one family at a time, so this is the largest
    number that any family allows.
    """
    by_family: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for resource in resources:
        if resource.decided_by is Decider.IDS and isinstance(resource.ids, NumberedIds):
            by_family[resource.family].update(
                {block.device: block.count for block in resource.ids.blocks}
            )
        elif resource.decided_by is Decider.IDS:
            by_family[resource.family].update(entry.device for entry in resource.ids)
        elif resource.decided_by is Decider.POD:
            devices = (
                resource.ids.devices
                if isinstance(resource.ids, NumberedIds)
                else {entry.device for entry in resource.ids}
            )
            by_family[resource.family].update(dict.fromkeys(devices, resource.holders_per_device))
    return {
        device: max(holders[device] for holders in by_family.values())
        for holders in by_family.values()
        for device in holders
    }
