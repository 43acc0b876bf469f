"""Release the room of ended pods in the ledger for a start that needs it now.

An ended pod is released a moment later, or up to a minute later without the API server. A start
that is refused meanwhile would get an event and wait until the kubelet retries. So `late_start`
decides and books through `EndedPods.with_room`, which asks the kubelet for the live pods, releases
the others, and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, TypeVar

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

# Events come in bursts, and each try is a whole booking.
_PAUSE_SECONDS = 0.1
_A_MOMENT_SECONDS = 0.01  # more than two clocks can differ by

# the second also where a GPU serves another family, whose last pod may have ended
_NO_ROOM = (CapacityError, UnhealthyDeviceError)


@dataclasses.dataclass(frozen=True, slots=True)
class _Listed:
    """The pods that the kubelet lists.

    Attributes:
        uids: of those that are known by their ids.
        names: namespace and name of those whose UID is not known yet.
    """

    uids: frozenset[str]
    names: frozenset[tuple[str, str]]


class EndedPods:
    """The release of grants of ended pods; no state of its own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = context.ledger

    async def with_room(self, start: Start, attempt: Callable[[], T]) -> T:
        """Return the result of ``attempt``, which is repeated after ended pods were released.

        A refusal is raised in the same step as its attempt, or while the ledger is unchanged since.
        So nothing is refused that has room at the time of the answer: of several starts that meet a
        full GPU at once, one finds ended pods to release, and all of them try again.

        Args:
            start: the container that needs room.
            attempt: decides and books, without waiting for anything.

        Raises:
            CapacityError: there is no room.
            UnhealthyDeviceError: a device must not be given to any container now.
            NotProvenError: there was no room, and the kubelet has not reported in time which pods
                have ended.
        """
        try:
            return await self._after_releases(start, attempt)
        except _NO_ROOM:
            if (longest := self._ledger.turns_end_in_seconds) is None:
                raise
        # A GPU that was returned is offered to another family first for a moment; the kubelet would
        # ask again much later than that.
        now = asyncio.get_running_loop().time
        until = min(start.until, now() + longest + _A_MOMENT_SECONDS)
        while (left := until - now()) > 0 and (
            seconds := self._ledger.turn_ends_in_seconds
        ) is not None:
            await asyncio.sleep(min(left, max(seconds, _A_MOMENT_SECONDS)))
            self._ledger.end_turns()
            with contextlib.suppress(*_NO_ROOM):
                return attempt()
        return attempt()

    async def _after_releases(self, start: Start, attempt: Callable[[], T]) -> T:
        """Do the same as `with_room`, without waiting for GPUs
        that another family is offered first.
        """
        try:
            return attempt()
        except _NO_ROOM:
            pass  # an error from before the kubelet was asked may be wrong after it
        before = {grant.number: grant for grant in self._ledger.grants}
        kubelet_evidence = await self._all_pods(start)
        if kubelet_evidence is None:
            try:
                return attempt()
            except _NO_ROOM as err:
                raise NotProvenError(
                    "no room, and the kubelet has not reported within "
                    f"{identification.START_SECONDS:g} s which pods have ended; the kubelet will "
                    f"retry ({err})"
                ) from err
        return await self._tried_again(start, attempt, kubelet_evidence, before)

    async def _tried_again(
        self,
        start: Start,
        attempt: Callable[[], T],
        kubelet_evidence: KubeletEvidence,
        before: Mapping[int, Grant],
    ) -> T:
        """The result of ``attempt`` after each release.

        The API server may show the end of a pod a moment after the kubelet has let go of it, so
        such a pod is waited for.
        """
        now = asyncio.get_running_loop().time
        until = min(start.until, now() + identification.POD_WAIT_SECONDS)
        listed, pods = (
            self._listed(start, kubelet_evidence.pod_resources),
            self._context.pods.revision,
        )
        while True:
            version, ending = pods.version, self._release(listed, before)
            try:
                return attempt()
            except _NO_ROOM:
                if not ending or now() >= until:
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await pods.newer_than(version)
                    await asyncio.sleep(_PAUSE_SECONDS)

    async def _all_pods(self, start: Start) -> KubeletEvidence | None:
        """Kubelet's records about every pod, read now; None when it has not answered in time."""
        try:
            async with asyncio.timeout_at(start.until):
                return await self._context.read_records(start.offered.name, start.ids, whole=True)
        except TimeoutError:
            return None

    def _listed(self, start: Start, entries: tuple[Holding, ...] | None) -> _Listed | None:
        """Return the pods behind ``entries``. pod-resources gives names only;
        the proof and the ledger know owners by UID.
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
            if holders:  # none of a resource that is only there to be counted
                (unknown if "" in holders else known).add((entry.owner.namespace, entry.owner.pod))
        named = {(entry.owner.namespace, entry.owner.pod) for entry in entries}
        return _Listed(frozenset(uids - {""}), frozenset(named - known | unknown))

    def _release(self, listed: _Listed | None, before: Mapping[int, Grant]) -> bool:
        """Release the grants of pods that the kubelet does not list and that have ended or are gone
        by the API server.

        Returns:
            Whether there are pods that the kubelet does not list and whose end the API server has
            not shown.
        """
        if listed is None or not self._context.pods.synced.is_set():
            return False
        ending = False
        for grant in self._ledger.grants:
            owner = grant.owner
            if (
                owner is None
                or not owner.pod_uid
                or owner.pod_uid in listed.uids
                or (owner.namespace, owner.pod) in listed.names
            ):
                continue
            if before.get(grant.number) != grant:
                # booked or proven since the kubelet was asked, so its answer does not cover it
                continue
            pod = self._context.pods.get(owner.pod_uid)
            if pod is None and self._context.pods.may_have(owner.pod_uid):
                continue
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
            # pod-resources hides init containers, whose pod may well be alive.
            ending |= (
                bool(grant.shares)
                and container is not None
                and container.kind is not ContainerKind.INIT
            )
        return ending
