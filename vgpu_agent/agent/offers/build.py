"""The families of this node, built from the settings, from the files of the plugins that are replaced, and from what the node has.

Called by `composition` at start and whenever one of the three changes. A later family is one entry more in `build`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.agent.devices.cdi import NO_CDI
from vgpu_agent.agent.offers.control_nodes import NONE_FOUND, find_control_nodes
from vgpu_agent.allocation.node_families import Families
from vgpu_agent.config.collisions import static_mig_strategy
from vgpu_agent.config.volcano_files import DEVICE_CONFIG, NODE_CONFIG, come_to, read_device_config, read_node_config, told
from vgpu_agent.families.aws.family import AwsFamily, AwsOptions
from vgpu_agent.families.device_lists import GENERATED_KIND, TOOLKIT_KIND, ListOptions
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.families.volcano_gpushare.family import VolcanoGpushareFamily, VolcanoGpushareOptions
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily
from vgpu_agent.families.volcano_vgpu.mig.family import VolcanoVgpuMigFamily
from vgpu_agent.families.volcano_vgpu.mig.static import MIXED, StaticMigOptions, VolcanoStaticMigFamily
from vgpu_agent.families.volcano_vgpu.offer import MIG, VolcanoVgpuOptions
from vgpu_agent.isolation.backend import NoIsolation
from vgpu_agent.isolation.hami_core import HamiCore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vgpu_agent.agent.devices.cdi import CdiFound
    from vgpu_agent.agent.offers.control_nodes import ControlNodes
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.config.volcano_files import Overlay
    from vgpu_agent.families.family import IdFamily, PodFamily
    from vgpu_agent.isolation.backend import Backend


_CONFIG_MAPS = {DEVICE_CONFIG: "volcano-vgpu-device-config", NODE_CONFIG: "volcano-vgpu-node-config"}


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The findings on the node and in the cluster.

    Attributes:
        nodes: NVIDIA's control device nodes.
        cdi: IMEX channels, and what has a CDI spec.
        late: grants of families whose pods decide are bound late.
        device_configs: texts of Volcano's ConfigMap, see `volcano_files.told`.
        node_configs: the same of the mounted node configuration.
        node_trouble: why that exists and cannot be read; empty otherwise.
        library_path: the installed libvgpu.so; empty when there is none.
        library_locks: whether that library makes a lock file, see `isolation.hami_core.uses_lock`.
        given: dotted paths that were set by a flag or a variable, which beat the ConfigMap.
        divides: the program that divides GPUs is there.
    """

    nodes: ControlNodes = NONE_FOUND
    cdi: CdiFound = NO_CDI
    late: bool = False
    device_configs: tuple[str, ...] = ()
    node_configs: tuple[str, ...] = ()
    node_trouble: str = ""
    library_path: str = ""
    given: frozenset[str] = frozenset()
    divides: bool = True
    library_locks: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """The families, the faults of the files they were built from, and the resulting volcano-vgpu settings.

    Attributes:
        in_force: attribute of the volcano-vgpu settings → its value.
        origins: of those that a file has set, attribute → the file.
        node_configs: as in `Found`.
        nodes: as in `Found`.
        without_nodes: families whose containers would lack a device node that they need, see `ControlNodes.trouble`.
    """

    families: Families
    problems: tuple[str, ...] = ()
    in_force: Mapping[str, object] = dataclasses.field(default_factory=dict)
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    node_configs: tuple[str, ...] = ()
    nodes: ControlNodes = NONE_FOUND
    without_nodes: frozenset[str] = frozenset()


async def look(
    settings: Settings,
    *,
    device_configs: tuple[str, ...],
    node_before: tuple[str, ...],
    library_path: str,
    library_locks: bool = False,
    origins: Mapping[str, str],
    cdi: CdiFound,
    late: bool,
) -> Found:
    """Look at the node; nothing here waits for the API server.

    Args:
        settings: what is asked for.
        device_configs: see `Found`.
        node_before: `Found.node_configs` of the last look, also that of the agent before this one.
        library_path: see `Found`.
        library_locks: see `Found`.
        origins: dotted path → where a setting came from.
        cdi: see `Found`.
        late: see `Found`.
    """
    nodes = await asyncio.to_thread(find_control_nodes, settings)
    node_configs: tuple[str, ...] = ()
    trouble = ""
    if settings.families.volcano_vgpu and settings.volcano_vgpu.node_config_file:
        text, trouble = await asyncio.to_thread(_text, Path(settings.volcano_vgpu.node_config_file))
        node_configs = node_before if trouble else told(node_before, text, _node_reader(settings))
    given = frozenset(path for path, origin in origins.items() if origin.startswith(("flag ", "environment ")))
    divides = await asyncio.to_thread(shutil.which, settings.volcano_vgpu.mig_parted) is not None
    return Found(nodes, cdi, late, device_configs, node_configs, trouble, library_path, given, divides, library_locks)


def build(settings: Settings, found: Found) -> Built:
    """The families that the settings ask for; never an error, problems of foreign files are named."""
    by_ids: list[IdFamily] = []
    by_pod: list[PodFamily] = []
    off: list[IdFamily] = []  # what they have given away before they were switched off is still held
    built = Built(Families())
    lists = list_options(settings, found)
    nvidia = NvidiaFamily(NvidiaOptions.from_settings(settings, lists=lists, wsl=found.nodes.wsl))
    aws = AwsFamily(AwsOptions.from_settings(settings, lists=lists))
    (by_ids if settings.families.nvidia else off).append(nvidia)
    (by_ids if settings.families.aws else off).append(aws)
    if settings.families.volcano_vgpu:
        family, static, built = _volcano_vgpu(settings, found)
        by_pod.append(family)
        by_ids += static
    if not any(isinstance(family, VolcanoStaticMigFamily) for family in by_ids):
        off.append(VolcanoStaticMigFamily(StaticMigOptions(MIXED, settings.volcano_vgpu.mig_resource_prefix)))
    if settings.families.volcano_gpushare:
        by_pod.append(VolcanoGpushareFamily(VolcanoGpushareOptions.from_settings(settings, lists=_of_pods(settings, found))))
    without_nodes: frozenset[str] = frozenset()
    if found.nodes.trouble:
        named = [family.name for family in by_ids] if lists.names_nodes else []
        named += [family.name for family in by_pod] if _of_pods(settings, found).names_nodes else []
        without_nodes = frozenset(named)
    families = Families(tuple(by_ids), tuple(by_pod), idle=tuple(off))
    return dataclasses.replace(built, families=families, nodes=found.nodes, without_nodes=without_nodes)


def list_options(settings: Settings, found: Found) -> ListOptions:
    """Return how containers of every family get their devices."""
    plugin = settings.plugin
    return ListOptions(
        strategies=plugin.device_list_strategy,
        id_strategy=plugin.device_id_strategy,
        cdi_annotation_prefix=plugin.cdi_annotation_prefix,
        cdi_kind=TOOLKIT_KIND if settings.cdi.source == "toolkit" else GENERATED_KIND,
        cdi_id_strategy="uuid" if settings.cdi.source == "toolkit" else "",
        pass_device_specs=plugin.pass_device_specs,
        device_root=settings.gpu.dev_root or settings.gpu.driver_root,
        control_nodes=found.nodes.paths,
        imex_channels=found.cdi.channels.ids,
        imex_root=found.cdi.channels.root,
        enabled=plugin.device_modes,
        cdi_modes=found.cdi.modes,
    )


def _of_pods(settings: Settings, found: Found) -> ListOptions:
    """Return the same for families whose pods decide: bound late, a grant's own spec has what CDI names stand for (`cdi.inline`)."""
    lists = list_options(settings, found)
    return dataclasses.replace(lists, strategies=("cdi-cri",)) if settings.cdi.inline and found.late else lists


def _volcano_vgpu(settings: Settings, found: Found) -> tuple[PodFamily, list[IdFamily], Built]:
    problems: list[str] = []
    origins: dict[str, str] = {}
    vgpu, device_config, node_config = settings.volcano_vgpu, None, None
    if found.device_configs:
        device_config = come_to(found.device_configs, read_device_config)
        prefix = "volcanoVgpu."
        attributes = {field.encode_name: field.name for field in msgspec.structs.fields(type(vgpu))}
        given = {attributes[path.removeprefix(prefix)] for path in found.given if path.startswith(prefix)}
        vgpu = device_config.over(vgpu, but=given)
        origins |= dict.fromkeys(device_config.values.keys() - given, DEVICE_CONFIG)
        problems += device_config.problems
    if found.node_configs:
        node_config = come_to(found.node_configs, _node_reader(settings))
        vgpu = node_config.over(vgpu)
        origins |= dict.fromkeys(node_config.values, NODE_CONFIG)
        problems += node_config.problems
    if found.node_trouble:
        problems.append(f"{NODE_CONFIG}: cannot be read: {found.node_trouble}; what stood there before stays in force")
    backend: Backend = NoIsolation()
    if vgpu.isolation == "hami-core":
        hami = settings.hami_core
        backend = HamiCore(hami.host_directory, found.library_path, found.library_locks, hami.disable_variable, late=found.late)
    options = VolcanoVgpuOptions.from_settings(
        msgspec.structs.replace(settings, volcano_vgpu=vgpu),
        lists=_of_pods(settings, found),
        node_config=node_config,
        geometries=device_config.geometries if device_config else (),
    )
    strategy, problem = static_mig_strategy(settings, vgpu)
    problems += [f"volcanoVgpu.migStrategy: {problem}"] if problem else []
    if vgpu.operating_mode == MIG and not found.divides:
        problems.append(
            f"volcanoVgpu.migParted: there is no program {vgpu.mig_parted} here, so no GPU can be divided, and pods that need one divided "
            "wait; install nvidia-mig-parted where the agent runs (manifests/components/mig)"
        )
    built = Built(Families(), tuple(problems), msgspec.structs.asdict(vgpu), origins, found.node_configs)
    names = {field.name: field.encode_name for field in msgspec.structs.fields(type(vgpu))}
    set_in = tuple((names[attribute], _CONFIG_MAPS[file]) for attribute, file in sorted(origins.items()))
    options = dataclasses.replace(options, set_in=set_in)
    static: list[IdFamily] = []
    if strategy != "none":
        lists = dataclasses.replace(list_options(settings, found), enabled=options.lists.enabled)
        hidden = options.hidden_uuids, options.hidden_indices
        static.append(VolcanoStaticMigFamily(StaticMigOptions(strategy, vgpu.mig_resource_prefix, *hidden, lists)))
    return VolcanoVgpuMigFamily(options) if options.mode == MIG else VolcanoVgpuFamily(options, backend), static, built


def _node_reader(settings: Settings) -> Callable[[str], Overlay]:
    name = settings.node_name_or_hostname
    return lambda text: read_node_config(text, name)


def _text(path: Path) -> tuple[str | None, str]:
    """The file's text, None when it is not there, and why it cannot be read. Junk bytes become characters that the reader complains of."""
    try:
        return path.read_bytes().decode(errors="replace"), ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as err:
        return None, err.strerror or str(err)
