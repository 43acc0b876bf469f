"""The meaning of a line of the kubelet's records:
the family of the ids, their holder, and what was decided for it.

`allocator` hands this to the ledger whenever that follows the records. Ids that name devices are
enough. Where the pod decides, the decision is known from the record beside the container's CDI
spec, or from the pod itself for a container that has started. What has not started is decided at
PreStartContainer. What the kubelet lists is never dropped because today's settings do not know it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.allocation.holdings import is_outdated, is_over, told_apart
from vgpu_agent.allocation.questions import question
from vgpu_agent.families.family import Ownership
from vgpu_agent.ledger.reconciliation import Meaning
from vgpu_agent.model import Decider
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.allocation.carrier import GrantRecord
    from vgpu_agent.allocation.context import Context
    from vgpu_agent.families.family import Family, PodFamily
    from vgpu_agent.model import Grant, Holding, KubeletRecords, Owner, Resource
    from vgpu_agent.pods import Pod


_Index = tuple["dict[str, list[GrantRecord]]", "dict[str, list[GrantRecord]]"]


class Interpretation:
    """The reading of holdings with the facts of families, pods and grant records.
    Its only state is an index of the records.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = context.ledger
        self._index: tuple[tuple[GrantRecord, ...], _Index] | None = None

    def sorted_out(self, records: KubeletRecords) -> KubeletRecords:
        """``records`` with one holder for each id, see `holdings.told_apart`."""
        names = {offer.name for offer in self._ledger.resources if offer.decided_by is Decider.POD}
        names |= {grant.resource for grant in self._ledger.grants if grant.decided_for} | {
            record.resource for record in self._context.carrier.records
        }
        found = told_apart(records, names, self._context.pods, self._at_work())
        return dataclasses.replace(
            found,
            holdings=tuple(
                self._named(holding) if holding.resource in names else holding
                for holding in found.holdings
            ),
        )

    def _at_work(self) -> set[tuple[str, str]]:
        """Return the init containers that were started last in their pod; until a later one starts
        they may run, with all their shares.

        A restart of an earlier sidecar proves nothing: it runs beside them.
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

    def _named(self, holding: Holding) -> Holding:
        """``holding`` in the hands of the container that the spec of its ids was made for,
        where a pod's containers share them.
        """
        if not holding.owner.pod_uid:
            return holding
        by_token, _ = self._indexed(self._context.carrier.records)
        for record in by_token.get(grant_token(holding.resource, holding.ids), ()):
            if record.owner.pod_uid == holding.owner.pod_uid:
                return dataclasses.replace(
                    holding,
                    owner=dataclasses.replace(holding.owner, container=record.owner.container),
                )
        return holding

    def __call__(self, holding: Holding) -> Meaning | None:
        """See `Ledger.reconcile`; None when the resource is not ours,
        or is only there to be counted.
        """
        families = self._context.families
        served_by = next(
            (offer.family for offer in self._ledger.resources if offer.name == holding.resource), ""
        )
        for ownership in (Ownership.CERTAIN, Ownership.POSSIBLE):
            for by_ids in (*families.by_ids, *families.idle):
                # A family owns names that it may have offered before; what another offers by that
                # name today is not meant.
                if (
                    served_by in ("", by_ids.name)
                    and _owns(by_ids, holding.resource, served_by) is ownership
                ):
                    shares = by_ids.shares(holding.resource, holding.ids, self._context.inventory())
                    if shares or served_by:
                        return Meaning(by_ids.name, shares)
            for by_pod in (*families.by_pod, *families.unserved):
                if _owns(by_pod, holding.resource, served_by) is ownership:
                    return self._by_pod(by_pod, holding)
        return None

    def may_be_hidden(self, grant: Grant) -> bool:
        """Tell whether the grant's container may run unseen in the kubelet's records:
        pod-resources hides plain init containers.
        """
        if grant.owner is None or not grant.shares:
            return False
        pod = self._context.pods.get(grant.owner.pod_uid)
        if pod is None and self._context.pods.may_have(grant.owner.pod_uid):
            return True
        container = pod.container(grant.owner.container) if pod else None
        if pod is None or container is None or pod.ended:
            return False
        return container.kind is ContainerKind.INIT and not self._is_over(pod, container.name)

    def _by_pod(self, family: PodFamily, holding: Holding) -> Meaning | None:
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
            return Meaning(family.name, (), by_pod=True, over=True)
        if record is not None:
            if pod is not None and is_outdated(record, self._of_pod(record.owner.pod_uid), pod):
                return Meaning(family.name, (), by_pod=True)
            key = (record.owner.pod_uid, record.owner.container)
            return Meaning(
                family.name,
                record.shares,
                by_pod=True,
                decided_for=key,
                may_overcommit=record.may_overcommit,
                decided_at=record.decided_at,
            )
        if offered is None:
            # Renamed, hidden or refused since: what it has, it keeps; a name that never had a grant
            # is only there to be counted.
            held = self._ledger.find(holding.resource, holding.ids)
            return _as_held(held) if held else None
        return self._recalled(family, offered, pod, holding)

    def _recalled(
        self, family: PodFamily, offered: Resource, pod: Pod | None, holding: Holding
    ) -> Meaning:
        """Return what a container that has started must have got;
        undecided for others, which PreStartContainer decides.
        """
        name = holding.owner.container
        container = pod.container(name) if pod else None
        if pod is None or container is None or not container.started:
            return Meaning(family.name, (), by_pod=True)
        asked = question(self._context, offered, pod, name, holding.ids)
        decision = family.recall(asked)
        if decision is None:
            return Meaning(family.name, (), by_pod=True)
        key = (pod.kubelet_uid, name)
        return Meaning(
            family.name,
            decision.shares,
            by_pod=True,
            decided_for=key,
            may_overcommit=decision.by_scheduler,
        )

    def _record(self, holding: Holding, pod: Pod | None) -> GrantRecord | None:
        """The record of the container that holds ``holding``.

        By the ids where it has all of them; a container that shares its ids with another is found
        by its name. The youngest counts: a static pod keeps its UID when it is made anew.
        """
        owner, token = holding.owner, grant_token(holding.resource, holding.ids)
        by_token, by_uid = self._indexed(self._context.carrier.records)
        whole = [record for record in by_token.get(token, ()) if record.owner.may_be(owner)]
        parts = [
            record
            for record in by_uid.get(owner.pod_uid, ())
            if record.ids > len(holding.ids) and _alike(pod, record.owner, owner)
        ]
        fitting = [record for record in (*whole, *parts) if record.resource == holding.resource]
        return max(
            fitting, key=lambda record: (record.token == token, record.decided_at), default=None
        )

    def _is_over(self, pod: Pod, name: str) -> bool:
        """Tell whether an init container has ended: one that comes after it was started after it.

        The records of their starts decide. The pod's status follows later, and after a reboot it is
        wrong for a while. It only counts for a container that has no record.
        """
        container = pod.container(name)
        if container is None or container.kind is not ContainerKind.INIT:
            return False
        _, by_uid = self._indexed(self._context.carrier.records)
        started: dict[str, float] = {}
        for record in by_uid.get(pod.kubelet_uid, ()):  # the youngest counts, see `_record`
            started[record.owner.container] = max(
                record.decided_at, started.get(record.owner.container, 0.0)
            )
        if name not in started:
            return is_over(pod, name)
        names = [each.name for each in pod.containers]
        return any(
            started.get(later, 0.0) > started[name] for later in names[names.index(name) + 1 :]
        )

    def _of_pod(self, uid: str) -> Sequence[GrantRecord]:
        return self._indexed(self._context.carrier.records)[1].get(uid, ())

    def _indexed(self, records: Sequence[GrantRecord]) -> _Index:
        """The records by token and by UID; a hundred holdings ask in a row."""
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


def _owns(family: Family, resource: str, served_by: str) -> Ownership:
    """Return how surely the name is the family's;
    the names that it offers today are, whatever they are.
    """
    return Ownership.CERTAIN if family.name == served_by else family.owns(resource)


def _as_held(held: Grant) -> Meaning:
    return Meaning(
        held.family,
        held.shares,
        by_pod=True,
        decided_for=held.decided_for,
        may_overcommit=held.may_overcommit,
    )


def _alike(pod: Pod | None, recorded: Owner, holder: Owner) -> bool:
    """Tell whether part of the ids of ``recorded`` may be of ``holder``:
    one container, or two init containers that share them.
    """
    if recorded.container == holder.container:
        return True
    kinds = {container.name: container.kind for container in pod.containers} if pod else {}
    return (
        kinds.get(recorded.container) is ContainerKind.INIT
        and kinds.get(holder.container) is ContainerKind.INIT
    )
