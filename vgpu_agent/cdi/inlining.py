"""The edits behind CDI names, for a spec of another kind that carries them itself.

The spec of a late-bound grant cannot refer to other CDI names, so the edits of those names are
written into it. A container then needs neither them nor an NVIDIA runtime. Called by `agent` for
`runtime`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from vgpu_agent.allocation.carrier import Inlined
from vgpu_agent.cdi.document import ContainerEdits
from vgpu_agent.cdi.rules import least_version
from vgpu_agent.errors import CarrierError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from vgpu_agent.cdi.document import Spec

T = TypeVar("T")


def inlined(names: Iterable[str], specs: Sequence[Spec]) -> Inlined:
    """Collect a runtime's edits for these CDI names:
    of each spec its common edits, then those of the devices.

    Args:
        names: qualified, e.g. ``vendor.com/gpu=0``.
        specs: those of the node; where two have a name, the later one counts, as with runtimes and
            their directories.

    Raises:
        CarrierError: a name that no spec has; the kubelet asks again, and by then there may be one.
    """
    known = {
        name: (spec, device)
        for spec in specs
        for name, device in zip(spec.names, spec.devices, strict=True)
    }
    parts: list[ContainerEdits] = []
    kinds: set[str] = set()
    for name in dict.fromkeys(names):
        if name not in known:
            raise CarrierError(
                f"no CDI spec of this node has the device {name} now; /debug/config, cdi, says "
                "why; the kubelet will retry"
            )
        spec, device = known[name]
        if spec.kind not in kinds:
            kinds.add(spec.kind)
            parts.append(spec.container_edits)
        parts.append(device.container_edits)
    edits = ContainerEdits(
        env=_distinct(line for part in parts for line in part.env),
        device_nodes=_by_key((node.path, node) for part in parts for node in part.device_nodes),
        net_devices=tuple(device for part in parts for device in part.net_devices),
        hooks=_distinct(hook for part in parts for hook in part.hooks),
        mounts=_by_key((mount.container_path, mount) for part in parts for mount in part.mounts),
        intel_rdt=next((part.intel_rdt for part in parts if part.intel_rdt is not None), None),
        additional_gids=_distinct(group for part in parts for group in part.additional_gids),
    )
    return Inlined(
        least_version(edits, annotated=True), msgspec.json.decode(msgspec.json.encode(edits))
    )


def _distinct(values: Iterable[T]) -> tuple[T, ...]:
    kept: list[T] = []
    for value in values:
        if value not in kept:
            kept.append(value)
    return tuple(kept)


def _by_key(values: Iterable[tuple[Hashable, T]]) -> tuple[T, ...]:
    return tuple(dict(values).values())
