"""Divide GPUs one after the other: the checks before, the host tool,
and what the driver must show afterwards.

The loop behind `allocation.dependencies.Divider`. `composition` starts it. It owns the changes, so
that a call of the kubelet's that ends early ends none of them. By then the ledger has kept the
whole GPU free. This module checks what the ledger cannot know: whether other processes than our
containers work on the GPU, whether the tool numbers the GPUs as the driver does, and whether the
GPU was divided as requested.
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
    from collections.abc import Callable, Mapping

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.family import MigLayout
    from vgpu_agent.families.spec import MigTool
    from vgpu_agent.gpu.source import GpuSource
    from vgpu_agent.mig.layouts import Division
    from vgpu_agent.model import Gpu, Inventory

_logger = log.get(__name__)

_PAUSE_SECONDS = 0.1  # between two looks at whether the driver has answered
_OWN_ERROR = "an internal error; the agent's log has the details"


class MigDivider:
    """The divider of GPUs.

    State: the changes that wait for their turn, and which GPU's last change failed when. A change
    that was cut short by the end of the agent is forgotten: the next container that needs it finds
    the GPU in that state.
    """

    def __init__(
        self, parted: MigParted, watch: GpuSource, tool: MigTool, *, call_timeout_seconds: float
    ) -> None:
        """Build it.

        Args:
            parted: runs it.
            watch: shows the GPUs.
            tool: how long to wait for what.
            call_timeout_seconds: how long the driver may take to answer.
        """
        self._parted = parted
        self._watch = watch
        self._tool = tool
        self._call_timeout_seconds = call_timeout_seconds
        self._waiting: asyncio.Queue[tuple[MigLayout, Callable[[str], None]]] = asyncio.Queue()
        self._failed: dict[MigLayout, tuple[float, str]] = {}

    @classmethod
    def from_settings(cls, settings: Settings, watch: GpuSource) -> MigDivider | None:
        """Return the divider that the configuration asks for; None where no family needs one."""
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
            Path(settings.state_directory) / "mig",
            timeout_seconds=tool.timeout_seconds,
            setting=tool.setting,
        )
        return cls(parted, watch, tool, call_timeout_seconds=nvml_thread.CALL_TIMEOUT_SECONDS)

    def divide(self, layout: MigLayout, done: Callable[[str], None]) -> None:
        """See `allocation.dependencies.Divider`."""
        self._waiting.put_nowait((layout, done))

    async def run(self) -> None:
        """Make the requested changes until cancelled;
        a loop for the supervisor, which may start it again.
        """
        while True:
            layout, done = await self._waiting.get()
            reason = _OWN_ERROR
            try:
                reason = await self._outcome(layout)
            finally:
                done(reason)

    async def _outcome(self, layout: MigLayout) -> str:
        """Divide the GPU; return why that failed, empty when it is divided so."""
        failed_at, before = self._failed.get(layout, (0.0, ""))
        left = failed_at + self._tool.retry_seconds - time.monotonic()
        if before and left > 0:
            return f"{before} (tried again in {left:.0f} s at the earliest)"
        try:
            gpu = await self._idle(layout)
            if not _is_divided(gpu, layout):
                await self._change(gpu, layout)
        except _NotNowError as err:
            return str(err)
        except MigError as err:
            self._failed[layout] = time.monotonic(), str(err)
            return str(err)
        self._failed.pop(layout, None)
        return ""

    async def _idle(self, layout: MigLayout) -> Gpu:
        """Return the GPU as the driver shows it now.

        Raises:
            _NotNowError: it does not answer or hides its instances, or a process works on it.
        """
        await self._look()
        gpu = self._watch.inventory.value.gpu(layout.gpu)
        usage = next((usage for usage in self._watch.usage.value if usage.uuid == layout.gpu), None)
        if gpu is None or not gpu.present or usage is None:
            raise _NotNowError("the driver does not report its state")
        if gpu.mig_trouble:
            raise _NotNowError(f"its instances cannot be read: {gpu.mig_trouble}")
        if usage.processes:
            pids = ", ".join(str(pid) for pid, _ in usage.processes[:5])
            raise _NotNowError(f"processes without a share of it use it (host pids {pids})")
        return gpu

    async def _change(self, gpu: Gpu, layout: MigLayout) -> None:
        """Have the tool do it.

        Raises:
            MigError: it failed, or the driver shows another division afterwards.
        """
        inventory = self._watch.inventory.value
        _require_same_sight(inventory, await self._parted.export(len(inventory.gpus)))
        _logger.info("mig.applying", gpu=gpu.uuid, index=gpu.index, profiles=list(layout.profiles))
        await self._parted.apply(gpu.index, layout.profiles)
        await self._settled(layout)
        found = self._watch.inventory.value.gpu(gpu.uuid)
        if found is None or not _is_divided(found, layout):
            shown = ", ".join(instance.profile for instance in found.mig_instances) if found else ""
            raise MigError(
                f"nvidia-mig-parted reported success, but {self._tool.settle_seconds:g} s later "
                f"the driver shows {shown or 'no instances'}; see `nvidia-smi -L` and dmesg"
            )

    async def _settled(self, layout: MigLayout) -> None:
        """Look at the GPUs until the change is seen, or for as long as the settings say."""
        until = time.monotonic() + self._tool.settle_seconds
        while True:
            try:
                await self._look()
            except _NotNowError as err:
                _logger.info("mig.waiting", gpu=layout.gpu, reason=str(err))
            gpu = self._watch.inventory.value.gpu(layout.gpu)
            if time.monotonic() >= until or (gpu is not None and _is_divided(gpu, layout)):
                return
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _look(self) -> None:
        """Wait until the driver has been asked for GPUs and processes after now.

        Raises:
            _NotNowError: it does not answer in time.
        """
        read_at, measured_at = self._watch.read_at, self._watch.measured_at
        self._watch.look_now()
        try:
            async with asyncio.timeout(2 * self._call_timeout_seconds):
                while True:
                    # Not compared with the time of asking: the wall clock may be set back between
                    # the two.
                    if self._watch.read_at != read_at and self._watch.measured_at != measured_at:
                        return
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError:
            raise _NotNowError("the NVIDIA driver does not answer") from None


class _NotNowError(MigError):
    """Nothing was tried, so it may be tried again at any time."""


def _is_divided(gpu: Gpu, layout: MigLayout) -> bool:
    return collections.Counter(
        instance.profile for instance in gpu.mig_instances
    ) == collections.Counter(layout.profiles)


def _require_same_sight(inventory: Inventory, exported: Mapping[int, Division]) -> None:
    """The tool knows GPUs by their index only; it must mean the same by it as the driver does.

    Raises:
        MigError: it does not.
    """
    for gpu in inventory.gpus:
        seen = exported.get(gpu.index)
        ours = collections.Counter(instance.profile for instance in gpu.mig_instances)
        if (
            seen is None
            or seen.enabled != gpu.mig_enabled
            or collections.Counter(seen.instances) != ours
        ):
            raise MigError(
                f"nvidia-mig-parted shows another division of GPU {gpu.index} ({gpu.uuid}) than "
                "the driver, so it may number the GPUs differently; compare `nvidia-mig-parted "
                "export` with `nvidia-smi -L`"
            )
