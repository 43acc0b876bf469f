"""Build the agent; start it so that nothing false is ever advertised,
and stop it so that no call is cut off.

Start: the GPUs; what this node offers, checked against the kubelet's limits; the kubelet's records
into the ledger; only then the plugin servers, which register. The web server starts as soon as they
have, or after a second, so that a waiting start is visible. Stop: the plugin servers drain, then
the loops end, then the driver is closed, then the web server goes.

Called by the command line (`run`); tests build `Agent` with settings of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_agent import __version__, concurrency, log
from vgpu_agent.agent import api_server
from vgpu_agent.agent.api_server import ClusterAccess
from vgpu_agent.agent.devices.library_services import LibraryServicesInForce
from vgpu_agent.agent.devices.mig import MigDivider
from vgpu_agent.agent.devices.mps import MpsController
from vgpu_agent.agent.lag import LoopLag
from vgpu_agent.agent.late_web import LateWeb
from vgpu_agent.agent.named_configuration import with_named_configuration
from vgpu_agent.agent.offers.families import FamiliesInForce
from vgpu_agent.agent.offers.servers import Offering
from vgpu_agent.agent.records import verification
from vgpu_agent.agent.records.audit import AuditLog
from vgpu_agent.agent.records.grant_files import GrantKeeping
from vgpu_agent.agent.records.limits import LimitsWatch
from vgpu_agent.agent.records.missing_devices import MissingDevices
from vgpu_agent.agent.records.reader import KubeletRecordsReader
from vgpu_agent.agent.records.share_seconds import ShareSeconds
from vgpu_agent.agent.records.starting_pods import StartingPods
from vgpu_agent.agent.records.verification import Verification
from vgpu_agent.agent.reload import Reload
from vgpu_agent.agent.report import Report
from vgpu_agent.agent.succession import Succession
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.carrier import tokens_of
from vgpu_agent.allocation.context import Context
from vgpu_agent.allocation.notices import Notices
from vgpu_agent.allocation.overcommits import Overcommits
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.cdi.controller import CdiController
from vgpu_agent.cluster.dead_gpus import GpuFacts
from vgpu_agent.concurrency import Supervisor, first_of, unless
from vgpu_agent.errors import HostFileError, SimulationError
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.gpu import thread as nvml_thread
from vgpu_agent.gpu import watch as gpu_watch
from vgpu_agent.gpu.discovery import BY_NVML, Discovery, discover
from vgpu_agent.gpu.source import source
from vgpu_agent.isolation.mps import IN_CONTAINER
from vgpu_agent.isolation.registry import BACKENDS, HAMI_CORE, VGPU_CONTROL
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet import directory as kubelet_directory
from vgpu_agent.kubelet import pod_resources, sockets
from vgpu_agent.kubelet.directory import DirectoryWatch
from vgpu_agent.kubelet.pod_resources import PodResources
from vgpu_agent.ledger import Ledger
from vgpu_agent.memory import freeze_objects, limit_heaps
from vgpu_agent.mps import directories
from vgpu_agent.runtime.container_usage import DIRECTORY_BEFORE_1_12, ContainerUsages
from vgpu_agent.runtime.control_usage import ControlledUses, UsageReading
from vgpu_agent.runtime.grants import GrantDirectory
from vgpu_agent.runtime.libraries import used_backends
from vgpu_agent.runtime.region_guard import GuardedPlace, RegionGuard
from vgpu_agent.runtime.region_slots import RegionSlots
from vgpu_agent.status import KubeletStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable

    from vgpu_agent.agent.named_configuration import NamedConfiguration
    from vgpu_agent.config.load import Loaded
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.isolation.mps import MpsView
    from vgpu_agent.status import Problem

_logger = log.get(__name__)

# Pauses before a loop that failed is started again.
TASK_BACKOFF_MIN_SECONDS = 0.5
TASK_BACKOFF_MAX_SECONDS = 30.0
# The longest time that plugin servers, and then the MPS daemons and the API server, have to stop.
SHUTDOWN_SECONDS = 10.0
_FREEZE_AFTER_SECONDS = 2.0  # see `run`
# How long an agent that takes over waits for the kubelet to ask for the lists, before it reads the
# kubelet's records and answers calls.
_LIST_SECONDS = 3.0
# The pause between two passes of `_follow_pods`: many pods at once change the cache a hundred times
# in a row. Starts of containers do not wait for a pass: they compute the claims themselves.
_COALESCING_SECONDS = 0.02
_SUCCESSION = "succession"  # the supervisor's name of the loop that keeps the socket


async def run(loaded: Loaded) -> bool:
    """Run the agent until SIGTERM or SIGINT; tell whether it must run again from the beginning,
    because the agent that had taken over from it is gone.

    SIGHUP makes an agent without a terminal register again, as it does the plugins that the
    families replace (volcano-vgpu §1.3).

    Raises:
        AgentError: it cannot start: no driver, an address in use, a list that the kubelet would not
            take, a wrong configuration that a label of the Node names.
    """
    limit_heaps()  # so that freed memory returns to the system
    # The configuration that a label of the Node names, if there is one. It is read before all else,
    # because some settings hold for as long as the process lives.
    loaded, named = await with_named_configuration(loaded)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    settings = loaded.settings
    discovery = await discover(
        settings.gpu, sysfs_root=settings.sysfs_root, simulated=bool(settings.simulate)
    )
    # where this process sees the host's files of MPS
    mps_view = await asyncio.to_thread(
        directories.view,
        settings.mps.root,
        simulated=bool(settings.simulate),
        in_pod=_in_pod(),
    )
    agent = Agent(loaded, named, discovery, mps_view)
    # For a process with a terminal, SIGHUP means that the terminal was closed.
    loop.add_signal_handler(
        signal.SIGHUP, stop.set if sys.stderr.isatty() else agent.register_again
    )
    # `freeze_objects` excludes all present objects from garbage collection, also those that the web
    # server imports when the registrations are over.
    return await agent.run(
        stop, started=functools.partial(loop.call_later, _FREEZE_AFTER_SECONDS, freeze_objects)
    )


class Agent:
    """All parts of one agent.

    State: none but the parts'. It lives as long as the process.
    """

    def __init__(
        self,
        loaded: Loaded,
        named_configuration: NamedConfiguration | None = None,
        discovery: Discovery = BY_NVML,
        mps_view: MpsView = IN_CONTAINER,
    ) -> None:
        """Build all parts; nothing runs yet.

        Args:
            loaded: the configuration.
            named_configuration: the part of it that a label of the Node names; None for none.
            discovery: the kind of node, and so the way to its GPUs; by default that of NVML.
            mps_view: where this process sees the host's files of MPS; by default where they are
                mounted in the agent's container.
        """
        self._loaded, self._named_configuration = loaded, named_configuration
        settings, kubelet_settings = loaded.settings, loaded.settings.kubelet
        self._journal = named_configuration.journal if named_configuration else Journal()
        self._supervisor = Supervisor(
            backoff_min_seconds=TASK_BACKOFF_MIN_SECONDS,
            backoff_max_seconds=TASK_BACKOFF_MAX_SECONDS,
        )
        self._kubelet_status = KubeletStatus()
        self._ledger = Ledger()
        self._gpu_watch = source(
            discovery,
            settings.gpu,
            self._journal,
            sysfs_root=settings.sysfs_root,
            beat=self._beat("gpu watch"),
        )
        self._kubelet_directory = DirectoryWatch(
            kubelet_settings.device_plugin_directory,
            poll_seconds=kubelet_directory.POLL_SECONDS,
            journal=self._journal,
            status=self._kubelet_status,
        )
        self._cluster = ClusterAccess(
            settings, self._journal, self._supervisor, named_configuration
        )
        self._refusals = Refusals()  # the containers that may not start now, and why
        self._notices = Notices()  # messages to the owners of pods
        # starts on a GPU of which a scheduler has assigned more than there is
        self._overcommits = Overcommits(self._notices)
        self._pod_resources = PodResources(
            kubelet_settings.pod_resources_socket, timeout_seconds=pod_resources.TIMEOUT_SECONDS
        )
        self._cdi = CdiController(
            settings,
            ledger=self._ledger,
            journal=self._journal,
            supervisor=self._supervisor,
            is_late=lambda: self._allocator.is_late,  # late binding
            simulated_tool=_simulated_nvidia_ctk if settings.simulate else None,
        )
        containers_in = [backend.containers_directory(settings) for backend in BACKENDS]
        # where the plugin that a family replaces, and earlier agents, made the directories of
        # containers
        earlier_in = HAMI_CORE.directory_before(settings)
        grants_in = (*containers_in, earlier_in)
        self._region_guard = RegionGuard(
            # `folders`: in a container's directory, those with the files that it can write;
            # `allowed_size`: a file's name → how large it may be, else it is cut
            [
                GuardedPlace(directory, folders=backend.folders, allowed_size=backend.allowed_size)
                for backend, directory in zip(BACKENDS, containers_in, strict=True)
            ],
            self._journal,
            pause_seconds=settings.gpu.usage_seconds,
        )
        grant_directory = GrantDirectory(
            settings.binding.cdi_directory,
            self._journal,
            proc_root=settings.gpu.proc_root,
            # records of grants without a spec, which were answered in full in Allocate
            kept_directory=f"{settings.state_directory}/grants",
            inline=self._cdi.inline,  # replaces CDI names with the edits behind them
            # cuts at once the regions that containers have made larger
            free_disk_space=self._region_guard.free_disk_space,
            on_file_made=self._on_file_made,
            old_directory=earlier_in,
            slots=[RegionSlots(directory) for directory in containers_in],
            # where a killed agent may have left unfinished files
            other_directories=(
                *(backend.host_directory(settings) for backend in BACKENDS),
                *grants_in,
                settings.state_directory,
            ),
        )
        self._mig_divider = MigDivider.from_settings(settings, self._gpu_watch)
        # guesses which pod the kubelet is starting, so that its records are asked for that one
        self._starting_pods = StartingPods(
            self._cluster.pod_cache,
            self._ledger,
            # the containers that have their shares, by UID, container and resource
            started=lambda: self._allocator.late_start.started,
        )
        self._allocator = Allocator(
            Context(
                ledger=self._ledger,
                inventory=lambda: self._gpu_watch.inventory.value,
                journal=self._journal,
                node=settings.node_name_or_hostname,
                pods=self._cluster.pod_cache,
                read_records=KubeletRecordsReader(
                    self._pod_resources,
                    kubelet_settings.checkpoint_path,
                    # in early binding, the checkpoint's copies of our answers to all containers,
                    # and not to one alone
                    needs_all_answers=lambda: (
                        self._allocator.mode is not None and not self._allocator.is_late
                    ),
                    pods=self._starting_pods,
                    until_idle=lambda: self._allocator.until_idle(),  # noqa: PLW0108 - not made yet
                ),
                fetch_pod=self._cluster.fetch_pod,
                carrier=grant_directory,
                refusals=self._refusals,
                settings=settings.binding,
                divider=self._mig_divider,
                notices=self._notices,
                overcommits=self._overcommits,
                node_annotations=lambda: self._cluster.node_annotations,
                # for how long the API server has answered without a failure
                api_reachable_seconds=self._cluster.reachable_seconds,
            ),
        )
        # the plugin servers; `sync` runs exactly those that the ledger's offers call for
        self._offering = Offering(
            ledger=self._ledger,
            allocator=self._allocator,
            directory=self._kubelet_directory,
            supervisor=self._supervisor,
            journal=self._journal,
            # when a resource that only waits for something is reported as an error
            error_after_seconds=concurrency.STUCK_SECONDS,
        )
        # a gate is asked before a resource is served, and may say why it must not be offered now
        self._offering.gates.append(self._cdi.withheld)
        self._mps = MpsController(
            settings,
            ledger=self._ledger,
            offering=self._offering,
            inventory=lambda: self._gpu_watch.inventory.value,
            supervisor=self._supervisor,
            journal=self._journal,
            view=mps_view,
        )
        self._families = FamiliesInForce(
            settings,
            origins=loaded.origins,  # setting → the file, flag or variable that has set it
            allocator=self._allocator,
            offering=self._offering,
            cluster=self._cluster,
            inventory=lambda: self._gpu_watch.inventory.value,
            journal=self._journal,
            cdi=self._cdi,
            mps_view=mps_view,
        )
        # restores the files of grants after a reboot, and removes them when their pod is gone
        self._grant_keeping = GrantKeeping(
            grant_directory=grant_directory,
            allocator=self._allocator,
            ledger=self._ledger,
            pod_cache=self._cluster.pod_cache,
            container_directories=grants_in,
            # where the replaced plugins have other things, too
            shared_directories=[
                backend.directory_of_replaced(backend.host_directory(settings))
                for backend in BACKENDS
                if backend.directory_of_replaced and backend.name in used_backends(settings)
            ],
            pause_seconds=verification.VERIFY_SECONDS,
            renew_offer=self._renew_offer,  # in each pass, as a library may have been delivered
        )
        # compares the ledger with the kubelet's records
        self._verification = Verification(
            allocator=self._allocator,
            ledger=self._ledger,
            kubelet_settings=kubelet_settings,
            kubelet_status=self._kubelet_status,
            pod_resources=self._pod_resources,
            pod_cache=self._cluster.pod_cache,
            journal=self._journal,
            servers=lambda: self._offering.plugins,
            # since the kubelet made its socket, that is, since it started
            kubelet_age_seconds=functools.partial(
                sockets.age_seconds, kubelet_settings.kubelet_socket
            ),
        )
        # reports pods whose device the node no longer has, and keeps in a file of which GPU each
        # MIG instance was
        self._missing_devices = MissingDevices(
            settings,
            self._ledger,
            inventory=lambda: self._gpu_watch.inventory.value,
            journal=self._journal,
        )
        self._share_seconds = ShareSeconds(settings.state_directory, self._ledger)  # for chargeback
        # which container held which devices, in a file
        self._audit = (
            AuditLog(
                settings.audit,
                self._ledger,
                inventory=lambda: self._gpu_watch.inventory.value,
                journal=self._journal,
            )
            if settings.audit.file
            else None
        )
        self._container_usages = ContainerUsages(
            self._cluster.pod_cache,
            # the last: where volcano-vgpu-device-plugin before 1.12 made containers' directories
            (HAMI_CORE.containers_directory(settings), earlier_in, DIRECTORY_BEFORE_1_12),
            self._journal,
            pause_seconds=settings.gpu.usage_seconds,
            proc_root=settings.gpu.proc_root,
        )
        # the use by containers that are limited by vgpu-control
        self._controlled_uses = ControlledUses(
            self._cluster.pod_cache,
            # the second: where the replaced plugin made the directories of pods that still run
            (
                VGPU_CONTROL.containers_directory(settings),
                VGPU_CONTROL.host_directory(settings),
            ),
            self._journal,
            usage=lambda: UsageReading(self._gpu_watch.usage.value, self._gpu_watch.measured_at),
            proc_root=settings.gpu.proc_root,
            pause_seconds=settings.gpu.usage_seconds,
        )
        # services that vgpu-control needs: the registry of processes, and samples of compute use
        self._library_services = LibraryServicesInForce(
            self._families.services,
            ledger=self._ledger,
            gpu_watch=self._gpu_watch,
            pods=self._cluster.pod_cache,
            supervisor=self._supervisor,
            journal=self._journal,
            proc_root=settings.gpu.proc_root,
            sysfs_root=settings.sysfs_root,
        )
        # puts a changed configuration file in force
        self._reload = Reload(
            loaded,
            apply=self._apply,
            journal=self._journal,
            named_configuration=named_configuration,
        )
        self._serves_node = False  # true once no other agent does
        # at the last rebuild of the ledger: the offered names, and whether the pods were known
        self._understood: tuple[frozenset[str], bool] | None = None
        self._lag = LoopLag()  # measures how late the event loop wakes its tasks
        self._report = Report(
            ledger=self._ledger,
            gpu_watch=self._gpu_watch,
            kubelet_status=self._kubelet_status,
            allocator=self._allocator,
            families=self._families,
            offering=self._offering,
            refusals=self._refusals,
            overcommits=self._overcommits,
            grants=grant_directory,
            regions=self._region_guard,
            verification=self._verification,
            cluster=self._cluster,
            reload=self._reload,
            supervisor=self._supervisor,
            journal=self._journal,
            lag=self._lag,
            container_usage=self._container_usages.usage,
            controlled_uses=self._controlled_uses.uses,
            cdi=self._cdi.status,
            write_failures=lambda: (
                *self._cluster.write_failures,
                *filter(None, [self._missing_devices.write_failure]),
                *grant_directory.write_failures,
            ),
            unreadable_regions=lambda: self._container_usages.unreadable,
            mps=lambda: self._mps.statuses,
            share_seconds=lambda: self._share_seconds.sums,
        )
        # `reviews`: asks the API server whether the owner of a token may scrape metrics
        self.web = LateWeb(self._report.status, settings, reviews=self._cluster.may_get)
        # takes the node over from an agent that serves it, and hands it over to the next one
        self._succession = Succession(
            settings.state_directory, kubelet_settings.device_plugin_directory, self._journal
        )

    async def run(
        self, stop: asyncio.Event, *, started: Callable[[], object] = lambda: None
    ) -> bool:
        """Start, call ``started``, run until ``stop`` is set, and stop in order. An agent that has
        handed over only waits for ``stop``, or for the end of its successor.

        Returns:
            Whether the successor ended first, so that this node needs an agent.

        Raises:
            AgentError: it cannot start; whatever had been started is stopped again.
        """
        settings = self._loaded.settings
        _logger.info(
            "agent.starting",
            version=__version__,
            node=settings.node_name_or_hostname,
            config=self._loaded.files or "defaults",
            pid=os.getpid(),
        )
        for warning in self._loaded.warnings:
            _logger.warning("config.warning", problem=warning)
        for collision in self._loaded.collisions:  # conflicts between families
            _logger.error("config.collision", problem=collision)
        async with self.web, self._supervisor:
            try:
                if await unless(stop, self._start_all()):
                    started()
                    await first_of(stop.wait(), self._succession.handed_over.wait())
            finally:
                await self._stop()
            if self._succession.handed_over.is_set():
                await first_of(stop.wait(), self._succession.successor_lost.wait())
            self._succession.stop_answering()
        _logger.info("agent.stopped")
        needed_again = self._succession.successor_lost.is_set() and not stop.is_set()
        if needed_again:
            self._journal.record("agent.successor_lost", level="warning")
        return needed_again

    def register_again(self) -> None:
        """Let every plugin server begin again with the kubelet; all else goes on."""
        _logger.info(
            "agent.registering_again",
            resources=[plugin.resource.name for plugin in self._offering.plugins],
        )
        for plugin in self._offering.plugins:
            plugin.register_again("SIGHUP received")

    async def _start_all(self) -> None:
        """Start everything, the web server at the same time; if one of the two starts fails, the
        other is cancelled.
        """
        starts = [
            asyncio.ensure_future(start)
            for start in (self._start(), self.web.start(lambda: self._offering.registered_once))
        ]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _start(self) -> None:
        settings = self._loaded.settings
        if settings.simulate:
            await self._simulate(Path(settings.simulate))
        self._loop("event loop", self._lag.run)
        self._loop("kubelet directory", self._kubelet_directory.run)
        # the client is imported while the driver starts
        await asyncio.gather(self._gpu_watch.start(), self._cluster.load_client())
        # reading the named configuration may have used up a part of the wait for the API server
        named = self._named_configuration
        await self._cluster.connect(waited_seconds=named.waited_seconds if named else 0.0)
        await self._grant_keeping.load()
        await self._missing_devices.load_instances()
        await self._cdi.begin(settings, self._gpu_watch.inventory.value)
        await self._families.apply(settings)
        await self._know_holders()
        await self._take_over()
        await self._share_seconds.load()
        self._serves_node = True
        await self._grant_keeping.tidy()
        await self._grant_keeping.restore()  # specs and files that are missing, as after a reboot
        # specs whose ids the kubelet has given to another container meanwhile
        await self._grant_keeping.withdraw_foreign_specs()
        self._allocator.ready.set()  # without it, the kubelet's calls wait
        # now, because grants of pods that have ended during a hand-over are still there
        self._start_verification()
        self._cluster.start_writers(
            self._allocator,
            self._refusals,
            self._notices,
            wake=self._ledger.revision,  # after each change of it, they look for what to write
            tokens=self._tokens,
            pods_are_starting=self._starting_pods.any_starting,
            offered_names=self._offered_names,
            family_names=lambda: {each.name: each.family for each in self._ledger.resources},
            # the numbers of ids in the kubelet's lists; none while one family has all GPUs
            counts_sent=lambda: self._offering.counts_sent_while_shared,
            lists_sent=self._offering.lists_sent,  # advances when these numbers change
            # advances with each withdrawal of ids, which then are no longer for schedulers
            withdrawn=self._ledger.withdrawn,
            # until then the kubelet keeps withdrawn ids, for pods that are bound already
            on_counts_written=self._ledger.note_written_counts,
            # for the Node's labels and conditions, and for pods on GPUs that no longer work
            gpus=GpuFacts(
                self._gpu_watch.inventory,
                driver=lambda: self._gpu_watch.status,
                grants=lambda: self._ledger.grants,
                libraries=lambda: self._families.missing_libraries,
                labels=self._families.node_labels,
                problems=self._problems,
            ),
        )
        # until schedulers can read on the Node what the plugin servers then register
        await self._cluster.until_node_written(api_server.START_WAIT_SECONDS)
        self._mps.start()
        await self._offering.sync()
        self._start_loops(settings)
        # When the next agent comes, the first ends all that two agents must not do at once, the
        # second lets that agent register while this one still answers, and the third undoes the
        # second if that agent ends first.
        await self._succession.listen(self._hand_over, self._unlink, self._serve_again)
        self._supervisor.start(_SUCCESSION, self._succession.keep_listening)
        self._report.starting = ""
        inventory = self._gpu_watch.inventory.value
        _logger.info(
            "agent.started",
            gpus=len(inventory.gpus),
            driver=inventory.driver_version,
            simulated=inventory.simulated,
            resources={resource.name: len(resource.ids) for resource in self._ledger.resources},
            grants=len(self._ledger.grants),
        )

    def _start_loops(self, settings: Settings) -> None:
        self._supervisor.start(
            "gpu watch", self._gpu_watch.run, stuck_after_seconds=self._stuck_seconds
        )
        self._supervisor.start("offering", self._follow_inventory)
        self._supervisor.start("claims", self._follow_pods)
        if self._mig_divider is not None:
            self._supervisor.start("mig", self._mig_divider.run)
        self._supervisor.start(
            "cdi devices", functools.partial(self._cdi.watch, self._gpu_watch.inventory)
        )
        # the device names in CDI specs
        self._supervisor.start("cdi names", functools.partial(self._cdi.follow, self._renew_offer))
        control_nodes = functools.partial(
            self._families.watch_control_nodes,
            self._renew_offer,
            pause_seconds=gpu_watch.POLL_SECONDS,
        )
        self._supervisor.start("device nodes", control_nodes)
        self._supervisor.start("vanished devices", self._missing_devices.run)
        self._supervisor.start("remembered MIG instances", self._missing_devices.save_instances)
        # No heartbeats: a restart of the agent does not repair a disk that hangs.
        self._supervisor.start("share seconds", self._share_seconds.run)
        if self._audit is not None:
            self._supervisor.start("audit log", self._audit.run)
        self._supervisor.start("configuration", self._reload.run)
        if self._cluster.connected:
            self._supervisor.start(
                "cluster", functools.partial(self._cluster.follow, self._renew_offer)
            )
            self._supervisor.start(
                "grants",
                functools.partial(self._grant_keeping.run, self._beat("grants")),
                stuck_after_seconds=concurrency.STUCK_SECONDS + verification.VERIFY_SECONDS,
            )
            self._supervisor.start("library services", self._library_services.run)
            if any(family.library and family.is_on(settings) for family in FAMILIES):
                # No heartbeat: a restart of the agent does not repair a disk that hangs.
                self._supervisor.start("container usage", self._container_usages.run)
                if self.web.serves_replaced_metrics or VGPU_CONTROL.name in used_backends(settings):
                    self._supervisor.start(
                        "use of controlled containers", self._controlled_uses.run
                    )
                self._supervisor.start("region sizes", self._region_guard.run)
                # records containers whose limit is not in force
                self._supervisor.start(
                    "limits",
                    LimitsWatch(
                        # limits and use, as the libraries in containers write them
                        evidence=(self._container_usages.usage, self._controlled_uses.uses),
                        status=self._report.status,
                        journal=self._journal,
                    ).run,
                )

    def _start_verification(self) -> None:
        self._supervisor.start(
            "verification",
            functools.partial(self._verification.run, self._beat("verification")),
            # Its longest pause, and the two calls of a pass.
            stuck_after_seconds=(
                concurrency.STUCK_SECONDS
                + verification.VERIFY_SECONDS
                + 2 * pod_resources.TIMEOUT_SECONDS
            ),
        )

    async def _take_over(self) -> None:
        """Register in the place of the agent that serves the node, as soon as it lets go; without
        one, do nothing.

        All is ready by then: the sockets are served and the lists encoded. The grants that the
        other agent has made since this one read the records are read afterwards, and until then the
        kubelet's calls wait.
        """
        starting, reason = (
            self._report.starting,
            "another agent is starting or stopping on this node",
        )
        has_waited = False

        def report_wait() -> None:
            nonlocal has_waited
            has_waited = True
            if self._report.starting != reason:
                self._report.starting = reason
                _logger.info("agent.waiting", reason=reason)

        found = await self._succession.find_predecessor(report_wait)
        self._report.starting = starting
        if not found:
            if has_waited:  # the other one has ended meanwhile
                await self._grant_keeping.load()
                await self._verification.rebuild()
            return
        self._allocator.ready.clear()
        self._offering.may_register.clear()
        await self._offering.sync()
        resources = [plugin.resource.name for plugin in self._offering.plugins]
        await self._succession.take_over(resources, self._register_beside)
        # a List would make the kubelet forget the ids of calls that wait, see `catch_up`
        self._pod_resources.forbid_lists("this agent is taking over from another one")
        # reading at the same time would make the time without healthy ids longer
        await self._register()
        await self._grant_keeping.load()
        has_caught_up = await self._verification.catch_up()
        self._pod_resources.allow_lists()
        # By a List all the same: to grant devices that others hold would be worse than ids that the
        # kubelet gives to two pods.
        if not has_caught_up:
            await self._verification.rebuild()

    async def _register_beside(self) -> None:
        """Register while the predecessor still answers the kubelet's calls, after a last look at
        the records, so that little is left for `catch_up`.
        """
        await self._verification.rebuild()
        self._pod_resources.forbid_lists("this agent is taking over from another one")
        await self._register()

    async def _unlink(self, resources: Collection[str]) -> bool:
        """Make the kubelet forget its clients of this agent, so that a successor can register
        beside it (`Offering.unlink`); tell whether that worked.

        The kubelet's calls then wait for the successor, and a List of pod-resources would make it
        forget their ids, see `Verification.catch_up`.
        """
        await self._supervisor.stop("verification")
        self._pod_resources.forbid_lists("another agent is taking over from this one")
        return await self._offering.unlink(resources)

    async def _serve_again(self) -> None:
        """Undo `_unlink`: the successor has ended."""
        self._pod_resources.allow_lists()
        self._start_verification()
        await self._offering.serve_again()

    async def _register(self) -> None:
        """Register all plugins with the kubelet, and wait a while until it has their lists."""
        if self._offering.may_register.is_set():
            return  # done while the predecessor still served
        self._offering.may_register.set()
        await self._offering.until_listed(_LIST_SECONDS)

    async def _hand_over(self, is_awaited: Callable[[], bool]) -> None:
        """Let go of the node: first end all loops that write, then answer no call any more.

        A successor for which ``is_awaited`` is false may serve the node already: then its file of
        share seconds is newer, and its containers may use a daemon that has no clients in this
        ledger.
        """
        self._report.starting = "another agent has taken over this node"
        # the plugin servers need the first, and end by themselves
        await self._supervisor.stop_all_but(
            lambda name: name == "kubelet directory" or self._offering.has_task(name)
        )
        self._grant_keeping.keep_all()  # threads of these loops may go on
        await self._store_records(share_seconds=is_awaited())
        await self._offering.hand_over()
        if is_awaited():
            await self._mps.stop(SHUTDOWN_SECONDS)

    def _on_file_made(self, path: str) -> None:
        self._region_guard.take(path)
        self._controlled_uses.note_written_file(path)

    def _offered_names(self) -> frozenset[str]:
        return frozenset(resource.name for resource in self._ledger.resources)

    async def _stop(self) -> None:
        await self._supervisor.stop(_SUCCESSION)
        await self._succession.stop_listening()
        if self._succession.handed_over.is_set():
            # all that the successor needs stays: the specs of containers, the Node's annotations
            await self._release_driver_and_cluster()
            return
        self._report.starting = "the agent is stopping"
        _logger.info("agent.stopping")
        if not self._serves_node:  # another agent may serve the node: its specs and records stay
            await self._offering.stop()
            await self._release_driver_and_cluster()
            return
        try:
            async with asyncio.timeout(SHUTDOWN_SECONDS):
                # After the last registration containers start without the agent, from the specs
                # that are there. So none may have the spec of another container.
                await self._grant_keeping.withdraw_foreign_specs()
                await self._offering.stop()
        except HostFileError as err:
            _logger.error("agent.stale_spec", error=str(err))
            await self._offering.stop()
        except TimeoutError:
            _logger.warning("agent.drain_incomplete", after_seconds=SHUTDOWN_SECONDS)
        await self._mps.stop(SHUTDOWN_SECONDS)
        await self._store_records()
        # both only with `cluster.withdrawAtStop`: remove our specs, and what schedulers read
        await self._cdi.withdraw()
        await self._cluster.withdraw(SHUTDOWN_SECONDS)
        await self._release_driver_and_cluster()

    async def _release_driver_and_cluster(self) -> None:
        await self._cluster.close()
        self._pod_resources.close()
        with contextlib.suppress(TimeoutError):
            await self._gpu_watch.stop(2 * nvml_thread.EVENT_WAIT_SECONDS)
        # last, because a predecessor that still runs begins again when it sees this end
        self._succession.close()

    async def _store_records(self, *, share_seconds: bool = True) -> None:
        """Write what the loops of share seconds and audit log have not written yet, the former only
        with ``share_seconds``; a disk that hangs delays the stop by no more than
        `SHUTDOWN_SECONDS`.
        """
        await self._supervisor.stop("share seconds")
        await self._supervisor.stop("audit log")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_SECONDS):
                await self._share_seconds.end(write=share_seconds)
                if self._audit is not None:
                    await self._audit.close()

    async def _simulate(self, directory: Path) -> None:
        try:
            # a node with real GPUs never loads the simulator
            from vgpu_agent.sim.preload import preload  # noqa: PLC0415
        except ModuleNotFoundError as err:
            elsewhere = "" if _in_pod() else ", or run the agent from a checkout"
            raise SimulationError(
                f"--simulate: the image does not contain the simulator; leave the flag out"
                f"{elsewhere}"
            ) from err
        _logger.warning(
            "agent.simulated",
            directory=str(directory),
            meaning="the GPUs are simulated; no work runs on them",
        )
        await asyncio.to_thread(preload, directory)

    async def _apply(self, settings: Settings) -> None:
        """Put new settings in force as far as that works without a restart.

        Raises:
            ConfigError: they would offer more than the kubelet takes; nothing has changed.
        """
        await self._families.apply(settings)
        self._mps.apply(settings)
        self._gpu_watch.apply(settings.gpu)
        await self._know_holders()
        await self._offering.sync()

    def _problems(self) -> Iterable[Problem]:
        # not imported before the first registration, like all of the web server (`late_web`)
        from vgpu_agent.web import problems  # noqa: PLC0415

        return problems.known(self._report.status(), time.time())

    def _tokens(self, pod_uid: str) -> tuple[str, ...]:
        """The tokens of a pod's grants, also of those that ended
        before its annotations were written.
        """
        started = self._allocator.late_start.started.values()
        return tokens_of(pod_uid, (*self._ledger.grants, *started))

    async def _renew_offer(self) -> None:
        """Bring the offers in line with a possible change outside the configuration: of the Node, a
        ConfigMap, a library, CDI names or device nodes.
        """
        await self._families.rebuild()
        await self._know_holders()
        await self._offering.sync()

    async def _know_holders(self) -> None:
        """Read the kubelet's records again before something is offered whose holders could not be
        understood before.
        """
        known = (
            frozenset(offer.name for offer in self._ledger.resources),
            self._cluster.pod_cache.synced.is_set(),
        )
        if known != self._understood and not self._pod_resources.lists_forbidden:
            self._understood = known
            await self._verification.rebuild()
        # what is offered next must not be what a scheduler has given to a pod
        self._allocator.refresh_claims()

    async def _follow_pods(self) -> None:
        """Keep GPUs for the pods to which schedulers have given them. And end the turns whose time
        is over: a GPU that was returned is first offered to one family at a time.
        """
        while True:
            pods, ledger = self._cluster.pod_cache.revision.version, self._ledger.revision.version
            self._ledger.end_turns()
            self._allocator.refresh_claims()
            await first_of(
                self._cluster.pod_cache.revision.newer_than(pods),
                self._ledger.revision.newer_than(ledger),
                self._refusals.revision.newer_than(self._refusals.revision.version),
                timeout_seconds=self._ledger.turn_ends_in_seconds,
            )
            await asyncio.sleep(_COALESCING_SECONDS)

    async def _follow_inventory(self) -> None:
        async for _ in self._gpu_watch.inventory.changes():
            self._families.refresh()
            await self._know_holders()
            await self._offering.sync()

    def _loop(self, name: str, loop: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._supervisor.start(
            name, functools.partial(loop, self._beat(name)), stuck_after_seconds=self._stuck_seconds
        )

    def _beat(self, name: str) -> Callable[[], None]:
        return functools.partial(self._supervisor.beat, name)

    @property
    def _stuck_seconds(self) -> float:
        """The longest silence allowed to a loop: its longest pause plus the limit of all loops."""
        return concurrency.STUCK_SECONDS + max(
            gpu_watch.POLL_SECONDS, kubelet_directory.POLL_SECONDS
        )


def _in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _simulated_nvidia_ctk() -> tuple[str, ...]:
    # a node with real GPUs never loads the simulator
    from vgpu_agent.sim.nvidia_ctk import COMMAND  # noqa: PLC0415

    return COMMAND
