"""Identify the pod and container about to start: the proof of `proof`, with everything that has to be waited for.

Called by `binder` for each start. Kubelet's records are read after the question; a pod that our watch does not show yet is waited for and
then requested once. Without an answer of the API server, a container that has started here before is known by its spec.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.allocation.proof import NotProvenError, claim, holder, suspects
from vgpu_agent.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.allocation.carrier import GrantRecord
    from vgpu_agent.allocation.dependencies import Dependencies
    from vgpu_agent.allocation.proof import Claim, KubeletEvidence
    from vgpu_agent.model import Owner
    from vgpu_agent.pods import Pod, PodCache

_REREAD_SECONDS = 0.05  # kubelet writes its records before it calls us; once in a while a reader is quicker than the disk


@dataclasses.dataclass(frozen=True, slots=True)
class Identified:
    """The container that has the ids, proven, and what proves it."""

    pod: Pod
    owner: Owner
    found: Claim
    kubelet_evidence: KubeletEvidence


class Identification:
    """The identification of containers; no state of its own."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._around = dependencies

    async def identify(self, resource: str, ids: Sequence[str], token: str) -> Identified | GrantRecord:
        """The container that is about to start with ``ids``, or the record of its earlier start when its pod cannot be asked about.

        Raises:
            NotProvenError: it is not certain (yet).
        """
        seconds = self._around.settings.start_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._identify(resource, ids, token)
        except TimeoutError:
            raise NotProvenError(
                f"kubelet's records and the API server have not answered within {seconds:g} s; kubelet will ask again"
            ) from None

    async def _identify(self, resource: str, ids: Sequence[str], token: str) -> Identified | GrantRecord:
        loop, book = asyncio.get_running_loop(), self._around.book
        until = loop.time() + self._around.settings.pod_wait_seconds
        fetched: Pod | None = None
        while True:
            version = book.revision.version
            kubelet_evidence = await self._around.read_records(resource, ids)
            try:
                found = claim(resource, ids, kubelet_evidence)
            except NotProvenError as err:
                if err.ambiguous or loop.time() + _REREAD_SECONDS >= until:
                    err.suspects = suspects(resource, ids, kubelet_evidence, book)
                    raise
                await asyncio.sleep(_REREAD_SECONDS)
                continue
            try:
                if named := holder(found, book, fetched):
                    return Identified(*named, found, kubelet_evidence)
                if fetched is None:
                    record = self._before(found, token)
                    # While the first list is read, which takes seconds with the largest pods, this one may appear at any time.
                    reading = record is None and not book.synced.is_set()
                    if not reading and await _newer(book, version, until - loop.time()):
                        continue
                    if record and await self._around.carrier.stands(token):
                        return record
                    fetched = await self._ask_for(found)
            except NotProvenError as err:
                err.suspects = suspects(resource, ids, kubelet_evidence, book)
                raise

    def _before(self, found: Claim, token: str) -> GrantRecord | None:
        """The record of the very container that kubelet's records name for these ids, from an earlier start of it."""
        for record in self._around.carrier.records:
            owner = record.owner
            if record.token == token and found.uids == (owner.pod_uid,) and owner.container in found.containers[owner.pod_uid]:
                return record if found.named in {None, (owner.namespace, owner.pod)} else None
        return None

    async def _ask_for(self, found: Claim) -> Pod:
        """The pod from the API server itself, because our watch does not know it."""
        seconds, book = self._around.settings.pod_wait_seconds, self._around.book
        known = next((pod for uid in found.uids if (pod := book.get(uid))), None)
        name = found.named or ((known.namespace, known.name) if known else None)
        missing = f"pod {'/'.join(name)}" if name else f"the pod with UID {' or '.join(found.uids)}"
        if name is None:
            raise NotProvenError(f"{missing} did not appear in the watch within {seconds:g} s; kubelet will ask again")
        try:
            pod = await self._around.fetch(*name)
        except ClusterError as err:
            raise NotProvenError(f"{missing} did not appear in the watch within {seconds:g} s, and {err}; kubelet will ask again") from err
        if pod is None or pod.node != self._around.node:
            where = f"is bound to {pod.node or 'no node'}" if pod else "does not exist any more"
            raise NotProvenError(f"{missing} {where}; kubelet will notice")
        return pod


async def _newer(book: PodCache, version: int, seconds: float) -> bool:
    """Wait for a change of the pod cache; return False when there is none in time."""
    if seconds <= 0:
        return False
    try:
        async with asyncio.timeout(seconds):
            await book.revision.newer_than(version)
    except TimeoutError:
        return False
    return True
