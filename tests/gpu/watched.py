"""A watch that runs on a simulated node with times that suit a test,
and ways to wait for what it finds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from tests import constants
from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.config.settings import Gpu as GpuSettings
from vgpu_agent.config.settings import Recovery
from vgpu_agent.gpu.watch import GpuWatch
from vgpu_agent.journal import Entry, Journal
from vgpu_agent.model import Gpu, Inventory
from vgpu_agent.sim.state import SimulatedNode

# For tests of hangs. Elsewhere a machine that stands still for half a second must not look like a
# driver that does.
SOON_HUNG = {constants.NVML_CALL_TIMEOUT: 0.4, constants.GPU_HUNG_UNHEALTHY: 0.5}
QUICK = {
    constants.GPU_POLL: 0.1,
    constants.GPU_INIT_RETRY: 0.1,
    constants.GPU_HUNG_UNHEALTHY: PATIENCE_SECONDS,
    constants.NVML_CALL_TIMEOUT: PATIENCE_SECONDS,
    constants.NVML_EVENT_WAIT: 0.05,
}


class Watched:
    """A running watch, its journal, and ways to wait for it."""

    def __init__(self, watch: GpuWatch, journal: Journal) -> None:
        self.watch, self.journal = watch, journal

    async def until(self, condition: Callable[[Inventory], bool]) -> Inventory:
        """The first inventory that fulfils the condition."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for inventory in self.watch.inventory.changes():
                if condition(inventory):
                    return inventory
        raise AssertionError("changes() never ends")

    def gpu(self, uuid: str) -> Gpu:
        """The GPU as it is now."""
        return found(self.watch.inventory.value, uuid)

    async def unhealthy(self, uuid: str) -> Gpu:
        """Wait until the GPU is Unhealthy."""
        return found(await self.until(lambda inventory: not found(inventory, uuid).health.ok), uuid)

    async def healthy(self, uuid: str) -> Gpu:
        """Wait until the GPU is Healthy."""
        return found(await self.until(lambda inventory: found(inventory, uuid).health.ok), uuid)

    async def recorded(self, event: str) -> Entry:
        """Wait for the journal to hold an entry of that name; answers the last one."""
        await eventually(lambda: self.count(event) > 0)
        return [entry for entry in self.journal.entries if entry.event == event][-1]

    def count(self, event: str) -> int:
        """Return the number of journal entries with that name."""
        return sum(entry.event == event for entry in self.journal.entries)

    async def polls(self, number: int) -> None:
        """Let that many polls go by."""
        for _ in range(number):
            before = self.watch._polled_at
            # a lambda's default has no type
            await eventually(lambda before=before: self.watch._polled_at != before)  # type: ignore[misc]  # mypy does not infer a lambda with a default


def found(inventory: Inventory, uuid: str) -> Gpu:
    """The GPU of that UUID, which must be there."""
    gpu = inventory.gpu(uuid)
    assert gpu is not None
    return gpu


def settings(
    node: SimulatedNode, *, quiet: float = 0.2, mode: Any = "auto", **changes: Any
) -> GpuSettings:
    """Times short enough for a test; ``changes`` are keys of `GpuSettings`."""
    values: dict[str, Any] = {
        "proc_root": str(node.directory / "proc"),
        "usage_seconds": 0.1,
        "recovery": Recovery(mode=mode, quiet_seconds=quiet),
    }
    return GpuSettings(**{**values, **changes})


def sysfs_of(node: SimulatedNode) -> str:
    """The root of the simulated node's sysfs."""
    return str(node.directory / "sys")


@contextlib.asynccontextmanager
async def watching(
    node: SimulatedNode, others: Mapping[str, float] = QUICK, **changes: Any
) -> AsyncIterator[Watched]:
    """A started watch whose loop runs, with other values of constants; at the end the driver is
    closed, so that the next test opens its own.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        constants.use(monkeypatch, {**QUICK, **others})
        async with _watching(node, **changes) as watched:
            yield watched


@contextlib.asynccontextmanager
async def _watching(
    node: SimulatedNode, *, sysfs_root: str = "", **changes: Any
) -> AsyncIterator[Watched]:
    journal = Journal()
    root = sysfs_root or sysfs_of(node)
    watch = GpuWatch(settings(node, **changes), journal, sysfs_root=root)
    await watch.start()
    async with asyncio.TaskGroup() as group:
        loop = group.create_task(watch.run())
        try:
            yield Watched(watch, journal)
        finally:
            loop.cancel()
            assert await watch.stop(PATIENCE_SECONDS)
