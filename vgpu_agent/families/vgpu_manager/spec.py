"""The declaration of the family `vgpu-manager`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.spec import BuiltFamily, FamilySpec
from vgpu_agent.families.vgpu_manager.control import (
    DECISIVE_VARIABLES,
    LIBRARY_USE,
    control_backend,
    is_limited,
    why_blocked,
)
from vgpu_agent.families.vgpu_manager.family import VgpuManagerFamily
from vgpu_agent.families.vgpu_manager.keys import (
    CUDA_MAJOR_LABEL,
    CUDA_MINOR_LABEL,
    CUDA_VERSION_LABEL,
    DRIVER_VERSION_LABEL,
    Keys,
)
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.families.vgpu_manager.settings import FAMILY, SETTINGS, VgpuManager

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.spec import NodeFacts

_KEYS = Keys()


def _build(settings: Settings, facts: NodeFacts) -> BuiltFamily:
    if not settings.is_on(FAMILY):
        return BuiltFamily()
    vgpu = settings.section(VgpuManager)
    options = VgpuManagerOptions(
        keys=Keys(vgpu.domain),
        split=vgpu.device_split_count,
        cores_scaling=vgpu.device_cores_scaling,
        memory_scaling=vgpu.device_memory_scaling,
        memory_factor=vgpu.device_memory_factor,
        mig_strategy=vgpu.mig_strategy,
        lists=facts.pod_lists,
        message_budget_bytes=settings.kubelet.message_budget_bytes,
    )
    return BuiltFamily(
        by_pod=(VgpuManagerFamily(options, control_backend(settings, options, facts)),),
        blocked=why_blocked(settings, facts),
        uses_library=LIBRARY_USE.backend if is_limited(settings) else "",
    )


SPEC = FamilySpec(
    SETTINGS,
    _build,
    needs_api_server=True,
    resource_prefixes=(_KEYS.number, _KEYS.cores, _KEYS.memory),
    annotations=(*_KEYS.state_annotations, *_KEYS.user_annotations),
    labels=_KEYS.state_labels,
    variables=(
        f"CUDA_MEM_(LIMIT(_\\d{{1,2}})?|RATIO|OVERSOLD)|DISABLE_VGPU_CONTROL|{DECISIVE_VARIABLES}"
    ),
    library=LIBRARY_USE,
    node_annotations=(
        _KEYS.node_config,
        _KEYS.node_register,
        _KEYS.node_topology,
        DRIVER_VERSION_LABEL,
        CUDA_VERSION_LABEL,
        CUDA_MAJOR_LABEL,
        CUDA_MINOR_LABEL,
    ),
    progress=frozenset({_KEYS.predicate_time, _KEYS.real_allocated}),
)
