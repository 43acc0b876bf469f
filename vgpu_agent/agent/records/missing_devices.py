"""Report pods whose device the node no longer has, e.g. because the GPU was divided into other MIG
instances.

Such a pod keeps its ids in the kubelet until it ends. The journal names these pods for the operator
who changed the MIG layout, and a metric counts the grants. `composition` runs the loops.

As long as such a pod exists, the ledger does not grant the GPU through another resource. So the
ledger must know the GPU of a MIG instance that is gone, also after a restart of the agent. This
module keeps that in a file.
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
    from vgpu_agent.status import WriteFailure

# One start of a container changes the ledger several times, so the changes of this time are handled
# together.
_COALESCING_SECONDS = 0.1


class RememberedInstance(msgspec.Struct, frozen=True, rename="camel"):
    """A MIG instance that this node has or had.

    Attributes:
        uuid: the UUID of the instance.
        gpu: the UUID of its GPU.
        memory_mib: the memory of the instance.
    """

    uuid: str
    gpu: str
    memory_mib: int


class InstanceFile:
    """The file in ``directory`` with the GPU of each MIG instance.

    The kubelet's records have only the UUID of an instance, and its GPU may be divided again while
    a pod holds the instance. If the file is lost, the GPU of an instance that is gone may be
    granted to other pods.
    """

    def __init__(self, directory: str) -> None:
        self._file = StateFile(
            directory,
            "slices.json",  # the name in earlier versions, so that an upgraded agent reads it
            tuple[RememberedInstance, ...],
            when_unreadable=(
                "it will be written again; until then pods on removed MIG instances block nothing"
            ),
            when_not_written="a restart loses the GPUs of removed MIG instances",
        )
        self._written: frozenset[str] = frozenset()  # UUIDs; an instance never changes

    async def read(self) -> dict[str, Device]:
        """Read the instances by UUID, in the order in which they were written. Return none if the
        file is missing or damaged.
        """
        instances = await self._file.read() or ()
        self._written = frozenset(instance.uuid for instance in instances)
        return {
            instance.uuid: Device(instance.uuid, instance.gpu, instance.memory_mib)
            for instance in instances
        }

    @property
    def failure(self) -> WriteFailure | None:
        """The reason why the instances could not be written; None while the file has them."""
        return self._file.failure

    async def write(self, instances: Mapping[str, Device]) -> None:
        """Write ``instances``, unless the file has exactly these."""
        if instances.keys() == self._written:
            return
        content = tuple(
            RememberedInstance(device.uuid, device.gpu, device.memory_mib)
            for device in instances.values()
        )
        if await self._file.write(content):
            self._written = frozenset(instance.uuid for instance in content)


class MissingDevices:
    """The loops that report grants whose device is gone, and store the MIG instances.

    State: the reported pairs of grant and device, so that each is reported once. After a restart,
    the agent reports them again.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        *,
        inventory: Callable[[], Inventory],
        journal: Journal,
    ) -> None:
        self._file = InstanceFile(settings.state_directory)
        self._ledger = ledger
        self._inventory = inventory
        self._journal = journal
        self._reported = log.ChangeFilter()  # by (`Grant.number`, UUID of the device)

    @property
    def write_failure(self) -> WriteFailure | None:
        """The reason why the MIG instances could not be written; None while they are."""
        return self._file.failure

    async def load_instances(self) -> None:
        """Read the MIG instances from the file into the ledger. Call this before anything is
        offered.
        """
        self._ledger.mig_instances.update(await self._file.read())

    async def run(self) -> None:
        """Check after each change of devices or grants, until cancelled."""
        async for _ in self._ledger.revision.changes(coalesce_seconds=_COALESCING_SECONDS):
            self.check()

    async def save_instances(self) -> None:
        """Write the MIG instances to the file after each change, until cancelled. This loop is
        separate from `run`, because a disk may hang.
        """
        async for _ in self._ledger.revision.changes(coalesce_seconds=_COALESCING_SECONDS):
            await self._file.write(self._ledger.mig_instances)

    def check(self) -> None:
        """Report each device of a grant that has disappeared since the last call, and each that has
        returned. Do nothing while the driver lists no GPU, because then no device is known.
        """
        if not self._inventory().gpus:
            return
        live = {grant.number: grant for grant in self._ledger.grants}
        missing = dict(self._missing(live.values()))
        for (number, device), grant in missing.items():
            # a grant without an owner is reported by a later call, once its owner is known
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
                if key not in missing and self._reported.forget(key) and grant.owner is not None:
                    self._journal.record(
                        "grant.device_returned",
                        pod=grant.owner.pod_name,
                        device=device,
                        grant=grant.number,
                    )
        self._reported.keep_only(missing)

    def _missing(self, grants: Iterable[Grant]) -> Iterator[tuple[tuple[int, str], Grant]]:
        present = self._inventory().devices
        for grant in grants:
            yield from (
                ((grant.number, share.device), grant)
                for share in grant.shares
                if share.device not in present
            )
