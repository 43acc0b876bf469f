"""Interpret the kubelet's records: the family, the holder and the shares of each holding.

`allocator` passes this to the ledger, which follows the records. In some families the ids name the
devices, and nothing else is needed. In the others the pod decides on the devices (`Decider.POD`).
There the decision is known from the grant record in the container's CDI spec, or, for a container
that has started, from its pod. For other containers it is made at PreStartContainer.

A holding keeps its meaning when the current settings no longer have its resource.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.allocation.holdings import (
    has_started_before,
    has_started_since,
    is_outdated,
    is_over,
    ruled_out,
    with_single_holders,
)
from vgpu_agent.allocation.questions import question
from vgpu_agent.families.family import Ownership
from vgpu_agent.ledger.reconciliation import InterpretedHolding
from vgpu_agent.model import Decider
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vgpu_agent.allocation.carrier import GrantRecord
    from vgpu_agent.allocation.context import Context
    from vgpu_agent.families.family import Family, PodFamily
    from vgpu_agent.model import Grant, Holding, KubeletRecords, Owner, Resource
    from vgpu_agent.pods import Pod, PodContainer


# grant records by token (a hash of the resource and its ids), and by the pod's UID
_Index = tuple["dict[str, list[GrantRecord]]", "dict[str, list[GrantRecord]]"]


class Interpretation:
    """The interpreter of the kubelet's holdings. It uses families, pods and grant records.

    State: an index of the grant records, rebuilt when they change; and the holdings that
    `with_single_holders` returned last. The holdings that are interpreted after it are these.
    """

    def __init__(self, context: Context) -> None:
        """Read what ``context`` has: families, ledger, pods, inventory, and in its ``carrier`` the
        grant records.
        """
        self._context = context
        self._ledger = context.ledger
        self._index: tuple[tuple[GrantRecord, ...], _Index] | None = None
        self._holdings: tuple[Holding, ...] = ()

    def with_single_holders(self, records: KubeletRecords) -> KubeletRecords:
        """Return ``records`` with one holder for each id of the resources where the pod decides,
        also where the kubelet has given an id to several containers.
        """
        names = {offer.name for offer in self._ledger.resources if offer.decided_by is Decider.POD}
        # `decided_for`: (pod's UID, container) that the shares were decided for, set only where the
        # pod decides; `owner`: the container that the kubelet names, which a guess may have missed.
        names |= {grant.resource for grant in self._ledger.grants if grant.decided_for} | {
            record.resource for record in self._context.carrier.records
        }
        running_inits = self._running_inits()
        decided = {
            (record.owner.pod_uid, record.owner.container, record.resource)
            for record in self._context.carrier.records
        }
        found = with_single_holders(records, names, self._context.pods, running_inits, decided)
        # `entries` is None: the checkpoint could not be read
        hidden = self._hidden_inits(running_inits) if records.entries is None else {}
        self._holdings = tuple(
            self._with_recorded_container(holding, hidden) if holding.resource in names else holding
            for holding in found.holdings
        )
        return msgspec.structs.replace(found, holdings=self._holdings)

    def __call__(self, holding: Holding) -> InterpretedHolding | None:
        """Interpret one holding, for `Ledger.reconcile`. Return None when the resource is not one
        of the agent's, or is only there for schedulers to count (`Decider.NOBODY`).
        """
        families = self._context.families
        offered_by = next(
            (offer.family for offer in self._ledger.resources if offer.name == holding.resource), ""
        )
        # ``idle`` and ``paused`` are the families that offer nothing now: those whose ids name
        # devices, and those whose pods decide.
        # First the families whose name the resource certainly is, then those that only may have
        # offered it.
        for ownership in (Ownership.CERTAIN, Ownership.POSSIBLE):
            for id_family in (*families.id_families, *families.idle):
                # A family also owns names that it may have offered under earlier settings. A name
                # that another family offers now is that family's.
                if (
                    offered_by in ("", id_family.name)
                    and _owns(id_family, holding.resource, offered_by) is ownership
                ):
                    inventory = self._context.inventory()
                    shares = id_family.shares(holding.resource, holding.ids, inventory)
                    if shares or offered_by:
                        return InterpretedHolding(id_family.name, shares)
            for pod_family in (*families.pod_families, *families.paused):
                if _owns(pod_family, holding.resource, offered_by) is ownership:
                    return self._by_pod(pod_family, holding)
        return None

    def may_be_hidden(self, grant: Grant) -> bool:
        """Tell whether the grant's container may run although the kubelet's records lack it:
        pod-resources does not list plain init containers.
        """
        if grant.owner is None or not grant.shares:
            return False
        pod = self._context.pods.get(grant.owner.pod_uid)
        if pod is None and self._context.pods.was_left_out(grant.owner.pod_uid):
            return True  # the pod is there, but too large for the pod cache, or one too many
        container = pod.container(grant.owner.container) if pod else None
        if pod is None or container is None or pod.ended:
            return False
        return container.kind is ContainerKind.INIT and not self._is_over(pod, container.name)

    def _running_inits(self) -> set[tuple[str, str]]:
        """Return the last started init container of each pod (pod's UID, container). It may run,
        with all its shares, until a later container starts.

        A restart of an earlier sidecar does not show that it has ended: sidecars run beside it.
        """
        _, by_uid = self._indexed(self._context.carrier.records)
        found = set()
        for uid, records in by_uid.items():
            if (pod := self._context.pods.get(uid)) is None:
                continue
            inits = {
                container.name
                for container in pod.containers
                if container.kind is ContainerKind.INIT
            }
            starts = [record for record in records if record.owner.container in inits]
            last = max(starts, key=lambda record: record.decided_at, default=None)
            if last is not None and not self._is_over(pod, last.owner.container):
                found.add((uid, last.owner.container))
        return found

    def _hidden_inits(
        self, running_inits: Collection[tuple[str, str]]
    ) -> dict[tuple[str, str], str]:
        """Return the init containers that run and that the ledger does not know, as (pod's UID,
        resource) → name.

        Only the checkpoint names init containers. Without it, the ids of one that runs appear as
        those of a container after it.
        """
        known = {grant.decided_for for grant in self._ledger.grants if grant.shares}
        return {
            (record.owner.pod_uid, record.resource): record.owner.container
            for record in self._context.carrier.records
            if (key := (record.owner.pod_uid, record.owner.container)) in running_inits
            and key not in known
        }

    def _with_recorded_container(
        self, holding: Holding, hidden: dict[tuple[str, str], str]
    ) -> Holding:
        """Return ``holding`` with the container that has the grant record for these ids.

        Containers of one pod may share ids. The kubelet's records do not show which one uses them.
        ``hidden`` are those of `_hidden_inits`. Each is removed once it has a holding.
        """
        pod = self._pod_of(holding)
        # the kubelet's UID of the pod; a static pod's mirror in the API server has another
        uid = pod.kubelet_uid if pod else holding.owner.pod_uid
        name = ""
        key = (uid, holding.resource)
        if pod and key in hidden and self._may_hold_for(hidden[key], holding, pod):
            name = hidden.pop(key)
        by_token, _ = self._indexed(self._context.carrier.records)
        for record in by_token.get(grant_token(holding.resource, holding.ids), ()):
            # without a UID: by namespace and name, as far as both are known
            if record.owner.pod_uid == uid if uid else record.owner.may_be_in_pod_of(holding.owner):
                name = name or record.owner.container
        return (
            msgspec.structs.replace(
                holding, owner=msgspec.structs.replace(holding.owner, container=name, pod_uid=uid)
            )
            if name
            else holding
        )

    def _may_hold_for(self, init: str, holding: Holding, pod: Pod) -> bool:
        """Tell whether the holding of a later container can stand for an init container that runs:
        the holding's own container starts after it, and the ledger has nothing decided for the ids.
        """
        names = [container.name for container in pod.containers]
        grant = self._ledger.find(holding.resource, holding.ids)
        return holding.owner.container in names[names.index(init) + 1 :] and (
            grant is None or grant.decided_for is None
        )

    def _by_pod(self, family: PodFamily, holding: Holding) -> InterpretedHolding | None:
        """Interpret a holding of a resource whose devices the pod decides on (``by_pod``)."""
        offered = next(
            (offer for offer in self._ledger.resources if offer.name == holding.resource), None
        )
        if offered is not None and offered.decided_by is not Decider.POD:
            return None
        pod = self._pod_of(holding)
        record = self._record(holding, pod)
        if pod is not None and self._is_over(
            pod, record.owner.container if record else holding.owner.container
        ):
            # ended: a later container of the pod may have the shares now
            return InterpretedHolding(family.name, shares=(), by_pod=True, ended=True)
        if record is not None:
            if self._is_outdated(record, pod):
                return InterpretedHolding(family.name, shares=(), by_pod=True)
            key = (record.owner.pod_uid, record.owner.container)  # whom the shares are for
            return InterpretedHolding(
                family.name,
                record.shares,
                by_pod=True,
                decided_for=key,
                may_overcommit=record.may_overcommit,
                decided_at=record.decided_at,
            )
        if offered is None:
            # The resource is no longer offered (renamed, switched off or refused), and the
            # container keeps its shares. Without a grant, the resource is one that is only there
            # for schedulers to count.
            grant = self._ledger.find(holding.resource, holding.ids)
            return _from_grant(grant) if grant else None
        return self._from_pod(family, offered, pod, holding)

    def _is_outdated(self, record: GrantRecord, pod: Pod | None) -> bool:
        """Tell whether a later start in the pod shows that the record's container does not run.

        While the pod is not known, only init containers can be seen to have ended: the record of a
        later start names those that did not run then (`inits_not_running`).
        """
        others = self._records_of_pod(record.owner.pod_uid)
        if pod is not None:
            return is_outdated(record, others, pod)
        return any(
            record.owner.container in other.inits_not_running
            and other.decided_at > record.decided_at
            for other in others
        )

    def _from_pod(
        self, family: PodFamily, offered: Resource, pod: Pod | None, holding: Holding
    ) -> InterpretedHolding:
        """Return the shares of a container that has started, as its pod shows them. For other
        containers there are none yet: PreStartContainer decides on them.
        """
        name = holding.owner.container
        container = pod.container(name) if pod else None
        if (
            pod is None
            or container is None
            or not self._started_in_this_sandbox(pod, container)
            or (not holding.owner.pod_uid and self._has_other_ids(pod, holding))
        ):
            return InterpretedHolding(family.name, shares=(), by_pod=True)
        # `recall`: what a running container must have got, by its pod alone
        decision = family.recall(question(self._context, offered, pod, name, holding.ids))
        if decision is None:
            return InterpretedHolding(family.name, shares=(), by_pod=True)
        key = (pod.kubelet_uid, name)
        return InterpretedHolding(
            family.name,
            decision.shares,
            by_pod=True,
            decided_for=key,
            may_overcommit=decision.by_scheduler,  # it may have given more than the device has
        )

    def _has_other_ids(self, pod: Pod, holding: Holding) -> bool:
        """Tell whether the ledger has other ids for the container of that name in ``pod``. Then the
        holding is of another pod of the same name, which the watch does not show yet.
        """
        return any(
            grant.decided_for == (pod.kubelet_uid, holding.owner.container)
            and grant.resource == holding.resource
            and set(grant.ids).isdisjoint(holding.ids)
            for grant in self._ledger.grants
        )

    def _started_in_this_sandbox(self, pod: Pod, container: PodContainer) -> bool:
        """Tell whether the container has started since the pod's sandbox was created, by the pod's
        status and by the grant records. `ruled_out` names the containers that cannot run when a
        given one starts.

        After a reboot the status still shows the earlier sandbox. But a decision for an init
        container that is later than the container's last start shows that there is a new sandbox.
        """
        return container.started and not any(
            container.started_at
            and has_started_before(container, record.decided_at)
            and pod.container(record.owner.container)
            and container.name in ruled_out(pod, record.owner.container)
            for record in self._records_of_pod(pod.kubelet_uid)
        )

    def _record(self, holding: Holding, pod: Pod | None) -> GrantRecord | None:
        """Return the grant record of the container in ``holding``; None without one.

        A record with the same ids is found by these. A container that shares its ids with another
        one may have a record with more ids, which is found by the container's name, unless a
        holding has just the ids of that record. The newest record counts: a static pod keeps its
        UID when it is created again.
        """
        owner, token = holding.owner, grant_token(holding.resource, holding.ids)
        by_token, by_uid = self._indexed(self._context.carrier.records)
        # `may_be`: the two are the same container, as far as both are known
        same_ids = [record for record in by_token.get(token, ()) if record.owner.may_be(owner)]
        more_ids = [
            record
            for record in by_uid.get(owner.pod_uid, ())
            if record.id_count > len(holding.ids)
            and _may_share_ids(pod, record.owner, owner)
            and not self._is_held_whole(record)
        ]
        candidates = [
            record for record in (*same_ids, *more_ids) if record.resource == holding.resource
        ]
        return max(
            candidates, key=lambda record: (record.token == token, record.decided_at), default=None
        )

    def _is_held_whole(self, record: GrantRecord) -> bool:
        """Tell whether one holding of the pod has all ids of the record, so no other has any."""
        return any(
            len(holding.ids) == record.id_count
            and holding.owner.pod_uid == record.owner.pod_uid
            and grant_token(holding.resource, holding.ids) == record.token
            for holding in self._holdings
        )

    def _is_over(self, pod: Pod, name: str) -> bool:
        """Tell whether the container is an init container that has ended, because a later container
        of the pod was started after it.

        The times in the grant records decide. The pod's status follows later, and after a reboot it
        is wrong for a while. It counts for a container without a record, and where it shows a later
        start: containers may start again without a new record.
        """
        container = pod.container(name)
        if container is None or container.kind is not ContainerKind.INIT:
            return False
        _, by_uid = self._indexed(self._context.carrier.records)
        started: dict[str, float] = {}
        for record in by_uid.get(pod.kubelet_uid, ()):  # the newest counts, see `_record`
            started[record.owner.container] = max(
                record.decided_at, started.get(record.owner.container, 0.0)
            )
        if name not in started:
            return is_over(pod, name)
        return any(
            started.get(later.name, 0.0) > started[name] or has_started_since(later, started[name])
            for later in pod.containers[pod.containers.index(container) + 1 :]
        )

    def _records_of_pod(self, uid: str) -> Sequence[GrantRecord]:
        return self._indexed(self._context.carrier.records)[1].get(uid, ())

    def _indexed(self, records: Sequence[GrantRecord]) -> _Index:
        """Return the records by token and by the pod's UID. The index is kept, because a hundred
        holdings may be interpreted in a row.
        """
        if (
            self._index is None
            or len(self._index[0]) != len(records)
            or any(one is not other for one, other in zip(self._index[0], records, strict=True))
        ):
            by_token: dict[str, list[GrantRecord]] = {}
            by_uid: dict[str, list[GrantRecord]] = {}
            for record in records:
                by_token.setdefault(record.token, []).append(record)
                if record.owner.pod_uid:
                    by_uid.setdefault(record.owner.pod_uid, []).append(record)
            self._index = tuple(records), (by_token, by_uid)
        return self._index[1]

    def _pod_of(self, holding: Holding) -> Pod | None:
        owner = holding.owner
        return (
            self._context.pods.get(owner.pod_uid)
            if owner.pod_uid
            else self._context.pods.named(owner.namespace, owner.pod)
        )


def _owns(family: Family, resource: str, offered_by: str) -> Ownership:
    """Return how certain it is that the resource is the family's. It is certain for resources that
    the family offers now, whatever their names; ``offered_by`` is the family that does, or empty.
    """
    return Ownership.CERTAIN if family.name == offered_by else family.owns(resource)


def _from_grant(grant: Grant) -> InterpretedHolding:
    """Return the holding with the shares that the ledger already has for it."""
    return InterpretedHolding(
        grant.family,
        grant.shares,
        by_pod=True,
        decided_for=grant.decided_for,
        may_overcommit=grant.may_overcommit,
    )


def _may_share_ids(pod: Pod | None, recorded: Owner, holder: Owner) -> bool:
    """Tell whether ``holder`` may have a part of the ids of ``recorded``: the two are one
    container, or two init containers of the pod, which share ids.
    """
    if recorded.container == holder.container:
        return True
    kinds = {container.name: container.kind for container in pod.containers} if pod else {}
    return (
        kinds.get(recorded.container) is ContainerKind.INIT
        and kinds.get(holder.container) is ContainerKind.INIT
    )
