"""The declaration of the family `volcano-gpushare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.spec import BuiltFamily, FamilySpec
from vgpu_agent.families.volcano_gpushare.family import (
    GPU_ASSIGNED,
    GPU_INDEX,
    PREDICATE_TIME,
    VolcanoGpushareFamily,
    VolcanoGpushareOptions,
)
from vgpu_agent.families.volcano_gpushare.settings import (
    FAMILY,
    MEMORY_RESOURCE,
    NUMBER_RESOURCE,
    SETTINGS,
)

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.spec import NodeFacts


def _build(settings: Settings, facts: NodeFacts) -> BuiltFamily:
    if not settings.is_on(FAMILY):
        return BuiltFamily()
    return BuiltFamily(
        # `pod_lists`: how containers get their devices in families whose pods decide
        pod_families=(
            VolcanoGpushareFamily(
                VolcanoGpushareOptions.from_settings(settings, lists=facts.pod_lists)
            ),
        )
    )


SPEC = FamilySpec(
    SETTINGS,
    _build,
    needs_api_server=True,
    resource_prefixes=(MEMORY_RESOURCE, NUMBER_RESOURCE),
    annotations=(GPU_INDEX, PREDICATE_TIME, GPU_ASSIGNED),
    # a pattern: the variables that the family sets in containers
    variables="VOLCANO_GPU_(ALLOCATED|MEMORY_TOTAL)",
    # only shows how far a start has come; written after the annotations that schedulers count by
    progress_annotations=frozenset({GPU_ASSIGNED}),
    # removed when a pod is recreated
    stale_keys=lambda _: (GPU_INDEX, PREDICATE_TIME, GPU_ASSIGNED),
)
