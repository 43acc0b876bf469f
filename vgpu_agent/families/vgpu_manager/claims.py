"""The texts by which vgpu-manager's extender gives cards to containers (vgpu-manager §4.2).

``init[0_GPU-…_100_24576];train[0_GPU-…_50_8192,1_GPU-…_50_8192]``: containers separated by ``;``,
the claims of each by ``,``, and a claim is index, UUID, percent of compute and MiB of memory.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceClaim:
    """One card of a container's claim.

    Attributes:
        index: the card's NVML index on its node.
        uuid: of the card.
        cores_percent: of the card's compute; 0 for no limit.
        memory_mib: of the card's memory, as far as it is offered.
    """

    index: int
    uuid: str
    cores_percent: int
    memory_mib: int
