"""The declaration of the family `volcano-vgpu`: GPUs that HAMi-core shares, or that are divided for
pods, and existing MIG instances.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.families.mig_instances import MIXED
from vgpu_agent.families.plugin_files import Findings, PluginFile
from vgpu_agent.families.spec import BuiltFamily, FamilySpec, LibraryUse, MigTool, SchedulingPart
from vgpu_agent.families.volcano_vgpu.decisions import DECISION, NODE, TO_ALLOCATE
from vgpu_agent.families.volcano_vgpu.family import (
    NO_TYPE,
    NO_UUID,
    USE_TYPE,
    USE_UUID,
    WANTED_MODE,
    VolcanoVgpuFamily,
)
from vgpu_agent.families.volcano_vgpu.files import (
    CONFIG_MAP,
    DEVICE_CONFIG,
    NAMESPACES,
    NODE_CONFIG,
    NODE_CONFIG_MAP,
    merge_texts,
    read_device_config,
    read_node_config,
)
from vgpu_agent.families.volcano_vgpu.metrics import METRICS
from vgpu_agent.families.volcano_vgpu.mig.family import VolcanoVgpuMigFamily
from vgpu_agent.families.volcano_vgpu.mig.static import StaticMigOptions, VolcanoStaticMigFamily
from vgpu_agent.families.volcano_vgpu.offer import VolcanoVgpuOptions
from vgpu_agent.families.volcano_vgpu.pod_state import BIND_TIME, PHASE, TIME
from vgpu_agent.families.volcano_vgpu.requests import Names
from vgpu_agent.families.volcano_vgpu.settings import (
    FAMILY,
    HAMI_CORE,
    MIG,
    SETTINGS,
    STATIC_MIG_FAMILY,
    VolcanoVgpu,
    static_mig_strategy,
)
from vgpu_agent.isolation.backend import LibraryLimits, NoIsolation
from vgpu_agent.isolation.hami_core import HamiCore

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.family import IdFamily
    from vgpu_agent.families.scheduling import SchedulingFamily, SchedulingOptions
    from vgpu_agent.families.spec import NodeFacts
    from vgpu_agent.families.volcano_vgpu.files import Overlay
from vgpu_agent.isolation.backend import Backend

# a file of the replaced plugin → the ConfigMap that has it
_CONFIG_MAPS = {DEVICE_CONFIG: CONFIG_MAP, NODE_CONFIG: NODE_CONFIG_MAP}


class _Files(msgspec.Struct, frozen=True):
    """The settings with the files of the replaced plugin applied to them.

    Attributes:
        settings: the result.
        device_config: the values of the ConfigMap; None without one.
        node_config: the same of the node configuration, a file with other values for single nodes.
        origins: attribute → the file that has set it.
        problems: the faults of the files.
    """

    settings: VolcanoVgpu
    device_config: Overlay | None
    node_config: Overlay | None
    origins: dict[str, str]
    problems: tuple[str, ...]


def _build(settings: Settings, facts: NodeFacts) -> BuiltFamily:
    # Existing MIG instances that are not offered may still be held.
    not_offered = (
        VolcanoStaticMigFamily(
            StaticMigOptions(MIXED, settings.section(VolcanoVgpu).mig_resource_prefix)
        ),
    )
    if not settings.is_on(FAMILY):
        return BuiltFamily(idle=not_offered)
    files = _files(settings, facts)
    vgpu, problems = files.settings, list(files.problems)
    # attribute of the settings → its key in the configuration
    names = {field.name: field.encode_name for field in msgspec.structs.fields(type(vgpu))}
    options = VolcanoVgpuOptions.from_settings(
        settings,
        vgpu,
        # How containers get their devices: by a variable, mounts, device nodes or CDI names.
        # `pod_lists` is for families whose pods decide, `lists` for those whose ids name devices.
        lists=facts.pod_lists,
        node_config=files.node_config,
        # how GPUs of each model may be divided in the operating mode mig
        geometries=files.device_config.geometries if files.device_config else (),
    )
    # where a value has to be changed, for messages
    set_in = tuple(
        (names[attribute], _CONFIG_MAPS[file]) for attribute, file in sorted(files.origins.items())
    )
    options = msgspec.structs.replace(options, set_in=set_in)
    strategy, problem = static_mig_strategy(settings, vgpu)
    problems += [f"volcanoVgpu.migStrategy: {problem}"] if problem else []
    # `divides`: the program that divides GPUs is installed
    if vgpu.operating_mode == MIG and not facts.divides:
        problems.append(
            f"volcanoVgpu.migParted: there is no program {vgpu.mig_parted} here, so no GPU can be "
            "divided, and pods that need one divided wait; install nvidia-mig-parted where the "
            "agent runs (manifests/components/mig)"
        )
    static: tuple[IdFamily, ...] = ()  # existing MIG instances
    if strategy != "none":
        # how containers get these instances, and the same other devices (GDS …) as with shared GPUs
        lists = msgspec.structs.replace(facts.lists, enabled=options.lists.enabled)
        hidden = options.hidden_uuids, options.hidden_indices
        static = (
            VolcanoStaticMigFamily(
                StaticMigOptions(strategy, vgpu.mig_resource_prefix, *hidden, lists)
            ),
        )
    backend: Backend = NoIsolation()
    if vgpu.isolation == HAMI_CORE:
        hami, library = settings.hami_core, facts.library(HAMI_CORE)
        backend = HamiCore(
            hami.host_directory,
            library_path=library.path,
            library_locks=library.locks,  # it makes a lock file
            disable_variable=hami.disable_variable,  # which pods may switch their limit off
            late=facts.late,
        )
    return BuiltFamily(
        id_families=static,
        pod_families=(
            VolcanoVgpuMigFamily(options)
            if options.mode == MIG
            else VolcanoVgpuFamily(options, backend),
        ),
        idle=() if static else not_offered,  # ids that are still held are read, none are offered
        problems=tuple(problems),
        in_force=msgspec.structs.asdict(vgpu),  # the settings with the files applied
        origins=files.origins,
        blocked=_blocked(vgpu, facts),
        limits=_limits(vgpu),
        uses_library=HAMI_CORE
        if vgpu.isolation == HAMI_CORE and vgpu.operating_mode != MIG
        else "",
    )


def _files(settings: Settings, facts: NodeFacts) -> _Files:
    """Apply the files to the settings: the node configuration overrides all, then come flags and
    variables, then the ConfigMap.
    """
    problems: list[str] = []
    origins: dict[str, str] = {}
    vgpu, device_config, node_config = settings.section(VolcanoVgpu), None, None
    # the last valid text of the file, and invalid ones after it, whose correct parts count
    if texts := facts.texts.get(DEVICE_CONFIG):
        device_config = merge_texts(texts, read_device_config)
        prefix = "volcanoVgpu."
        attributes = {field.encode_name: field.name for field in msgspec.structs.fields(type(vgpu))}
        # what a flag or an environment variable has set
        given = {
            attributes[path.removeprefix(prefix)] for path in facts.given if path.startswith(prefix)
        }
        vgpu = device_config.applied_to(vgpu, keep=given)
        origins |= dict.fromkeys(device_config.values.keys() - given, DEVICE_CONFIG)
        problems += device_config.problems
    if texts := facts.texts.get(NODE_CONFIG):
        node_config = merge_texts(texts, functools.partial(_read_node_config, settings))
        vgpu = node_config.applied_to(vgpu)
        origins |= dict.fromkeys(node_config.values, NODE_CONFIG)
        problems += node_config.problems
    if trouble := facts.unreadable.get(NODE_CONFIG):
        problems.append(
            f"{NODE_CONFIG}: cannot be read: {trouble}; its previous content stays in force"
        )
    return _Files(vgpu, device_config, node_config, origins, tuple(problems))


def _read_node_config(settings: Settings, text: str) -> Overlay:
    return read_node_config(text, settings.node_name_or_hostname)


def _findings(settings: Settings, text: str) -> Findings:
    """Return the faults of a node configuration: errors where a value is wrong, otherwise notes
    about parts that have no effect.
    """
    config = _read_node_config(settings, text)
    return Findings(notes=config.problems) if config.is_valid else Findings(errors=config.problems)


def _namespaces(settings: Settings) -> tuple[str, ...]:
    """Return the namespaces to search, in order; the operator's own is the first
    (``DEVICE_CONFIG_NAMESPACE``).
    """
    if not (settings.is_on(FAMILY) and settings.section(VolcanoVgpu).read_config_map):
        return ()
    return tuple(
        dict.fromkeys(
            namespace for namespace in (_configured_namespace(settings), *NAMESPACES) if namespace
        )
    )


def _configured_namespace(settings: Settings) -> str:
    return settings.section(VolcanoVgpu).config_map_namespace


def _node_config_path(settings: Settings) -> str:
    return settings.section(VolcanoVgpu).node_config_file if settings.is_on(FAMILY) else ""


def _limits(vgpu: VolcanoVgpu) -> LibraryLimits:
    return LibraryLimits(
        # why the library limits nothing; empty where it does
        missing="" if vgpu.isolation == HAMI_CORE else "volcanoVgpu.isolation is none",
        cores=not vgpu.disable_core_limit,
        oversubscribed=max(vgpu.device_memory_scaling, vgpu.device_core_scaling) > 1,
        unit_mib=vgpu.gpu_memory_factor or 1,
    )


def _mig_tool(settings: Settings) -> MigTool:
    vgpu = settings.section(VolcanoVgpu)
    return MigTool(
        program=vgpu.mig_parted,
        setting="volcanoVgpu.migParted",
        timeout_seconds=vgpu.mig_parted_timeout_seconds,
    )


def _device_modes(settings: Settings) -> tuple[str, ...]:
    return settings.section(VolcanoVgpu).device_modes


def _wants_library(settings: Settings) -> bool:
    return settings.section(VolcanoVgpu).isolation == HAMI_CORE


def _blocked(vgpu: VolcanoVgpu, facts: NodeFacts) -> str:
    """Explain why pods must not be started now; empty when they can be."""
    if vgpu.operating_mode == MIG:
        if facts.late:
            return ""
        return (
            "the operating mode mig has GPUs divided before a container starts, which takes late "
            "binding: a runtime that resolves CDI names (containerd ≥ 2.0, CRI-O ≥ 1.23), or "
            "binding.mode: late"
        )
    if vgpu.isolation != HAMI_CORE:
        return ""
    library = facts.library(HAMI_CORE)
    if not library.path and library.trouble:
        return library.trouble
    if library.locks and not facts.late:
        return (
            f"{library.path} makes a lock file in /tmp/vgpulock, which containers would have "
            "to share, and one could stop all others; deliver the library of HAMi 2.8.2 or newer, "
            "or let containers be bound late (a runtime that resolves CDI names, binding.mode: "
            "late), where each gets a place of its own"
        )
    return ""


def _scheduling(options: SchedulingOptions) -> SchedulingFamily:
    # the agent on a node never needs it
    from vgpu_agent.families.volcano_vgpu.scheduling import VolcanoScheduling  # noqa: PLC0415

    return VolcanoScheduling(Names(), options)


SPEC = FamilySpec(
    SETTINGS,
    _build,
    needs_api_server=True,
    files=(
        PluginFile(
            DEVICE_CONFIG,
            lambda _, text: read_device_config(text).is_valid,
            config_map=CONFIG_MAP,
            namespaces=_namespaces,
            configured_namespace=_configured_namespace,
        ),
        PluginFile(
            NODE_CONFIG,
            lambda settings, text: _read_node_config(settings, text).is_valid,
            path=_node_config_path,
            findings=_findings,
        ),
    ),
    # the settings and Volcano's ConfigMap may rename them within this domain
    resource_prefixes=("volcano.sh/",),
    annotations=(  # of pods: those that the family reads or writes
        NODE,
        PHASE,
        TIME,
        WANTED_MODE,
        DECISION,
        TO_ALLOCATE,
        USE_TYPE,
        NO_TYPE,
        USE_UUID,
        NO_UUID,
        BIND_TIME,
    ),
    # a pattern for the variables of containers that the family must know of
    variables=(
        "CUDA_(DISABLE_CONTROL|REDIRECT|DEVICE_MEMORY_LIMIT(_\\d{1,2})?|DEVICE_SM_LIMIT(_\\d{1,"
        "2})?|DEVICE_MEMORY_SHARED_CACHE|OVERSUBSCRIBE|TASK_PRIORITY)|GPU_CORE_UTILIZATION_POLICY|"
        "ACTIVE_OOM_KILLER|LIBCUDA_LOG_LEVEL|VGPU_(DEVICE|RESOURCE)"
    ),
    mig_tool=_mig_tool,
    device_modes=_device_modes,
    library=LibraryUse(
        HAMI_CORE,
        is_wanted=_wants_library,
        # what else can be done where there is no library, as the end of a sentence
        instead="or set volcanoVgpu.isolation to none, which shares without any limit",
    ),
    metrics=METRICS,
    # of the Node; messages name them, because they are removed with the agent
    node_annotations=("volcano.sh/node-vgpu-*",),
    # They only show how far the start of a pod has come. Those by which schedulers count what is
    # free are written first.
    progress_annotations=frozenset({PHASE, TIME, TO_ALLOCATE}),
    parts=(STATIC_MIG_FAMILY,),  # grants of existing instances have this name instead
    # removed when a pod is recreated
    stale_keys=lambda _: (NODE, PHASE, TIME, DECISION, TO_ALLOCATE, BIND_TIME),
    # the extender places its pods only where the operator asks for it
    scheduling=SchedulingPart(_scheduling, by_default=False),
)
