"""The declaration of the family `nvidia`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.offers import FAMILY
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.families.spec import BuiltFamily, FamilySpec

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.spec import NodeFacts


def _is_on(settings: Settings) -> bool:
    return settings.families.nvidia


def _build(settings: Settings, facts: NodeFacts) -> BuiltFamily:
    family = NvidiaFamily(NvidiaOptions.from_settings(settings, lists=facts.lists, wsl=facts.wsl))
    return BuiltFamily(by_ids=(family,)) if _is_on(settings) else BuiltFamily(idle=(family,))


SPEC = FamilySpec(FAMILY, _is_on, _build)
