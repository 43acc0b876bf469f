"""Edits: what a grant adds to a container, before anybody says how it gets there.

Families and isolation backends build them, a carrier takes them to the container: the plugin servers in the ``Allocate`` answer (early), or
a CDI spec of the grant's own (late). The fields are those of kubelet's ContainerAllocateResponse (kubelet contract §1).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount; both paths are absolute, ``host_path`` as the host sees it."""

    container_path: str
    host_path: str
    read_only: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node; ``permissions`` are letters of ``rwm`` (device cgroup)."""

    container_path: str
    host_path: str
    permissions: str = "rw"


@dataclasses.dataclass(frozen=True, slots=True)
class Edits:
    """Environment, mounts, device nodes, annotations and CDI names (``vendor.com/class=name``) of one container."""

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cdi_names: tuple[str, ...] = ()
