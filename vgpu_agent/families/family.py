"""What every family must be able to answer; `allocation` and `agent` know families only through this.

To add a family: write a module with a class of this shape, translate its golden vectors into tests, and add it to the list in `agent`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.model import Inventory, Resource, Share


class Family(Protocol):
    """Pure translation between one vocabulary and the model."""

    @property
    def name(self) -> str:
        """The glossary's name of the family, e.g. ``nvidia``."""
        ...

    def claims(self, resource: str) -> bool:
        """Whether kubelet's records of ``resource`` are about this family's devices, offered under today's settings or earlier ones."""
        ...

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """What a node with these GPUs offers, deterministic for the same inventory."""
        ...

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """Refuse a request that is nonsense in this family's terms.

        Raises:
            RequestRefusedError: with the text that the pod's status will show.
        """
        ...

    def shares(self, resource: str, ids: Sequence[str], inventory: Inventory) -> tuple[Share, ...]:
        """What the holder of ``ids`` has of each device; also for ids of earlier settings, as far as they can be read."""
        ...

    def prefer(self, resource: Resource, available: Sequence[str], required: Sequence[str], size: int) -> list[str]:
        """The ids that suit best.

        Raises:
            CapacityError: there are not enough; the caller answers with a simple pick.
        """
        ...

    def edits(self, resource: Resource, ids: Sequence[str], inventory: Inventory) -> Edits:
        """What the container gets for these ids."""
        ...
