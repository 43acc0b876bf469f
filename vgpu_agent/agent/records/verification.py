"""The ledger against kubelet's own records: at start, soon after each Allocate or end of a pod, and every ``kubelet.verifySeconds``.

kubelet never says whose ids it has just allocated, nor that a pod has ended; its checkpoint and its pod-resources socket do. When to look
for ended pods is what the watch of pods says. Each regular pass also asks whether kubelet still lists what it was told (`listed`). Run by
`composition`: `rebuild` before the first registration (kubelet V10), `run` as a supervised loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from vgpu_agent.agent import memory
from vgpu_agent.agent.records.advertised import ListedIds
from vgpu_agent.agent.records.pod_ends import PodEnds
from vgpu_agent.kubelet.checkpoint import let_go_of_memory
from vgpu_agent.kubelet.records import read_records
from vgpu_agent.kubelet.waiting import first_of
from vgpu_agent.model import Decider

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vgpu_agent.agent.records.advertised import Server
    from vgpu_agent.allocation.allocator import Allocator
    from vgpu_agent.concurrency import Revision
    from vgpu_agent.config.settings import Kubelet
    from vgpu_agent.journal import Journal
    from vgpu_agent.kubelet.pod_resources import PodResources
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.pods import PodCache
    from vgpu_agent.status import KubeletStatus

# pod-resources allows bursts of 10 calls; one a second leaves it to others (kubelet §13).
_SHORTEST_PAUSE_SECONDS = 1.0
# While pods keep coming a pass would only slow down their starts: with 50,000 ids it takes a fifth of a second.
_LONGEST_BURST_SECONDS = 10.0
# Pods that end together are looked for together. Where a look takes long, looks for them take a tenth of the time at most.
_BETWEEN_ENDS_SECONDS = 0.25
_REST_AFTER_LOOK = 9
# A start changes its pod and the ledger ten times in a row, and whether something has ended is asked after each change.
_GATHERING_SECONDS = 0.1


class Verification:
    """Keeps the ledger true to kubelet's records.

    State: when the records were last read, which ended pods kubelet still had then, and how much drift was ever found; nothing that a
    restart would miss.
    """

    def __init__(
        self,
        *,
        allocator: Allocator,
        ledger: Ledger,
        settings: Kubelet,
        kubelet: KubeletStatus,
        pod_resources: PodResources,
        book: PodCache,
        journal: Journal,
        servers: Callable[[], Iterable[Server]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocator = allocator
        self._ledger = ledger
        self._book = book
        self._settings = settings
        self._kubelet = kubelet
        self._journal = journal
        self._clock = clock
        self._pod_resources = pod_resources
        self._listed = ListedIds(servers=servers, pod_resources=self._pod_resources, settings=settings, kubelet=kubelet, journal=journal)
        self._restarts_seen = 0
        self._restarted_at = -math.inf  # by a clock that only grows, and may begin at 0
        self._ends = PodEnds(ledger, book, clock)
        self._looked_for: frozenset[str] = frozenset()  # the ends that were known at the last look
        self._look_seconds = self._looked_at = -math.inf  # how long that took, and when it was over (loop time)
        self._end_pause = _BETWEEN_ENDS_SECONDS  # until the next look for the same ends
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
            if await self._pause(pause, beat):
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

    async def _pause(self, seconds: float, beat: Callable[[], None]) -> bool:
        """Wait, but not much longer than until something new is booked, and that booking has paused; whether something was.

        Ended pods are looked for meanwhile. That moves the next regular pass neither forward nor back.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        first_at: float | None = None
        revision: Revision = self._ledger.revision
        newest, woken = self._ledger.newest, False
        while (left := until - loop.time()) > 0:
            version, pods = revision.version, self._book.revision.version
            if (ends_in := self._seconds_to_ends()) <= 0:
                beat()
                await self._verify(ended_only=True)
            elif woken:
                woken = False
                await asyncio.sleep(min(_GATHERING_SECONDS, left, ends_in))
            else:
                changes = revision.newer_than(version), self._book.revision.newer_than(pods)
                woken = await first_of(*changes, timeout_seconds=min(left, ends_in))
            if self._ledger.newest > newest:
                newest, now = self._ledger.newest, loop.time()
                first_at = now if first_at is None else first_at
                until = min(now + _SHORTEST_PAUSE_SECONDS, first_at + _LONGEST_BURST_SECONDS)
        return first_at is not None

    def _seconds_to_ends(self) -> float:
        """When ended pods should be looked for: 0 or less for now, infinity for no sooner than the next pass.

        kubelet lets go of a pod before it reports the end, so one look nearly always does. Where it does not, looks become rare soon.
        """
        ended = self._ends.pending()
        if not ended or (ended <= self._looked_for and self._end_pause >= self._settings.verify_seconds):
            return math.inf
        pause = self._end_pause if ended <= self._looked_for else _BETWEEN_ENDS_SECONDS
        return self._looked_at + max(pause, _REST_AFTER_LOOK * self._look_seconds) - asyncio.get_running_loop().time()

    async def _verify(self, *, initial: bool = False, ended_only: bool = False) -> bool:
        """Compare once with the ledger; whether pod-resources answered.

        Args:
            initial: the book is being rebuilt.
            ended_only: look for ended pods, between two passes.
        """
        began, newest, ended = asyncio.get_running_loop().time(), self._ledger.newest, self._ends.pending()
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
            has_ended=lambda grant: self._ends.has_ended(grant, records),
            ended_only=ended_only,
        )
        self._note_look(ended, began)
        if drift:
            self.drift_total += len(drift)
            self.drift_last = tuple(f"{correction.event}: {correction.reason}" for correction in drift)
        for problem in self._ledger.audit():
            self._journal.record("ledger.unsound", level="error", problem=problem)
        if records.complete:
            self.verified_at = shown_at
        return records.complete

    def _note_look(self, ended: frozenset[str], began: float) -> None:
        """Take note of a look for the ends ``ended`` that began at ``began`` (loop time)."""
        self._end_pause = 2 * self._end_pause if ended and ended <= self._looked_for else _BETWEEN_ENDS_SECONDS
        self._looked_for, self._looked_at = ended, asyncio.get_running_loop().time()
        self._look_seconds = self._looked_at - began


def _give_back() -> None:
    """A burst of pods is over: its memory goes back to the system, up to 8 MB on a node that counts memory in ids."""
    let_go_of_memory()
    memory.give_back()
