"""Number cards and count a pod's units:
the meaning of ``volcano.sh/gpu-index`` for this node and for each container.

The annotation names the cards of a whole pod, so each container's part of it has to be found.
Called by `family`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from vgpu_agent.pods import Pod

# Decimal numbers joined by commas, without spaces, as the scheduler writes them; no node has a
# thousand cards.
_INDICES = re.compile(r"\A(0|[1-9][0-9]{0,2})(,(0|[1-9][0-9]{0,2})){0,999}\Z", re.ASCII)


def parse_indices(text: str) -> list[int] | None:
    """The numbers in the annotation, in its order;
    None when it is no list of numbers (volcano-gpushare §3).
    """
    return [int(index) for index in text.split(",")] if _INDICES.match(text) else None


def first_units(pod: Pod, resource: str) -> dict[str, int]:
    """Map each container to the place of its first unit among the pod's.

    Sidecars and main containers come one after the other. Init containers come after the sidecars
    before them, on places that the main ones take over.
    """
    places, running = {}, 0
    for container in pod.containers:
        places[container.name] = running
        if container.kind is not ContainerKind.INIT:
            running += container.limits.get(resource, 0)
    return places


def units(pod: Pod, resource: str) -> int:
    """Return what the whole pod needs at its peak."""
    first = first_units(pod, resource)
    return max(
        (first[container.name] + container.limits.get(resource, 0) for container in pod.containers),
        default=0,
    )
