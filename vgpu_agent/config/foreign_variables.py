"""Environment variables of the replaced plugins that ask for something this agent does not do.

A DaemonSet that is moved over with its environment keeps those variables. Some mean the same here and are `options`,
the others are ignored. An ignored variable must not remain unnoticed. So each that would have had an effect is named
once at the start, with the remedy. Called by `load` for its warnings. Names and defaults: volcano-vgpu §5.3,
volcano-gpushare §5.
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
        concerns: tells whether it would have had an effect on the families that are on.
        in_force: the value in force, in the variable's own words; the variable is lost only where it differs.
        instead: the remedy, as the end of the sentence.
    """

    name: str
    concerns: Callable[[Settings], bool]
    in_force: Callable[[Settings], tuple[str, ...]]
    instead: str


def _gpushare(settings: Settings) -> bool:
    return settings.families.volcano_gpushare


def _limited(settings: Settings) -> bool:
    return settings.families.volcano_vgpu and settings.volcano_vgpu.isolation == "hami-core"


_VARIABLES: Final = (
    _Variable("HOOK_PATH", _limited, lambda s: (s.hami_core.host_directory,), "set hamiCore.hostDirectory to that, and mount the path"),
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
    """Yield a sentence for each variable that differs from the value in force; an empty variable counts as not set."""
    for variable in _VARIABLES:
        value = environment.get(variable.name, "")
        if not value or not variable.concerns(settings):
            continue
        if _plain(value) not in {_plain(held) for held in variable.in_force(settings)}:
            yield f"environment variable {variable.name}: {shown(value)} has no effect here; {variable.instead}"


def _plain(value: str) -> str:
    """Return one form of equivalent values: ``True`` and ``1`` (Go's ParseBool), a path with and without a trailing slash."""
    word = value.strip().lower()
    if word in _TRUE:
        return "true"
    if word in _FALSE:
        return "false"
    return value.strip().rstrip("/") or "/"
