"""The order in which a family takes GPUs on a node that several families share.

A GPU serves one family at a time. A family should not occupy a free GPU while it has room on a GPU
that already serves it. So every choice goes by rank first, and by the policy of the resource among
GPUs of one rank. Pure functions on plain data: `allocation` collects the facts about the GPUs, the
families pass them to `policies` and `rooms`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# The ranks of a GPU for a family: the family's already, nobody's, another family's.
OWN, FREE, OTHERS = range(3)


class GpuUses(msgspec.Struct, frozen=True):
    """The GPUs of the node by their use, for one family; empty if the family is alone on the node.

    Attributes:
        shared: GPUs that another family may use as well.
        serving: GPUs of which the family has a share.
        others: GPUs that serve another family, or that are claimed for a pod of one. Where the
            family shares no GPU, those that a scheduler has given to another pod of the family,
            which has not started yet.
    """

    shared: frozenset[str] = frozenset()
    serving: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()

    def rank(self, gpu: str) -> int:
        """Return the rank of a GPU by its UUID; the lowest is taken first.

        `OWN`: the GPU serves the family already, or is offered to no other family. `FREE`: no
        family has the GPU, and other families could use it. `OTHERS`: another family has it, or
        somebody else waits for it.
        """
        if gpu in self.others:
            return OTHERS
        return FREE if gpu in self.shared and gpu not in self.serving else OWN

    def ranks(self, gpu_of: Mapping[str, str]) -> dict[str, int]:
        """Return device → the rank of its GPU, for the mapping device → GPU (UUIDs)."""
        return {device: self.rank(gpu) for device, gpu in gpu_of.items()}


ALONE = GpuUses()
"""For a family that shares no GPU: every GPU has the rank `OWN`."""


def gpu_uses(
    family: str,
    shared: frozenset[str],
    held: Iterable[tuple[str, str]],
    claimed: Iterable[tuple[str, str]] = (),
) -> GpuUses:
    """Return the GPUs by their use, for ``family``; `ALONE` where it shares no GPU.

    Args:
        family: the family that chooses a GPU.
        shared: GPUs that another family may use as well.
        held: GPU and family of each share.
        claimed: GPU and family of each claim.
    """
    if not shared:
        return ALONE
    serving, others = set[str](), set[str]()
    for gpu, holder in held:
        (serving if holder == family else others).add(gpu)
    others.update(gpu for gpu, claimant in claimed if claimant != family)
    return GpuUses(shared, frozenset(serving), frozenset(others))
