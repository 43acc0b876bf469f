"""Compare the ledger with the kubelet's records: at start, soon after each Allocate or end of a
pod, and every ``VERIFY_SECONDS``.

The kubelet reports neither the owner of the ids that it has just allocated nor the end of a pod to
a plugin. Its records show both: its checkpoint and its pod-resources socket. An ended pod in the
watch triggers an additional reading. Each regular pass also checks that the kubelet lists the ids
that it was sent (`advertised`). `composition` runs `rebuild` before the first registration (kubelet
V10) and when the names of the offered resources change or the pods are first known, and `run` as a
supervised loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import memory
from vgpu_agent.agent.records.advertised import ListedIds
from vgpu_agent.agent.records.pod_ends import PodEnds
from vgpu_agent.concurrency import first_of
from vgpu_agent.kubelet.checkpoint import release_memory
from vgpu_agent.kubelet.records import read_records, unlisted
from vgpu_agent.model import Decider, Holding, KubeletRecords, Owner
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from vgpu_agent.agent.records.advertised import Server
    from vgpu_agent.allocation.allocator import Allocator
    from vgpu_agent.concurrency import Revision
    from vgpu_agent.config.settings import Kubelet
    from vgpu_agent.journal import Journal
    from vgpu_agent.kubelet.pod_resources import PodResources
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Grant
    from vgpu_agent.pods import PodCache
    from vgpu_agent.status import KubeletStatus

# How often the ledger is compared with the kubelet's records.
VERIFY_SECONDS = 30.0
# How long device ids stay booked after an Allocate that the kubelet never confirms in its records.
RESERVATION_SECONDS = 60.0
# The shortest pause between two regular passes. pod-resources allows bursts of 10 calls, and other
# programs need some of them (kubelet §13).
_SHORTEST_PAUSE_SECONDS = 1.0
# The longest time that a pass is deferred while pods keep starting: with 50,000 ids a pass takes
# 0.2 s, which would delay their starts.
_LONGEST_BURST_SECONDS = 10.0
# The shortest pause between two readings for ended pods, so that one reading covers pods that end
# together. Where a reading takes long, the pause is nine times its duration, so that readings take
# a tenth of the time. It is never more than one second: a busy kubelet must not delay the release
# of its pods.
_BETWEEN_ENDS_SECONDS = 0.25
_REST_AFTER_READING = 9  # pause in durations of the reading before it
# The factor by which the pause grows while the kubelet still has the same ended pods. So the
# reading that finds them gone is late by at most a quarter of the time that the kubelet took to
# drop them, plus the pause above.
_END_PAUSE_GROWTH = 1.25
# How long a kubelet that has started may take until it has admitted, and lists, all its pods.
_LISTS_ALL_SECONDS = 10.0
# A start changes its pod and the ledger ten times in a row. One check for ended pods covers all.
_COALESCING_SECONDS = 0.1


class Verification:
    """The loop that corrects the ledger by the kubelet's records.

    State: in memory only. When the records were last read, and for which ended pods; the grants
    that pod-resources has not listed yet; when the kubelet last restarted; the drift so far.
    """

    def __init__(
        self,
        *,
        allocator: Allocator,
        ledger: Ledger,
        kubelet_settings: Kubelet,
        kubelet_status: KubeletStatus,
        pod_resources: PodResources,
        pod_cache: PodCache,
        journal: Journal,
        servers: Callable[[], Iterable[Server]],
        kubelet_age_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the loop.

        Args:
            allocator: applies the records to the ledger (`confirm`).
            ledger: the ledger.
            kubelet_settings: the settings about the kubelet.
            kubelet_status: what is known of the kubelet; gets the faults of its records.
            pod_resources: the client of the kubelet's socket.
            pod_cache: the pods of this node.
            journal: receives what was corrected.
            servers: returns the running plugin servers.
            kubelet_age_seconds: returns the seconds since the kubelet started; it may block.
            clock: that of the ledger, monotonic seconds.
        """
        self._allocator = allocator
        self._ledger = ledger
        self._pod_cache = pod_cache
        self._kubelet_settings = kubelet_settings
        self._kubelet_status = kubelet_status
        self._journal = journal
        self._clock = clock
        self._pod_resources = pod_resources
        self._kubelet_age_seconds = kubelet_age_seconds
        # checks that the kubelet lists the ids that it was sent
        self._advertised_check = ListedIds(
            servers=servers,
            pod_resources=self._pod_resources,
            kubelet_status=kubelet_status,
            journal=journal,
        )
        self._restarts_seen = 0
        self._restarted_at = -math.inf  # monotonic seconds; the clock may begin at 0
        self._ends = PodEnds(ledger, pod_cache, clock)
        # numbers of grants that were there at the last rebuild, and that pod-resources has not
        # listed since
        self._grants_not_listed: set[int] = set()
        # the lines that only the checkpoint had at the last rebuild, both before and after the List
        # of pod-resources
        self._left_over: frozenset[Holding] = frozenset()
        self._lists_all_at = math.inf  # when pod-resources should list every pod
        # the ends of pods that were known at the last reading, by the keys of `PodEnds.pending`: a
        # pod's UID, or one key for all ends while the pod of some grant is not known
        self._ends_known_at_reading: frozenset[str] = frozenset()
        # the duration of the last reading, and when it was over (loop time)
        self._reading_seconds = self._read_at = -math.inf
        self._end_pause = _BETWEEN_ENDS_SECONDS  # until the next reading for the same ends
        self._serving = False  # until `run`, another agent may serve the node
        # the number of corrections that were drift since the start, and the latest of them
        self.drift_total = 0
        self.drift_last: tuple[str, ...] = ()
        self.verified_at = 0.0  # unix seconds of the last complete reading; 0 for never

    async def rebuild(self) -> None:
        """Read the records and enter all grants that the ledger lacks, without counting them as
        drift: before the first registration, and again before the agent offers resources whose ids
        it could not interpret until then.
        """
        await self._verify(initial=True)
        self._journal.record(
            "ledger.rebuilt",
            grants=len(self._ledger.grants),
            trouble=self._kubelet_status.records_trouble,
        )

    async def catch_up(self) -> bool:
        """Enter what another agent has granted since `rebuild`, by the checkpoint alone, for an
        agent that has just taken over; tell whether that could be read. What has ended since then
        is left to `run`.

        Calls of Allocate wait meanwhile, and a List of pod-resources would make the kubelet forget
        the ids of such a call, if a pod has ended since it began (kubelet §7). The kubelet writes
        the file when a container has all its resources, so the answers of the last milliseconds
        may be missing.
        """
        records = await self._read(None)
        if records.entries is None:
            self._note_trouble(records.trouble, time.time())
            return False
        self._allocator.confirm(
            # `complete`, although pod-resources was not asked: what `_granted_since` yields counts
            # as alive, as its lines would
            KubeletRecords(
                tuple(self._granted_since(records.entries)), complete=True, entries=records.entries
            ),
            reservation_seconds=RESERVATION_SECONDS,
            initial=True,
            serving=self._serving,
            may_release=False,
        )
        return True

    def _granted_since(self, entries: Iterable[Holding]) -> Iterator[Holding]:
        """Yield what is new in the checkpoint's ``entries`` since `rebuild`: each id once, for pods
        that have not ended, and not what the ledger has for the same pod. Pods that the watch has
        not shown yet count as alive.
        """
        taken: set[tuple[str, str]] = set()
        # init containers last: later containers have taken over their ids
        for entry in sorted(entries, key=self._is_of_init_container):
            owner, pod = entry.owner, self._pod_cache.get(entry.owner.pod_uid)
            if entry in self._left_over or (pod is not None and pod.ended):
                continue
            if pod is not None:
                owner = Owner(owner.container, owner.pod_uid, pod.namespace, pod.name)
            held = {
                id_
                for grant in self._ledger.holders(entry.resource, entry.ids)
                if grant.owner is not None and _in_same_pod(grant.owner, owner)
                for id_ in grant.ids
            }
            left = tuple(
                id_ for id_ in entry.ids if id_ not in held and (entry.resource, id_) not in taken
            )
            taken.update((entry.resource, id_) for id_ in left)
            if left:
                yield Holding(entry.resource, left, owner)

    def _is_of_init_container(self, entry: Holding) -> bool:
        """Tell whether an entry is of an init container, whose ids a later one takes over."""
        pod = self._pod_cache.get(entry.owner.pod_uid)
        container = pod.container(entry.owner.container) if pod is not None else None
        return container is not None and container.kind is ContainerKind.INIT

    async def run(self, beat: Callable[[], None]) -> None:
        """Verify until cancelled, at least every ``VERIFY_SECONDS``.

        After a booking, the next pass comes one second after the last booking, in a long burst
        after ten seconds. While the kubelet does not confirm a booking, the pause until the next
        pass doubles each time.
        """
        self._serving = True
        pause = _SHORTEST_PAUSE_SECONDS
        while True:
            beat()
            if await self._wait_and_read_ends(pause, beat):
                pause = _SHORTEST_PAUSE_SECONDS
            pod_resources_answered = await self._verify()
            differs = pod_resources_answered and await self._advertised_check.compare()
            await asyncio.to_thread(_release_memory)
            # in doubt: there were no records yet, or the last complete ones lacked a grant
            if differs or self._ledger.in_doubt:
                pause = 2 * _SHORTEST_PAUSE_SECONDS  # the next pass settles the difference
            elif self._allocator.unconfirmed():  # bookings that the kubelet has not confirmed
                pause = min(pause * 2, VERIFY_SECONDS)
            else:
                pause = VERIFY_SECONDS
            if self._grants_not_listed and (left := self._lists_all_at - self._clock()) > 0:
                pause = min(pause, max(left, _SHORTEST_PAUSE_SECONDS))

    async def _wait_and_read_ends(self, seconds: float, beat: Callable[[], None]) -> bool:
        """Wait for ``seconds``, or until one second after new bookings; tell whether there were
        any.

        Meanwhile the records are read for ended pods. That does not change when the wait ends.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        first_at: float | None = None
        revision: Revision = self._ledger.revision
        newest, woken = self._ledger.newest, False  # newest: the number of the last booking
        while (left := until - loop.time()) > 0:
            version, pods = revision.version, self._pod_cache.revision.version
            if (ends_in := self._seconds_to_ends()) <= 0:
                beat()
                await self._verify(ended_only=True)
            elif woken:
                woken = False
                await asyncio.sleep(min(_COALESCING_SECONDS, left, ends_in))
            else:
                changes = revision.newer_than(version), self._pod_cache.revision.newer_than(pods)
                woken = await first_of(*changes, timeout_seconds=min(left, ends_in))
            if self._ledger.newest > newest:
                newest, now = self._ledger.newest, loop.time()
                first_at = now if first_at is None else first_at
                until = min(now + _SHORTEST_PAUSE_SECONDS, first_at + _LONGEST_BURST_SECONDS)
        return first_at is not None

    def _seconds_to_ends(self) -> float:
        """Return the seconds until the records should be read for ended pods: 0 or less for now,
        infinity when the next regular pass is soon enough.

        The kubelet drops a pod from its records before it reports the end to the API server, so one
        reading is nearly always enough. If it is not, the pause until the next one grows.
        """
        ended = self._ends.pending()
        if not ended or (
            ended <= self._ends_known_at_reading and self._end_pause >= VERIFY_SECONDS
        ):
            return math.inf
        pause = self._end_pause if ended <= self._ends_known_at_reading else _BETWEEN_ENDS_SECONDS
        rest = min(_REST_AFTER_READING * self._reading_seconds, _SHORTEST_PAUSE_SECONDS)
        return self._read_at + max(pause, rest) - asyncio.get_running_loop().time()

    async def _verify(self, *, initial: bool = False, ended_only: bool = False) -> bool:
        """Compare the ledger with the records once; tell whether pod-resources answered.

        Args:
            initial: the ledger is being rebuilt.
            ended_only: release nothing but grants of ended pods; for a reading between two regular
                passes.
        """
        # The kubelet would forget the ids of calls that are under way, see `catch_up`.
        await self._allocator.until_idle()
        began, newest, ended = (
            asyncio.get_running_loop().time(),
            self._ledger.newest,
            self._ends.pending(),
        )
        # A pod may be admitted between a List and the reading of the file that follows it.
        earlier = (await self._read(None)).entries or () if initial else ()
        records = await self._read(self._pod_resources)
        now, shown_at = self._clock(), time.time()  # the latter for the status
        listed = (
            {(holding.resource, id_) for holding in records.holdings for id_ in holding.ids}
            if records.complete
            else set()
        )
        if records.complete and self._lists_all_at == math.inf:
            self._lists_all_at = now + max(
                0.0, _LISTS_ALL_SECONDS - await asyncio.to_thread(self._kubelet_age_seconds)
            )
        # `unlisted`: the lines that only the checkpoint has
        if initial and records.complete:
            self._left_over = frozenset(earlier).intersection(unlisted(records))
        if initial and now < self._lists_all_at:
            records = msgspec.structs.replace(
                records,
                holdings=(*records.holdings, *self._of_live_pods(unlisted(records))),
            )
        self._note_trouble(records.trouble, shown_at)
        if self._kubelet_status.restarts_seen != self._restarts_seen:
            self._restarts_seen, self._restarted_at = self._kubelet_status.restarts_seen, now
        drift = self._allocator.confirm(
            records,
            reservation_seconds=RESERVATION_SECONDS,
            newest_grant=newest,  # the last one that was booked before the reading
            initial=initial,
            serving=self._serving,
            # A kubelet that has just come back does not list its pods until it has received them
            # again.
            may_release=now - self._restarted_at > RESERVATION_SECONDS,
            has_ended=lambda grant: self._ends.has_ended(grant, records),
            ended_only=ended_only,
            kept_grants=self._kept(records, now),
        )
        if initial:
            self._grants_not_listed = {grant.number for grant in self._ledger.grants}
        self._grants_not_listed = {
            grant.number
            for grant in self._ledger.grants
            if grant.number in self._grants_not_listed and not _is_in(grant, listed)
        }
        self._note_reading(ended, began)
        if drift:
            self.drift_total += len(drift)
            self.drift_last = tuple(
                f"{correction.event}: {correction.reason}" for correction in drift
            )
        for problem in self._ledger.audit():  # invariants of the ledger that do not hold
            self._journal.record("ledger.unsound", level="error", problem=problem)
        if records.complete:
            self.verified_at = shown_at
        return records.complete

    async def _read(self, pod_resources: PodResources | None) -> KubeletRecords:
        """Read the checkpoint, and ``pod_resources`` unless it is None."""
        # resources that are only there for schedulers to count: the ledger has no grants of them
        only_counted = frozenset(
            offer.name for offer in self._ledger.resources if offer.decided_by is Decider.NOBODY
        )
        return await read_records(
            pod_resources,
            self._kubelet_settings.checkpoint_path,
            is_wanted=lambda name: name not in only_counted,
        )

    def _note_trouble(self, trouble: str, read_at: float) -> None:
        """Show what the records lack, empty for nothing, since ``read_at`` (unix seconds)."""
        status = self._kubelet_status
        if trouble and trouble != status.records_trouble:
            self._journal.record("kubelet.records_incomplete", level="warning", reason=trouble)
        status.records_trouble, status.records_read_at = trouble, read_at

    def _of_live_pods(self, holdings: Iterable[Holding]) -> Iterator[Holding]:
        """Yield the holdings of pods that have not ended, with namespace and name for pods that the
        watch has.

        The checkpoint may still have holdings of ended pods.
        """
        for holding in holdings:
            uid = holding.owner.pod_uid
            if self._pod_cache.has_ended(uid):
                continue
            pod = self._pod_cache.get(uid)
            owner = (
                Owner(holding.owner.container, uid, pod.namespace, pod.name)
                if pod is not None
                else holding.owner
            )
            yield Holding(holding.resource, holding.ids, owner)

    def _kept(self, records: KubeletRecords, now: float) -> frozenset[int]:
        """Return the numbers of grants that stay although pod-resources has never listed them.

        A kubelet that starts together with the agent, e.g. after a reboot, lists its pods one after
        the other. Until it should list all, grants that were there at the last rebuild stay,
        unless the API server has reported the end of the pod. After that, a grant that only
        the checkpoint has belongs to an ended pod.
        """
        if now >= self._lists_all_at:
            return frozenset()
        found = (grant for grant in self._ledger.grants if grant.number in self._grants_not_listed)
        return frozenset(
            grant.number for grant in found if not self._ends.has_ended(grant, records)
        )

    def _note_reading(self, ended: frozenset[str], began: float) -> None:
        """Note a reading that began at ``began`` (loop time), when the ends of pods ``ended`` were
        known.
        """
        self._end_pause = (
            _END_PAUSE_GROWTH * self._end_pause
            if ended and ended <= self._ends_known_at_reading
            else _BETWEEN_ENDS_SECONDS
        )
        self._ends_known_at_reading, self._read_at = ended, asyncio.get_running_loop().time()
        self._reading_seconds = self._read_at - began


def _is_in(grant: Grant, listed: Collection[tuple[str, str]]) -> bool:
    """Tell whether any id of the grant is among those that pod-resources lists."""
    return any((grant.resource, id_) in listed for id_ in grant.ids)


def _release_memory() -> None:
    """Give back to the system the memory that a pass has used: up to 8 MB on a node where each unit
    of GPU memory has an id.
    """
    release_memory()
    memory.release_free_pages()


def _in_same_pod(one: Owner, other: Owner) -> bool:
    """Tell whether both are certainly containers of one pod: by its UID, or by its name where
    ``one`` has no UID.
    """
    if one.pod_uid:
        return one.pod_uid == other.pod_uid
    return bool(one.pod) and (one.namespace, one.pod) == (other.namespace, other.pod)
