"""Answer for resources whose ids name devices: everything is known in Allocate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.allocation import advice
from vgpu_agent.allocation.questions import gpu_uses_of
from vgpu_agent.errors import CapacityError, UnhealthyDeviceError, UnknownDeviceError, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.allocation.context import Context
    from vgpu_agent.families.family import IdFamily
    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.model import Grant, Resource


class IdAllocator:
    """The answers for resources whose ids name devices; no state of its own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = context.ledger

    def prefer(
        self, offered: Resource, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """Return the ids that suit best. Never raises, because the kubelet would fail the pod
        (kubelet §6). Where no ids suit, the first available ones are returned. ``available``,
        ``must_include`` and ``size`` are those of the kubelet's GetPreferredAllocation.
        """
        # The kubelet's view of health can be a moment older than ours; what Allocate would refuse
        # is not recommended.
        usable = {entry.id.id for entry in self._ledger.listing(offered.name) if entry.healthy}
        healthy = [id_ for id_ in available if id_ in usable]
        # The use of the GPUs: those that serve this family already are taken first, and those that
        # other families have last.
        uses = gpu_uses_of(self._ledger, offered.family, self._ledger.grants)
        try:
            return self._family(offered).prefer(
                offered, healthy, must_include, size, self._context.inventory(), uses
            )
        except (CapacityError, UnknownDeviceError) as err:
            self._context.journal.record(
                "preferred.simple",
                level="warning",
                resource=offered.name,
                size=size,
                reason=str(err),
            )
            return list(dict.fromkeys([*must_include, *healthy, *available]))[:size]

    def allocate(self, offered: Resource, ids: Sequence[str]) -> tuple[Grant, Edits]:
        """Book the ids and return what the container gets.

        Raises:
            LedgerError: they cannot be granted; the text has the remedies.
        """
        inventory = self._context.inventory()
        self._ledger.observe(inventory)  # a MIG instance may be gone since the last offer
        family = self._family(offered)
        try:
            grant = self._ledger.reserve(
                offered.name, ids, family.shares(offered.name, ids, inventory)
            )
        except (CapacityError, UnhealthyDeviceError) as err:
            if err.advice or not err.device:  # it has remedies already, or is not about one device
                raise
            raise err.advised(advice.for_ids(err, self._ledger, offered, inventory)) from err
        return grant, family.edits(offered, ids, inventory)

    def start(self, offered: Resource, ids: Sequence[str]) -> None:
        """Let a container start whose ids are booked.

        Raises:
            UnknownDeviceError: the ledger knows no holder of them.
        """
        wanted = set(ids)
        if not any(
            wanted <= set(grant.ids)
            for grant in self._ledger.grants
            if grant.resource == offered.name
        ):
            raise UnknownDeviceError(
                f"{offered.name}: {listed(ids)} are not booked for any container; the kubelet "
                "will retry"
            )

    def _family(self, offered: Resource) -> IdFamily:
        return next(
            family for family in self._context.families.id_families if family.name == offered.family
        )
