"""A small backend for tests of the kubelet side:
eight ids on two GPUs, every call remembered, faults on request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from vgpu_agent.concurrency import Revision
from vgpu_agent.device_ids import DeviceId, ListedDevice
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.model import Resource

U0 = "GPU-aaaaaaaa-0000-4000-8000-000000000000"
U1 = "GPU-bbbbbbbb-0000-4000-8000-000000000001"


def shared_resource(
    name: str = "nvidia.com/gpu.shared", *, pre_start_required: bool = False, prefix: str = ""
) -> Resource:
    """Two GPUs on two NUMA nodes, four ids each."""
    ids = tuple(
        DeviceId(f"{prefix}{uuid}::{replica}", uuid, node)
        for node, uuid in enumerate((U0, U1))
        for replica in range(4)
    )
    return Resource(
        name, "nvidia", ids, holders_per_device=4, pre_start_required=pre_start_required
    )


class FakeBackend:
    """Answers like the allocator without a ledger; set `failure` to let every call fail with it."""

    def __init__(self, *resources: Resource) -> None:
        self.revision = Revision()
        self.ready = asyncio.Event()
        self.ready.set()
        self.resources = {resource.name: resource for resource in resources}
        self.unhealthy: set[str] = set()
        self.allocated: list[tuple[str, tuple[str, ...]]] = []
        self.started: list[tuple[str, tuple[str, ...]]] = []
        self.failure: Exception | None = None
        self.choice: list[str] | None = None
        self.edits: Edits | None = None
        self.right_by_itself = True

    def lose(self, uuid: str) -> None:
        """Make a GPU unhealthy, with all its ids, and wake the readers."""
        self.unhealthy.add(uuid)
        self.touch()

    def heal(self, uuid: str) -> None:
        """Make the GPU healthy again."""
        self.unhealthy.discard(uuid)
        self.touch()

    def touch(self) -> None:
        """Say that something may have changed."""
        self.revision.advance()

    def listing(self, resource: str) -> list[ListedDevice]:
        return [
            ListedDevice(device, device.device not in self.unhealthy)
            for device in self.resources[resource].ids
        ]

    def preferred(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        self._fail()
        return (
            self.choice
            if self.choice is not None
            else list(dict.fromkeys([*must_include, *reversed(available)]))[:size]
        )

    async def allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        self._fail()
        self.allocated.append((resource, tuple(ids)))
        if self.edits is not None:
            return self.edits
        return Edits(
            environment={
                "NVIDIA_VISIBLE_DEVICES": ",".join(
                    sorted({device.partition("::")[0] for device in ids})
                )
            }
        )

    def may_start_unasked(self, resource: str) -> bool:
        """Every earlier answer is right, unless the test says otherwise."""
        return self.right_by_itself

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        self._fail()
        self.started.append((resource, tuple(ids)))

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure
