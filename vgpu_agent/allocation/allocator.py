"""From kubelet's calls to the edits: which family answers, what is booked, and whose it turns out to be.

The plugin servers call `Allocator` as their backend; `agent` calls `confirm` with kubelet's records at start, shortly after each Allocate
and every 30 seconds. Nothing in here waits for anybody: an Allocate costs no API call, no NVML call and no file (kubelet waits with every
pod of the node while it runs).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vgpu_agent.errors import CapacityError, LedgerError, RequestRefusedError, UnknownDeviceError
from vgpu_agent.model import GrantState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.concurrency import Latest
    from vgpu_agent.device_ids import ListedDevice
    from vgpu_agent.families.family import IdFamily
    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Correction, Grant, Holding, Inventory, KubeletRecords, Share


class Allocator:
    """Answers kubelet for all resources of the node.

    State: none of its own; what is booked stands in the ledger, what GPUs there are in the inventory that ``inventory()`` returns.
    """

    def __init__(self, *, ledger: Ledger, families: Sequence[IdFamily], inventory: Callable[[], Inventory], journal: Journal) -> None:
        self._ledger = ledger
        self._families = tuple(families)
        self._inventory = inventory
        self._journal = journal

    @property
    def revision(self) -> Latest[int]:
        """Moves on whenever a list that kubelet should see may have changed."""
        return self._ledger.revision

    def use_families(self, families: Sequence[IdFamily]) -> None:
        """Answer with other options from now on (a reloaded configuration); grants stay as they are."""
        self._families = tuple(families)

    def refresh_offer(self) -> None:
        """Bring the ledger's devices and offers in line with the inventory and the families."""
        inventory = self._inventory()
        self._ledger.observe(inventory)
        self._ledger.offer(resource for family in self._families for resource in family.resources(inventory))

    def listing(self, resource: str) -> Sequence[ListedDevice]:
        """The complete list for one resource; empty when it is no longer offered."""
        try:
            return self._ledger.listing(resource)
        except UnknownDeviceError:
            return []

    def preferred(self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str]:
        """The ids that suit best; never an error, for which kubelet would fail the pod (kubelet contract §6), but then a simple pick."""
        try:
            offered = self._ledger.resource(resource)
            # kubelet's view of health can be a moment older than ours; what Allocate would refuse is not recommended.
            usable = {entry.id.id for entry in self._ledger.listing(resource) if entry.healthy}
            healthy = [id_ for id_ in available if id_ in usable]
            return self._family(offered.family).prefer(offered, healthy, must_include, size)
        except (CapacityError, UnknownDeviceError) as err:
            simple = list(dict.fromkeys([*must_include, *available]))[:size]
            self._journal.record("preferred.simple", level="warning", resource=resource, size=size, reason=str(err))
            return simple

    def allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        """Book the ids and say what the container gets.

        Raises:
            RequestRefusedError: the request is nonsense in its family's terms (A23).
            UnknownDeviceError: an id that is not offered (A24).
            UnhealthyDeviceError: a device that must not be given to anybody now.
            CapacityError: more than a device has.
        """
        try:
            offered = self._ledger.resource(resource)
            family = self._family(offered.family)
            family.check(offered, ids)
            inventory = self._inventory()
            grant = self._ledger.reserve(resource, ids, family.shares(resource, ids, inventory))
        except (RequestRefusedError, LedgerError) as err:
            self._journal.record("allocate.refused", level="warning", resource=resource, ids=list(ids), reason=str(err))
            raise type(err)(f'invalid allocation request for "{resource}": {err}') from err
        edits = family.edits(offered, ids, inventory)
        self._journal.record("allocate.reserved", grant=grant.number, resource=resource, ids=list(ids), devices=_devices(grant))
        return edits

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        """Let a container start whose ids are booked; families that bind late decide here.

        Raises:
            UnknownDeviceError: the ids are in nobody's hands as far as the ledger knows.
        """
        wanted = set(ids)
        if not any(wanted <= set(grant.ids) for grant in self._ledger.grants if grant.resource == resource):
            raise UnknownDeviceError(f"{resource}: {', '.join(ids)} are not booked for any container; kubelet will ask again")

    def confirm(
        self,
        records: KubeletRecords,
        *,
        reservation_seconds: float,
        newest: float = math.inf,
        initial: bool = False,
        may_release: bool = True,
    ) -> list[Correction]:
        """Bring the ledger in line with kubelet's records (see `Ledger.reconcile`); each correction is journalled.

        Returns:
            The corrections that were drift: the ledger had been wrong.
        """
        corrections = self._ledger.reconcile(
            records, self._interpret, reservation_seconds=reservation_seconds, newest=newest, initial=initial, may_release=may_release
        )
        for correction in corrections:
            grant = correction.grant
            self._journal.record(
                correction.event,
                level="warning" if correction.drift else "info",
                grant=grant.number,
                pod=grant.owner.pod_name if grant.owner else "",
                container=grant.owner.container if grant.owner else "",
                resource=grant.resource,
                ids=list(grant.ids),
                devices=_devices(grant),
                reason=correction.reason,
            )
        return [correction for correction in corrections if correction.drift]

    def unconfirmed(self) -> bool:
        """Whether a grant still waits for kubelet's records to name its container."""
        return any(grant.state is GrantState.RESERVED for grant in self._ledger.grants)

    def _family(self, name: str) -> IdFamily:
        return next(family for family in self._families if family.name == name)

    def _interpret(self, holding: Holding) -> tuple[str, tuple[Share, ...]] | None:
        for family in self._families:
            if family.claims(holding.resource):
                return family.name, family.shares(holding.resource, holding.ids, self._inventory())
        return None


def _devices(grant: Grant) -> list[str]:
    return [share.device for share in grant.shares]
