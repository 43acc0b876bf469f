"""The source of the node's GPUs: the interface for the rest of the agent,
and the choice of a source.

Most nodes have `GpuWatch`, which uses NVML. A Tegra processor has one GPU for which NVML reports
nothing useful, so there `IntegratedGpu` is the source. The choice is made once, by `discovery`,
before the agent is built. Called by `agent`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from vgpu_agent.concurrency import Latest
from vgpu_agent.gpu import changes
from vgpu_agent.gpu.watch import GpuWatch
from vgpu_agent.model import INTEGRATED, Gpu, Inventory
from vgpu_agent.status import NvmlState, NvmlStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.config.settings import Gpu as GpuSettings
    from vgpu_agent.gpu.discovery import Discovery
    from vgpu_agent.gpu.sampling import Sink
    from vgpu_agent.journal import Journal
    from vgpu_agent.model import GpuUsage


# How often the loop of a GPU without NVML sends a heartbeat.
BEAT_SECONDS = 5.0


class GpuSource(Protocol):
    """The node's GPUs as `agent` sees them.

    Attributes:
        inventory: the facts about the GPUs.
        usage: the load of each GPU.
        read_at: unix seconds at which ``inventory`` was read last; 0 if never.
        measured_at: the same for ``usage``.
    """

    inventory: Latest[Inventory]  # readers can wait for a newer one
    usage: Latest[tuple[GpuUsage, ...]]
    read_at: float
    measured_at: float

    @property
    def status(self) -> NvmlStatus:
        """The state of the driver."""

    async def start(self) -> None:
        """Find the GPUs; afterwards ``inventory`` is filled."""

    async def run(self) -> None:
        """Watch the GPUs, until cancelled."""

    def refresh(self) -> None:
        """Read and measure the GPUs at once instead of when it is next due."""

    def apply(self, settings: GpuSettings) -> None:
        """Use other settings from now on."""

    def sample(self, gpus: Sequence[tuple[int, str]], sink: Sink) -> None:
        """Have the use of these GPUs (index and UUID) by each process sampled into ``sink`` from
        now on, instead of what an earlier call asked for.
        """

    async def stop(self, timeout_seconds: float) -> bool:
        """Release the GPUs; return whether that was done in time."""


class IntegratedGpu:
    """The source of the GPU of a Tegra processor (Jetson): one device with the id ``tegra``, about
    which nothing else is known.

    It has no UUID, no memory of its own, no device node for itself and no NVML that reports its
    health. So nothing is read and nothing is watched, as in NVIDIA's plugin (nvidia §4, §10). It
    never disappears.

    State: none that changes after `start`.
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


def source(
    discovery: Discovery,
    settings: GpuSettings,
    journal: Journal,
    *,
    sysfs_root: str,
    beat: Callable[[], None],
) -> GpuSource:
    """Return the source that fits this node; ``beat`` tells the supervisor that its loop runs."""
    if discovery.integrated:
        return IntegratedGpu(journal, beat=beat)
    return GpuWatch(settings, journal, sysfs_root=sysfs_root, beat=beat)
