"""From the kubelet's calls to the edits: the family that answers, what is booked, and its owner.

The plugin servers call `Allocator` as their backend; `agent` calls `confirm` with kubelet's records at start, shortly after each Allocate
and every 30 seconds. An Allocate costs no API call, no NVML call and no file (the kubelet delays every pod of the node while it runs).

Where ids name devices, the answer is complete in Allocate. Where the pod decides, Allocate answers with a CDI name that stands for the ids
(late), or for the likeliest pod (early), and `binder` proves the pod at PreStartContainer.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from vgpu_agent.allocation import advice, desired_state, early
from vgpu_agent.allocation.binder import Binder
from vgpu_agent.allocation.carrier import CDI_KIND, cdi_name, grant_token
from vgpu_agent.allocation.claims import Claims
from vgpu_agent.allocation.guesses import Given
from vgpu_agent.allocation.interpretation import Interpretation
from vgpu_agent.allocation.overcommits import may_overcommit
from vgpu_agent.allocation.questions import neighbours_of, question
from vgpu_agent.errors import AgentError, CapacityError, LedgerError, RequestRefusedError, UnhealthyDeviceError, UnknownDeviceError, listed
from vgpu_agent.families.node_lock import NodeLocks
from vgpu_agent.isolation.edits import Edits, Provision
from vgpu_agent.model import Decider, GrantState
from vgpu_agent.pods import ContainerKind, DesiredPod

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from vgpu_agent.allocation.carrier import GrantRecord
    from vgpu_agent.allocation.dependencies import Dependencies
    from vgpu_agent.allocation.mode import BindingMode
    from vgpu_agent.allocation.node_families import Families
    from vgpu_agent.concurrency import Revision
    from vgpu_agent.device_ids import ListedDevice
    from vgpu_agent.families.family import Decision, Family, IdFamily, PodFamily, Question
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.ledger.reconciliation import Correction
    from vgpu_agent.model import Grant, Inventory, KubeletRecords, Resource, Share
    from vgpu_agent.nodes import DesiredNode, Node
    from vgpu_agent.pods import Pod


class Allocator:
    """The answers to the kubelet for all resources of the node.

    State: bookings are in the ledger, GPUs in the inventory that ``inventory()`` returns. Here are only the last Allocate of each resource
    (for schedulers' locks) and, in early mode, the containers that this process's answers were meant for.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        families: Families,
        inventory: Callable[[], Inventory],
        journal: Journal,
        dependencies: Dependencies | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Answer from ``ledger``; without dependencies only families whose ids name the device can be served."""
        self._ledger = ledger
        self._families = families
        self._inventory = inventory
        self._journal = journal
        self._around = dependencies
        self._clock = clock
        self._siblings = early.Siblings()
        self._desired_pods = desired_state.DesiredPods()
        self._tokens: tuple[int, dict[str, Grant]] | None = None  # the ledger's version, and its grants by token
        self._interpretation = Interpretation(
            ledger=ledger, families=lambda: self._families, inventory=inventory, dependencies=dependencies
        )
        self.mode: BindingMode | None = None
        self.allocated_at: dict[str, float] = {}
        self._locks = NodeLocks()
        self._claims: Claims | None = None
        self.binder: Binder | None = None
        if dependencies:
            self._claims = Claims(
                ledger=ledger,
                book=dependencies.book,
                refusals=dependencies.refusals,
                families=lambda: self._families,
                inventory=inventory,
                wall_clock=clock,
            )
            self.binder = Binder(
                ledger=ledger, inventory=inventory, journal=journal, dependencies=dependencies, claims=self._claims, clock=clock
            )

    @property
    def revision(self) -> Revision:
        """Moves on whenever a list that kubelet should see may have changed."""
        return self._ledger.revision

    def use_families(self, families: Families) -> None:
        """Answer with other options from now on (a reloaded configuration); grants stay as they are."""
        self._families = families

    def refresh_offer(self) -> None:
        """Bring the ledger's devices and offers in line with the inventory and the families."""
        inventory = self._observed()
        resources = [resource for family in self._families.all for resource in family.resources(inventory)]
        by_ids = {family.name: family for family in self._families.by_ids}

        def stand_for(grant: Grant) -> tuple[Share, ...]:
            # A container from before a change has a part of today's size: its ids are as many of those of the device.
            family = by_ids.get(grant.family)
            return family.shares(grant.resource, grant.ids, inventory) if family else grant.shares

        self._ledger.offer(resources, stand_for, unserved=[family.name for family in self._families.unserved])

    def refresh_claims(self) -> None:
        """Bring the ledger's claims in line with the pods that schedulers have bound to this node; see `Claims`."""
        if self._claims is not None:
            self._claims.refresh()

    def listing(self, resource: str) -> Sequence[ListedDevice]:
        """The complete list for one resource; empty when it is no longer offered."""
        try:
            return self._ledger.listing(resource)
        except UnknownDeviceError:
            return []

    def preferred(self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str]:
        """The ids that suit best; never an error, for which kubelet would fail the pod (kubelet §6), but then a simple pick."""
        simple = list(dict.fromkeys([*must_include, *available]))[:size]
        try:
            offered = self._ledger.resource(resource)
            if offered.decided_by is not Decider.IDS:
                return simple  # which ids these are decides nothing; kubelet is not to ask at all (volcano-vgpu D10)
            # kubelet's view of health can be a moment older than ours; what Allocate would refuse is not recommended.
            usable = {entry.id.id for entry in self._ledger.listing(resource) if entry.healthy}
            healthy = [id_ for id_ in available if id_ in usable]
            simple = list(dict.fromkeys([*must_include, *healthy, *available]))[:size]
            around = neighbours_of(self._ledger, offered.family, self._ledger.grants)
            return self._id_family(offered).prefer(offered, healthy, must_include, size, self._inventory(), around)
        except (CapacityError, UnknownDeviceError) as err:
            self._journal.record("preferred.simple", level="warning", resource=resource, size=size, reason=str(err))
            return simple

    async def allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        """Book the ids and return what the container gets. Only early mode ever waits, and only for a pod that has not been seen yet.

        Raises:
            RequestRefusedError: the request is nonsense in its family's terms (nvidia A23), or it fits no pod (early mode).
            UnknownDeviceError: an id that is not offered (nvidia A24).
            UnhealthyDeviceError: a device that must not be given to any container now.
            CapacityError: more than a device has.
        """
        try:
            offered = self._ledger.resource(resource)
            if offered.decided_by is Decider.NOBODY:
                if self.mode is not None and not self.mode.late:
                    self._siblings.heard(resource, len(ids))
                return Edits()
            self._family(offered).check(offered, ids)
            if offered.decided_by is Decider.IDS:
                grant, edits = self._allocate_by_ids(offered, ids)
            elif self._late:
                grant, edits = self._allocate_late(offered, ids)
            else:
                grant, edits = await self._allocate_early(offered, ids)
        except (RequestRefusedError, LedgerError) as err:
            reason = self._advised(resource, err)
            self._journal.record("allocate.refused", level="warning", resource=resource, ids=_shown(ids), reason=reason)
            raise type(err)(f'invalid allocation request for "{resource}": {reason}') from err
        finally:
            self.allocated_at[resource] = self._clock()
        self._journal.record(
            "allocate.reserved",
            grant=grant.number,
            resource=resource,
            ids=_shown(ids),
            devices=_devices(grant),
            **({"token": grant_token(resource, ids)} if offered.decided_by is Decider.POD else {}),
        )
        return edits

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        """Let a container start whose ids are booked. Where the pod decides, the decision is made here (`Binder.start`).

        Raises:
            UnknownDeviceError: the ledger knows no holder of the ids.
            AgentError: see `Binder.start`.
        """
        offered = self._ledger.resource(resource)
        if offered.decided_by is Decider.NOBODY:
            return
        if offered.decided_by is Decider.IDS:
            wanted = set(ids)
            if not any(wanted <= set(grant.ids) for grant in self._ledger.grants if grant.resource == resource):
                raise UnknownDeviceError(f"{resource}: {listed(ids)} are not booked for any container; kubelet will ask again")
            return
        if self.binder is None or self.mode is None:
            raise AgentError(f"{resource}: this node's Node object has not been read yet; kubelet will ask again")
        await self.binder.start(offered, ids, self._pod_family(offered), late=self.mode.late)

    def may_start_unasked(self, resource: str) -> bool:
        """Tell whether a container may start without a call of ours: what it would start with must be its own, or nothing.

        That holds for ids that name their device and for a CDI name, but not for an early answer that has not been proven, nor while there
        are specs of an agent whose containers could change what is mounted.
        """
        offered = next((offer for offer in self._ledger.resources if offer.name == resource), None)
        if offered is None or offered.decided_by is not Decider.POD:
            return True
        return self.mode is not None and self.mode.late and self._around is not None and not self._around.carrier.outdated

    def confirm(
        self,
        records: KubeletRecords,
        *,
        reservation_seconds: float,
        newest: float = math.inf,
        initial: bool = False,
        may_release: bool = True,
        has_ended: Callable[[Grant], bool] = lambda _: False,
        ended_only: bool = False,
        kept: Collection[int] = (),
    ) -> list[Correction]:
        """Bring the ledger in line with kubelet's records (see `Ledger.reconcile`); each correction is journalled.

        ``kept`` are numbers of grants that stay although the records do not show them.

        Returns:
            The corrections that were drift: the ledger had been wrong.
        """
        if initial:
            # After a restart it is unknown for which Allocate a scheduler's lock was taken, so one from before our start can go.
            for offer in self._ledger.resources:
                self.allocated_at[offer.name] = self._clock()
        records = self._interpretation.sorted_out(records)
        corrections = self._ledger.reconcile(
            records,
            self._interpretation,
            reservation_seconds=reservation_seconds,
            newest=newest,
            initial=initial,
            may_release=may_release,
            still_runs=lambda grant: grant.number in kept or self._interpretation.may_be_hidden(grant),
            has_ended=has_ended,
            ended_only=ended_only,
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
                ids=_shown(grant.ids),
                devices=_devices(grant),
                reason=correction.reason,
            )
        if self.binder is not None and self._around is not None:
            self.binder.guesses.learn(
                ((holding.owner.pod_uid, holding.owner.container) for holding in records.holdings if holding.owner.pod_uid),
                self._ledger.grants,
            )
            self.binder.forget_absent()
            self.binder.pods_unread = not self._around.book.synced.is_set() and any(
                grant.owner is not None and grant.decided_for is None and not grant.shares for grant in self._ledger.grants
            )
            if self._around.book.synced.is_set():
                self._around.refusals.forget_absent(self._around.book.pods)
        return [correction for correction in corrections if correction.drift]

    def unconfirmed(self) -> bool:
        """Tell whether a grant still waits for the kubelet's records to name its container."""
        return any(grant.state is GrantState.RESERVED and grant.owner is None for grant in self._ledger.grants)

    # -- desired state --------------------------------------------------------------------------------------------------------------

    def desired_node(self, node: Node, now: float) -> DesiredNode:
        """Return the desired state of our Node, for all families together."""
        return desired_state.desired_node(self._families, self._ledger, node, self._inventory(), self.allocated_at, now, self._locks)

    def cleanup(self, now: float) -> DesiredNode:
        """Return the desired state of our Node after the agent has left it for good."""
        return desired_state.cleanup(self._families, now)

    def desired_pods(self) -> dict[str, DesiredPod]:
        """Return the desired state of our pods, by the kubelet's UID; only pods of which something is desired."""
        if self._around is None or self.binder is None:
            return {}
        failed = {refusal.pod.kubelet_uid for refusal in self._around.refusals.current if refusal.final}
        return self._desired_pods(self._families, self._ledger, self._around.book, self.binder.served.values(), failed)

    def deliveries(self) -> list[tuple[GrantRecord, Provision]]:
        """See `Binder.deliveries`; none in early mode, where kubelet keeps the answers itself."""
        if self.binder is None or self.mode is None or not self.mode.late:
            return []
        return self.binder.deliveries({family.name: family for family in self._families.by_pod})

    def is_current(self, record: GrantRecord) -> bool:
        """Tell whether the ids of ``record`` still belong to the container that it was made for."""
        grant = self._by_token().get(record.token)
        return grant is not None and grant.decided_for == (record.owner.pod_uid, record.owner.container)

    def is_foreign(self, record: GrantRecord) -> bool:
        """Tell whether the ids of ``record`` were given to another pod, or to one that the kubelet has not named yet."""
        if self.binder is not None and record.token in self.binder.handed_out:
            return True  # also when the ids are part of what was booked for an init container before it
        grant = self._by_token().get(record.token)
        if grant is None:
            return False
        holder = grant.owner.pod_uid if grant.owner and grant.owner.pod_uid else grant.decided_for[0] if grant.decided_for else ""
        return holder != record.owner.pod_uid

    def _by_token(self) -> dict[str, Grant]:
        version = self._ledger.revision.version
        if self._tokens is None or self._tokens[0] != version:
            by_pod = {family.name for family in (*self._families.by_pod, *self._families.unserved)}
            # A change concerns one grant; the others keep their ids, and with them their tokens.
            before = self._tokens[1] if self._tokens else {}
            known = {(grant.resource, grant.ids): token for token, grant in before.items()}
            self._tokens = (
                version,
                {
                    known.get((grant.resource, grant.ids)) or grant_token(grant.resource, grant.ids): grant
                    for grant in self._ledger.grants
                    if grant.family in by_pod
                },
            )
        return self._tokens[1]

    # -- how it is done -------------------------------------------------------------------------------------------------------------

    @property
    def _late(self) -> bool:
        if self._around is None or self.mode is None:
            raise RequestRefusedError("this node's Node object has not been read yet, so it is not known how grants reach containers")
        return self.mode.late

    def _observed(self) -> Inventory:
        """Return the present inventory, after the ledger has taken it over: a MIG instance may be gone since the last offer."""
        inventory = self._inventory()
        self._ledger.observe(inventory)
        return inventory

    def _advised(self, resource: str, err: AgentError) -> str:
        """The reason of a refusal with its remedies, where a device is not to be had."""
        if not isinstance(err, (CapacityError, UnhealthyDeviceError)) or err.advice or not err.device:
            return str(err)
        offered = self._ledger.resource(resource)
        if offered.decided_by is not Decider.IDS:
            return str(err)
        return str(err.advised(advice.for_ids(err, self._ledger, offered, self._inventory())))

    def _allocate_by_ids(self, offered: Resource, ids: Sequence[str]) -> tuple[Grant, Edits]:
        inventory = self._observed()
        family = self._id_family(offered)
        grant = self._ledger.reserve(offered.name, ids, family.shares(offered.name, ids, inventory))
        return grant, family.edits(offered, ids, inventory)

    def _allocate_late(self, offered: Resource, ids: Sequence[str]) -> tuple[Grant, Edits]:
        grant = self._ledger.reserve(offered.name, ids, ())
        token = grant_token(offered.name, ids)
        if self.binder is not None:
            self.binder.handed_out.add(token)
        if self.mode is not None and self.mode.by_annotation:
            return grant, Edits(annotations={f"cdi.k8s.io/vgpu-agent_{token}": f"{CDI_KIND}={token}"})
        return grant, Edits(cdi_names=(cdi_name(token),))

    async def _allocate_early(self, offered: Resource, ids: Sequence[str]) -> tuple[Grant, Edits]:
        assert self._around is not None  # noqa: S101 - `_late` has just asked
        assert self.binder is not None  # noqa: S101 - likewise
        around, family = self._around, self._pod_family(offered)
        guess = await early.awaited_guess(
            around,
            self.binder.guesses,
            self._siblings,
            offered.name,
            len(ids),
            offered={offer.name: len(offer.ids) for offer in self._ledger.resources},
            is_refused=lambda candidate: isinstance(self._decide_early(offered, candidate, ids), AgentError),
        )
        if guess is None:
            # The words before the colon are those that users of the replaced plugin know (volcano-vgpu G11).
            raise RequestRefusedError(
                f"cannot get valid pod: no pending pod on node {around.node} has a container that waits for {len(ids)} of "
                f"{offered.name}; see /debug/pods"
            )
        candidate, decision = guess.candidate, self._decide_early(offered, guess.candidate, ids)
        if isinstance(decision, AgentError):
            if guess.alone:
                raise decision
            # Another pod may be meant, and an error would fail it for good. At the start the pod is known, and kubelet asks again.
            self._journal.record("allocate.unanswered", level="warning", resource=offered.name, ids=_shown(ids), reason=str(decision))
            grant = self._ledger.reserve(offered.name, ids, (), candidate.key)
            self._siblings.decided(candidate.container.limits, self._counted())
            self.binder.guesses.made(grant_token(offered.name, ids), Given(candidate.key, (), Provision(_NOTHING)))
            return grant, _NOTHING
        try:
            may = may_overcommit(decision, candidate.pod, around.settings)
            grant = self._ledger.reserve(offered.name, ids, decision.shares, candidate.key, may_overcommit=may)
        except (CapacityError, UnhealthyDeviceError):
            # A refusal here would be final; at the start it is not, and by then a pod that is ending may have made room.
            grant = self._ledger.reserve(offered.name, ids, (), candidate.key)
        provision = family.provision(self._question(offered, candidate.pod, candidate.container.name, ids), decision.shares)
        self._siblings.decided(candidate.container.limits, self._counted())
        self.binder.guesses.made(grant_token(offered.name, ids), Given(candidate.key, decision.shares, provision))
        return grant, provision.edits

    def _decide_early(self, offered: Resource, candidate: early.Candidate, ids: Sequence[str]) -> Decision | AgentError:
        """Return what a candidate would get, or why it cannot get anything."""
        pod = candidate.pod
        try:
            decision = self._pod_family(offered).decide(self._question(offered, pod, candidate.container.name, ids))
        except (RequestRefusedError, LedgerError) as err:
            return type(err)(f"pod {pod.full_name}, container {candidate.container.name}: {err}")
        if decision.layouts:
            return RequestRefusedError(f"pod {pod.full_name}: a GPU has to be divided for it, which takes binding.mode late")
        if decision.by_agent and candidate.container.kind is ContainerKind.INIT:
            # It and the container behind it would each get a share of its own for the same ids, of which only one can be booked.
            return RequestRefusedError(
                f"pod {pod.full_name}: an init container that asks for {offered.name} needs a scheduler that decides for the pod, or "
                "binding.mode late"
            )
        return decision

    def _counted(self) -> list[str]:
        return [offer.name for offer in self._ledger.resources if offer.decided_by is Decider.NOBODY]

    def _family(self, offered: Resource) -> Family:
        return next(family for family in self._families.all if family.name == offered.family)

    def _id_family(self, offered: Resource) -> IdFamily:
        return next(family for family in self._families.by_ids if family.name == offered.family)

    def _pod_family(self, offered: Resource) -> PodFamily:
        return next(family for family in self._families.by_pod if family.name == offered.family)

    def _question(self, offered: Resource, pod: Pod, container: str, ids: Sequence[str]) -> Question:
        self.refresh_claims()
        node = self._around.node if self._around else ""
        return question(self._ledger, offered, pod, container, ids, node=node, inventory=self._inventory())


def _devices(grant: Grant) -> list[str]:
    return [share.device for share in grant.shares]


def _shown(ids: Sequence[str]) -> list[str]:
    """Shorten the ids for a log line; thousands of them add nothing to the first."""
    return list(ids) if len(ids) <= _MOST_SHOWN else [*ids[:_MOST_SHOWN], f"… {len(ids)} in all"]


_MOST_SHOWN = 16

# With no answer at all, the runtime of many nodes would go by the variable of the image, and images for GPUs ask for all of them.
_NOTHING = Edits({"NVIDIA_VISIBLE_DEVICES": "void"})
