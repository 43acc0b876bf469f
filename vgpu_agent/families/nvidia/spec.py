"""The declaration of the family `nvidia`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.feature_labels import TIMESTAMP, feature_labels
from vgpu_agent.families.nvidia.options import DOMAIN, NvidiaOptions
from vgpu_agent.families.nvidia.settings import FAMILY, SETTINGS
from vgpu_agent.families.spec import BuiltFamily, FamilySpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.spec import NodeFacts
    from vgpu_agent.isolation.mps import MpsOptions, MpsView
    from vgpu_agent.model import Inventory


def _build(settings: Settings, facts: NodeFacts) -> BuiltFamily:
    options = NvidiaOptions.from_settings(
        settings, lists=facts.lists, wsl=facts.wsl, mps_view=facts.mps_view
    )
    family, is_on = NvidiaFamily(options), settings.is_on(FAMILY)

    def labels(inventory: Inventory) -> Mapping[str, str] | None:
        return feature_labels(options, family.resources(inventory) if is_on else (), inventory)

    return BuiltFamily(
        id_families=(family,) if is_on else (),
        idle=() if is_on else (family,),
        node_labels=labels if settings.node_status.feature_labels else None,
    )


def _mps(settings: Settings, view: MpsView) -> MpsOptions:
    return NvidiaOptions.from_settings(settings, lists=ListOptions(), mps_view=view).mps


SPEC = FamilySpec(
    SETTINGS,
    _build,
    mps=_mps,
    resource_prefixes=(DOMAIN,),
    foreign_label=TIMESTAMP,  # shows that GPU Feature Discovery writes its labels itself
)
