"""The settings of the family `volcano-gpushare`: its section and its rules. Defaults:
volcano-gpushare §5.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.families import FamilySettings, OfferedName
from vgpu_agent.config.foreign_settings import ForeignVariable
from vgpu_agent.config.settings import Settings

FAMILY = "volcano-gpushare"
SHARE, NUMBER = "share", "number"  # strategies
MEMORY_RESOURCE = "volcano.sh/gpu-memory"
NUMBER_RESOURCE = "volcano.sh/gpu-number"


class VolcanoGpushare(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The family `volcano-gpushare`: advisory sharing, nothing limits a container."""

    strategy: Annotated[
        Literal["share", "number"],
        Meta(
            description=(
                "share: offer memory (`volcano.sh/gpu-memory`). number: offer whole GPUs "
                "(`volcano.sh/gpu-number`)."
            )
        ),
    ] = "share"
    gpu_memory_factor: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description=(
                "MiB in one unit of the memory resource. 0: the smallest power of two that fits, "
                "usually 1."
            ),
        ),
    ] = 1
    unequal_gpus: Annotated[
        Literal["refuse", "minimum"],
        Meta(
            description=(
                "GPUs of different size, which the scheduler cannot tell apart: offer nothing and "
                "say why, or offer each with the size of the smallest."
            )
        ),
    ] = "refuse"
    visible_devices: Annotated[
        Literal["index", "uuid"],
        Meta(
            description=(
                "How NVIDIA_VISIBLE_DEVICES names a GPU. index is what the replaced plugin does; "
                "uuid survives renumbering."
            )
        ),
    ] = "index"


def _names(settings: Settings) -> Iterator[OfferedName]:
    """Yield the names of both resources, whichever is offered: the other one is written into the
    Node's capacity.
    """
    for strategy, name in ((SHARE, MEMORY_RESOURCE), (NUMBER, NUMBER_RESOURCE)):
        # not offered, but written into the Node's capacity
        counted = strategy != settings.section(VolcanoGpushare).strategy
        yield OfferedName(name, FAMILY, "volcanoGpushare.strategy", counted=counted)


def _strategy(settings: Settings) -> str:
    return settings.section(VolcanoGpushare).strategy


def _factor(settings: Settings) -> str:
    return str(settings.section(VolcanoGpushare).gpu_memory_factor)


SETTINGS = FamilySettings(
    FAMILY,
    "`volcano.sh/gpu-memory` or `volcano.sh/gpu-number`, as Volcano's own device plugin offers "
    "them.",
    sections={"volcano_gpushare": VolcanoGpushare},
    # variables of the replaced plugin: not followed, and reported where they differ from the value
    # in force, which the function returns
    ignored_variables=(
        ForeignVariable("GPU_STRATEGY", _strategy, "set volcanoGpushare.strategy to that"),
        ForeignVariable(
            "GPU_MEMORY_FACTOR", _factor, "set volcanoGpushare.gpuMemoryFactor to that"
        ),
    ),
    names=_names,
)
