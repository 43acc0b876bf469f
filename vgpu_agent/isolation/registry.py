"""The isolation backends that put limits in force by a library that the operator delivers.

The agent installs their libraries, keeps their containers' files from growing, removes them, and
mounts slots (small file systems in memory) for them, by iterating over `BACKENDS`; only the
families that use a backend know it by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.isolation import hami_core, hami_region, vgpu_control

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vgpu_agent.config.settings import Settings


class LibraryBackend(msgspec.Struct, frozen=True):
    """The facts about a backend that the agent has to know.

    Attributes:
        name: the glossary's name, e.g. ``hami-core``.
        host_directory: the settings → where the library and the containers' directories are.
        delivered: the settings → where the operator delivers the library; empty for ``file`` in
            the host directory.
        setting: the key of ``delivered``, for messages.
        file: the library's name.
        library: its path in containers.
        containers: the host directory → the parent of the containers' own directories.
        containers_before: the same in an earlier version of the agent, in whose directories
            containers could write; None where there was none.
        directory_of_replaced: the host directory → where the replaced plugin made the containers'
            directories, among other things; None where that is one of the other two.
        folders: the directories with files that a container writes, relative to its own directory;
            "" for that directory.
        allowed_size: the name of a file there → its largest allowed size; None when containers do
            not write to it.
        marker: a variable that every container of this backend is given, so that the backend is
            known from an answer to Allocate.
        decisive: variables by which a pod could escape its limits.
    """

    name: str
    host_directory: Callable[[Settings], str]
    delivered: Callable[[Settings], str]
    setting: str
    file: str
    library: str
    containers: Callable[[str], str]
    folders: tuple[str, ...]
    allowed_size: Callable[[str], int | None]
    marker: str
    decisive: frozenset[str]
    containers_before: Callable[[str], str] | None = None
    directory_of_replaced: Callable[[str], str] | None = None

    def containers_directory(self, settings: Settings) -> str:
        """The parent of the containers' own directories, by the settings."""
        return self.containers(self.host_directory(settings))

    def directory_before(self, settings: Settings) -> str:
        """The same for an earlier version of the agent; empty where there was none."""
        before = self.containers_before
        return before(self.host_directory(settings)) if before else ""


def decisive_variables(answered: Collection[str]) -> frozenset[str]:
    """The variables by which a pod could escape the limits of an answer with the variables
    ``answered``.
    """
    found: frozenset[str] = frozenset()
    return found.union(*(backend.decisive for backend in BACKENDS if backend.marker in answered))


HAMI_CORE = LibraryBackend(
    "hami-core",
    host_directory=lambda settings: settings.hami_core.host_directory,
    delivered=lambda settings: settings.hami_core.library,
    setting="hamiCore.library",
    file="libvgpu.so",
    library=hami_core.LIBRARY,
    containers=hami_core.containers_directory,
    folders=("",),
    allowed_size=lambda _: hami_region.SIZE,
    marker=hami_core.REGION_VARIABLE,
    decisive=hami_core.DECISIVE,
    containers_before=hami_core.directory_before,
)

VGPU_CONTROL = LibraryBackend(
    "vgpu-control",
    host_directory=lambda settings: settings.vgpu_control.host_directory,
    delivered=lambda settings: settings.vgpu_control.library,
    setting="vgpuControl.library",
    file="libvgpu-control.so",
    library=vgpu_control.LIBRARY,
    containers=vgpu_control.containers_directory,
    folders=vgpu_control.FOLDERS,
    allowed_size=vgpu_control.allowed_size,
    marker=vgpu_control.SLOTS_VARIABLE,  # names its cards: the slots of the library's table
    decisive=vgpu_control.DECISIVE,
    directory_of_replaced=lambda host_directory: host_directory,
)

BACKENDS = (HAMI_CORE, VGPU_CONTROL)
