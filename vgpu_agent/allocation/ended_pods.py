"""Release the grants of ended pods in the ledger for a container that needs their room now.

The grants of an ended pod are released a moment after its end, or up to a minute after it without
the API server. A start that is refused meanwhile would get an event and wait until the kubelet
retries. So `late_start` decides and books through `EndedPods.with_room`. If there is no room, it
asks the kubelet for the live pods, releases the grants of the others, and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vgpu_agent.allocation import identification
from vgpu_agent.allocation.identification import NotProvenError
from vgpu_agent.errors import CapacityError, UnhealthyDeviceError
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vgpu_agent.allocation.context import Context
    from vgpu_agent.allocation.identification import KubeletEvidence, Start
    from vgpu_agent.model import Grant, Holding

T = TypeVar("T")

# Watch events of pods come in bursts, and each attempt is a whole booking.
_PAUSE_SECONDS = 0.1
# more than the ledger's clock and the loop's can differ by
_CLOCK_DIFFERENCE_SECONDS = 0.01

# UnhealthyDeviceError also stands for a GPU that serves another family, whose last pod may have
# ended.
_NO_ROOM = (CapacityError, UnhealthyDeviceError)


class _LivePods(msgspec.Struct, frozen=True):
    """The pods that the kubelet lists, which are the live ones.

    Attributes:
        uids: the UIDs of those whose device ids have a known owner.
        names: namespace and name of those with an id whose owner is not known, or without ids.
    """

    uids: frozenset[str]
    names: frozenset[tuple[str, str]]


class EndedPods:
    """The release of grants of ended pods; no state of its own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = context.ledger

    async def with_room(self, start: Start, attempt: Callable[[], T]) -> T:
        """Return the result of ``attempt``, which is repeated after grants were released.

        A refusal is always current: the ledger has not changed between the attempt and the raise.
        If several starts find a GPU full at once, only the first finds grants to release; all of
        these starts try again.

        Args:
            start: the container that needs room; the kubelet must have its answer by
                ``start.until``, a time of the event loop.
            attempt: decides and books, without any await.

        Raises:
            CapacityError: there is no room.
            UnhealthyDeviceError: a device must not be given to any container now.
            NotProvenError: there was no room, and the kubelet has not reported in time which pods
                have ended.
        """
        try:
            return await self._after_releases(start, attempt)
        except _NO_ROOM:
            if (longest := self._ledger.all_turns_end_in_seconds) is None:  # no GPU is in a turn
                raise
        # A GPU whose last share was returned is first offered to one family at a time, for a short
        # turn each (`ledger.turns`). The kubelet would retry long after these turns.
        now = asyncio.get_running_loop().time
        until = min(start.until, now() + longest + _CLOCK_DIFFERENCE_SECONDS)
        while (left := until - now()) > 0 and (
            seconds := self._ledger.turn_ends_in_seconds
        ) is not None:
            await asyncio.sleep(min(left, max(seconds, _CLOCK_DIFFERENCE_SECONDS)))
            self._ledger.end_turns()  # only those whose time is over
            with contextlib.suppress(*_NO_ROOM):
                return attempt()
        return attempt()

    async def _after_releases(self, start: Start, attempt: Callable[[], T]) -> T:
        """Do the same as `with_room`, without waiting for the turns of other families."""
        try:
            return attempt()
        except _NO_ROOM:
            pass  # This error may be out of date once the kubelet has answered.
        before = {grant.number: grant for grant in self._ledger.grants}
        kubelet_evidence = await self._records(start)
        if kubelet_evidence is None or kubelet_evidence.pod_resources is None:
            why = (
                f"within {identification.START_SECONDS:g} s"
                if kubelet_evidence is None
                else f"({kubelet_evidence.trouble})"
            )
            try:
                return attempt()
            except _NO_ROOM as err:
                raise NotProvenError(
                    f"no room, and the kubelet has not reported {why} which pods have ended; the "
                    f"kubelet will retry ({err})"
                ) from err
        return await self._try_again(start, attempt, kubelet_evidence, before)

    async def _try_again(
        self,
        start: Start,
        attempt: Callable[[], T],
        kubelet_evidence: KubeletEvidence,
        before: Mapping[int, Grant],
    ) -> T:
        """Release grants and repeat ``attempt``, until it succeeds or no other pod is ending.

        The kubelet may drop a pod from its records a moment before the API server shows the pod's
        end. Such a pod is *ending*, and the loop waits for the API server. ``before`` has the
        grants at the time when the kubelet was asked, by number.
        """
        now = asyncio.get_running_loop().time
        # as long as a start waits for a pod that the watch has not shown yet
        until = min(start.until, now() + identification.POD_WAIT_SECONDS)
        # `revision` counts the changes of the pods that the watch has shown
        live, pods = (
            self._live_pods(start, kubelet_evidence.pod_resources),
            self._context.pods.revision,
        )
        while True:
            version, ending = pods.version, self._release(live, before)
            try:
                return attempt()
            except _NO_ROOM:
                if not ending or now() >= until:
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await pods.newer_than(version)
                    await asyncio.sleep(_PAUSE_SECONDS)

    async def _records(self, start: Start) -> KubeletEvidence | None:
        """Read the kubelet's records of all pods; None when it has not answered in time."""
        try:
            async with asyncio.timeout_at(start.until):
                return await self._context.read_records(start.offered.name, start.ids, whole=True)
        except TimeoutError:
            return None

    def _live_pods(self, start: Start, entries: tuple[Holding, ...] | None) -> _LivePods | None:
        """Return the pods of ``entries``, by UID where it is known.

        The entries come from the kubelet's pod-resources API, which gives names only. A deleted pod
        and its successor may share a name. The UID follows from the device ids: the ledger knows
        their owners, and ``start`` is the owner of its own.
        """
        if entries is None:
            return None
        uids, known, unknown = set[str](), set[tuple[str, str]](), set[tuple[str, str]]()
        for entry in entries:
            if entry.resource == start.offered.name and not set(start.ids).isdisjoint(entry.ids):
                holders = {start.owner.pod_uid}
            else:
                holders = {
                    grant.owner.pod_uid if grant.owner else ""
                    for grant in self._ledger.holders(entry.resource, entry.ids)
                }
            uids |= holders
            if holders:  # empty for a resource that is only counted and has no grants
                (unknown if "" in holders else known).add((entry.owner.namespace, entry.owner.pod))
        named = {(entry.owner.namespace, entry.owner.pod) for entry in entries}
        return _LivePods(frozenset(uids - {""}), frozenset(named - known | unknown))

    def _release(self, live: _LivePods | None, before: Mapping[int, Grant]) -> bool:
        """Release the grants of pods that have ended according to both the kubelet and the API
        server.

        Args:
            live: the pods that the kubelet lists; None when they are not known.
            before: the grants at the time when the kubelet was asked, by number.

        Returns:
            True while a pod is ending: the kubelet lists it no more, and the API server has not
            shown its end yet.
        """
        if live is None or not self._context.pods.synced.is_set():
            return False
        ending = False
        for grant in self._ledger.grants:
            owner = grant.owner
            if (
                owner is None
                or not owner.pod_uid
                or owner.pod_uid in live.uids
                or (owner.namespace, owner.pod) in live.names
            ):
                continue
            if before.get(grant.number) != grant:
                # changed since the kubelet was asked, so its answer does not cover this grant
                continue
            pod = self._context.pods.get(owner.pod_uid)
            if pod is None and self._context.pods.was_left_out(owner.pod_uid):
                continue  # the pod is there, but too large for the pod cache, or one too many
            if pod is None or pod.ended:
                self._ledger.release(grant.number)
                self._context.journal.record(
                    "ledger.released",
                    grant=grant.number,
                    pod=owner.pod_name,
                    reason="the pod has ended",
                )
                continue
            container = pod.container(owner.container)
            # A grant without shares takes no room, so its end need not be awaited. pod-resources
            # hides init containers, whose pod may well be alive.
            ending |= (
                bool(grant.shares)
                and container is not None
                and container.kind is not ContainerKind.INIT
            )
        return ending
