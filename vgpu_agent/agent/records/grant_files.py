"""Keep the files of grants: restore them after a reboot, and remove them when their pod is gone,
never before.

A supervised loop of `composition`, which also calls `load` and `restore` at start, before anything
is offered.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from vgpu_agent.concurrency import first_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from vgpu_agent.allocation.allocator import Allocator
    from vgpu_agent.allocation.carrier import GrantRecord
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.pods import PodCache
    from vgpu_agent.runtime.grants import GrantDirectory

# after a change of the pods, so that one pass serves a burst of changes
_SETTLING_SECONDS = 1.0

# ``<pod UID>_<container>``, by the API server's UIDs; the kubelet's UIDs of static pods are hashes
# without hyphens
_OF_A_CONTAINER = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}_[a-z0-9-]{1,63}")


class GrantKeeping:
    """The comparison of the files on the disk with the ledger and the pods."""

    def __init__(
        self,
        *,
        grant_directory: GrantDirectory,
        allocator: Allocator,
        ledger: Ledger,
        pod_cache: PodCache,
        container_directories: Sequence[str],
        shared_directories: Sequence[str] = (),
        pause_seconds: float,
        renew_offer: Callable[[], Awaitable[None]],
    ) -> None:
        """Build it.

        Args:
            grant_directory: the files of grants.
            allocator: knows what should be there.
            ledger: knows the holders of ids.
            pod_cache: knows which pods there are.
            container_directories: where each container has a directory of its own, for the files
                of an isolation backend, or had one from an earlier agent.
            shared_directories: where a plugin that a family replaces has made such directories,
                among other things.
            pause_seconds: the longest pause between two passes.
            renew_offer: brings the offers up to date. In each pass, because it also looks for a
                newer library of an isolation backend, which the operator may supply at any time.
        """
        self._grant_directory = grant_directory
        self._allocator = allocator
        self._ledger = ledger
        self._pod_cache = pod_cache
        self._container_directories = tuple(container_directories)
        self._shared_directories = tuple(shared_directories)
        self._pause_seconds = pause_seconds
        self._renew_offer = renew_offer

    async def load(self) -> None:
        """Read what an earlier agent has left.

        Raises:
            HostFileError: the directory cannot be read.
        """
        await self._grant_directory.load()

    async def tidy(self) -> None:
        """Remove what a killed agent has left unfinished, while no other agent serves the node."""
        await self._grant_directory.tidy()

    def keep_all(self) -> None:
        """Remove nothing any more: another agent is taking over this node."""
        self._grant_directory.keep_all()

    async def restore(self) -> None:
        """Write what is missing, as after a reboot;
        each only while its ids still belong to the container that it was made for.
        """
        await self._grant_directory.restore(
            # the grant records that should be there, each with the edits and files of its grant
            self._allocator.late_start.deliveries(),
            self._allocator.late_start.is_current,
        )

    async def withdraw_foreign_specs(self) -> None:
        """Remove specs whose ids the kubelet has given to another container by now.

        The next holder's PreStartContainer would replace such a spec, but that call is not certain:
        the kubelet omits it after its restart until we have registered again, and after the last
        registration of an orderly stop, which asks for no such calls, so that containers can
        restart while no agent runs.
        """
        records = self._grant_directory.records
        for record in self._allocator.late_start.foreign_records(records):
            await self._grant_directory.withdraw(record)

    async def run(self, beat: Callable[[], None]) -> None:
        """Restore and remove files until cancelled, in passes: soon after a change of the pods, and
        regularly.
        """
        while True:
            beat()
            await self._renew_offer()
            await self.restore()
            await self.collect(beat)
            await self._watch_for_foreign_specs(self._pause_seconds, beat)

    async def _watch_for_foreign_specs(self, seconds: float, beat: Callable[[], None]) -> None:
        """Check after each Allocate whether the CDI name of its ids has a spec already;
        return when the pods have changed, or after a while.
        """
        loop = asyncio.get_running_loop()
        until, pods = loop.time() + seconds, self._pod_cache.revision.version
        while (left := until - loop.time()) > 0 and self._pod_cache.revision.version == pods:
            ledger = self._ledger.revision.version
            beat()
            await self.withdraw_foreign_specs()
            await first_of(
                self._ledger.revision.newer_than(ledger),
                self._pod_cache.revision.newer_than(pods),
                timeout_seconds=left,
            )
        await asyncio.sleep(min(_SETTLING_SECONDS, self._pause_seconds))

    async def collect(self, beat: Callable[[], None] = lambda: None) -> None:
        """Remove the files of pods that are gone;
        without a complete picture of the pods, none counts as gone.
        """
        if not self._pod_cache.synced.is_set():
            return
        await self._grant_directory.collect(self._still_wanted, beat)
        # Then the directories for which there is no grant record. `sweep` removes those whose name
        # the function rejects.
        for directory in self._container_directories:
            await self._grant_directory.sweep(
                directory, lambda name: self._lives(name.partition("_")[0]), beat
            )
        for directory in self._shared_directories:
            await self._grant_directory.sweep(
                directory,
                lambda name: (
                    not _OF_A_CONTAINER.fullmatch(name) or self._lives(name.partition("_")[0])
                ),
                beat,
            )

    def _still_wanted(self, record: GrantRecord) -> bool:
        return self._lives(record.owner.pod_uid)

    def _lives(self, uid: str) -> bool:
        pod = self._pod_cache.get(uid)
        if pod is not None and not pod.ended:
            return True
        return any(
            grant.owner is not None and grant.owner.pod_uid == uid for grant in self._ledger.grants
        )
