"""The families of this node by kind: `agent` builds them from the settings, `allocator` and its modules answer through them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vgpu_agent.families.family import Family, IdFamily, PodFamily


@dataclasses.dataclass(frozen=True, slots=True)
class Families:
    """The families of this node, by kind.

    Attributes:
        by_ids: families whose ids name devices.
        by_pod: families whose pods decide.
        unserved: those of ``by_pod``, or besides them, that serve no container now: their schedulers see that nothing is free.
        idle: families whose ids name devices and that are not offered now, or are switched off; their holders keep what they have.
    """

    by_ids: tuple[IdFamily, ...] = ()
    by_pod: tuple[PodFamily, ...] = ()
    unserved: tuple[PodFamily, ...] = ()
    idle: tuple[IdFamily, ...] = ()

    @property
    def all(self) -> tuple[Family, ...]:
        """Both kinds."""
        return (*self.by_ids, *self.by_pod)
