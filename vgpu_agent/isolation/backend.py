"""The interface of an isolation backend, which turns a container's shares into the edits and files
that enforce them.

Families call it while they put a grant in force; `agent` chooses the backend and leaves a family's
resources unoffered when the backend's own needs (a library, a daemon) are not met. Pure: a backend
names files and mounts, `runtime` makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from vgpu_agent.isolation.edits import Provision

if TYPE_CHECKING:
    from vgpu_agent.model import Gpu, Share


class Target(msgspec.Struct, frozen=True):
    """The container that is to keep to its shares.

    Attributes:
        pod_uid: the kubelet's UID of the pod.
        container: its name.
        grant: a name that stays the same over restarts of the container and differs from every
            other grant's.
        environment: names of the variables that the pod's specification sets; with one of them a
            pod may switch its library off.
        shares: (GPU, share) in the order in which the container is to count the GPUs.
        oversubscribed: more memory or compute is offered than there is, so a share as large as the
            GPU may not keep other containers off it.
        limit_cores: compute is to be limited as well as booked.
        unit_mib: the smallest share of memory that the node gives. A GPU that has less left can
            serve no other container, so the one on it may be allowed to switch its library off.
    """

    pod_uid: str
    container: str
    grant: str
    environment: frozenset[str]
    shares: tuple[tuple[Gpu, Share], ...]
    oversubscribed: bool = False
    limit_cores: bool = True
    unit_mib: int = 1


class InstalledLibrary(msgspec.Struct, frozen=True):
    """The library of one backend on this node.

    Attributes:
        path: where it is installed; empty when there is none.
        trouble: why the library that was delivered last could not be installed, or cannot limit
            anything on this node; empty when it can, or is not needed.
        locks: it makes a lock file that all containers would have to share, as HAMi-core before
            2.8.1 does.
    """

    path: str = ""
    trouble: str = ""
    locks: bool = False


class LibraryServices(msgspec.Struct, frozen=True):
    """The services of the running agent that a library relies on, in addition to files.

    Attributes:
        containers_directory: the parent of the containers' own directories,
            ``<pod UID>_<container>``.
        registry_directory: of the socket by which a container's processes register with the agent,
            so that the library can tell them from others; empty where none do.
        samples_directory: of the file with the samples that the agent takes of the processes' use
            of compute; empty when the library does not read them.
    """

    containers_directory: str = ""
    registry_directory: str = ""
    samples_directory: str = ""


NO_SERVICES = LibraryServices()


class LibraryLimits(msgspec.Struct, frozen=True):
    """The limits that a backend's library sets for a family's containers, by the present settings;
    `web` judges by them whether a container is limited.

    Attributes:
        missing: why it sets none; empty where it does.
        cores: it limits compute.
        oversubscribed: more memory or compute is offered than there is.
        unit_mib: as for `Target`.
        backend: the name of the backend whose library it is.
        memory_scaling: how many times a device's memory is offered.
    """

    missing: str = ""
    cores: bool = True
    oversubscribed: bool = False
    unit_mib: int = 1
    backend: str = "hami-core"
    memory_scaling: float = 1.0


class Backend(Protocol):
    """One way to put a limit in force."""

    @property
    def name(self) -> str:
        """The glossary's name, e.g. ``hami-core``."""
        ...

    def provision(self, target: Target) -> Provision:
        """Return the edits of the container and the files that must be on the host."""
        ...


class NoIsolation:
    """The backend `none`: sharing by time-slicing, which limits nothing."""

    name = "none"

    def provision(self, target: Target) -> Provision:
        """Return nothing to add."""
        del target
        return Provision()
