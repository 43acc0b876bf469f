"""The time for which each pod has held shares, for chargeback.

The sum of one pod and one resource grows by the number of ids that the pod holds of the resource,
times the seconds. It survives a restart in a file in ``stateDirectory``, and the time in which no
agent ran is added for pods that still hold their shares. A sum never falls below a value that was
scraped, because Prometheus takes a fall for a reset of the counter. The file of a process that
crashed may be a minute old, so then only sums of pods that still hold their shares are continued.

`composition` runs the loop; `report` reads the sums for the metrics.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.agent.state_file import StateFile
from vgpu_agent.concurrency import Versions
from vgpu_agent.model import GrantState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Grant

_WRITE_SECONDS = 60.0
# Changes of the ledger in this time are counted together. A burst of Allocate calls changes it
# hundreds of times a second, and each call would wait while the grants are counted.
_COALESCING_SECONDS = 0.1
# The sum of a pod that has ended stays in the metrics this long, so that each scraper sees its last
# value.
_KEPT_SECONDS = 3600.0
# The most sums that are kept. A node has about a hundred pods, and each holds a few resources.
_MAX_SUMS = 4096
# A pod that is not in the kubelet's records this long after a restart has ended.
_AWAITED_SECONDS = 600.0
# A longer time without an agent is a clock that was wrong, so it is not added.
_LONGEST_GAP_SECONDS = 30 * 86400.0

Key = tuple[str, str, str]  # namespace, pod, resource


class Sum(msgspec.Struct, rename="camel"):
    """The sum of one pod and one resource.

    Attributes:
        pod_uid: of the pod that holds it or held it last; empty where it is not known.
        seconds: the sum: ids × seconds.
        held: the number of ids that it holds now.
        held_at: unix seconds at which it held something last.
    """

    namespace: str
    pod: str
    resource: str
    pod_uid: str = ""
    seconds: float = 0.0
    held: int = 0
    held_at: float = 0.0


class _Stored(msgspec.Struct, rename="camel"):
    """The content of the file.

    Attributes:
        at: unix seconds at which it was written.
        sums: those in the metrics, and those of an earlier file whose pods have not been seen yet.
        final: it was written at a graceful end, so no scrape has seen a higher sum.
    """

    at: float = 0.0
    sums: tuple[Sum, ...] = ()
    final: bool = False


class ShareSeconds:
    """The sums of this node's pods.

    State: in memory, and in the file ``share-seconds.json`` for the next process. When the file is
    lost, all sums begin at zero.
    """

    def __init__(
        self,
        directory: str,
        ledger: Ledger,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build it.

        Args:
            directory: the setting ``stateDirectory``.
            ledger: its grants are what pods hold.
            wall: unix seconds.
            clock: seconds that only grow.
        """
        self._ledger, self._wall, self._clock = ledger, wall, clock
        self._file = StateFile(
            directory,
            "share-seconds.json",
            _Stored,
            when_unreadable="the sums of vgpu_agent_share_seconds_total begin at zero",
            when_not_written="a restart begins the sums of vgpu_agent_share_seconds_total at zero",
        )
        self._sums: dict[Key, Sum] = {}
        self._at = clock()  # up to when the sums are complete
        # from the file: sums of pods that held something then, and have not been seen since
        self._awaited: dict[Key, Sum] = {}
        # until when (by `clock`) they are waited for; when (by `wall`) the file was written
        self._awaited_until, self._stored_at = 0.0, 0.0
        # a sum differs from the file; the sums grow: from `load` to `end`
        self._changed = self._counting = False

    async def load(self) -> None:
        """Read the file. Call this before `run`."""
        stored = await self._file.read() or _Stored()
        now, self._stored_at = self._wall(), stored.at
        for one in stored.sums[:_MAX_SUMS]:
            key = one.namespace, one.pod, one.resource
            if one.held:
                self._awaited[key] = one
            elif stored.final and now - one.held_at < _KEPT_SECONDS:
                self._sums[key] = one
        self._awaited_until = self._clock() + _AWAITED_SECONDS
        self._at = self._clock()
        self._counting = True

    async def run(self) -> None:
        """Count soon after each change of the ledger, and write the file every minute, until
        cancelled.
        """
        written_at = self._clock()
        while True:
            versions = Versions(self._ledger.revision)  # `passed` waits for the next change
            self.advance()
            left = written_at + _WRITE_SECONDS - self._clock()
            if left <= 0:
                await self._write(final=False)
                written_at, left = self._clock(), _WRITE_SECONDS
            await versions.passed(timeout_seconds=left)
            await asyncio.sleep(_COALESCING_SECONDS)

    async def end(self, *, write: bool) -> None:
        """Let the sums stand still from now on: the next agent counts, also where this process
        still answers scrapes. Before, write the file if ``write`` and if it has been loaded.
        """
        try:
            if self._counting and write:
                await self._write(final=True)
        finally:
            self._counting = False  # also where the disk hangs, and the caller gives up

    async def _write(self, *, final: bool) -> None:
        """Write the file if anything was held since the last time."""
        self.advance()
        if self._changed or final:
            sums = (*self._sums.values(), *self._awaited.values())
            content = tuple(msgspec.structs.replace(one) for one in sums)
            stored = _Stored(self._wall(), content, final)
            self._changed = not await self._file.write(stored)

    @property
    def sums(self) -> Mapping[Key, float]:
        """The sums at this moment, by namespace, pod and resource."""
        self.advance()
        return {key: one.seconds for key, one in self._sums.items()}

    def advance(self) -> None:
        """Add the time since the last call to what was held in it, and see what is held now.

        Nothing is added before the file has been loaded: a sum that began before would hide the one
        in the file.
        """
        if not self._counting:
            return
        clock, wall = self._clock(), self._wall()
        passed, self._at = clock - self._at, clock
        for one in self._sums.values():
            if one.held:
                one.seconds += one.held * passed
                one.held_at, self._changed = wall, True
                one.held = 0
        for grant in self._ledger.grants:
            if (of_grant := self._sum_of(grant, wall)) is not None:
                of_grant.held += len(grant.ids)
                of_grant.held_at = wall
        if self._awaited and clock >= self._awaited_until:
            self._awaited.clear()
        self._forget(wall)

    def _sum_of(self, grant: Grant, wall: float) -> Sum | None:
        """Return the sum to which the grant's ids belong; None while the name of its pod is not
        known, and for a grant that has been released.
        """
        owner = grant.owner
        if owner is None or not owner.pod or grant.state is GrantState.RELEASED:
            return None
        key = owner.namespace, owner.pod, grant.resource
        one = self._sums.get(key)
        if one is None:
            one = self._continued(key, owner.pod_uid, wall)
            self._sums[key] = one
            self._changed = True
        one.pod_uid = owner.pod_uid or one.pod_uid
        return one

    def _continued(self, key: Key, pod_uid: str, wall: float) -> Sum:
        """Return a new sum, or that of the file with the time in which no agent ran, where the same
        pod still holds its shares.
        """
        stored = self._awaited.pop(key, None)
        if stored is None or (pod_uid and stored.pod_uid and pod_uid != stored.pod_uid):
            return Sum(*key)
        gap = wall - self._stored_at
        if 0 < gap < _LONGEST_GAP_SECONDS:
            stored.seconds += stored.held * gap
        stored.held = 0
        return stored

    def _forget(self, wall: float) -> None:
        """Drop the sums of pods that ended more than `_KEPT_SECONDS` ago, and above `_MAX_SUMS` the
        ones whose pods held something longest ago.
        """
        over = [
            key
            for key, one in self._sums.items()
            if not one.held and not 0 <= wall - one.held_at < _KEPT_SECONDS
        ]
        excess = len(self._sums) - len(over) - _MAX_SUMS
        if excess > 0:
            ended = sorted(self._sums, key=lambda key: self._sums[key].held_at)
            over += [key for key in ended if key not in set(over)][:excess]
        for key in over:
            del self._sums[key]
