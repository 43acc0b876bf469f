"""The declaration of the family `vgpu-manager`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.config.types import DEVICE_MODES
from vgpu_agent.families.mig_instances import NONE
from vgpu_agent.families.plugin_files import PluginFile
from vgpu_agent.families.spec import (
    BuiltFamily,
    ExporterOptions,
    FamilyExporter,
    FamilySpec,
    SchedulingPart,
    Vocabulary,
)
from vgpu_agent.families.vgpu_manager import node_config
from vgpu_agent.families.vgpu_manager.control import (
    DECISIVE_VARIABLES,
    LIBRARY_USE,
    control_backend,
    is_limited,
    library_limits,
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
from vgpu_agent.families.vgpu_manager.metrics import METRICS
from vgpu_agent.families.vgpu_manager.mig import MIG_FAMILY, VgpuManagerMigFamily
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.families.vgpu_manager.requests import DISABLED, OVERSOLD
from vgpu_agent.families.vgpu_manager.settings import (
    FAMILY,
    SECTION,
    SETTINGS,
    VgpuManager,
    static_mig_strategy,
)

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.admission import AdmissionFamily, AdmissionOptions
    from vgpu_agent.families.device_lists import ListOptions
    from vgpu_agent.families.scheduling import SchedulingFamily, SchedulingOptions
    from vgpu_agent.families.spec import NodeFacts


def _build(settings: Settings, facts: NodeFacts) -> BuiltFamily:
    section = settings.section(VgpuManager)  # without the node configuration
    if not settings.is_on(FAMILY):
        # `idle`: the part that is not offered, whose ids containers may still hold
        return BuiltFamily(idle=(_instances(settings, section, facts.lists),))
    config = node_config.in_force(settings, facts)
    vgpu, plugin = config.applied_to(section), settings.plugin
    # the reason, to be reported, why existing MIG instances are not offered as the settings ask
    _, why_not = static_mig_strategy(settings, vgpu)
    # errors, and keys of the file that have no effect
    problems = [*config.problems, *config.notes]
    # values that the settings of the whole agent do not allow
    problems += [f"{section.node_config_file}: {problem}" for problem in config.ruled_out(plugin)]
    problems += [f"{SECTION}.migStrategy: {why_not}"] if why_not else []
    # `pod_lists`: how containers get their devices where pods decide; `lists`: where ids name them.
    # Where each grant has a CDI spec of its own, no NVIDIA runtime is needed, and a list strategy
    # in the node configuration must not change that.
    own_specs = settings.cdi.inline and facts.late
    lists = facts.pod_lists if own_specs else config.lists(facts.pod_lists, plugin)
    options = VgpuManagerOptions.from_settings(settings, vgpu, lists=lists)
    instances = _instances(settings, vgpu, config.lists(facts.lists, plugin))
    offers_instances = options.mig_strategy != NONE
    control = control_backend(settings, options, facts)
    return BuiltFamily(
        id_families=(instances,) if offers_instances else (),
        pod_families=(VgpuManagerFamily(options, control),),
        # Existing instances that are not offered may still be held.
        idle=() if offers_instances else (instances,),
        problems=tuple(problems),
        in_force=msgspec.structs.asdict(vgpu),
        origins=dict.fromkeys(config.own, node_config.FILE),  # attributes that the file sets
        # why no pod may start now, e.g. because the library that limits its containers is missing
        blocked=why_blocked(settings, facts),
        uses_library=LIBRARY_USE.backend if is_limited(settings) else "",
        services=control.services,  # of the agent, on which that library relies
        limits=library_limits(settings, options),
    )


def _instances(settings: Settings, vgpu: VgpuManager, lists: ListOptions) -> VgpuManagerMigFamily:
    """Build the part that offers existing MIG instances; ``lists``: how containers get them."""
    return VgpuManagerMigFamily(
        VgpuManagerOptions.from_settings(settings, vgpu, lists=lists), lists
    )


def _vocabulary(keys: Keys) -> Vocabulary:
    return Vocabulary(
        resource_prefixes=(keys.number, keys.cores, keys.memory, keys.mig("")),
        # `state_…`: written by schedulers and the agent; `user_…`: by users
        annotations=(*keys.state_annotations, *keys.user_annotations),
        labels=keys.state_labels,
        node_annotations=(
            keys.node_config,
            keys.node_register,
            keys.node_topology,
            # labels of the Node, which are removed with the annotations
            DRIVER_VERSION_LABEL,
            CUDA_VERSION_LABEL,
            CUDA_MAJOR_LABEL,
            CUDA_MINOR_LABEL,
        ),
        # only show how far a start has come; written after those by which schedulers count
        progress_annotations=frozenset({keys.predicate_time, keys.real_allocated}),
    )


def _renamed(settings: Settings) -> Vocabulary:
    """Return the names under the domain that the operator has chosen."""
    return _vocabulary(Keys(settings.section(VgpuManager).domain))


def _stale_keys(settings: Settings) -> tuple[str, ...]:
    """Return the annotations and labels that are removed when a pod is recreated."""
    keys = Keys(settings.section(VgpuManager).domain)
    return (*keys.state_annotations, *keys.state_labels)


def _exporter(settings: Settings) -> ExporterOptions | None:
    exporter = settings.section(VgpuManager).exporter
    if not exporter.address or not settings.is_on(FAMILY):
        return None
    return ExporterOptions(
        listen=exporter.address,
        flag=f"{SECTION}.exporter.address",
        min_interval_seconds=exporter.min_scrape_interval_seconds,
        authorised=exporter.authorised,
        certificate_file=exporter.certificate_file,
        key_file=exporter.key_file,
        tls_flags=f"{SECTION}.exporter.certificateFile and .keyFile",
    )


def _admission(options: AdmissionOptions) -> AdmissionFamily:
    # The agent on a node has no use for it.
    from vgpu_agent.families.vgpu_manager.admission.family import build  # noqa: PLC0415

    return build(options)


def _node_config_path(settings: Settings) -> str:
    return settings.section(VgpuManager).node_config_file if settings.is_on(FAMILY) else ""


def _scheduling(options: SchedulingOptions) -> SchedulingFamily:
    # the agent on a node never needs it
    from vgpu_agent.families.vgpu_manager.scheduling.family import (  # noqa: PLC0415
        VgpuManagerScheduling,
    )

    return VgpuManagerScheduling(Keys(options.domain), options)


def _device_modes(settings: Settings) -> tuple[str, ...]:
    """Return all device modes where there is a node configuration: those that it asks for are not
    known before it is read, and a CDI spec that is not used does no harm.
    """
    return DEVICE_MODES if settings.section(VgpuManager).node_config_file else ()


_BY_DEFAULT = _vocabulary(Keys())

SPEC = FamilySpec(
    SETTINGS,
    _build,
    needs_api_server=True,
    files=(
        PluginFile(
            node_config.FILE,
            node_config.is_valid,
            path=_node_config_path,
            findings=node_config.findings,
        ),
    ),
    resource_prefixes=_BY_DEFAULT.resource_prefixes,
    annotations=_BY_DEFAULT.annotations,
    labels=_BY_DEFAULT.labels,
    # patterns of containers' variables: those whose text the family reads (the names have no
    # metacharacters), and all that it has to know of, such as those by which a pod could evade its
    # limits (`DECISIVE_VARIABLES`)
    values=f"{OVERSOLD}|{DISABLED}",
    variables=(
        f"CUDA_MEM_(LIMIT(_\\d{{1,2}})?|RATIO|OVERSOLD)|DISABLE_VGPU_CONTROL|{DECISIVE_VARIABLES}"
    ),
    library=LIBRARY_USE,
    device_modes=_device_modes,
    node_annotations=_BY_DEFAULT.node_annotations,
    progress_annotations=_BY_DEFAULT.progress_annotations,
    renamed=_renamed,
    # `by_default`: the extender places this family's pods where the operator names no family
    scheduling=SchedulingPart(_scheduling, by_default=True),
    parts=(MIG_FAMILY,),  # grants of MIG instances have this name instead of the family's
    exporter=FamilyExporter(METRICS, _exporter),
    stale_keys=_stale_keys,
    admission=_admission,
    # whether its failed pods are evicted or created again although `binding.rescheduleFailed` is
    # off
    reschedules=lambda settings: settings.section(VgpuManager).gates.reschedule,
)
