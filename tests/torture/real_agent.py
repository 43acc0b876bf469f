"""The agent under test: the real ledger, allocator, family and isolation backend, started as
`vgpu_agent.agent` starts them.

Only what touches the outside is the model's: the kubelet's records, the API watch, the disk and the
sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from tests.torture import dialects
from tests.torture.agents import Life, Offer, World, register
from tests.torture.api_model import EPOCH, NODE
from tests.torture.plan import MEMORY_FACTOR_MIB, SPLIT
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.carrier import GrantRecord
from vgpu_agent.allocation.context import Context, Families
from vgpu_agent.allocation.mode import choose_mode
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.config.binding import Binding
from vgpu_agent.families.family import PodFamily
from vgpu_agent.families.vgpu_manager.family import VgpuManagerFamily
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.isolation.hami_core import HamiCore
from vgpu_agent.isolation.vgpu_control import VgpuControl
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet.records import join
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import KubeletRecords
from vgpu_agent.pods import PodCache

_RESERVATION_SECONDS = 60.0
_VERIFY_SECONDS = 30.0
_START_WAIT_SECONDS = 5.0


class _QuietJournal(Journal):
    """Goes into the episode's story instead of the log."""

    def __init__(self, world: World) -> None:
        super().__init__(10)
        self._world = world

    def record(self, event: str, /, *, level: str = "info", **facts: Any) -> None:
        """Tell it of the pod that is meant, if there is one."""
        del level
        if event in ("allocate.reserved", "start.bound"):
            return
        self._world.story.tell(event, "", facts)


def _volcano(settings: Binding) -> PodFamily:
    options = VolcanoVgpuOptions(split=SPLIT, factor=MEMORY_FACTOR_MIB, policy=settings.policy)
    return VolcanoVgpuFamily(options, HamiCore("/usr/local/vgpu", "/usr/local/vgpu/libvgpu.so"))


def _vgpu_manager(settings: Binding) -> PodFamily:
    del settings  # it packs by itself
    options = VgpuManagerOptions(
        split=SPLIT, memory_factor=MEMORY_FACTOR_MIB, offer_cores=True, offer_memory=True
    )
    return VgpuManagerFamily(options, VgpuControl("/h", "/h/libvgpu-control.so"))


_FAMILIES: Mapping[str, Callable[[Binding], PodFamily]] = {
    dialects.VOLCANO.name: _volcano,
    dialects.VGPU_MANAGER.name: _vgpu_manager,
}


class RealAgent:
    """One life of the agent."""

    def __init__(self, world: World) -> None:
        loop = asyncio.get_running_loop()

        def clock() -> float:
            return EPOCH + loop.time()

        self._world = world
        self.life = Life()
        self._inventory = world.inventory
        self._book = PodCache()
        self.ledger = Ledger(clock=clock)
        settings = Binding(
            mode="early" if world.early else "late", policy=world.rng.choice(("binpack", "spread"))
        )
        family = _FAMILIES[world.dialect.name](settings)
        self.allocator = Allocator(
            Context(
                ledger=self.ledger,
                families=Families(pod_families=(family,)),
                inventory=lambda: self._inventory,
                journal=_QuietJournal(world),
                clock=clock,
                booted_at=lambda: EPOCH + world.booted_at,
                node=NODE,
                pods=self._book,
                read_records=world.read_records,
                fetch_pod=world.api.fetch,
                carrier=world.files,
                refusals=Refusals(clock),
                settings=settings,
            )
        )
        self.allocator.use_mode(choose_mode(settings.mode, None))
        self._kubelet_restarted_at = -1e9
        self._registrations = 0

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
        await self._verify(initial=True)
        self.register()
        self.life.run(self._verify_for_ever())

    def register(self) -> None:
        """All resources, with the kubelet that is there now;
        the second time it is another one than before.
        """
        if not self._world.kubelet.up:
            return
        if self._registrations:
            self._kubelet_restarted_at = asyncio.get_running_loop().time()
        self._registrations += 1
        offers = [
            Offer(
                resource.name,
                [entry.id.id for entry in self.allocator.listing(resource.name) if entry.healthy],
                resource.pre_start_required,
                resource.offers_preference,
            )
            for resource in self.ledger.resources
        ]
        register(self._world, self.life, self.allocator, offers)

    def left_over(self) -> list[str]:
        """Broken invariants, and grants without an owner."""
        return [
            *self.ledger.audit(),
            *(f"grant {grant} is left over" for grant in self.ledger.grants),
        ]

    async def _verify_for_ever(self) -> None:
        newest = self.ledger.newest
        while True:
            await asyncio.sleep(
                1.0
                if self.ledger.newest != newest
                else 5.0
                if self.ledger.in_doubt
                else _VERIFY_SECONDS
            )
            newest = self.ledger.newest
            await self._verify()
            await self._world.files.collect(self._is_kept)

    async def _verify(self, *, initial: bool = False) -> None:
        newest = self.ledger.newest
        kubelet_evidence = await self._world.read_records()
        entries = (
            self._world.kubelet.devices.checkpoint_entries(self._world.dialect.number)
            if kubelet_evidence.checkpoint is not None
            else ()
        )
        holdings = join(kubelet_evidence.pod_resources, entries)
        settled = (
            asyncio.get_running_loop().time() - self._kubelet_restarted_at > _RESERVATION_SECONDS
        )
        records = KubeletRecords(
            holdings,
            complete=kubelet_evidence.pod_resources is not None,
            trouble=kubelet_evidence.trouble,
            entries=kubelet_evidence.checkpoint,
        )
        self.allocator.confirm(
            records,
            reservation_seconds=_RESERVATION_SECONDS,
            newest_grant=newest,
            initial=initial,
            may_release=settled,
        )
        for problem in self.ledger.audit():
            self._world.story.accuse(f"ledger.unsound: {problem}", "")

    def _is_kept(self, record: GrantRecord) -> bool:
        """A spec stays as long as its pod may start a container with it."""
        if not self._book.synced.is_set() or self._book.get(record.owner.pod_uid) is not None:
            return True
        return any(
            grant.owner is not None and grant.owner.pod_uid == record.owner.pod_uid
            for grant in self.ledger.grants
        )
