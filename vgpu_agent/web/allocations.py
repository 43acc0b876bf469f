"""``/debug/allocations``: every grant with its evidence, reservations that the kubelet's records
do not confirm yet, and refused starts.

Used by `debug`, and by `explain`, which puts the same into sentences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.model import GrantState
from vgpu_agent.web import binding, views
from vgpu_agent.web.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu_agent.model import Grant
    from vgpu_agent.status import AgentStatus


class DecidedFor(msgspec.Struct, frozen=True):
    """The container that the shares were decided for."""

    pod_uid: str
    container: str


class AllocationView(views.GrantView, frozen=True):
    """A grant and the evidence for its owner.

    Attributes:
        token: stands in all log lines about the grant, and names its CDI device; empty where the
            ids name the devices.
        decided_for: null until the shares were decided for a container. With early binding that is
            a guess, and may differ from the owner, which comes from the kubelet.
        evidence: how the owner was identified and what decided the shares, one sentence each.
    """

    token: str = ""
    decided_for: DecidedFor | None = None
    evidence: tuple[str, ...] = ()


def answer(status: AgentStatus, now: float, pod: str | None) -> dict[str, Any]:
    """Show everything, or only what concerns ``pod`` (``namespace/name``), at ``now`` in unix
    seconds.

    Unconfirmed reservations are shown for every pod, because each of them may be for that pod.
    """
    limits = Limits(status)  # tells of each grant whether its limit is in force
    found = {
        "allocations": allocations(status, now) if pod is None else of_pod(status, now, pod),
        "unconfirmed": tuple(_view(status, grant, now, limits) for grant in unconfirmed(status)),
        "refusals": tuple(
            refusal
            for refusal in binding.refusals(status, now)
            if pod is None or refusal.pod_name == pod
        ),
    }
    return found if pod is None else {"pod": pod, **found}


def allocations(status: AgentStatus, now: float) -> tuple[AllocationView, ...]:
    """Every live grant, the oldest first."""
    limits = Limits(status)
    return tuple(
        _view(status, grant, now, limits)
        for grant in sorted(views.live_grants(status), key=lambda grant: grant.number)
    )


def of_pod(status: AgentStatus, now: float, pod: str) -> tuple[AllocationView, ...]:
    """List the grants of the pod ``namespace/name``: those that have its name or only its UID, and
    those without a container yet that were decided for it.
    """
    # for a static pod, the UID that the kubelet's records have; the API server has another one
    uids = {known.kubelet_uid for known in status.cluster.pods if known.full_name == pod}
    return tuple(
        grant
        for grant in allocations(status, now)
        if grant.pod_name == pod
        or (grant.pod_uid and grant.pod_uid in uids)
        or (
            not grant.container
            and grant.decided_for is not None
            and grant.decided_for.pod_uid in uids
        )
    )


def unconfirmed(status: AgentStatus) -> Iterable[Grant]:
    """Grants that the kubelet's records do not name a container for, the oldest first."""
    waiting = (
        grant
        for grant in views.live_grants(status)
        if grant.state is GrantState.RESERVED and grant.owner is None
    )
    return sorted(waiting, key=lambda grant: grant.reserved_at)


def _view(status: AgentStatus, grant: Grant, now: float, limits: Limits) -> AllocationView:
    return AllocationView(
        **msgspec.structs.asdict(views.grant_view(status, grant, now, limits)),
        # `decided_by_pod`: the resources whose ids name no devices
        token=(
            grant_token(grant.resource, grant.ids)
            if grant.resource in status.ledger.decided_by_pod
            else ""
        ),
        decided_for=DecidedFor(*grant.decided_for) if grant.decided_for else None,
        evidence=grant.evidence,
    )
