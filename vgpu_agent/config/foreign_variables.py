"""Environment variables of the plugins that are replaced, where they say something that this agent does not do because of them.

A DaemonSet that is moved over with its environment keeps those variables; some mean the same here and are `options`, the others are
ignored. Ignoring is right only as long as nobody has to find out by himself, so each that would have had an effect is named once at the
start, with what to do instead. Called by `load` for its warnings. Names and defaults: volcano-vgpu contract §5.3, volcano-gpushare
contract §5.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from vgpu_agent.config.problems import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vgpu_agent.config.settings import Settings

_TRUE, _FALSE = frozenset({"1", "t", "true"}), frozenset({"0", "f", "false"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Variable:
    """One variable that is not followed.

    Attributes:
        concerns: whether it would have meant anything for the families that are on.
        in_force: what holds here, in the variable's own words; the variable is lost only where it says something else.
        instead: what to do, as the end of the sentence.
    """

    name: str
    concerns: Callable[[Settings], bool]
    in_force: Callable[[Settings], tuple[str, ...]]
    instead: str


def _vgpu(settings: Settings) -> bool:
    return settings.families.volcano_vgpu


def _gpushare(settings: Settings) -> bool:
    return settings.families.volcano_gpushare


def _always(settings: Settings) -> bool:
    del settings
    return True


def _limited(settings: Settings) -> bool:
    return settings.families.volcano_vgpu and settings.volcano_vgpu.isolation == "hami-core"


def _nothing_but(*values: str) -> Callable[[Settings], tuple[str, ...]]:
    return lambda _: values


_NOT_YET = "this version has nothing like it; keep the plugin on nodes that need it, or take the variable out"
_VARIABLES: Final = (
    _Variable("GDRCOPY_ENABLED", _vgpu, lambda s: (str(s.volcano_vgpu.gdrcopy_enabled),), "set volcanoVgpu.gdrcopyEnabled to that"),
    _Variable("GDS_ENABLED", _vgpu, lambda s: (str(s.volcano_vgpu.gds_enabled),), "set volcanoVgpu.gdsEnabled to that"),
    _Variable("MOFED_ENABLED", _vgpu, lambda s: (str(s.volcano_vgpu.mofed_enabled),), "set volcanoVgpu.mofedEnabled to that"),
    _Variable("NVIDIA_DRIVER_ROOT", _always, lambda s: (s.gpu.driver_root,), "set gpu.driverRoot to that, and mount the path"),
    _Variable(
        "NVIDIA_DEV_ROOT", _always, lambda s: (str(s.gpu.device_node_root), s.gpu.dev_root), "set gpu.devRoot to that, and mount the path"
    ),
    _Variable("HOOK_PATH", _limited, lambda s: (s.hami_core.host_directory,), "set hamiCore.hostDirectory to that, and mount the path"),
    _Variable(
        "KUBELET_SOCKET", _always, lambda s: (str(s.kubelet.kubelet_socket),), "set kubelet.directory to the kubelet's root directory"
    ),
    _Variable(
        "CONFIG_FILE", _always, _nothing_but(), "write what it says into the file of --config; vgpu-agent config example shows the keys"
    ),
    _Variable("DEVICE_LIST_STRATEGY", _always, _nothing_but("envvar"), _NOT_YET),
    _Variable("MIG_STRATEGY", _always, _nothing_but("none"), _NOT_YET),
    _Variable("DEVICE_DISCOVERY_STRATEGY", _always, _nothing_but("auto", "nvml"), _NOT_YET),
    _Variable("IMEX_CHANNEL_IDS", _always, _nothing_but(), _NOT_YET),
    _Variable("IMEX_REQUIRED", _always, _nothing_but("false"), _NOT_YET),
    _Variable("GPU_STRATEGY", _gpushare, lambda s: (s.volcano_gpushare.strategy,), "set volcanoGpushare.strategy to that"),
    _Variable(
        "GPU_MEMORY_FACTOR",
        _gpushare,
        lambda s: (str(s.volcano_gpushare.gpu_memory_factor),),
        "set volcanoGpushare.gpuMemoryFactor to that",
    ),
)
NAMES: Final = frozenset(variable.name for variable in _VARIABLES)


def without_effect(settings: Settings, environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable that says something else than what holds here; an empty one counts as not set."""
    for variable in _VARIABLES:
        value = environment.get(variable.name, "")
        if not value or not variable.concerns(settings):
            continue
        if _plain(value) not in {_plain(held) for held in variable.in_force(settings)}:
            yield f"environment variable {variable.name}: {shown(value)} has no effect here; {variable.instead}"


def _plain(value: str) -> str:
    """One form of what means the same: ``True`` and ``1`` (Go's ParseBool), a path with and without a slash behind it."""
    word = value.strip().lower()
    if word in _TRUE:
        return "true"
    if word in _FALSE:
        return "false"
    return value.strip().rstrip("/") or "/"
