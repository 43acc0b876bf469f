"""Bring the ledger in line with the kubelet's records: add grants that only the records show (adopt
them), enter the owners of grants (name them), and release grants.

Where the two differ, the kubelet's records decide. `Ledger.reconcile` in `book` calls this at start
and after each reading of the records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vgpu_agent.ledger.grants import HANDED_ON
from vgpu_agent.model import Grant, GrantState

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.ledger.grants import Grants
    from vgpu_agent.model import Holding, KubeletRecords, Owner, Share

_ENDED = "the pod has ended"


class InterpretedHolding(NamedTuple):
    """The grant that an entry of the kubelet's records stands for.

    Attributes:
        family: the family of the ids.
        shares: the shares of the holder; empty if the pod decides and there is no decision yet.
        by_pod: the pod decides (`Decider.POD`).
        decided_for: (UID of the pod, container) that the shares were decided for, where the
            pod decides; None before.
        ended: the container has ended, and a later container of its pod may have the shares now.
        may_overcommit: a scheduler decided the shares, so the device may have more compute in use,
            or more holders, than it is meant for.
        decided_at: the time of the decision in unix seconds; 0 if unknown.
    """

    family: str
    shares: tuple[Share, ...]
    by_pod: bool = False
    decided_for: tuple[str, str] | None = None
    ended: bool = False
    may_overcommit: bool = False
    decided_at: float = 0.0


class Correction(msgspec.Struct, frozen=True):
    """One thing that the ledger changed because of the kubelet's records.

    Attributes:
        event: the name of the event, e.g. ``ledger.adopted`` or ``ledger.released``.
        drift: True if the ledger was wrong; to name or release a grant is normal.
        grant: the grant after the change.
        reason: the reason, as one sentence.
    """

    event: str
    drift: bool
    grant: Grant
    reason: str


class Reconciliation:
    """The correction of the grants by the kubelet's records. State: none but the grants.

    ``clock`` is that of the reservations, which only grows; ``wall_clock`` is in unix seconds.
    """

    def __init__(
        self, grants: Grants, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._grants = grants
        self._clock, self._wall_clock = clock, wall_clock

    def run(
        self,
        records: KubeletRecords,
        interpret: Callable[[Holding], InterpretedHolding | None],
        *,
        reservation_seconds: float,
        newest: float,
        initial: bool,
        serving: bool,
        may_release: bool,
        still_runs: Callable[[Grant], bool],
        has_ended: Callable[[Grant], bool],
        ended_only: bool,
    ) -> list[Correction]:
        """Apply one reading of the kubelet's records.

        Args:
            records: the reading; if it is not complete, it releases no grant.
            interpret: returns the meaning of a holding; None if it is not ours to book.
            reservation_seconds: how long a grant without an owner may stay unconfirmed.
            newest: the number of the last grant from before the records were read; infinity if
                they are newer than all grants.
            initial: the ledger is being rebuilt, so to adopt a grant is no drift.
            serving: False while another agent may serve the node, whose pods may change: to name
                another holder is no drift then.
            may_release: False while a restarted kubelet still finds its pods again.
            still_runs: tells whether a grant stays although the records do not show it.
            has_ended: tells whether the API server confirms the end of a grant's pod.
            ended_only: release nothing but grants of ended pods.
        """
        corrections: list[Correction] = []
        confirmed: set[int] = set()
        for holding in records.holdings:
            if (interpreted := interpret(holding)) is None:
                continue
            holders = self._grants.holders(holding.resource, holding.ids)
            # not for ids that were booked since the records were read
            if max(holders, default=0) <= newest and (
                correction := self._apply_holding(
                    holding, holders, interpreted, initial=initial, serving=serving
                )
            ):
                corrections.append(correction)
            confirmed |= self._grants.holders(holding.resource, holding.ids)
        # in complete records, a holder that is not mentioned is gone
        if records.complete and may_release:
            for grant in list(self._grants.by_number.values()):
                if grant.number in confirmed or still_runs(grant):
                    continue
                # If the API server confirms the end of the pod, no second reading is needed. A
                # grant that was booked during the reading cannot be in the records.
                reason = _ENDED if grant.number <= newest and has_ended(grant) else ""
                if reason or (
                    not ended_only and (reason := self._release_reason(grant, reservation_seconds))
                ):
                    self._grants.remove(grant)
                    gone = msgspec.structs.replace(grant, state=GrantState.RELEASED)
                    corrections.append(
                        Correction("ledger.released", drift=False, grant=gone, reason=reason)
                    )
        for number in confirmed:
            self._grants.misses.pop(number, None)
        return corrections

    def _apply_holding(
        self,
        holding: Holding,
        holders: set[int],
        interpreted: InterpretedHolding,
        *,
        initial: bool,
        serving: bool,
    ) -> Correction | None:
        owner = holding.owner
        grants = [self._grants.by_number[number] for number in sorted(holders)]
        if len(grants) == 1 and set(grants[0].ids) == set(holding.ids):
            return self._name_owner(grants[0], owner, interpreted, serving=serving)
        undecided = all(grant.owner is None and grant.decided_for is None for grant in grants)
        if (
            interpreted.by_pod
            and grants
            and not undecided
            and all(grant.owner is None or grant.owner.may_be_in_pod_of(owner) for grant in grants)
        ):
            # Containers of one pod can have the same ids one after the other. The holder is decided
            # before each start.
            return None
        for grant in grants:
            self._grants.take_from(grant, set(holding.ids))
        # It continues the reservation that Allocate made, although not all ids are the same, and is
        # no grant that was unknown.
        continued = interpreted.by_pod and bool(grants) and undecided
        adopted = self._grants.add(
            Grant(
                self._grants.next_number(),
                interpreted.family,
                holding.resource,
                holding.ids,
                interpreted.shares,
                self._state(owner, interpreted),
                owner,
                interpreted.decided_at or self._wall_clock(),
                interpreted.decided_for,
                reserved_at_monotonic=self._clock(),
                may_overcommit=interpreted.may_overcommit,
                # in the records only, so it may be older than its time here says
                found=not continued and not interpreted.decided_at,
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

    def _name_owner(
        self, grant: Grant, owner: Owner, interpreted: InterpretedHolding, *, serving: bool
    ) -> Correction | None:
        known = grant.owner
        # `may_be`: no field that both know differs
        same_container = known is None or known.may_be(owner)
        within_pod = (
            interpreted.by_pod
            and known is not None
            and not same_container
            and known.may_be_in_pod_of(owner)
        )
        if within_pod and (
            grant.decided_for is not None
            or interpreted.decided_for is None
            or grant.evidence == HANDED_ON  # its container has ended; a later one has its shares
        ):
            # Another container of the pod has the ids now, see `_apply_holding`. Only a decision
            # for that container changes the owner.
            return None
        # Keep the fields of the owner that this reading does not have: pod-resources has no UIDs,
        # and the checkpoint has no names of pods.
        merged = owner if known is None or not same_container else owner.filled_from(known)
        shares, decided_for, may_overcommit = grant.shares, grant.decided_for, grant.may_overcommit
        if interpreted.ended and same_container and not grant.evidence:
            # Not for a grant that this agent has decided, which has `evidence`: sentences on what
            # proved the owner and decided the shares. The decision for the next container takes
            # its shares, and the pod's status may be older than its start.
            shares, decided_for = (), None
        elif not same_container and interpreted.by_pod:
            # the decision, if there is one, was for another pod
            shares, decided_for, may_overcommit = (
                interpreted.shares,
                interpreted.decided_for,
                interpreted.may_overcommit,
            )
        elif (
            not any(share.memory_mib for share in shares)
            and interpreted.shares
            and not grant.evidence
        ):
            # The GPU may not have answered when the grant was made, or its pod was unknown. A
            # decision of this agent is not changed, even if it has no memory.
            shares, decided_for, may_overcommit = (
                interpreted.shares,
                interpreted.decided_for,
                interpreted.may_overcommit,
            )
        named = msgspec.structs.replace(
            grant,
            owner=merged,
            shares=shares,
            decided_for=decided_for,
            may_overcommit=may_overcommit,
        )
        named = self._grants.by_number[grant.number] = msgspec.structs.replace(
            named, state=self._state(merged, interpreted, named)
        )
        if known == merged and named == grant:
            return None
        if same_container or within_pod:
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
        return Correction("ledger.renamed", drift=serving, grant=named, reason=reason)

    @staticmethod
    def _state(
        owner: Owner, interpreted: InterpretedHolding, grant: Grant | None = None
    ) -> GrantState:
        """Return the state: `IDENTIFIED` once it is certain which container holds the grant,
        `RESERVED` where the pod decides and no decision is known yet, and otherwise `GRANTED`: the
        records name a container, but not fully, or not the one that was decided for.
        """
        if interpreted.by_pod:
            decided_for = grant.decided_for if grant else interpreted.decided_for
            if decided_for is None:
                return GrantState.RESERVED
            return (
                GrantState.IDENTIFIED
                if decided_for == (owner.pod_uid, owner.container)
                else GrantState.GRANTED
            )
        return GrantState.IDENTIFIED if owner.pod_uid and owner.pod else GrantState.GRANTED

    def _release_reason(self, grant: Grant, reservation_seconds: float) -> str:
        """Return why ``grant``, which the records do not show, is released; "" to keep it.

        Each call for a grant with an owner counts as one reading without it.
        """
        if grant.owner is None:
            expired = self._clock() - grant.reserved_at_monotonic > reservation_seconds
            return (
                f"the kubelet did not confirm the reservation within {reservation_seconds:g} s"
                if expired
                else ""
            )
        self._grants.misses[grant.number] += 1
        return _ENDED if self._grants.misses[grant.number] >= 2 else ""
