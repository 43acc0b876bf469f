"""Resolve CDI names to the edits that their specs define, to copy them into the spec of a grant.

The spec of a grant that is bound late, at ``PreStartContainer``, cannot refer to other CDI names.
So the edits of those names are written into it. The container then needs neither those names nor an
NVIDIA runtime. Called by `controller` for `runtime`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from vgpu_agent.allocation.carrier import InlinedEdits
from vgpu_agent.cdi.document import ContainerEdits
from vgpu_agent.cdi.rules import least_version
from vgpu_agent.errors import HostFileError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from vgpu_agent.cdi.document import Spec

T = TypeVar("T")


def resolve_edits(names: Iterable[str], specs: Sequence[Spec]) -> InlinedEdits:
    """Collect the edits that a container runtime would apply for these CDI names.

    The edits common to a spec come before those of its devices, once for each spec: two files may
    have the same kind.

    Args:
        names: qualified device names, e.g. ``vendor.com/gpu=0``.
        specs: the specs of the node. Where two define the same name, the later one counts, as in
            runtimes.

    Raises:
        HostFileError: no spec defines one of the names. The kubelet retries, and by then there may
            be one.
    """
    defined = {
        name: (spec, device)
        for spec in specs
        for name, device in zip(spec.names, spec.devices, strict=True)
    }
    parts: list[ContainerEdits] = []
    used: set[int] = set()  # the specs' identities
    for name in dict.fromkeys(names):
        if name not in defined:
            raise HostFileError(
                f"no CDI spec of this node has the device {name} now; /debug/config, cdi, says "
                "why; the kubelet will retry"
            )
        spec, device = defined[name]
        if id(spec) not in used:
            used.add(id(spec))
            parts.append(spec.container_edits)
        parts.append(device.container_edits)
    edits = ContainerEdits(
        env=_distinct(line for part in parts for line in part.env),
        device_nodes=_last_of_each(
            (node.path, node) for part in parts for node in part.device_nodes
        ),
        net_devices=tuple(device for part in parts for device in part.net_devices),
        hooks=_distinct(hook for part in parts for hook in part.hooks),
        mounts=_last_of_each(
            (mount.container_path, mount) for part in parts for mount in part.mounts
        ),
        intel_rdt=next((part.intel_rdt for part in parts if part.intel_rdt is not None), None),
        additional_gids=_distinct(group for part in parts for group in part.additional_gids),
    )
    return InlinedEdits(
        version=least_version(edits, annotated=True),  # the spec of a grant has annotations
        container_edits=msgspec.json.decode(msgspec.json.encode(edits)),
    )


def _distinct(values: Iterable[T]) -> tuple[T, ...]:
    """Drop repeated values and keep the order."""
    kept: list[T] = []
    for value in values:
        if value not in kept:
            kept.append(value)
    return tuple(kept)


def _last_of_each(values: Iterable[tuple[Hashable, T]]) -> tuple[T, ...]:
    """Keep the last value of each key."""
    return tuple(dict(values).values())
