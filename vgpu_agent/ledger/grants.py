"""The grants and the holder of each id:
the entries of the ledger, without the rules about what may be entered.

Used by `book`, which books and decides, and by `reconciliation`, which follows the kubelet's
records. No other module changes a grant.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.model import Decider, Grant, GrantState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vgpu_agent.ledger.offers import Offers
    from vgpu_agent.model import Share

# The evidence of a grant whose container has ended (evidence: sentences on who has the grant and
# what decided its shares). Its shares have passed to a later container of the pod, with some ids.
HANDED_ON = ("handed on to a container that came after",)

Saved = dict[int, Grant]  # number of a grant → the grant


class Grants:
    """All grants that are not released.

    State: the grants, the index of their ids, and how many times in a row the kubelet's records did
    not know a grant (`misses`, by its number; one that has an owner is released at the second). One
    container can hold thousands of ids, so the foreign ids of each grant are cached.
    """

    def __init__(self, offers: Offers) -> None:
        self._offers = offers
        self.by_number: dict[int, Grant] = {}
        # Resource → id → number of its grant. A resource that was renamed keeps its ids, and the
        # kubelet may give them again under the new name.
        self.number_of: dict[str, dict[str, int]] = {}
        # number of a grant → (version of the offers, its ids, those of them that are not offered)
        self._foreign: dict[int, tuple[int, tuple[str, ...], tuple[str, ...]]] = {}
        self.misses: collections.Counter[int] = collections.Counter()
        self.last_number = 0

    def next_number(self) -> int:
        """A number that no grant of this process has had."""
        self.last_number += 1
        return self.last_number

    def saved(self) -> Saved:
        """The grants as they are now, for `restore`."""
        return dict(self.by_number)

    def restore(self, saved: Saved) -> None:
        """Go back to what `saved` returned, because a later change broke a rule of the ledger."""
        self.by_number, self.number_of = saved, {}
        for grant in saved.values():
            self._index(grant)

    def device_behind(self, grant: Grant, id_: str) -> str:
        """Return the device of an id of ``grant``, even when it is not offered any more;
        empty when unknown.
        """
        if device := self._offers.device(grant.resource, id_):
            return device
        # an id that names its device begins with the device's UUID
        devices = [share.device for share in grant.shares]
        return next(
            (device for device in devices if id_.startswith(device)), devices[0] if devices else ""
        )

    def foreign_ids(self, grant: Grant) -> tuple[str, ...]:
        """The ids of ``grant`` that are not offered (any more)."""
        known = self._foreign.get(grant.number)
        if known is None or known[0] != self._offers.version or known[1] is not grant.ids:
            foreign = tuple(
                id_ for id_ in grant.ids if self._offers.device(grant.resource, id_) is None
            )
            known = self._foreign[grant.number] = (self._offers.version, grant.ids, foreign)
        return known[2]

    def all_ids_offered(self, grant: Grant) -> bool:
        """Tell whether all ids of the grant are offered under today's settings."""
        return not self.foreign_ids(grant)

    def holders(self, resource: str, ids: Iterable[str]) -> set[int]:
        """The numbers of the grants that have any of ``ids``."""
        index = self.number_of.get(resource, {})
        return {number for id_ in ids if (number := index.get(id_)) is not None}

    def held_devices(self) -> set[str]:
        """The devices that have a holder."""
        return {share.device for grant in self.by_number.values() for share in grant.shares}

    def add(self, grant: Grant) -> Grant:
        """Add ``grant``; its ids must have no holder."""
        self.by_number[grant.number] = grant
        self._index(grant)
        return grant

    def remove(self, grant: Grant) -> None:
        """Remove ``grant``; its ids have no holder then."""
        self.by_number.pop(grant.number)
        self.misses.pop(grant.number, None)
        self._foreign.pop(grant.number, None)
        index = self.number_of[grant.resource]
        for id_ in grant.ids:
            index.pop(id_, None)

    def restate(self, stand_for: Callable[[Grant], tuple[Share, ...]]) -> bool:
        """Bring the shares of each grant whose ids name devices and are all offered in line with
        today's settings; tell whether any share changed. ``stand_for`` returns the shares that the
        ids of a grant stand for now.
        """
        restated = {
            number: msgspec.structs.replace(grant, shares=shares)
            for number, grant in self.by_number.items()
            if self._is_offered_by_ids(grant) and (shares := stand_for(grant)) != grant.shares
        }
        self.by_number.update(restated)
        return bool(restated)

    def clear_shares(self, number: int) -> None:
        """Clear the shares of grant ``number``, whose container has ended and handed them on; the
        ids stay with its pod. Unknown numbers are allowed.
        """
        # `RESERVED`: booked, and no container has its shares
        if grant := self.by_number.get(number):
            self.by_number[number] = msgspec.structs.replace(
                grant, shares=(), decided_for=None, state=GrantState.RESERVED, evidence=HANDED_ON
            )

    def take_from(self, grant: Grant, ids: set[str]) -> None:
        """Take ``ids`` out of ``grant``; remove the grant when nothing remains."""
        self.remove(grant)
        rest = tuple(id_ for id_ in grant.ids if id_ not in ids)
        if not rest:
            return
        offered = self._offers.by_name.get(grant.resource)
        if grant.decided_for or (offered and offered.decided_by is Decider.POD):
            # The container that the decision was for has ended: its shares have passed to the next
            # one, which took ``ids``.
            left = msgspec.structs.replace(
                grant,
                ids=rest,
                shares=(),
                decided_for=None,
                state=GrantState.RESERVED,
                evidence=HANDED_ON,
            )
            self.add(left)
            return
        devices = {self.device_behind(grant, id_) for id_ in rest}
        shares = tuple(share for share in grant.shares if share.device in devices)
        self.add(msgspec.structs.replace(grant, ids=rest, shares=shares))

    def _is_offered_by_ids(self, grant: Grant) -> bool:
        offered = self._offers.by_name.get(grant.resource)
        if (
            offered is None
            or offered.decided_by is not Decider.IDS
            or offered.family != grant.family
        ):
            return False
        return self.all_ids_offered(grant)

    def _index(self, grant: Grant) -> None:
        index = self.number_of.setdefault(grant.resource, {})
        index.update(dict.fromkeys(grant.ids, grant.number))
