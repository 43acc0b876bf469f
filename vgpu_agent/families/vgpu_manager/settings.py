"""The settings of the family `vgpu-manager`: its section and its rules. Defaults: vgpu-manager
§1.2, §1.7.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.families import FamilySettings, OfferedName
from vgpu_agent.config.settings import Settings
from vgpu_agent.families.vgpu_manager.keys import DEFAULT_DOMAIN, Keys

FAMILY = "vgpu-manager"


class VgpuManager(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The family `vgpu-manager`."""

    domain: Annotated[
        str,
        Meta(
            pattern=r"\A[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?\Z",
            extra={"expected": "a DNS name"},
            description="The domain of its resources, annotations and labels.",
        ),
    ] = DEFAULT_DOMAIN
    device_split_count: Annotated[
        int, Meta(ge=1, le=65536, description="How many containers may share one GPU.")
    ] = 10
    device_cores_scaling: Annotated[
        float,
        Meta(ge=0.01, le=100, description="How many times a GPU's compute is offered."),
    ] = 1.0
    device_memory_scaling: Annotated[
        float,
        Meta(
            ge=0.01,
            le=100,
            description=(
                "How many times a GPU's memory is offered. Above 1, containers spill into the "
                "host's memory."
            ),
        ),
    ] = 1.0
    device_memory_factor: Annotated[
        int, Meta(ge=1, le=65536, description="MiB in one unit of the memory resource.")
    ] = 1
    mig_strategy: Annotated[
        Literal["none", "single", "mixed"],
        Meta(description="Which existing MIG instances are offered, as `mig-<profile>`."),
    ] = "mixed"


def _names(settings: Settings) -> Iterator[OfferedName]:
    keys = Keys(settings.section(VgpuManager).domain)
    for name in (keys.number, keys.cores, keys.memory):
        yield OfferedName(name, FAMILY, "vgpuManager.domain")


SETTINGS = FamilySettings(
    FAMILY,
    "`nvidia.com/vgpu-number`, `-cores` and `-memory`, as vgpu-manager offers them.",
    sections={"vgpu_manager": VgpuManager},
    names=_names,
)
