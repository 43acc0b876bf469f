"""The choice between NVML and the only GPU of a Tegra processor (``gpu.discovery``).

With ``auto`` the order is that of NVIDIA's plugin (nvidia §9): the Windows Subsystem for Linux has
NVML; a Tegra processor without NVML, or whose NVML lists integrated GPUs only, has the one GPU
``tegra``; everything else has NVML. To decide this, NVML is only called on a Tegra processor, so
other nodes start without that call. Called by `agent.composition` before the agent is built. The
answer holds for as long as the process lives.
"""

from __future__ import annotations

import asyncio
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import log
from vgpu_agent.errors import AgentError, DriverMissingError
from vgpu_agent.gpu import thread as nvml_thread
from vgpu_agent.gpu.library import SONAME
from vgpu_agent.gpu.nvml import Nvml
from vgpu_agent.gpu.session import Session
from vgpu_agent.gpu.thread import Listener, NvmlThread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from vgpu_agent.config.settings import Gpu as GpuSettings

    Names = Callable[[GpuSettings], Awaitable[tuple[str, ...] | None]]

_logger = log.get(__name__)

_RELEASE = "etc/nv_tegra_release"  # of NVIDIA's Linux for Tegra, below the driver root
# the name of the processor's series, from every kernel on a Tegra processor; below sysfs
_FAMILY = "devices/soc0/family"
_FAMILY_BEGINS = "tegra"
_FAMILY_LIMIT = 64  # characters
_WSL_NODE = "dev/dxg"  # only the Windows Subsystem for Linux has it
# in the name that NVML has for a GPU of the Tegra's own kernel module, as in "Orin (nvgpu)"
_INTEGRATED_NAME = "(nvgpu)"


class Discovery(msgspec.Struct, frozen=True):
    """The way in which GPUs are found.

    Attributes:
        integrated: the node's GPU is that of a Tegra processor; False: NVML lists the GPUs.
        reason: why; empty on a node without signs of a Tegra processor.
        doubt: a sign that the choice is wrong, with the remedy; empty when there is none.
    """

    integrated: bool = False
    reason: str = ""
    doubt: str = ""


BY_NVML = Discovery()


async def discover(
    settings: GpuSettings, *, sysfs_root: str, simulated: bool, names: Names | None = None
) -> Discovery:
    """Discover, and log anything unusual. Never raises.

    Args:
        settings: where to look, and the operator's choice.
        sysfs_root: where sysfs is mounted.
        simulated: the agent runs on simulated GPUs, which have an NVML.
        names: asks NVML for the names of all GPUs, and returns None where there is no library; by
            default `names_by_nvml`.
    """
    if simulated or settings.discovery == "nvml":
        return BY_NVML
    sign = await asyncio.to_thread(_sign_of_tegra, settings, sysfs_root)
    if settings.discovery == "tegra":
        found = Discovery(
            integrated=True,
            reason="gpu.discovery is tegra",
            doubt="" if sign else _no_sign(settings, sysfs_root),
        )
    elif sign:
        found = await _on_tegra(
            sign, settings, names or functools.partial(names_by_nvml, sysfs_root=sysfs_root)
        )
    else:
        return BY_NVML
    _logger.info("gpu.discovery", integrated=found.integrated, reason=found.reason)
    if found.doubt:
        _logger.warning("gpu.discovery_doubtful", problem=found.doubt)
    return found


async def _on_tegra(sign: str, settings: GpuSettings, names: Names) -> Discovery:
    """Decide ``auto`` where something looks like a Tegra processor."""
    windows = settings.device_node_root / _WSL_NODE
    if await asyncio.to_thread(os.path.exists, windows):
        return Discovery(reason=f"there is {windows}, so this is a Windows subsystem")
    try:
        listed = await names(settings)
    except AgentError as err:
        doubt = (
            f"{sign}, but its NVML does not list GPUs: {err}; set gpu.discovery: tegra to offer "
            "the GPU of the processor all the same"
        )
        return Discovery(reason=f"{sign} and there is {SONAME}", doubt=doubt)
    if listed is None:
        return Discovery(integrated=True, reason=f"{sign} and there is no {SONAME}")
    if listed and all(_INTEGRATED_NAME in name for name in listed):
        return Discovery(
            integrated=True,
            reason=f"{sign} and NVML lists integrated GPUs only ({', '.join(listed)})",
        )
    return Discovery(reason=f"{sign}, but NVML lists {', '.join(listed) or 'no GPU'}")


async def names_by_nvml(settings: GpuSettings, *, sysfs_root: str) -> tuple[str, ...] | None:
    """Return the product names of all GPUs, None where there is no library. NVML is asked in a
    thread of its own, because a driver may hang.

    Raises:
        AgentError: there is a library, and the driver behind it does not answer.
    """
    nvml = Nvml()
    session = Session(
        nvml,
        driver_root=Path(settings.driver_root),
        sysfs_root=Path(sysfs_root),
        proc_root=Path(settings.proc_root),
        report=_ignore,
    )
    thread = NvmlThread(
        nvml, session, Listener(event=_ignore, wait_failed=_ignore, hung=_ignore, answering=_ignore)
    )
    thread.start()
    try:
        return await thread.call("look for integrated GPUs", session.names)
    except DriverMissingError:
        if nvml.library:
            raise
        return None
    finally:
        thread.stop()
        await thread.stopped(nvml_thread.CALL_TIMEOUT_SECONDS)


def _sign_of_tegra(settings: GpuSettings, sysfs_root: str) -> str:
    """Describe the sign of a Tegra processor; empty when there is none. Blocks."""
    release, family = _places(settings, sysfs_root)
    if os.path.isfile(release):  # Path.is_file raises where the root may not be read
        return f"there is {release}"
    try:
        with family.open(errors="replace") as file:
            text = file.read(_FAMILY_LIMIT).strip()
    except OSError:
        return ""
    return f"{family} says {text}" if text.lower().startswith(_FAMILY_BEGINS) else ""


def _no_sign(settings: GpuSettings, sysfs_root: str) -> str:
    release, family = _places(settings, sysfs_root)
    return (
        f"gpu.discovery is tegra, but there is no {release} and {family} does not say Tegra; "
        "containers would find no GPU here, so set gpu.discovery: auto, unless the node "
        "has a Tegra processor and the agent cannot see its files (gpu.driverRoot, /sys)"
    )


def _places(settings: GpuSettings, sysfs_root: str) -> tuple[Path, Path]:
    """The two files that show a Tegra processor: of its Linux, and of its kernel."""
    return Path(settings.driver_root) / _RELEASE, Path(sysfs_root) / _FAMILY


def _ignore(*_: object) -> None:
    """Ignore the thread's reports, which do not matter before the agent runs."""
