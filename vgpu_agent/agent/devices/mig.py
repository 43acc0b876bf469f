"""Divide GPUs into MIG instances, one GPU at a time: check the GPU, run ``nvidia-mig-parted``
(the *tool*, a program of the host), check the result.

This implements `allocation.context.Divider`, by which `allocation` requests a change. `composition`
starts the loop. The changes run in this loop, so a call from the kubelet that ends early does not
interrupt a change.

Before a change is requested, the ledger has made sure that no container holds a part of the GPU.
This module checks the rest: that no other process uses the GPU, that the tool numbers the GPUs as
the driver does, and that the GPU ends up divided as requested.
"""

from __future__ import annotations

import asyncio
import collections
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.errors import MigError
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.gpu import thread as nvml_thread
from vgpu_agent.mig.parted import MigParted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.family import MigLayout
    from vgpu_agent.gpu.source import GpuSource
    from vgpu_agent.mig.layouts import Division
    from vgpu_agent.model import Gpu

_logger = log.get(__name__)

# How long after the tool's success the driver may take to show the new instances.
SETTLE_SECONDS = 10.0
# For how long a change that has failed is not tried again.
RETRY_SECONDS = 60.0
_POLL_SECONDS = 0.1
_INTERNAL_ERROR = "an internal error; the agent's log has the details"


class MigDivider:
    """The divider of GPUs into MIG instances.

    State: the queue of requested changes; and, for each layout (a GPU and the profiles of its
    instances) whose last change failed, the time and the reason. All of it is lost when the agent
    ends. After an interrupted change, the next container that needs the layout has the GPU divided
    again.
    """

    def __init__(
        self, parted: MigParted, gpu_watch: GpuSource, *, call_timeout_seconds: float
    ) -> None:
        """Build the divider.

        Args:
            parted: the runner of the tool.
            gpu_watch: the node's GPUs and the processes on them.
            call_timeout_seconds: how long the driver may take to answer.
        """
        self._parted = parted
        self._gpu_watch = gpu_watch
        self._call_timeout_seconds = call_timeout_seconds
        self._waiting: asyncio.Queue[tuple[MigLayout, Callable[[str], None]]] = asyncio.Queue()
        self._failed: dict[MigLayout, tuple[float, str]] = {}

    @classmethod
    def from_settings(cls, settings: Settings, gpu_watch: GpuSource) -> MigDivider | None:
        """Return the divider for the families that are switched on; None when none needs one."""
        tool = next(
            (
                family.mig_tool(settings)
                for family in FAMILIES
                if family.mig_tool and family.is_on(settings)
            ),
            None,
        )
        if tool is None:
            return None
        parted = MigParted(
            tool.program,
            Path(settings.state_directory) / "mig",  # the tool's configuration is written here
            timeout_seconds=tool.timeout_seconds,
            setting=tool.setting,  # the settings key of the program, for messages
        )
        return cls(parted, gpu_watch, call_timeout_seconds=nvml_thread.CALL_TIMEOUT_SECONDS)

    def divide(self, layout: MigLayout, done: Callable[[str], None]) -> None:
        """Queue a division. ``done`` is called once at its end: with "" when the GPU has the
        layout, else with the reason of the failure.
        """
        self._waiting.put_nowait((layout, done))

    async def run(self) -> None:
        """Make the requested changes until cancelled. After an error the supervisor starts this
        loop again.
        """
        while True:
            layout, done = await self._waiting.get()
            reason = _INTERNAL_ERROR
            try:
                reason = await self._divide(layout)
            finally:
                done(reason)

    async def _divide(self, layout: MigLayout) -> str:
        """Divide the GPU; return why that failed, or an empty text when it has the layout."""
        failed_at, reason = self._failed.get(layout, (0.0, ""))
        wait_seconds = failed_at + RETRY_SECONDS - time.monotonic()
        if reason and wait_seconds > 0:
            return f"{reason} (tried again in {wait_seconds:.0f} s at the earliest)"
        try:
            gpu = await self._idle_gpu(layout)
            if not _is_divided(gpu, layout):
                await self._change(gpu, layout)
        except _NotNowError as err:
            return str(err)
        except MigError as err:
            self._failed[layout] = time.monotonic(), str(err)
            return str(err)
        self._failed.pop(layout, None)
        return ""

    async def _idle_gpu(self, layout: MigLayout) -> Gpu:
        """Return the current state of the GPU, which no process uses.

        Raises:
            _NotNowError: the driver does not answer or does not show the GPU's instances, or a
                process uses the GPU.
        """
        await self._refresh()
        gpu = self._gpu_watch.inventory.value.gpu(layout.gpu)
        usage = next(
            (usage for usage in self._gpu_watch.usage.value if usage.uuid == layout.gpu), None
        )
        if gpu is None or not gpu.present or usage is None:
            raise _NotNowError("the driver does not report its state")
        if gpu.mig_trouble:
            raise _NotNowError(f"its instances cannot be read: {gpu.mig_trouble}")
        if usage.processes:
            pids = ", ".join(str(pid) for pid, _ in usage.processes[:5])
            raise _NotNowError(f"processes without a share of it use it (host pids {pids})")
        return gpu

    async def _change(self, gpu: Gpu, layout: MigLayout) -> None:
        """Run the tool and wait until the driver shows the result.

        Raises:
            MigError: the tool failed, or it and the driver show another division, before or after.
        """
        # Lost GPUs stay in the inventory. The driver counts some of them, which do not answer, and
        # others no more. `export` fails where the tool sees another number of GPUs.
        inventory = self._gpu_watch.inventory.value
        answering = [each for each in inventory.gpus if each.present]
        counted = len(answering) + len(inventory.failures)
        _require_same_view(answering, await self._parted.export(counted))
        _logger.info("mig.applying", gpu=gpu.uuid, index=gpu.index, profiles=list(layout.profiles))
        await self._parted.apply(gpu.index, layout.profiles)
        await self._wait_for_layout(layout)
        found = self._gpu_watch.inventory.value.gpu(gpu.uuid)
        if found is None or not _is_divided(found, layout):
            profiles = [instance.profile for instance in found.mig_instances] if found else []
            raise MigError(
                f"nvidia-mig-parted reported success, but {SETTLE_SECONDS:g} s later "
                f"the driver shows {', '.join(profiles) or 'no instances'}; "
                "see `nvidia-smi -L` and dmesg"
            )

    async def _wait_for_layout(self, layout: MigLayout) -> None:
        """Wait until the driver shows the layout, at most for `SETTLE_SECONDS`."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                await self._refresh()
            except _NotNowError as err:
                _logger.info("mig.waiting", gpu=layout.gpu, reason=str(err))
            gpu = self._gpu_watch.inventory.value.gpu(layout.gpu)
            if time.monotonic() >= deadline or (gpu is not None and _is_divided(gpu, layout)):
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _refresh(self) -> None:
        """Have the GPUs and the processes on them read again, and wait for the result.

        Raises:
            _NotNowError: the driver does not answer in time.
        """
        # when the GPUs were last read, and the processes on them
        read_at, measured_at = self._gpu_watch.read_at, self._gpu_watch.measured_at
        self._gpu_watch.refresh()
        try:
            async with asyncio.timeout(2 * self._call_timeout_seconds):
                while True:
                    # Compare for inequality only: the wall clock may have been set back.
                    if (
                        self._gpu_watch.read_at != read_at
                        and self._gpu_watch.measured_at != measured_at
                    ):
                        return
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise _NotNowError("the NVIDIA driver does not answer") from None


class _NotNowError(MigError):
    """The change was not tried, so a retry needs no waiting time."""


def _is_divided(gpu: Gpu, layout: MigLayout) -> bool:
    """Tell whether the GPU has just the instances of the layout, in any order."""
    return collections.Counter(
        instance.profile for instance in gpu.mig_instances
    ) == collections.Counter(layout.profiles)


def _require_same_view(gpus: Iterable[Gpu], exported: Mapping[int, Division]) -> None:
    """Check that the tool and the driver show the same division of each of ``gpus``.

    ``exported`` is GPU index → division, by the tool. The tool knows GPUs by their index only. If
    it numbered them differently from the driver, it would divide another GPU.

    Raises:
        MigError: they differ.
    """
    for gpu in gpus:
        seen = exported.get(gpu.index)
        ours = collections.Counter(instance.profile for instance in gpu.mig_instances)
        if (
            seen is None
            or seen.enabled != gpu.mig_enabled
            or collections.Counter(seen.instances) != ours
        ):
            raise MigError(
                f"nvidia-mig-parted shows a division of GPU {gpu.index} ({gpu.uuid}) other than "
                "the driver's, so it may number the GPUs differently; compare `nvidia-mig-parted "
                "export` with `nvidia-smi -L`"
            )
