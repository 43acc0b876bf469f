"""Edits: the things that a grant adds to a container, in whatever way they get there.

Families and isolation backends build them, a carrier takes them to the container: the answer to
``Allocate`` (early), or a CDI spec of the grant's own (late). The fields are those of the kubelet's
ContainerAllocateResponse (kubelet §1), and memory mounts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class Mount(msgspec.Struct, frozen=True):
    """A bind mount; both paths are absolute, ``host_path`` as the host sees it."""

    container_path: str
    host_path: str
    read_only: bool = False


class MemoryMount(msgspec.Struct, frozen=True):
    """A small file system in memory that one container has for itself.
    Only a CDI spec can carry it, so only late binding can.

    Attributes:
        container_path: where the container has it.
        size_kib: how much its files may take.
        files: how many files it may have.
    """

    container_path: str
    size_kib: int
    files: int


class DeviceNode(msgspec.Struct, frozen=True):
    """A device node; ``permissions`` are letters of ``rwm`` (device cgroup)."""

    container_path: str
    host_path: str
    permissions: str = "rw"


class Edits(msgspec.Struct, frozen=True):
    """Environment, mounts, device nodes, annotations, CDI names (``vendor.com/class=name``) and
    memory mounts of one container.
    """

    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi_names: tuple[str, ...] = ()
    memory_mounts: tuple[MemoryMount, ...] = ()

    def joined(self, other: Edits) -> Edits:
        """Join both, in this order; where they set the same variable or annotation,
        ``other`` wins.
        """
        return Edits(
            environment={**self.environment, **other.environment},
            mounts=self.mounts + other.mounts,
            device_nodes=self.device_nodes + other.device_nodes,
            annotations={**self.annotations, **other.annotations},
            cdi_names=self.cdi_names + other.cdi_names,
            memory_mounts=self.memory_mounts + other.memory_mounts,
        )


class HostDirectory(msgspec.Struct, frozen=True):
    """A directory that must exist on the host before the container starts."""

    path: str
    mode: int = 0o755


class HostFile(msgspec.Struct, frozen=True):
    """A file that must be on the host, whole, before the container starts.

    Attributes:
        size: bytes; what ``parts`` do not cover is zero.
        parts: (offset, bytes), in the order in which they are written.
        allocated: its space is taken on the disk at once. Otherwise a full disk would kill a
            process that has the file mapped and touches a new page.
        renewed: parts that are written into an existing file of that size, in place, because
            containers have it mapped; a file that does not exist yet is created with all ``parts``
            and renamed into place.
    """

    path: str
    size: int
    parts: tuple[tuple[int, bytes], ...] = ()
    mode: int = 0o644
    renewed: tuple[tuple[int, bytes], ...] = ()
    allocated: bool = False


class Provision(msgspec.Struct, frozen=True):
    """Everything that puts a grant in force:
    the container's edits, and what must be on the host before it starts.

    Attributes:
        own_directory: the grant's own directory on the host; removed with all its content once the
            pod is gone and nothing in it is mounted.
        earlier_directory: the directory that an earlier version of the agent gave to this
            container, and that the specs and answers of that version still mount.
        replaces_earlier: the kubelet's checkpoint has an answer to Allocate that mounts
            `earlier_directory`. Then that directory is replaced at each start, with the files of
            `own_directory` in it, because a container has written to the old one.
        removed: files that the container must not find when it starts, such as those of its
            previous run; as paths within `own_directory`. ``files`` are made after that.
    """

    edits: Edits = msgspec.field(default_factory=Edits)
    directories: tuple[HostDirectory, ...] = ()
    files: tuple[HostFile, ...] = ()
    own_directory: str = ""
    earlier_directory: str = ""
    replaces_earlier: bool = False
    removed: tuple[str, ...] = ()

    def joined(self, other: Provision) -> Provision:
        """Join both, in this order."""
        return Provision(
            edits=self.edits.joined(other.edits),
            directories=self.directories + other.directories,
            files=self.files + other.files,
            own_directory=self.own_directory or other.own_directory,
            earlier_directory=self.earlier_directory or other.earlier_directory,
            replaces_earlier=self.replaces_earlier or other.replaces_earlier,
            removed=self.removed + other.removed,
        )
