"""The declaration of the family `aws`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.aws.family import RESOURCE, AwsFamily, AwsOptions
from vgpu_agent.families.aws.settings import FAMILY, SETTINGS
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.spec import BuiltFamily, FamilySpec

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.spec import NodeFacts
    from vgpu_agent.isolation.mps import MpsOptions, MpsView


def _build(settings: Settings, facts: NodeFacts) -> BuiltFamily:
    options = AwsOptions.from_settings(settings, lists=facts.lists, mps_view=facts.mps_view)
    family = AwsFamily(options)
    return (
        BuiltFamily(id_families=(family,))
        if settings.is_on(FAMILY)
        else BuiltFamily(idle=(family,))
    )


def _mps(settings: Settings, view: MpsView) -> MpsOptions:
    return AwsOptions.from_settings(settings, lists=ListOptions(), mps_view=view).paths


SPEC = FamilySpec(SETTINGS, _build, mps=_mps, resource_prefixes=(RESOURCE,))
