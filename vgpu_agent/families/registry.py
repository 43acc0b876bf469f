"""The families of this agent, in the order in which they are offered:
of two that conflict, the first wins.

Import it before a configuration is read: that makes the families' sections and flags known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.config import schema
from vgpu_agent.families.aws.spec import SPEC as AWS
from vgpu_agent.families.nvidia.spec import SPEC as NVIDIA
from vgpu_agent.families.vgpu_manager.spec import SPEC as VGPU_MANAGER
from vgpu_agent.families.volcano_gpushare.spec import SPEC as VOLCANO_GPUSHARE
from vgpu_agent.families.volcano_vgpu.spec import SPEC as VOLCANO_VGPU

if TYPE_CHECKING:
    from vgpu_agent.families.spec import FamilySpec

FAMILIES: list[FamilySpec] = [NVIDIA, AWS, VOLCANO_VGPU, VOLCANO_GPUSHARE, VGPU_MANAGER]

for _family in FAMILIES:
    schema.declare(_family.settings)


def register(family: FamilySpec) -> None:
    """Add a family that does not come with this program.

    Call it before any other module of the program is imported: the decoder of pods, for one, is
    made from the families once.

    Raises:
        ValueError: there is a family of that name.
    """
    if any(family.name == other.name for other in FAMILIES):
        raise ValueError(f"there is a family {family.name} already")
    schema.declare(family.settings)
    FAMILIES.append(family)
