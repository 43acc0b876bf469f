"""The agent under test on a mixed day: the real ledger, allocator, families and verification, wired
as `vgpu_agent.agent` wires them.

Only what touches the outside is the model's: kubelet's records, the streams of the plugin servers,
the API watch and what is written to the Node, and the disk. Started by `day` through
`tests.torture.faults.Machine`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tests.torture.agents import BackendPlugin, Life, World
from tests.torture.api_model import NODE
from tests.torture.device_manager import Endpoint
from tests.torture.mixed.judge import Waits
from tests.torture.mixed.plan import (
    AWS,
    BY_IDS,
    BY_POD,
    FAMILIES,
    GPUSHARE,
    MANAGER,
    NVIDIA,
    REPLICAS,
    RESOURCES,
    VOLCANO,
    gpus_behind,
)
from tests.torture.mixed.schedulers import NodeStatus
from tests.torture.plan import MEMORY_FACTOR_MIB, SPLIT
from vgpu_agent.agent.records import verification
from vgpu_agent.agent.records.verification import Verification
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.carrier import GrantRecord
from vgpu_agent.allocation.context import Context, Families
from vgpu_agent.allocation.mode import choose_mode
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.cluster.allocatable import AllocatableWriter
from vgpu_agent.cluster.api import Api
from vgpu_agent.concurrency import Latest, Revision, first_of
from vgpu_agent.config.binding import Binding
from vgpu_agent.config.settings import Kubelet
from vgpu_agent.device_ids import ListedDevice
from vgpu_agent.errors import ClusterError
from vgpu_agent.families.aws.family import AwsFamily, AwsOptions
from vgpu_agent.families.family import IdFamily, PodFamily
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions, SharedEntry
from vgpu_agent.families.vgpu_manager.family import VgpuManagerFamily
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.families.volcano_gpushare.family import (
    VolcanoGpushareFamily,
    VolcanoGpushareOptions,
)
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.isolation.hami_core import HamiCore
from vgpu_agent.isolation.vgpu_control import VgpuControl
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet import server
from vgpu_agent.kubelet.pod_resources import PodResources
from vgpu_agent.kubelet.records import join
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import KubeletRecords
from vgpu_agent.nodes import Node, SentCounts
from vgpu_agent.pods import PodCache
from vgpu_agent.status import KubeletStatus

_EPOCH = 1_800_000_000.0
_START_WAIT_SECONDS = 5.0
_FAMILY_OF = {resource: family for family, resource in RESOURCES.items()}


@dataclasses.dataclass
class MixedWorld(World):
    """The environment of the agent on the node of a mixed day.

    Attributes:
        node: the Node object.
        waits: receives each list that reaches the kubelet.
        families: those that the agent offers.
    """

    node: NodeStatus = dataclasses.field(default_factory=NodeStatus)
    waits: Waits = dataclasses.field(default_factory=Waits)
    families: Sequence[str] = FAMILIES


async def read_model_records(
    source: PodResources | None, checkpoint: Path, is_wanted: Callable[[str], bool] = lambda _: True
) -> KubeletRecords:
    """`vgpu_agent.kubelet.records.read_records` for a source that is a `World`. The model has no
    file to be read without one.
    """
    del checkpoint
    if source is None:
        return KubeletRecords(complete=False)
    world = cast(World, source)
    kubelet_evidence = await world.read_records(whole=True)
    entries = (
        world.kubelet.devices.checkpoint_entries(*world.resources)
        if kubelet_evidence.checkpoint is not None
        else ()
    )
    holdings = tuple(
        holding
        for holding in join(kubelet_evidence.pod_resources, entries)
        if is_wanted(holding.resource)
    )
    return KubeletRecords(
        holdings,
        complete=kubelet_evidence.pod_resources is not None,
        trouble=kubelet_evidence.trouble,
        entries=kubelet_evidence.checkpoint,
    )


class _ModelApi:
    """The API server, as far as counts are written to the Node."""

    def __init__(self, world: MixedWorld) -> None:
        self._world = world

    async def patch(self, path: str, body: Mapping[str, Any]) -> None:
        """Merge the allocatable numbers.

        Raises:
            ClusterError: the API server is away.
        """
        del path
        await asyncio.sleep(self._world.rng.random() * 0.05)
        if self._world.api.away:
            raise ClusterError("the API server does not answer")
        self._world.node.write(
            {name: int(number) for name, number in body["status"]["allocatable"].items()}
        )


class _QuietJournal(Journal):
    """Goes into the day's story instead of the log."""

    def __init__(self, world: World) -> None:
        super().__init__(10)
        self._world = world

    def record(self, event: str, /, *, level: str = "info", **facts: Any) -> None:
        """Tell it of the pod that is meant, if there is one."""
        del level
        if event == "ledger.unsound":
            self._world.story.accuse(f"{event}: {facts['problem']}", "")
        elif event not in ("allocate.reserved", "start.bound"):
            self._world.story.tell(event, "", facts)


def _nvidia() -> IdFamily:
    shared = SharedEntry(RESOURCES[NVIDIA], REPLICAS, RESOURCES[NVIDIA])
    return NvidiaFamily(NvidiaOptions(shared=(shared,)))


def _volcano(settings: Binding) -> PodFamily:
    options = VolcanoVgpuOptions(split=SPLIT, factor=MEMORY_FACTOR_MIB, policy=settings.policy)
    return VolcanoVgpuFamily(options, HamiCore("/usr/local/vgpu", "/usr/local/vgpu/libvgpu.so"))


def _manager(_: Binding) -> PodFamily:
    options = VgpuManagerOptions(split=SPLIT, memory_factor=MEMORY_FACTOR_MIB)
    return VgpuManagerFamily(options, VgpuControl("/h", "/h/libvgpu-control.so"))


def _gpushare(_: Binding) -> PodFamily:
    return VolcanoGpushareFamily(VolcanoGpushareOptions(factor=MEMORY_FACTOR_MIB))


_BY_IDS: Mapping[str, Callable[[], IdFamily]] = {
    NVIDIA: _nvidia,
    AWS: lambda: AwsFamily(AwsOptions(vgpus=REPLICAS)),
}
_BY_POD: Mapping[str, Callable[[Binding], PodFamily]] = {
    VOLCANO: _volcano,
    MANAGER: _manager,
    GPUSHARE: _gpushare,
}


class MixedAgent:
    """One life of the agent on a node that offers several families."""

    def __init__(self, world: MixedWorld) -> None:
        loop = asyncio.get_running_loop()

        def clock() -> float:
            return _EPOCH + loop.time()

        self._world, self._clock = world, clock
        self.life = Life()
        self._inventory = world.inventory
        self._book, self._refusals = PodCache(clock), Refusals(clock)
        self.ledger = Ledger(clock=clock, wall_clock=clock)
        settings = Binding(mode="late")
        families = Families(
            id_families=tuple(_BY_IDS[name]() for name in BY_IDS if name in world.families),
            pod_families=tuple(
                _BY_POD[name](settings) for name in BY_POD if name in world.families
            ),
        )
        journal = _QuietJournal(world)
        self.allocator = Allocator(
            Context(
                ledger=self.ledger,
                families=families,
                inventory=lambda: self._inventory,
                journal=journal,
                clock=clock,
                node=NODE,
                pods=self._book,
                read_records=world.read_records,
                fetch_pod=world.api.fetch,
                carrier=world.files,
                refusals=self._refusals,
                settings=settings,
            )
        )
        self.allocator.use_mode(choose_mode(settings.mode, None))
        self._kubelet = KubeletStatus()
        self._verification = Verification(
            allocator=self.allocator,
            ledger=self.ledger,
            kubelet_settings=Kubelet(),
            kubelet_status=self._kubelet,
            pod_resources=cast(PodResources, world),
            pod_cache=self._book,
            journal=journal,
            servers=lambda: (),
            kubelet_age_seconds=lambda: world.kubelet.age_seconds,
            clock=clock,
        )
        self._registered = False
        self._node: Latest[Node | None] = Latest(None)
        # resource → ids that kubelet was sent last, and how many of them are healthy
        self._sent: dict[str, tuple[int, int]] = {}
        self._lists = Revision()
        self._allocatable = AllocatableWriter(
            cast(Api, _ModelApi(world)),
            NODE,
            self._node,
            self._counts,
            self._lists,
            self.ledger.withdrawn,
            self.ledger.note_written_counts,
            journal,
        )

    async def begin(self) -> None:
        """Pods, offers, kubelet's records into the ledger, and only then kubelet."""
        self._world.api.connect(self._book)
        # the end of the faults does not end an agent that is just starting
        await asyncio.shield(self.life.run(self._begin()))

    async def _begin(self) -> None:
        try:
            async with asyncio.timeout(_START_WAIT_SECONDS):
                await self._book.synced.wait()
        except TimeoutError:
            self._world.story.tell("started without pods")
        self.allocator.refresh_offer()
        await self._verification.rebuild()
        self.allocator.refresh_claims()
        self.register()
        self.life.run(self._verification.run(lambda: None))
        self.life.run(self._follow_pods())
        self.life.run(self._watch_node())
        self.life.run(self._allocatable.run(lambda: None))
        self.life.run(self._publish())
        self.life.run(self._collect())

    def register(self) -> None:
        """All resources, with the kubelet that is there now;
        the second time it is another one than before.
        """
        kubelet = self._world.kubelet
        if not kubelet.up:
            return
        self._kubelet.restarts_seen += self._registered
        self._registered = True
        for resource in self.ledger.resources:
            plugin = BackendPlugin(self.life, self.allocator, resource.name)
            endpoint = Endpoint(plugin, resource.pre_start_required, resource.offers_preference)
            sent = self.allocator.listing(resource.name)
            kubelet.devices.listed_ids[resource.name] = len(sent)
            self._note_sent(resource.name, sent)
            kubelet.devices.register(resource.name, endpoint, _healthy(sent))
            self.life.run(self._send_lists(resource.name, endpoint, sent))
        self._world.story.tell("registered")

    def left_over(self) -> list[str]:
        """Broken invariants, and grants without an owner."""
        return [
            *self.ledger.audit(),
            *(f"grant {grant} is left over" for grant in self.ledger.grants),
        ]

    async def _follow_pods(self) -> None:
        """Follow the pods as `vgpu_agent.agent.composition` does."""
        while True:
            pods, ledger, refusals = (
                self._book.revision.version,
                self.ledger.revision.version,
                self._refusals.revision.version,
            )
            self.ledger.end_turns()
            self.allocator.refresh_claims()
            await first_of(
                self._book.revision.newer_than(pods),
                self.ledger.revision.newer_than(ledger),
                self._refusals.revision.newer_than(refusals),
                timeout_seconds=self.ledger.turn_ends_in_seconds,
            )
            await asyncio.sleep(0.02)

    async def _watch_node(self) -> None:
        """The watch of the Node, a moment behind."""
        node = self._world.node
        async for _ in node.revision.changes():
            await asyncio.sleep(self._world.rng.random() * 0.05)
            capacity, allocatable = (
                {name: str(number) for name, number in each.items()}
                for each in (node.capacity, node.allocatable)
            )
            self._node.publish(Node(NODE, uid="node", capacity=capacity, allocatable=allocatable))

    def _note_sent(self, resource: str, devices: Sequence[ListedDevice]) -> None:
        self._sent[resource] = len(devices), len(_healthy(devices))
        self._lists.advance()

    def _counts(self) -> dict[str, SentCounts]:
        """Return the counts as `vgpu_agent.agent.offers.servers` does."""
        offered = self.ledger.offered_ids
        return {
            name: SentCounts(listed, healthy, min(healthy, offered(name)))
            for name, (listed, healthy) in self._sent.items()
        }

    async def _send_lists(
        self, resource: str, endpoint: Endpoint, sent: Sequence[ListedDevice]
    ) -> None:
        """The stream of one registration, as `vgpu_agent.kubelet.plugin` sends it."""
        world, revision, loop = self._world, self.ledger.revision, asyncio.get_running_loop()
        while True:
            version = revision.version
            devices = self.allocator.listing(resource)
            if devices != sent:
                await asyncio.sleep(world.rng.random() * 0.01)
                if (
                    not world.kubelet.up
                    or world.kubelet.devices.endpoints.get(resource) is not endpoint
                ):
                    return
                ids = _healthy(devices)
                world.kubelet.devices.listed_ids[resource] = len(devices)
                world.kubelet.devices.listed(resource, ids)
                self._note_sent(resource, devices)
                sent = devices
                if (family := _FAMILY_OF.get(resource)) is None:
                    pass  # it is only counted
                elif family in BY_IDS:
                    world.waits.listed(resource, family, gpus_behind(ids), loop.time())
                else:
                    world.waits.reached(family, gpus_behind(ids), loop.time())
            await revision.newer_than(version)
            await asyncio.sleep(server.COALESCE_SECONDS)

    async def _publish(self) -> None:
        """Write what schedulers read, as the publisher of `vgpu_agent.cluster` does, as soon as the
        API server can be reached.
        """
        world = self._world
        async for _ in self.ledger.revision.changes(coalesce_seconds=0.1):
            await asyncio.sleep(world.rng.random() * 0.05)
            while world.api.away:  # noqa: ASYNC110 - time is virtual
                await asyncio.sleep(1.0)
            world.node.take(self.allocator.desired_node(Node(NODE), self._clock()))

    async def _collect(self) -> None:
        while True:
            await asyncio.sleep(verification.VERIFY_SECONDS)
            await self._world.files.collect(self._is_kept)

    def _is_kept(self, record: GrantRecord) -> bool:
        """A spec stays as long as its pod may start a container with it."""
        if not self._book.synced.is_set() or self._book.get(record.owner.pod_uid) is not None:
            return True
        return any(
            grant.owner is not None and grant.owner.pod_uid == record.owner.pod_uid
            for grant in self.ledger.grants
        )


def _healthy(devices: Sequence[ListedDevice]) -> list[str]:
    return [entry.id.id for entry in devices if entry.healthy]
