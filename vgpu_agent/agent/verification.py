"""The ledger against kubelet's own records: at start, soon after each Allocate, and every ``kubelet.verifySeconds``.

kubelet never says whose ids it has just allocated, nor that a pod has ended; its checkpoint and its pod-resources socket do. The same pass
asks whether kubelet still lists what it was told (`listed`). Run by `composition`: `rebuild` before the first registration (kubelet
contract V10), `run` as a supervised loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from vgpu_agent.agent import footprint
from vgpu_agent.agent.listed import ListedIds
from vgpu_agent.kubelet.checkpoint import let_go_of_memory
from vgpu_agent.kubelet.records import read_records
from vgpu_agent.kubelet.waiting import first_of
from vgpu_agent.model import Decider

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vgpu_agent.agent.listed import Server
    from vgpu_agent.allocation.allocator import Allocator
    from vgpu_agent.concurrency import Latest
    from vgpu_agent.config.settings import Kubelet
    from vgpu_agent.journal import Journal
    from vgpu_agent.kubelet.pod_resources import PodResources
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.status import KubeletStatus

# pod-resources allows bursts of 10 calls; one a second leaves it to others (kubelet contract §13).
_SHORTEST_PAUSE_SECONDS = 1.0
# While pods keep coming a pass would only slow down their starts: with 50,000 ids it takes a fifth of a second.
_LONGEST_BURST_SECONDS = 10.0


class Verification:
    """Keeps the ledger true to kubelet's records.

    State: when the records were last read and how much drift was ever found; nothing that a restart would miss.
    """

    def __init__(
        self,
        *,
        allocator: Allocator,
        ledger: Ledger,
        settings: Kubelet,
        kubelet: KubeletStatus,
        pod_resources: PodResources,
        journal: Journal,
        servers: Callable[[], Iterable[Server]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocator = allocator
        self._ledger = ledger
        self._settings = settings
        self._kubelet = kubelet
        self._journal = journal
        self._clock = clock
        self._pod_resources = pod_resources
        self._listed = ListedIds(servers=servers, pod_resources=self._pod_resources, settings=settings, kubelet=kubelet, journal=journal)
        self._restarts_seen = 0
        self._restarted_at = -math.inf  # by a clock that only grows, and may begin at 0
        self.drift_total = 0
        self.drift_last: tuple[str, ...] = ()
        self.verified_at = 0.0

    async def rebuild(self) -> None:
        """Fill the ledger with what kubelet knows, before anything new is offered."""
        await self._verify(initial=True)
        self._journal.record("ledger.rebuilt", grants=len(self._ledger.grants), trouble=self._kubelet.records_trouble)

    async def run(self, beat: Callable[[], None]) -> None:
        """Verify for ever: a second after bookings have paused or while in doubt, less and less often while it stays so, else regularly."""
        pause = _SHORTEST_PAUSE_SECONDS
        while True:
            beat()
            if await self._pause(pause):
                pause = _SHORTEST_PAUSE_SECONDS
            pod_resources_answer = await self._verify()
            differs = pod_resources_answer and await self._listed.compare()
            await asyncio.to_thread(_give_back)
            if differs or self._ledger.in_doubt:
                pause = 2 * _SHORTEST_PAUSE_SECONDS  # the second look decides, so there is no third
            elif self._allocator.unconfirmed():
                pause = min(pause * 2, self._settings.verify_seconds)
            else:
                pause = self._settings.verify_seconds

    async def _pause(self, seconds: float) -> bool:
        """Wait, but not much longer than until something new is booked, and that booking has paused; whether something was."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        first_at: float | None = None
        revision: Latest[int] = self._ledger.revision
        newest = self._ledger.newest
        while (left := until - loop.time()) > 0:
            version = revision.version
            if not await first_of(revision.newer_than(version), timeout_seconds=left):
                break
            if self._ledger.newest > newest:
                newest, now = self._ledger.newest, loop.time()
                first_at = now if first_at is None else first_at
                until = min(now + _SHORTEST_PAUSE_SECONDS, first_at + _LONGEST_BURST_SECONDS)
        return first_at is not None

    async def _verify(self, *, initial: bool = False) -> bool:
        """Compare once with the ledger; whether pod-resources answered."""
        newest = self._ledger.newest
        counted = frozenset(offer.name for offer in self._ledger.resources if offer.decided_by is Decider.NOBODY)
        records = await read_records(self._pod_resources, self._settings.checkpoint_path, lambda name: name not in counted)
        now, shown_at = self._clock(), time.time()
        if records.trouble and records.trouble != self._kubelet.records_trouble:
            self._journal.record("kubelet.records_incomplete", level="warning", reason=records.trouble)
        self._kubelet.records_trouble, self._kubelet.records_read_at = records.trouble, shown_at
        if self._kubelet.restarts_seen != self._restarts_seen:
            self._restarts_seen, self._restarted_at = self._kubelet.restarts_seen, now
        drift = self._allocator.confirm(
            records,
            reservation_seconds=self._settings.reservation_seconds,
            newest=newest,
            initial=initial,
            # A kubelet that has just come back does not list its pods until it has heard of them again.
            may_release=now - self._restarted_at > self._settings.reservation_seconds,
        )
        if drift:
            self.drift_total += len(drift)
            self.drift_last = tuple(f"{correction.event}: {correction.reason}" for correction in drift)
        for problem in self._ledger.audit():
            self._journal.record("ledger.unsound", level="error", problem=problem)
        if records.complete:
            self.verified_at = shown_at
        return records.complete


def _give_back() -> None:
    """A burst of pods is over: its memory goes back to the system, up to 8 MB on a node that counts memory in ids."""
    let_go_of_memory()
    footprint.give_back()
