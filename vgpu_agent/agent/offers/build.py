"""The families of this node, built from the settings, from the files of the plugins that are
replaced, and from what the node has.

Called by `agent.offers.families` at start and whenever one of the three changes. The families
themselves are those of `families.registry`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.agent.offers.control_nodes import NONE_FOUND, find_control_nodes
from vgpu_agent.allocation.context import Families
from vgpu_agent.cdi.controller import NO_CDI
from vgpu_agent.config.load import LARGEST_FILE_BYTES
from vgpu_agent.families.device_lists import GENERATED_KIND, TOOLKIT_KIND, ListOptions
from vgpu_agent.families.plugin_files import texts_in_force
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.families.spec import NodeFacts
from vgpu_agent.isolation.backend import NO_SERVICES
from vgpu_agent.isolation.mps import IN_CONTAINER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vgpu_agent.agent.offers.control_nodes import ControlNodes
    from vgpu_agent.cdi.controller import CdiFound
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.isolation.backend import InstalledLibrary, LibraryLimits, LibraryServices
    from vgpu_agent.isolation.mps import MpsView
    from vgpu_agent.model import Inventory


class Found(msgspec.Struct, frozen=True):
    """The findings on the node and in the cluster.

    Attributes:
        control_nodes: NVIDIA's control device nodes.
        cdi: IMEX channels, and the device modes that have a CDI spec.
        facts: the facts that families need, without `lists` and `pod_lists` (how containers get
            their devices), which `build` adds.
    """

    control_nodes: ControlNodes = NONE_FOUND
    cdi: CdiFound = NO_CDI
    facts: NodeFacts = msgspec.field(default_factory=NodeFacts)


class Built(msgspec.Struct, frozen=True):
    """The families, the faults of the files they were built from, and the resulting settings.

    Attributes:
        in_force: family with files of a replaced plugin → attribute of its settings → value.
        origins: family → each of these attributes that a file has set → that file.
        limits: family → the limits that the library of its isolation backend sets its containers,
            whose processes load it.
        texts: file on the node → those of its texts that count: the newest, and while that has an
            error, those before it, back to the last one without (`plugin_files.texts_in_force`).
        control_nodes: as in `Found`.
        without_control_nodes: families whose containers would lack a device node that they need,
            see `ControlNodes.trouble`.
        blocked: family → why its pods must not be started now.
        uses_libraries: the isolation backends whose libraries some containers get.
        services: family → what the same library needs of the running agent: directories for
            containers, for the registry of their processes, and for samples of their use of
            compute.
        node_labels: the functions that make the labels for the Node which describe its GPUs, one of
            each family that has some.
    """

    families: Families
    problems: tuple[str, ...] = ()
    in_force: Mapping[str, Mapping[str, object]] = msgspec.field(default_factory=dict)
    origins: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)
    limits: Mapping[str, LibraryLimits] = msgspec.field(default_factory=dict)
    texts: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    control_nodes: ControlNodes = NONE_FOUND
    without_control_nodes: frozenset[str] = frozenset()
    blocked: Mapping[str, str] = msgspec.field(default_factory=dict)
    uses_libraries: frozenset[str] = frozenset()
    services: Mapping[str, LibraryServices] = msgspec.field(default_factory=dict)
    node_labels: tuple[Callable[[Inventory], Mapping[str, str] | None], ...] = ()


async def look_at_node(
    settings: Settings,
    *,
    texts: Mapping[str, tuple[str, ...]],
    libraries: Mapping[str, InstalledLibrary],
    origins: Mapping[str, str],
    cdi: CdiFound,
    late: bool,
    mps_view: MpsView = IN_CONTAINER,
) -> Found:
    """Look at the node; nothing here waits for the API server.

    Args:
        settings: those that the families are built from.
        texts: file of a replaced plugin → those of its texts that count (see `Built.texts`): from
            the ConfigMaps, and from the last look at files on the node, perhaps by the agent before
            this one.
        libraries: isolation backend → its library, where a family uses it.
        origins: dotted path → where a setting came from.
        cdi: see `Found`.
        late: grants of families whose pods decide are bound late.
        mps_view: where the agent sees the files of MPS control daemons; by default where its
            container has ``mps.root`` mounted.
    """
    control_nodes = await asyncio.to_thread(find_control_nodes, settings)
    found = dict(texts)
    unreadable: dict[str, str] = {}
    # the files on the node; those in ConfigMaps come with ``texts``
    for file in (file for family in FAMILIES for file in family.files if not file.config_map):
        before = found.pop(file.name, ())
        if path := file.path(settings):
            text, trouble = await asyncio.to_thread(_text, Path(path))
            # The check runs in a thread as well: with a large file it takes long.
            found[file.name] = (
                before
                if trouble
                else await asyncio.to_thread(
                    texts_in_force, before, text, functools.partial(file.is_valid, settings)
                )
            )
            unreadable |= {file.name: trouble} if trouble else {}
    facts = NodeFacts(
        late=late,
        wsl=control_nodes.wsl,
        libraries=libraries,
        cgroup_version=await asyncio.to_thread(_cgroup_version, settings.sysfs_root),
        # the program is there that divides GPUs into MIG instances
        divides=await asyncio.to_thread(_divides, settings),
        # the settings that a flag or a variable has set: they beat the files of a replaced plugin
        given=frozenset(
            path for path, origin in origins.items() if origin.startswith(("flag ", "environment "))
        ),
        texts=found,
        unreadable=unreadable,
        mps_view=mps_view,
    )
    return Found(control_nodes=control_nodes, cdi=cdi, facts=facts)


def build(settings: Settings, found: Found) -> Built:
    """Build the families that the settings ask for;
    never raises: problems in the files of replaced plugins are reported.
    """
    lists, pod_lists = list_options(settings, found), _pod_list_options(settings, found)
    facts = msgspec.structs.replace(found.facts, lists=lists, pod_lists=pod_lists)
    parts = [family.build(settings, facts) for family in FAMILIES]
    # the families whose ids name devices, those whose pods decide, and those that offer nothing now
    id_families = tuple(itertools.chain.from_iterable(part.id_families for part in parts))
    pod_families = tuple(itertools.chain.from_iterable(part.pod_families for part in parts))
    idle = tuple(itertools.chain.from_iterable(part.idle for part in parts))
    without_control_nodes: frozenset[str] = frozenset()
    if found.control_nodes.trouble:
        # `names_nodes`: the answers to containers name device nodes by their path
        lacking = [family.name for family in id_families] if lists.names_nodes else []
        lacking += [family.name for family in pod_families] if pod_lists.names_nodes else []
        without_control_nodes = frozenset(lacking)
    part_of = {family.name: part for family, part in zip(FAMILIES, parts, strict=True)}
    return Built(
        families=Families(id_families=id_families, pod_families=pod_families, idle=idle),
        problems=tuple(itertools.chain.from_iterable(part.problems for part in parts)),
        in_force={name: part.in_force for name, part in part_of.items() if part.in_force},
        origins={name: part.origins for name, part in part_of.items() if part.in_force},
        limits={name: part.limits for name, part in part_of.items() if part.limits is not None},
        texts={
            file.name: facts.texts.get(file.name, ())
            for family in FAMILIES
            for file in family.files
            if not file.config_map
        },
        control_nodes=found.control_nodes,
        without_control_nodes=without_control_nodes,
        blocked={
            family.name: part.blocked
            for part in parts
            for family in part.pod_families
            if part.blocked
        },
        uses_libraries=frozenset(part.uses_library for part in parts if part.uses_library),
        services={
            name: part.services for name, part in part_of.items() if part.services != NO_SERVICES
        },
        node_labels=tuple(part.node_labels for part in parts if part.node_labels is not None),
    )


def list_options(settings: Settings, found: Found) -> ListOptions:
    """Return how containers of every family get their devices: by variables, mounts, CDI or device
    nodes.
    """
    plugin = settings.plugin
    return ListOptions(
        strategies=plugin.device_list_strategy,
        id_strategy=plugin.device_id_strategy,
        cdi_annotation_prefix=plugin.cdi_annotation_prefix,
        # the kind in CDI names: that of the container toolkit's spec, or that of the agent's own
        cdi_kind=TOOLKIT_KIND if settings.cdi.source == "toolkit" else GENERATED_KIND,
        # how CDI specs name devices; empty: as `id_strategy` says
        cdi_id_strategy="uuid" if settings.cdi.source == "toolkit" else "",
        pass_device_specs=plugin.pass_device_specs,
        device_root=settings.gpu.dev_root or settings.gpu.driver_root,
        control_nodes=found.control_nodes.paths,
        imex_channels=found.cdi.channels.ids,
        # the directory on the node below which their device nodes are; empty: `device_root`
        imex_root=found.cdi.channels.root,
        enabled=plugin.device_modes,
        cdi_modes=found.cdi.modes,
    )


def _pod_list_options(settings: Settings, found: Found) -> ListOptions:
    """Return the same for families whose pods decide. With `cdi.inline` they name CDI devices only:
    when a grant is bound late, the edits that the names stand for are written into its own spec.
    """
    lists = list_options(settings, found)
    return (
        msgspec.structs.replace(lists, strategies=("cdi-cri",))
        if settings.cdi.inline and found.facts.late
        else lists
    )


def _divides(settings: Settings) -> bool:
    """Tell whether the program is there that divides GPUs into MIG instances for a family."""
    return any(
        shutil.which(family.mig_tool(settings).program) for family in FAMILIES if family.mig_tool
    )


def _cgroup_version(sysfs_root: str) -> int:
    """The version of the node's cgroups; a hybrid of both counts as 2, as runtimes have it."""
    controllers = ("cgroup.controllers", "unified/cgroup.controllers")
    root = f"{sysfs_root}/fs/cgroup"
    unified = any(os.path.exists(f"{root}/{name}") for name in controllers)
    return 2 if unified or not os.path.isdir(root) else 1


def _text(path: Path) -> tuple[str | None, str]:
    """The file's text, None when it is not there, and why it cannot be read. Bytes that are
    not UTF-8 become U+FFFD.
    """
    try:
        # O_NONBLOCK: a FIFO without a writer must not hang us
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as err:
        return None, err.strerror or str(err)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a directory has an error of its own
            return None, "it is no regular file"
        with open(descriptor, "rb", closefd=False) as stream:
            content = stream.read(LARGEST_FILE_BYTES + 1)
    except OSError as err:
        return None, err.strerror or str(err)
    finally:
        os.close(descriptor)
    if len(content) > LARGEST_FILE_BYTES:
        return None, f"it is larger than {LARGEST_FILE_BYTES} bytes"
    return content.decode(errors="replace"), ""
