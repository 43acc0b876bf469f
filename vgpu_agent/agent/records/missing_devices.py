"""Report pods that run on a device that the node no longer has, e.g.
because its GPU was divided into other MIG instances.

Such a pod keeps its ids in the kubelet until it ends. The report names the affected pods to the
operator who changed the MIG layout. A metric counts the grants. `composition` runs the loops.

As long as the pod exists, the ledger does not grant its GPU through another resource. For that it
needs the GPU of a MIG instance that is gone, also after a restart of the agent. This module keeps a
file with the GPU of each MIG instance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import log
from vgpu_agent.agent.state_file import StateFile
from vgpu_agent.ledger.accounting import Device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Grant, Inventory

# The start of a container changes the ledger several times, and these reports are not urgent.
_COALESCING_SECONDS = 0.1


class RememberedInstance(msgspec.Struct, frozen=True, rename="camel"):
    """One MIG instance that this node has or had: its UUID, its GPU's, and its memory."""

    uuid: str
    gpu: str
    memory_mib: int


class InstanceMemory:
    """The file in ``directory`` with the GPU of each MIG instance.

    The kubelet's records name an instance by its UUID only, and its GPU may be divided again while
    a pod holds it. If the file is lost, the GPU of an instance that is gone may be granted to
    others.
    """

    def __init__(self, directory: str) -> None:
        self._file = StateFile(
            directory,
            "slices.json",  # the name of earlier versions, so that an upgrade reads it
            tuple[RememberedInstance, ...],
            when_unreadable=(
                "it will be written again; until then pods on removed MIG instances block nothing"
            ),
            when_not_written="a restart loses the GPUs of removed MIG instances",
        )
        self._written: frozenset[str] = frozenset()  # UUIDs; the facts of a UUID never change

    async def recall(self) -> dict[str, Device]:
        """Read the instances that were written last, by UUID, the newest last.
        Return none without a file, or when the file is damaged.
        """
        found = await self._file.read() or ()
        self._written = frozenset(each.uuid for each in found)
        return {each.uuid: Device(each.uuid, each.gpu, each.memory_mib) for each in found}

    async def keep(self, instances: Mapping[str, Device]) -> None:
        """Write ``instances``, unless the file has exactly these."""
        if instances.keys() == self._written:
            return
        facts = tuple(
            RememberedInstance(each.uuid, each.gpu, each.memory_mib) for each in instances.values()
        )
        if await self._file.write(facts):
            self._written = frozenset(each.uuid for each in facts)


class MissingDevices:
    """The reporter of grants whose device is gone.

    State: the reported pairs of grant and device, so that each is reported once. A restart reports
    them again.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        *,
        inventory: Callable[[], Inventory],
        journal: Journal,
    ) -> None:
        self._memory = InstanceMemory(settings.state_directory)
        self._ledger = ledger
        self._inventory = inventory
        self._journal = journal
        self._reported = log.ChangeFilter()  # by number of the grant and device

    async def recall(self) -> None:
        """Give the ledger the MIG instances from before the agent's start;
        call this before anything is offered.
        """
        self._ledger.mig_instances.update(await self._memory.recall())

    async def run(self) -> None:
        """Report after every change of devices or grants, until cancelled."""
        async for _ in self._ledger.revision.changes(coalesce_seconds=_COALESCING_SECONDS):
            self.look()

    async def remember(self) -> None:
        """Write the MIG instances to the file after every change, until cancelled.
        This is a separate loop from `run`, because a disk may hang.
        """
        async for _ in self._ledger.revision.changes(coalesce_seconds=_COALESCING_SECONDS):
            await self._memory.keep(self._ledger.mig_instances)

    def look(self) -> None:
        """Report each pod that has lost its device since the last call, and each device that has
        come back. Do nothing while the driver shows no GPU, because then no device is known.
        """
        if not self._inventory().gpus:
            return
        live = {grant.number: grant for grant in self._ledger.grants}
        vanished = dict(self._vanished(live.values()))
        for (number, device), grant in vanished.items():
            # the holder is known a second later at the latest
            if grant.owner is not None and self._reported.is_new((number, device)):
                known = self._ledger.mig_instances.get(device)
                self._journal.record(
                    "grant.device_missing",
                    level="warning",
                    pod=grant.owner.pod_name,
                    container=grant.owner.container,
                    resource=grant.resource,
                    device=device,
                    gpu=known.gpu if known else "",
                    ids=list(grant.ids),
                    grant=number,
                    meaning=(
                        "the pod runs on a device that this node no longer has; delete it when its "
                        "work has failed"
                    ),
                )
        for grant in live.values():
            for device in {share.device for share in grant.shares}:
                key = grant.number, device
                if key not in vanished and self._reported.over(key) and grant.owner is not None:
                    self._journal.record(
                        "grant.device_returned",
                        pod=grant.owner.pod_name,
                        device=device,
                        grant=grant.number,
                    )
        self._reported.keep_only(vanished)

    def _vanished(self, grants: Iterable[Grant]) -> Iterator[tuple[tuple[int, str], Grant]]:
        present = self._inventory().devices
        for grant in grants:
            yield from (
                ((grant.number, share.device), grant)
                for share in grant.shares
                if share.device not in present
            )
