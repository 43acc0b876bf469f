"""The API server's part in the agent: what is watched, what is written,
and what is remembered for a restart during an outage.

Built by `composition`. Without credentials nothing here runs, and the families that need the API
server are not served. With credentials, an outage of any length changes nothing for what is known
already.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import time
from typing import TYPE_CHECKING

from vgpu_agent import concurrency
from vgpu_agent.agent.remembered import Remembered, RememberedFile
from vgpu_agent.cluster import api, decode, feature_labels, gpu_status, retrying, reviews
from vgpu_agent.cluster.allocatable import AllocatableWriter
from vgpu_agent.cluster.config_map import ConfigMapWatch
from vgpu_agent.cluster.credentials import credentials
from vgpu_agent.cluster.events import Events
from vgpu_agent.cluster.failed_pods import FailedPods
from vgpu_agent.cluster.feature_labels import FeatureLabels
from vgpu_agent.cluster.gpu_events import GpuEvents
from vgpu_agent.cluster.gpu_evictions import GpuEvictions, desired_labels
from vgpu_agent.cluster.node_publisher import NodePublisher
from vgpu_agent.cluster.pod_copies import PodCopies
from vgpu_agent.cluster.pod_publisher import PodPublisher
from vgpu_agent.cluster.reschedule import Reschedule
from vgpu_agent.cluster.rescue import Rescue
from vgpu_agent.cluster.watching import NodeWatch, PodWatch
from vgpu_agent.concurrency import Revision, first_of
from vgpu_agent.config.families import plugin_document
from vgpu_agent.errors import ClusterError
from vgpu_agent.families.plugin_files import texts_in_force
from vgpu_agent.families.pod_annotations import pod_keys
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.pods import GPU_HEALTH_LABEL, PodCache
from vgpu_agent.status import ClusterStatus

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Collection,
        Iterator,
        Mapping,
        Sequence,
    )

    from vgpu_agent.agent.named_configuration import NamedConfiguration
    from vgpu_agent.allocation.allocator import Allocator
    from vgpu_agent.allocation.notices import Notices
    from vgpu_agent.allocation.refusals import Refusals
    from vgpu_agent.cluster.client import ApiClient
    from vgpu_agent.cluster.dead_gpus import GpuFacts
    from vgpu_agent.concurrency import Supervisor
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.plugin_files import PluginFile
    from vgpu_agent.families.spec import FamilySpec
    from vgpu_agent.journal import Journal
    from vgpu_agent.nodes import DesiredNode, Node, SentCounts
    from vgpu_agent.pods import DesiredPod, Pod
    from vgpu_agent.status import WatchStatus, WriteFailure

# How long the start waits for the first list of Node and pods before it goes on with what it
# knows.
START_WAIT_SECONDS = 5.0
_COMPONENT = "vgpu-agent"  # the source of our Kubernetes events
# Longer annotations of the Node are not remembered: the defaults of operators are single words.
_LONGEST_DEFAULT = 256
_NODE_TASK = "writes to this node"


class ClusterAccess:
    """Client, watches and writers.

    State: `pod_cache` exists from the beginning, the client, the watches and `remembered` from
    `connect` on, and the parts that write from `start_writers` on. Remembered data replaces what
    the API server has not reported yet.

    Attributes:
        pod_cache: the pods of this node.
        node_watch, pod_watch: the watches of our Node and of its pods; None before `connect`.
        reschedule: the part that raises events for pods whose starts the agent refuses, and evicts
            these pods where the operator asks for it; None before `start_writers`.
        rescue: the part that evicts or recreates pods that have failed; None while it is off.
        gpu_evictions: the part that evicts pods on dead GPUs; None while it is off.
        failed_pods: the part that reports pods which failed while no agent ran; None while off.
        connected: there are credentials.
        disconnected_reason: why there is no connection; empty when there is one.
        origin: where the credentials come from; empty without any.
        remembered: what the agent before this one had read; None when there is nothing.
    """

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        supervisor: Supervisor,
        named_configuration: NamedConfiguration | None = None,
    ) -> None:
        """Make no request yet. ``named_configuration``, which a label of the Node chooses, gets the
        label's value, and its choice is remembered.
        """
        self.pod_cache = PodCache()
        self.connected = False
        self.disconnected_reason = "the agent is starting"
        self.origin = ""
        self.pod_watch: PodWatch | None = None
        self.node_watch: NodeWatch | None = None
        self.node_publisher: NodePublisher | None = None
        self.pod_publisher: PodPublisher | None = None
        self.allocatable: AllocatableWriter | None = None
        self.reschedule: Reschedule | None = None
        self.rescue: Rescue | None = None
        self.gpu_evictions: GpuEvictions | None = None
        self.events: Events | None = None
        self.failed_pods: FailedPods | None = None
        self.client: ApiClient | None = None
        self._outage = gpu_status.Outage()
        self._leaving_at = 0.0  # unix seconds; 0 until `withdraw`
        self._tasks: list[str] = []
        self._settings = settings
        # where the named configurations are, and the label that chooses one
        self._named_documents = plugin_document().named_documents(settings)
        self._journal = journal
        self._supervisor = supervisor
        self.config_maps: dict[str, ConfigMapWatch] = {}  # name of the file in it → its watch
        self._remembered_file = RememberedFile(settings.state_directory)
        self.remembered: Remembered | None = None
        self._named_configuration = named_configuration
        if named_configuration is not None:
            named_configuration.read_label_by(lambda: self.config_label)
        # name of a replaced plugin's file → its texts in force, see `plugin_texts`
        self._plugin_texts: dict[str, tuple[str, ...]] = {}

    @property
    def needed(self) -> bool:
        """Tell whether an enabled family or a setting needs the API server,
        so that pods are watched and Node and pods are written.
        """
        return self._settings.node_status.needs_api_server or any(
            family.needs_api_server and family.is_on(self._settings) for family in FAMILIES
        )

    @property
    def node(self) -> Node | None:
        """Our Node, or what is remembered of it while it has not been read."""
        if self.node_watch is not None and self.node_watch.node.value is not None:
            return self.node_watch.node.value
        return self.remembered.as_node if self.remembered else None

    @property
    def node_annotations(self) -> Mapping[str, str]:
        """The annotations of our Node, or those that are remembered while it has not been read: the
        defaults that operators set for its pods. Empty before it was ever read; then families that
        need the API server serve no pod, see `waiting_for`.
        """
        node = self.node
        return node.annotations if node else {}

    @property
    def config_label(self) -> str | None:
        """The value of the label that names this node's configuration, empty where it has none;
        None while the Node has not been read.
        """
        node = self.node_watch.node.value if self.node_watch is not None else None
        return None if node is None else node.labels.get(self._named_documents.label, "")

    @property
    def plugin_texts(self) -> Mapping[str, tuple[str, ...]]:
        """The texts in force of each configuration file of a plugin that a family replaces, also
        those from before a restart: the last valid text, and invalid ones after it, whose correct
        parts count (`plugin_files.texts_in_force`).
        """
        for file in _config_map_files(self._settings):
            watch = self.config_maps.get(file.name)
            if watch is not None and watch.synced.is_set():
                is_valid = functools.partial(file.is_valid, self._settings)
                self._plugin_texts[file.name] = texts_in_force(
                    self._plugin_texts.get(file.name, ()), watch.text.value, is_valid
                )
        return self._plugin_texts

    def remember_plugin_texts(self, texts: Mapping[str, tuple[str, ...]]) -> None:
        """Take over the texts of files on the node, which are remembered with the others."""
        self._plugin_texts |= texts

    @property
    def waiting_for(self) -> str:
        """The data that must be read before families that need the API server can be offered;
        empty when it is all there.
        """
        if not self.connected:
            return self.disconnected_reason
        unread = [watch.name for watch in self.config_maps.values() if not watch.synced.is_set()]
        if self.remembered is None and unread:
            return (
                f"the ConfigMap {unread[0]} has not been read yet, because the API server does not "
                "answer"
            )
        if self.node is None:
            return (
                "this node's Node object has not been read yet, because the API server does not "
                "answer or does not know it"
            )
        return ""

    def status(self) -> ClusterStatus:
        """The status at this moment. It has no secrets: of the credentials only their source."""
        failed_pods, remembered = self.failed_pods, self.remembered
        return ClusterStatus(
            connected=self.connected,
            disconnected_reason=self.disconnected_reason,
            needed=self.needed,
            origin=self.origin,
            waiting_for=self.waiting_for if self.needed else "",
            requests=self.client.requests if self.client else {},
            watches=tuple(self._watches()),
            writers=tuple(
                writer.counts
                for writer in (
                    self.node_publisher,
                    self.allocatable,
                    self.pod_publisher,
                    self.events,
                )
                if writer is not None
            ),
            evictions=self.reschedule.evictions if self.reschedule else {},
            rescued=self.rescue.counts if self.rescue else {},
            gpu_evictions=self.gpu_evictions.counts if self.gpu_evictions else {},
            # right → the file of manifests/ that grants it
            missing_rights={
                right: retrying.granted_by(right)
                for right in (self.client.missing_rights if self.client else ())
            },
            config_map=", ".join(
                f"{watch.namespace}/{watch.name}"
                for watch in self.config_maps.values()
                if watch.namespace
            ),
            remembered=(
                {}
                if remembered is None
                else {
                    "kubelet_version": remembered.kubelet_version,
                    "runtime_version": remembered.runtime_version,
                    "files": sorted(name for name, texts in remembered.texts.items() if texts),
                    "in_use": self.node_watch is None or self.node_watch.node.value is None,
                }
            ),
            pods=self.pod_cache.pods,
            pods_synced=self.pod_cache.synced.is_set(),
            failed_while_agent_down=failed_pods.found if failed_pods else 0,
        )

    def _watches(self) -> Iterator[WatchStatus]:
        for watch in (self.pod_watch, self.node_watch):
            if watch is not None:
                yield watch.status
        for config_map in self.config_maps.values():
            # a namespace without lists and errors is not watched
            yield from (
                status for status in config_map.statuses.values() if status.lists or status.errors
            )

    @property
    def write_failures(self) -> tuple[WriteFailure, ...]:
        """The files in ``stateDirectory`` that could not be written at the last attempt."""
        failures = (
            self._remembered_file.failure,
            self.rescue.write_failure if self.rescue else None,
        )
        return tuple(failure for failure in failures if failure is not None)

    async def load_client(self) -> None:
        """Import what `connect` needs, if anything needs the API server;
        without this call `connect` imports it later.
        """
        if self.needed or self._named_documents.directory:
            await asyncio.to_thread(importlib.import_module, "vgpu_agent.cluster.client")

    async def connect(self, waited_seconds: float = 0.0) -> None:
        """Find credentials, start the watches and wait a while for their first answers;
        ``waited_seconds`` of that time have passed already.
        """
        if not self.needed and not self._named_documents.directory:
            self.disconnected_reason = "no family or setting that needs the API server is on"
            return
        found = await asyncio.to_thread(credentials, self._settings)
        if found is None:
            self.disconnected_reason = (
                "there are no credentials for the API server: run with a service account, or set "
                "kubeconfig"
            )
            self._journal.record(
                "cluster.without_credentials", level="warning", remedy=self.disconnected_reason
            )
            return
        name = self._settings.node_name_or_hostname
        self.remembered = await self._remembered_file.read(name)
        if self.remembered is not None:
            self._plugin_texts = {
                file.name: self.remembered.texts.get(file.name, ())
                for file in _read_files(self._settings)
            }
        self.origin = found.origin
        await asyncio.to_thread(importlib.import_module, "vgpu_agent.cluster.client")
        # aiohttp, which most nodes need for metrics only
        from vgpu_agent.cluster.client import ApiClient  # noqa: PLC0415

        self.client = client = ApiClient(found)
        self.node_watch = NodeWatch(client, name, journal=self._journal)
        watches: list[tuple[str, PodWatch | NodeWatch | ConfigMapWatch]] = [
            ("watch of this node", self.node_watch)
        ]
        if self.needed:  # for the label alone no pods are read
            self.pod_watch = PodWatch(
                client,
                name,
                self.pod_cache,
                journal=self._journal,
                # keeps only these annotations and labels
                decode_pod=decode.pods_with(pod_keys(self._settings)),
            )
            watches.append(("watch of pods", self.pod_watch))
        for file in _config_map_files(self._settings):
            config_map = ConfigMapWatch(
                client,
                file.config_map,
                file.name,
                journal=self._journal,
                namespaces=file.namespaces(self._settings),
                # the namespace that the operator has named; empty for none
                expected_in=file.configured_namespace(self._settings),
            )
            self.config_maps[file.name] = config_map
            watches.append((f"watch of {file.config_map}", config_map))
        for task, watch in watches:
            self._loop(task, watch.run, watch.longest_silence_seconds)
        self.connected, self.disconnected_reason = True, ""
        await self._first_answers(max(0.0, START_WAIT_SECONDS - waited_seconds))

    def start_writers(
        self,
        allocator: Allocator,
        refusals: Refusals,
        notices: Notices,
        wake: Revision,
        tokens: Callable[[str], Sequence[str]],
        *,
        pods_are_starting: Callable[[], bool] = lambda: False,
        offered_names: Callable[[], Collection[str]] = lambda: (),
        family_names: Callable[[], Mapping[str, str]] = dict,
        counts_sent: Callable[[], Mapping[str, SentCounts]] = dict,
        lists_sent: Revision | None = None,
        withdrawn: Revision | None = None,
        on_counts_written: Callable[[int | None], None] = lambda _number: None,
        gpus: GpuFacts | None = None,
    ) -> None:
        """Start to keep Node and pods in the families' desired state.

        Args:
            allocator: has the desired state.
            refusals: the starts that are refused now.
            notices: messages to the owners of pods.
            wake: advances when the desired state may have changed.
            tokens: the kubelet's UID of a pod → the tokens of its grants.
            pods_are_starting: tells whether the kubelet is starting pods now.
            offered_names: returns the names of the resources that this agent offers.
            family_names: returns resource → its family.
            counts_sent: returns resource → the counts of the ids that the kubelet was sent last.
            lists_sent: advances when the result of ``counts_sent`` changes.
            withdrawn: advances when schedulers must see fewer ids than the kubelet has.
            on_counts_written: called with the value of ``withdrawn`` up to which the Node has the
                counts, or with None if the API server refuses them permanently.
            gpus: facts about the GPUs; without them their health is not reported.
        """
        if self.client is None or self.node_watch is None or not self.needed:
            return
        settings = self._settings
        # `foreign_label` shows that another program, gpu-feature-discovery, writes these labels
        labels = FeatureLabels(
            labels=gpus.labels if gpus and settings.node_status.feature_labels else None,
            foreign=next(family.foreign_label for family in FAMILIES if family.foreign_label),
            journal=self._journal,
        )
        self.node_publisher = NodePublisher(
            self.client,
            settings.node_name_or_hostname,
            self.node_watch.node,
            desired_state=functools.partial(self._desired_node, allocator, gpus, labels),
            wake=wake,
            journal=self._journal,
        )
        self.pod_publisher = PodPublisher(
            self.client,
            self.pod_cache,
            desired_state=functools.partial(self._desired_pods, allocator, gpus),
            wake=wake,
            journal=self._journal,
            tokens=tokens,
            starting=pods_are_starting,
            # These only show how far a start has come. While the kubelet is starting pods they
            # wait, for some seconds at most.
            progress_annotations=frozenset().union(
                *(family.vocabulary(settings).progress_annotations for family in FAMILIES)
            ),
        )
        self.events = Events(self.client, _COMPONENT, settings.node_name_or_hostname, self._journal)
        self.reschedule = Reschedule(
            self.client,
            self.events,
            refusals=lambda: refusals.current,
            wake=refusals.revision,
            binding=settings.binding,
            journal=self._journal,
            notices=notices,
            # pods whose resource is among these are left to `Rescue`
            rescued=lambda resource: resource in self._rescued(family_names()),
        )
        # writes the healthy counts of our resources into the Node before the kubelet does
        self.allocatable = AllocatableWriter(
            self.client,
            settings.node_name_or_hostname,
            self.node_watch.node,
            sent=counts_sent,
            lists=lists_sent or Revision(),
            withdrawn=withdrawn or Revision(),
            counted=on_counts_written,
            journal=self._journal,
        )
        self._loop("allocatable", self.allocatable.run)
        self._loop(_NODE_TASK, self.node_publisher.run)
        self._loop("writes to pods", self.pod_publisher.run)
        self._loop("events", self.events.run)
        self._loop("refused starts", self.reschedule.run)
        if any(rescues(family, settings) for family in FAMILIES):
            self.rescue = Rescue(
                self.client,
                settings.node_name_or_hostname,
                self.pod_cache,
                resources=lambda: self._rescued(family_names()),
                refusals=lambda: refusals.current,
                wake=refusals.revision,
                stale=stale_keys(settings),
                events=self.events,
                copies=PodCopies(settings.state_directory),  # of pods between deletion and creation
                journal=self._journal,
            )
            self._loop("failed pods", self.rescue.run)
        self.failed_pods = FailedPods(
            self.client,
            settings.node_name_or_hostname,
            node=lambda: self.node,
            resources=offered_names,
            events=self.events,
            journal=self._journal,
        )
        self._loop("pods failed while the agent was down", self.failed_pods.run)
        if gpus is not None:
            gpu_events = GpuEvents(self.events, gpus, self.pod_cache, node=lambda: self.node)
            self._loop("events of GPUs", gpu_events.run)
            if settings.node_status.evict_seconds > 0:
                self.gpu_evictions = GpuEvictions(
                    self.client,
                    self.events,
                    gpus,
                    self.pod_cache,
                    after_seconds=settings.node_status.evict_seconds,
                    journal=self._journal,
                )
                self._loop("pods on dead GPUs", self.gpu_evictions.run)

    def _desired_pods(self, allocator: Allocator, gpus: GpuFacts | None) -> dict[str, DesiredPod]:
        desired = allocator.desired_pods()
        # the label of pods that hold a dead GPU
        if gpus is not None and self._settings.node_status.pod_label:
            for uid, labels in desired_labels(gpus, self.pod_cache).items():
                desired[uid] = desired[uid].joined(labels) if uid in desired else labels
        return desired

    def _desired_node(
        self,
        allocator: Allocator,
        gpus: GpuFacts | None,
        labels: FeatureLabels,
        node: Node,
        now: float,
    ) -> DesiredNode:
        if self._leaving_at:
            # takes back what this agent, which leaves for good, has written to the Node
            return (
                allocator.cleanup(self._leaving_at)
                .joined(gpu_status.cleanup(node))
                .joined(feature_labels.cleanup(node))
            )
        desired_state = allocator.desired_node(node, now)
        if gpus is None:
            return desired_state
        outage = self._outage.seconds(gpus.inventory.value, asyncio.get_running_loop().time())
        return desired_state.joined(
            gpu_status.desired_node(gpus, self._settings.node_status, node, outage)
        ).joined(labels.desired_node(node))

    def _rescued(self, family_names: Mapping[str, str]) -> frozenset[str]:
        """Return those of the resources whose failed pods are evicted or created again
        (`cluster.rescue`); ``family_names`` has the family of each.
        """
        # `names`: its own name and those of its parts, such as vgpu-manager-mig
        asking = (family.names for family in FAMILIES if rescues(family, self._settings))
        families = frozenset().union(*asking)
        return frozenset(name for name, family in family_names.items() if family in families)

    async def until_node_written(self, seconds: float) -> None:
        """Wait, but not longer than ``seconds``,
        until the Node shows what this node offers (volcano-vgpu D11).
        """
        if self.node_publisher is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.node_publisher.first.wait()  # set once that is written

    async def fetch_pod(self, namespace: str, name: str) -> Pod | None:
        """Return the pod that has this name now; None when there is none.

        Raises:
            ClusterError: no answer, or there is no connection.
        """
        if self.pod_watch is None:
            raise ClusterError(self.disconnected_reason)
        return await self.pod_watch.fetch(namespace, name)

    def reachable_seconds(self) -> float:
        """Return for how many seconds the API server has answered without a failure."""
        return self.pod_watch.reachable_seconds if self.pod_watch is not None else 0.0

    async def may_get(self, token: str, path: str) -> bool:
        """Tell whether the owner of ``token`` may get ``path`` of this agent.

        Raises:
            ClusterError: the API server cannot be asked.
        """
        if self.client is None:
            raise ClusterError(self.disconnected_reason)
        return await reviews.may_get(self.client, token, path)

    async def follow(self, apply: Callable[[], Awaitable[None]]) -> None:
        """Remember what was read, and call ``apply`` on each change, until cancelled."""
        if self.node_watch is None:
            return
        seen, named = self._facts(), self._named_configuration
        while True:
            versions = (
                self.node_watch.node.version,
                [(watch, watch.text.version) for watch in self.config_maps.values()],
                named.revision.version if named else 0,
            )
            facts = self._facts()
            # also what could not be written before: the disk was full, or not mounted yet
            await self.remember()
            if facts != seen:
                seen = facts
                await apply()
            await first_of(
                self.node_watch.node.newer_than(versions[0]),
                *(watch.text.newer_than(version) for watch, version in versions[1]),
                *([named.revision.newer_than(versions[2])] if named else []),
                timeout_seconds=retrying.BACKOFF_MAX_SECONDS,
            )

    async def remember(self) -> None:
        """Keep what was read for the next start."""
        if self.node is not None:
            await self._remembered_file.write(self._facts())

    async def withdraw(self, seconds: float) -> None:
        """Remove what schedulers read about this node, if configured; give up after ``seconds``."""
        if self.node_publisher is None or not self._settings.cluster.withdraw_at_stop:
            return
        self._leaving_at = time.time()
        await self._supervisor.stop(_NODE_TASK)
        try:
            async with asyncio.timeout(seconds):
                await self.node_publisher.publish_all()
        except TimeoutError:
            patterns = (
                pattern
                for family in FAMILIES
                for pattern in family.vocabulary(self._settings).node_annotations
            )
            self._journal.record(
                "cluster.cleanup_failed",
                level="warning",
                gave_up_after_seconds=seconds,
                error="the API server accepted no request in that time",
                remedy=(
                    f"remove the annotations and labels {', '.join(patterns)} and "
                    "vgpu-agent.internal/* from the Node with kubectl"
                ),
            )
        else:
            self._journal.record("cluster.cleaned_up")

    async def close(self) -> None:
        """End the loops, then close the connections: a loop that still ran would open new ones."""
        for name in self._tasks:
            await self._supervisor.stop(name)
        if self.client is not None:
            await self.client.close()

    def _facts(self) -> Remembered:
        """Return the data to be remembered for a restart."""
        node, named = self.node, self._named_configuration
        in_force = named.in_force if named else None
        return Remembered(
            node=self._settings.node_name_or_hostname if node else "",
            kubelet_version=node.kubelet_version if node else "",
            runtime_version=node.runtime_version if node else "",
            texts=dict(self.plugin_texts),
            config_label=(
                named.label if named and self.config_label is None else self.config_label
            ),
            named_config=in_force.key if in_force else None,
            named_text=in_force.text if in_force else "",
            annotations={
                key: value
                for key in pod_keys(self._settings).annotations
                if node and (value := node.annotations.get(key))
                if len(value) <= _LONGEST_DEFAULT
            },
        )

    async def _first_answers(self, seconds: float) -> None:
        waiting = [self.pod_cache.synced.wait()] if self.pod_watch is not None else []
        if self.node_watch is not None:
            waiting.append(self.node_watch.synced.wait())
        waiting += [watch.synced.wait() for watch in self.config_maps.values()]
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*waiting)
        except TimeoutError:
            self._journal.record(
                "cluster.slow_start",
                level="warning",
                waited_seconds=START_WAIT_SECONDS,
                continues_with=(
                    "the remembered state"
                    if self.remembered
                    else "no remembered state; families that need the API server wait"
                ),
            )

    def _loop(
        self,
        name: str,
        run: Callable[[Callable[[], None]], Awaitable[None]],
        silence_seconds: float = 0.0,
    ) -> None:
        self._tasks.append(name)
        longest = max(silence_seconds, api.REQUEST_TIMEOUT_SECONDS + retrying.BACKOFF_MAX_SECONDS)
        self._supervisor.start(
            name,
            functools.partial(run, functools.partial(self._supervisor.beat, name)),
            stuck_after_seconds=longest + concurrency.STUCK_SECONDS,
        )


def rescues(family: FamilySpec, settings: Settings) -> bool:
    """Tell whether the family's failed pods are evicted or created again."""
    asked = family.reschedules is not None and family.reschedules(settings)
    return family.is_on(settings) and (asked or settings.binding.reschedule_failed)


def stale_keys(settings: Settings) -> frozenset[str]:
    """Return the annotations and labels that a pod must not have when it is recreated."""
    stale = frozenset(key for family in FAMILIES for key in family.stale_keys(settings))
    return stale | {GPU_HEALTH_LABEL}


def _read_files(settings: Settings) -> list[PluginFile]:
    """List the files of replaced plugins that the settings want to be read: each at a path on the
    node, or in a ConfigMap that is searched for in namespaces.
    """
    return [
        file
        for family in FAMILIES
        for file in family.files
        if file.path(settings) or file.namespaces(settings)
    ]


def _config_map_files(settings: Settings) -> list[PluginFile]:
    return [file for file in _read_files(settings) if file.config_map]
