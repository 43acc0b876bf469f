"""The families of this node by kind: `agent` builds them from the settings, `allocator` and its rooms answer through them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vgpu_agent.families.family import Family, IdFamily, PodFamily


@dataclasses.dataclass(frozen=True, slots=True)
class Families:
    """The families of this node, by kind.

    Attributes:
        by_ids: whose ids name devices.
        by_pod: whose pods decide.
        unserved: those of ``by_pod``, or besides them, that nobody is served by now: their schedulers are told that nothing is free.
        idle: families whose ids name devices and that are not offered now, or are switched off; who has something of them keeps it.
    """

    by_ids: tuple[IdFamily, ...] = ()
    by_pod: tuple[PodFamily, ...] = ()
    unserved: tuple[PodFamily, ...] = ()
    idle: tuple[IdFamily, ...] = ()

    @property
    def all(self) -> tuple[Family, ...]:
        """Both kinds."""
        return (*self.by_ids, *self.by_pod)
