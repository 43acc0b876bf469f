"""The isolation backend of vgpu-manager's containers, as the settings and the node allow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.spec import LibraryUse
from vgpu_agent.families.vgpu_manager.settings import VgpuManager
from vgpu_agent.isolation.backend import NO_SERVICES, LibraryLimits
from vgpu_agent.isolation.edits import Provision
from vgpu_agent.isolation.registry import VGPU_CONTROL
from vgpu_agent.isolation.vgpu_control import DECISIVE, VgpuControl

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.spec import NodeFacts
    from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
    from vgpu_agent.isolation.vgpu_control import ControlTarget


class NoControl:
    """The backend `none`: nothing limits what a container uses."""

    name = "none"
    services = NO_SERVICES  # no directory in which the running agent serves a library

    def provision(self, target: ControlTarget) -> Provision:
        """Return no edits and no files."""
        del target
        return Provision()


def is_limited(settings: Settings) -> bool:
    """Tell whether the library limits the containers, by the settings."""
    return settings.section(VgpuManager).isolation == VGPU_CONTROL.name


LIBRARY_USE = LibraryUse(
    VGPU_CONTROL.name,
    is_limited,
    # the alternative on a node without the library, as the end of a sentence
    "or set vgpuManager.isolation to none, which shares without any limit",
)

# a regular expression of the environment variables by which a pod could evade its limits
DECISIVE_VARIABLES = "|".join(sorted(DECISIVE))


def control_backend(
    settings: Settings, options: VgpuManagerOptions, facts: NodeFacts
) -> VgpuControl | NoControl:
    """Return the configured backend."""
    if not is_limited(settings):
        return NoControl()
    control = settings.vgpu_control
    return VgpuControl(
        control.host_directory,
        library_path=facts.library(VGPU_CONTROL.name).path,
        # how the library tells the container's processes from others
        processes=control.processes,
        cgroup_version=facts.cgroup_version,
        # the driver's kernel modules are the open ones, which the library has to know
        open_kernel_modules=options.open_kernel_modules,
        disable_variable=control.disable_variable,  # which pods may switch their limit off
        sm_watcher=options.sm_watcher,  # the agent measures compute for all containers
        # containers keep account of memory that was spilled to the host
        tracks_virtual_memory=options.tracks_virtual_memory,
    )


def library_limits(settings: Settings, options: VgpuManagerOptions) -> LibraryLimits:
    """Return how the library limits the containers."""
    return LibraryLimits(
        missing="" if is_limited(settings) else "vgpuManager.isolation is none",
        backend=VGPU_CONTROL.name,
        memory_scaling=options.memory_scaling,  # how many times a GPU's memory is offered
    )


def why_blocked(settings: Settings, facts: NodeFacts) -> str:
    """Explain why pods must not be started now; empty when they can be."""
    # its `path` is empty where none is installed, and `trouble` says why
    library = facts.library(VGPU_CONTROL.name)
    return library.trouble if is_limited(settings) and not library.path else ""
