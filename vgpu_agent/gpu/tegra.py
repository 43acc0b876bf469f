"""The GPU of a Tegra processor (Jetson): one device with the id ``tegra``, about which nothing else
is known.

It has no UUID, no memory of its own, no device node for itself and no NVML that reports its health.
So nothing is read and nothing is watched, as in NVIDIA's plugin (nvidia §4, §10). It never
disappears. Built by `source`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent.concurrency import Latest
from vgpu_agent.gpu import changes
from vgpu_agent.model import INTEGRATED, Gpu, Inventory
from vgpu_agent.status import NvmlState, NvmlStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.config.settings import Gpu as GpuSettings
    from vgpu_agent.gpu.sampling import Sink
    from vgpu_agent.journal import Journal
    from vgpu_agent.model import GpuUsage


# How often the loop sends a heartbeat.
BEAT_SECONDS = 5.0


class IntegratedGpu:
    """The source (`GpuSource`) of an inventory with the one GPU. State: none that changes after
    `start`.
    """

    def __init__(self, journal: Journal, *, beat: Callable[[], None] = lambda: None) -> None:
        self.inventory: Latest[Inventory] = Latest(Inventory())
        self.usage: Latest[tuple[GpuUsage, ...]] = Latest(())
        self.read_at = self.measured_at = 0.0  # nothing is ever read
        self.status = NvmlStatus(state=NvmlState.UNUSED)
        self._journal = journal
        self._beat = beat

    async def start(self) -> None:
        """Put the GPU into the inventory."""
        # `INTEGRATED` is ``tegra``; minor -1: there is no /dev/nvidia<minor>
        found = Inventory(
            version=1, gpus=(Gpu(INTEGRATED, index=0, minor=-1, name=INTEGRATED, memory_mib=0),)
        )
        changes.record(self._journal, self.inventory.value, found)
        self.inventory.publish(found)

    async def run(self) -> None:
        """Report to the supervisor until cancelled; this GPU has nothing to watch."""
        while True:
            self._beat()
            await asyncio.sleep(BEAT_SECONDS)

    def refresh(self) -> None:
        """Do nothing: this GPU has nothing to read."""

    def apply(self, settings: GpuSettings) -> None:
        """Do nothing: no setting applies to this GPU."""

    def sample(self, gpus: Sequence[tuple[int, str]], sink: Sink) -> None:
        """Do nothing: the processes of this GPU are not reported."""

    async def stop(self, timeout_seconds: float) -> bool:
        """Do nothing: nothing is open."""
        del timeout_seconds
        return True
