"""Compare the ledger with the kubelet's own records: what they add, name and take away.
The kubelet wins every disagreement.

`book` calls it for `Ledger.reconcile`, at start as well as every 30 seconds.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.ledger.grants import HANDED_ON
from vgpu_agent.model import Grant, GrantState

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.ledger.grants import Grants
    from vgpu_agent.model import Holding, KubeletRecords, Owner, Share

_ENDED = "the pod has ended"


class Meaning(NamedTuple):
    """The interpretation of a line of the kubelet's records.

    Attributes:
        family: the family of the ids.
        shares: what the holder has; empty where the pod decides and no decision was made yet.
        by_pod: the pod decides (`Decider.POD`).
        decided_for: see `Grant.decided_for`.
        over: the container has ended; what it had went on to the containers that came after it.
        may_overcommit: see `Grant.may_overcommit`.
        decided_at: unix seconds when it was decided; 0 when unknown.
    """

    family: str
    shares: tuple[Share, ...]
    by_pod: bool = False
    decided_for: tuple[str, str] | None = None
    over: bool = False
    may_overcommit: bool = False
    decided_at: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Correction:
    """One thing that the ledger changed because of the kubelet's records.

    Attributes:
        event: a fixed name for the journal (``ledger.adopted``, ``ledger.released``…).
        drift: True when the ledger had been wrong; naming and releasing are the normal course.
        grant: the grant after the change.
        reason: one sentence.
    """

    event: str
    drift: bool
    grant: Grant
    reason: str


class Reconciliation:
    """The ledger's changes by the kubelet's records; its state is that of the grants."""

    def __init__(
        self, grants: Grants, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._grants = grants
        self._clock, self._wall_clock = clock, wall_clock

    def run(
        self,
        records: KubeletRecords,
        interpret: Callable[[Holding], Meaning | None],
        *,
        reservation_seconds: float,
        newest: float,
        initial: bool,
        may_release: bool,
        still_runs: Callable[[Grant], bool],
        has_ended: Callable[[Grant], bool],
        ended_only: bool,
    ) -> list[Correction]:
        """See `Ledger.reconcile`."""
        corrections: list[Correction] = []
        confirmed: set[int] = set()
        for holding in records.holdings:
            if (meaning := interpret(holding)) is None:
                continue
            holders = self._grants.holders(holding.resource, holding.ids)
            if max(holders, default=0) <= newest and (
                correction := self._confirm(holding, holders, meaning, initial=initial)
            ):
                corrections.append(correction)
            confirmed |= self._grants.holders(holding.resource, holding.ids)
        if records.complete and may_release:
            for grant in list(self._grants.by_number.values()):
                if grant.number in confirmed or still_runs(grant):
                    continue
                # Where the kubelet and the API server agree, no second reading is needed.
                # What was booked while they were read is in none of them.
                reason = _ENDED if grant.number <= newest and has_ended(grant) else ""
                if reason or (
                    not ended_only and (reason := self._outlived(grant, reservation_seconds))
                ):
                    self._grants.leave(grant)
                    gone = dataclasses.replace(grant, state=GrantState.RELEASED)
                    corrections.append(
                        Correction("ledger.released", drift=False, grant=gone, reason=reason)
                    )
        for number in confirmed:
            self._grants.misses.pop(number, None)
        return corrections

    def _confirm(
        self, holding: Holding, holders: set[int], meaning: Meaning, *, initial: bool
    ) -> Correction | None:
        owner = holding.owner
        grants = [self._grants.by_number[number] for number in sorted(holders)]
        if len(grants) == 1 and set(grants[0].ids) == set(holding.ids):
            return self._name(grants[0], owner, meaning)
        open_ = all(grant.owner is None and grant.decided_for is None for grant in grants)
        if (
            meaning.by_pod
            and grants
            and not open_
            and all(grant.owner is None or grant.owner.may_be_in(owner) for grant in grants)
        ):
            # The containers of one pod hand ids on to each other; which of them has them now is
            # decided before each start.
            return None
        for grant in grants:
            self._grants.take_from(grant, set(holding.ids))
        continued = meaning.by_pod and bool(grants) and open_
        adopted = self._grants.enter(
            Grant(
                self._grants.next_number(),
                meaning.family,
                holding.resource,
                holding.ids,
                meaning.shares,
                self._state(owner, meaning),
                owner,
                meaning.decided_at or self._wall_clock(),
                meaning.decided_for,
                steady_at=self._clock(),
                may_overcommit=meaning.may_overcommit,
                found=not continued and not meaning.decided_at,
            )
        )
        if continued:
            return Correction(
                "ledger.named",
                drift=False,
                grant=adopted,
                reason="the kubelet's records name the container",
            )
        reason = (
            "found in the kubelet's records at start"
            if initial
            else "the kubelet's records name a holder that the ledger did not know"
        )
        return Correction("ledger.adopted", drift=not initial, grant=adopted, reason=reason)

    def _name(self, grant: Grant, owner: Owner, meaning: Meaning) -> Correction | None:
        known = grant.owner
        same_container = known is None or known.may_be(owner)
        inside = (
            meaning.by_pod and known is not None and not same_container and known.may_be_in(owner)
        )
        if inside and (
            grant.decided_for is not None
            or meaning.decided_for is None
            or grant.evidence == HANDED_ON
        ):
            # passed on inside its pod, see `_confirm`; only what was decided for its holder is
            # certain
            return None
        # A source without an answer this time takes no knowledge away.
        merged = owner if known is None or not same_container else owner.filled_from(known)
        shares, decided_for, may_overcommit = grant.shares, grant.decided_for, grant.may_overcommit
        if meaning.over and same_container and not grant.evidence:
            # One that was decided here hands its shares on when the next is decided; the pod's
            # status may be of the life before.
            shares, decided_for = (), None
        elif not same_container and meaning.by_pod:
            # What was decided, was for another pod.
            shares, decided_for, may_overcommit = (
                meaning.shares,
                meaning.decided_for,
                meaning.may_overcommit,
            )
        elif (
            not any(share.memory_mib for share in shares) and meaning.shares and not grant.evidence
        ):
            # A GPU that did not answer when its grant was made may be known by now, or a pod that
            # had not been seen. A decision stands, also one that gives nothing.
            shares, decided_for, may_overcommit = (
                meaning.shares,
                meaning.decided_for,
                meaning.may_overcommit,
            )
        named = dataclasses.replace(
            grant,
            owner=merged,
            shares=shares,
            decided_for=decided_for,
            may_overcommit=may_overcommit,
        )
        named = self._grants.by_number[grant.number] = dataclasses.replace(
            named, state=self._state(merged, meaning, named)
        )
        if known == merged and named == grant:
            return None
        if same_container or inside:
            return Correction(
                "ledger.named",
                drift=False,
                grant=named,
                reason="the kubelet's records name the container",
            )
        reason = (
            f"the ids belong to {owner.pod_name}, the ledger had "
            f"{known.pod_name if known else 'no owner'}"
        )
        return Correction("ledger.renamed", drift=True, grant=named, reason=reason)

    @staticmethod
    def _state(owner: Owner, meaning: Meaning, grant: Grant | None = None) -> GrantState:
        if meaning.by_pod:
            decided_for = grant.decided_for if grant else meaning.decided_for
            if decided_for is None:
                return GrantState.RESERVED
            return (
                GrantState.PROVEN
                if decided_for == (owner.pod_uid, owner.container)
                else GrantState.GRANTED
            )
        return GrantState.PROVEN if owner.pod_uid and owner.pod else GrantState.GRANTED

    def _outlived(self, grant: Grant, reservation_seconds: float) -> str:
        if grant.owner is None:
            expired = self._clock() - grant.steady_at > reservation_seconds
            return (
                f"the kubelet did not confirm the reservation within {reservation_seconds:g} s"
                if expired
                else ""
            )
        self._grants.misses[grant.number] += 1
        return _ENDED if self._grants.misses[grant.number] >= 2 else ""
