"""Answer the kubelet's calls for all resources of the node,
and keep the ledger in line with its records.

The plugin servers call `Allocator` as their backend; `agent` calls `confirm` with the kubelet's
records at start, shortly after each Allocate and every 30 seconds. An Allocate costs no API call,
no NVML call and no file (the kubelet delays every pod of the node while it runs).

Where ids name devices, the answer is complete in Allocate (`by_ids`). Where the pod decides,
Allocate answers with a CDI name that stands for the ids (`late_start`), or for the likeliest pod
(`early`). At PreStartContainer the kubelet's records prove which pod it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

from vgpu_agent.allocation import desired_state, preference
from vgpu_agent.allocation.by_ids import IdAllocator
from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.allocation.claims import Claims
from vgpu_agent.allocation.early.binding import EarlyBinding
from vgpu_agent.allocation.ended_pods import EndedPods
from vgpu_agent.allocation.interpretation import Interpretation
from vgpu_agent.allocation.late_start import LateStart
from vgpu_agent.allocation.shared_ids import has_containers_waiting_behind_init
from vgpu_agent.errors import (
    AgentError,
    LedgerError,
    RequestRefusedError,
    UnknownDeviceError,
    shortened_ids,
)
from vgpu_agent.families.node_lock import NodeLocks
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.model import Decider, GrantState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from vgpu_agent.allocation.context import Context, Families
    from vgpu_agent.allocation.mode import BindingMode
    from vgpu_agent.concurrency import Revision
    from vgpu_agent.device_ids import ListedDevice
    from vgpu_agent.families.family import PodFamily
    from vgpu_agent.ledger.reconciliation import Correction
    from vgpu_agent.model import Grant, KubeletRecords, Resource, Share
    from vgpu_agent.nodes import DesiredNode, Node
    from vgpu_agent.pods import DesiredPod

# How long a reading of the kubelet's records waits for calls of Allocate that are under way.
_IDLE_SECONDS = 1.0


class Allocator:
    """The answers to the kubelet for all resources of the node.

    State: bookings are in the ledger, GPUs in the inventory. Here is only the last Allocate of each
    resource, for schedulers' locks: annotations with which Volcano's scheduler keeps the Node for
    one pod until the Allocate of that pod.

    Attributes:
        allocated_at: resource → unix seconds of its last Allocate.
        late_start: the starts of containers whose pods decide.
        early: the answers to Allocate for such containers in early mode.
        ready: while it is not set, the kubelet's calls wait: an agent that served before this one
            is about to stop, and its last bookings are not in this ledger yet.
    """

    def __init__(self, context: Context) -> None:
        """Answer from ``context``."""
        self._context = context
        self._ledger = context.ledger
        self._journal = context.journal
        self._claims = Claims(context)
        ended_pods = EndedPods(context)
        self._by_ids = IdAllocator(context)
        self.early = EarlyBinding(context, claims=self._claims, ended_pods=ended_pods)
        self.late_start = LateStart(
            context, claims=self._claims, ended_pods=ended_pods, early=self.early
        )
        # the meaning of the kubelet's records: the devices and shares behind ids
        self._interpretation = Interpretation(context)
        self._desired_pods = desired_state.DesiredPods()
        self._locks = NodeLocks()
        self.allocated_at: dict[str, float] = {}
        self.ready = asyncio.Event()
        self.ready.set()
        self._calls = 0  # of Allocate that are under way
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def revision(self) -> Revision:
        """The revision of the lists; it advances whenever one may have changed."""
        return self._ledger.revision

    @property
    def mode(self) -> BindingMode | None:
        """The binding mode; None while it depends on this node's Node, and that is not known."""
        return self._context.mode

    @property
    def is_late(self) -> bool:
        """Tell whether grants are bound late; False while that is not known."""
        return self._context.mode is not None and self._context.mode.late

    def use_mode(self, mode: BindingMode | None) -> None:
        """Bind in this way from now on, None while that is not known;
        containers that have an answer already keep it.
        """
        self._context.mode = mode

    def use_families(self, families: Families) -> None:
        """Answer by these families, with their options, from now on (a reloaded configuration);
        grants stay as they are.
        """
        self._context.families = families

    def refresh_offer(self) -> None:
        """Bring the ledger's devices and offers in line with the inventory and the families."""
        inventory, families = self._context.inventory(), self._context.families
        self._ledger.observe(inventory)
        resources = [
            resource for family in families.all for resource in family.resources(inventory)
        ]
        by_ids = {family.name: family for family in families.id_families}

        def stand_for(grant: Grant) -> tuple[Share, ...]:
            # The ids of a container from before a change have today's meaning: one that stood for a
            # fourth of the device may stand for an eighth now.
            family = by_ids.get(grant.family)
            return family.shares(grant.resource, grant.ids, inventory) if family else grant.shares

        # paused families start no container now
        self._ledger.offer(resources, stand_for, paused=[family.name for family in families.paused])

    def refresh_claims(self) -> None:
        """Bring the ledger's claims in line with the pods that schedulers have bound to this node;
        see `Claims`.
        """
        self._claims.refresh()

    def listing(self, resource: str) -> Sequence[ListedDevice]:
        """Return the complete list for one resource; empty when it is no longer offered."""
        try:
            return self._ledger.listing(resource)
        except UnknownDeviceError:
            return []

    # -- the kubelet's calls -----------------------------------------------------------------------

    def preferred(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """Return the ids that suit best. Never raises, because the kubelet would fail the pod
        (kubelet §6). Where no ids suit, the first available ones are returned.
        """
        try:
            offered = self._ledger.resource(resource)
        except UnknownDeviceError as err:
            self._journal.record(
                "preferred.simple", level="warning", resource=resource, size=size, reason=str(err)
            )
        else:
            if offered.decided_by is Decider.IDS:
                return self._by_ids.prefer(offered, available, must_include, size)
            # Most families do not let the kubelet ask (volcano-vgpu D10).
            if offered.decided_by is Decider.POD and offered.offers_preference:
                chosen = preference.ids_of_named_gpus(
                    self._context,
                    self._pod_family(offered),
                    offered,
                    available,
                    must_include,
                    size,
                )
                if len(chosen) == size:
                    return chosen
        return list(dict.fromkeys([*must_include, *available]))[:size]

    async def allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        """Book the ids and return what the container gets. A call waits until the allocator is
        ready; beyond that only early mode ever waits, for pods that the watch has not shown yet.

        Raises:
            RequestRefusedError: the request is nonsense in its family's terms (nvidia A23); it is
                not known yet how grants reach containers; or, in early mode, it fits no pod, or
                none that can get what it asks for.
            UnknownDeviceError: an id that is not offered (nvidia A24).
            UnhealthyDeviceError: a device that must not be given to any container now.
            CapacityError: more than a device has.
        """
        self._calls += 1
        self._idle.clear()
        try:
            await self.ready.wait()
            return await self._allocate(resource, ids)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def until_idle(self) -> None:
        """Wait until no call of Allocate is under way, but not for longer than `_IDLE_SECONDS`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_SECONDS):
                await self._idle.wait()

    async def _allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        extra = {}  # fields of the log line
        try:
            offered = self._ledger.resource(resource)
            if offered.decided_by is Decider.NOBODY:  # it is only there for schedulers to count
                if self.mode is not None and not self.mode.late:
                    # their number is a sign of the container that the next Allocate is for
                    self.early.note_counted_ids(resource, len(ids))
                return Edits()
            next(
                family for family in self._context.families.all if family.name == offered.family
            ).check(offered, ids)
            if offered.decided_by is Decider.IDS:
                grant, edits = self._by_ids.allocate(offered, ids)
            else:
                extra["token"] = grant_token(resource, ids)
                grant, edits = await self._allocate_for_a_pod(offered, ids)
        except (RequestRefusedError, LedgerError) as err:
            self._journal.record(
                "allocate.refused",
                level="warning",
                resource=resource,
                ids=shortened_ids(ids),
                reason=str(err),
            )
            raise type(err)(f'invalid allocation request for "{resource}": {err}') from err
        finally:
            self.allocated_at[resource] = self._context.clock()
        self._journal.record(
            "allocate.reserved",
            grant=grant.number,
            resource=resource,
            ids=shortened_ids(ids),
            devices=_devices(grant),
            **extra,
        )
        return edits

    async def _allocate_for_a_pod(
        self, offered: Resource, ids: Sequence[str]
    ) -> tuple[Grant, Edits]:
        if (mode := self._context.mode) is None:
            raise RequestRefusedError(
                "this node's Node object has not been read yet, so it is not known how grants "
                "reach containers"
            )
        if mode.late:
            # by annotation where the kubelet has no field for CDI names
            return self.late_start.allocate(offered, ids, by_annotation=mode.by_annotation)
        return await self.early.allocate(offered, ids, self._pod_family(offered))

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        """Let a container start whose ids are booked.
        Where the pod decides, the decision is made here (`LateStart.start`).

        Raises:
            UnknownDeviceError: the ledger knows no holder of the ids.
            AgentError: see `LateStart.start`.
        """
        await self.ready.wait()
        offered = self._ledger.resource(resource)
        match offered.decided_by:
            case Decider.IDS:
                self._by_ids.start(offered, ids)
            case Decider.POD:
                if self._context.mode is None:
                    raise AgentError(
                        f"{resource}: this node's Node object has not been read yet; the kubelet "
                        "will retry"
                    )
                await self.late_start.start(
                    offered, ids, self._pod_family(offered), late=self._context.mode.late
                )

    def may_start_unasked(self, resource: str) -> bool:
        """Tell whether a container may start without PreStartContainer, as it has to while no
        agent runs: what it would start with must be its own, or nothing.

        That holds for ids that name their device and for a CDI name, but not for an early answer
        that has not been proven, nor while there are specs of an earlier agent whose containers
        could change what is mounted, nor while a container would find the spec of an init container
        that had its ids before and other shares.
        """
        offered = next((offer for offer in self._ledger.resources if offer.name == resource), None)
        if offered is None or offered.decided_by is not Decider.POD:
            return True
        # `init_shares`: init containers have shares of their own
        if offered.init_shares and has_containers_waiting_behind_init(
            self._context.pods.pods, resource
        ):
            return False
        return self.is_late and not self._context.carrier.has_outdated_spec

    def _pod_family(self, offered: Resource) -> PodFamily:
        return next(
            family
            for family in self._context.families.pod_families
            if family.name == offered.family
        )

    # -- the kubelet's records ---------------------------------------------------------------------

    def confirm(
        self,
        records: KubeletRecords,
        *,
        reservation_seconds: float,
        newest_grant: float = math.inf,
        initial: bool = False,
        serving: bool = True,
        may_release: bool = True,
        has_ended: Callable[[Grant], bool] = lambda _: False,
        ended_only: bool = False,
        kept_grants: Collection[int] = (),
    ) -> list[Correction]:
        """Bring the ledger in line with the kubelet's records (see `Ledger.reconcile`);
        each correction is journalled.

        Args:
            records: the kubelet's records.
            reservation_seconds: how long a grant may stay without a holder in the records.
            newest_grant: the number of the last grant that was booked before the records were read.
            initial: the ledger is being rebuilt, so a grant that only the records show is no drift.
            serving: False while another agent may serve the node, so another holder is no drift.
            may_release: False while the kubelet is still finding its pods again after a restart.
            has_ended: tells whether the pod of a grant has ended according to the API server.
            ended_only: release nothing but grants of ended pods.
            kept_grants: numbers of grants that stay although the records do not show them, because
                the kubelet has just started and may not list all of its pods yet.

        Returns:
            The corrections that were drift: the ledger had been wrong.
        """
        if initial:
            # After a restart it is unknown for which Allocate a scheduler's lock was taken, so any
            # lock from before our start may be removed.
            for offer in self._ledger.resources:
                self.allocated_at[offer.name] = self._context.clock()
        # where the pod decides, the kubelet may have given an id to several containers; one counts
        records = self._interpretation.with_single_holders(records)
        corrections = self._ledger.reconcile(
            records,
            self._interpretation,
            reservation_seconds=reservation_seconds,
            newest=newest_grant,
            initial=initial,
            serving=serving,
            may_release=may_release,
            # hidden: it runs, but the records lack it, such as an init container
            still_runs=lambda grant: (
                grant.number in kept_grants or self._interpretation.may_be_hidden(grant)
            ),
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
                ids=shortened_ids(grant.ids),
                devices=_devices(grant),
                reason=correction.reason,
            )
        # both forget the pods that are gone; `early` learns which of its guesses were right
        self.early.after_verification(records)
        self.late_start.after_verification()
        if self._context.pods.synced.is_set():  # all pods of the node have been listed once
            self._context.refusals.forget_absent(self._context.pods.pods)
        return [correction for correction in corrections if correction.drift]

    def unconfirmed(self) -> bool:
        """Tell whether a grant still waits for the kubelet's records to name its container."""
        return any(
            grant.state is GrantState.RESERVED and grant.owner is None
            for grant in self._ledger.grants
        )

    # -- desired state -----------------------------------------------------------------------------

    def desired_node(self, node: Node, now: float) -> DesiredNode:
        """Return the desired state of our Node at ``now`` (unix seconds), for all families
        together.
        """
        return desired_state.desired_node(self._context, node, self.allocated_at, now, self._locks)

    def cleanup(self, now: float) -> DesiredNode:
        """Return the desired state of our Node after the agent has left it for good."""
        return desired_state.cleanup(self._context.families, now)

    def desired_pods(self) -> dict[str, DesiredPod]:
        """Return the desired state of our pods, by the UID under which the kubelet keeps each (for
        a static pod not that of the API server); only pods of which something is desired.
        """
        # the UIDs of pods of which a container was refused for good
        failed = {
            refusal.pod.kubelet_uid for refusal in self._context.refusals.current if refusal.final
        }
        return self._desired_pods(self._context, self.late_start.started.values(), failed)


def _devices(grant: Grant) -> list[str]:
    return [share.device for share in grant.shares]
