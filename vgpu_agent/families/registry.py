"""The families of this agent, in the order in which they are offered: of two that are in conflict, the first is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.aws.spec import SPEC as AWS
from vgpu_agent.families.nvidia.spec import SPEC as NVIDIA
from vgpu_agent.families.volcano_gpushare.spec import SPEC as VOLCANO_GPUSHARE
from vgpu_agent.families.volcano_vgpu.spec import SPEC as VOLCANO_VGPU

if TYPE_CHECKING:
    from vgpu_agent.families.spec import FamilySpec

FAMILIES: tuple[FamilySpec, ...] = (NVIDIA, AWS, VOLCANO_VGPU, VOLCANO_GPUSHARE)
