"""The ledger: the devices of this node, the ids it offers for them,
and the containers that hold them.

One instance lives on the event loop and is changed by synchronous methods only, so every change is
atomic without a lock. It is a cache of the truth, never the only copy: the kubelet's records win
every disagreement (`reconcile`), at start as well as every 30 seconds.

Called by `allocation` (book, release), by `agent` (new inventory, new offers, verification) and
read by the plugin servers and `web`.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.concurrency import Revision
from vgpu_agent.device_ids import DeviceId, ListedDevice, NumberedIds, NumberedList
from vgpu_agent.errors import (
    CapacityError,
    OvercommitError,
    UnhealthyDeviceError,
    UnknownDeviceError,
    listed,
)
from vgpu_agent.ledger import accounting, availability
from vgpu_agent.ledger.accounting import Device
from vgpu_agent.ledger.arbitration import Arbitration
from vgpu_agent.ledger.cordons import Cordons
from vgpu_agent.ledger.devices import devices_of, gone, with_gone
from vgpu_agent.ledger.grants import Grants
from vgpu_agent.ledger.offers import Offers
from vgpu_agent.ledger.reconciliation import Reconciliation
from vgpu_agent.ledger.uses import held_back, uses
from vgpu_agent.model import Decider, Grant, GrantState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from vgpu_agent.ledger.accounting import Excess, Overcommit, Usage
    from vgpu_agent.ledger.claims import Claim
    from vgpu_agent.ledger.grants import Saved
    from vgpu_agent.ledger.reconciliation import Correction, InterpretedHolding
    from vgpu_agent.ledger.uses import GpuUse, HeldBack
    from vgpu_agent.model import (
        DeviceRoom,
        Holding,
        Inventory,
        KubeletRecords,
        Owner,
        Resource,
        Share,
    )


_HOLDERS_UNKNOWN = (
    "neither of the kubelet's records could be read since the agent started, so the family that "
    "has the GPU is not known; see kubelet.records_incomplete in the log"
)


class Ledger:
    """Devices, offers and grants.

    State: everything is rebuilt after a restart from NVML and from the kubelet's records, but for
    `mig_instances`, the MIG instances that were ever seen, which `agent` keeps. `revision` advances
    when a list that the kubelet should see, a grant or a claim has changed.

    Attributes:
        withdrawn: advances when a family is offered less than before, because of another one.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Make an empty ledger.

        Args:
            clock: seconds that only grow; it decides when a reservation is too old, a grant whose
                container the kubelet has not named yet.
            wall_clock: unix seconds, for what is shown.
        """
        self.revision = Revision()
        self.withdrawn = Revision()
        self._clock, self._wall_clock = clock, wall_clock
        self._devices: dict[str, Device] = {}
        self.mig_instances: dict[str, Device] = {}
        self._cordons = Cordons()
        self._offers = Offers()
        self._grants = Grants(self._offers)
        self._reconciliation = Reconciliation(self._grants, clock, wall_clock)
        # decides to which families a GPU is offered, where several could have it
        self._arbitration = Arbitration(self._offers, self._grants, self._cordons, clock)
        # the kubelet was given a list of ids (`listing`); before, nothing is withdrawn
        self._listed = False
        self._passes = 0  # readings of the kubelet's records so far
        # neither the first reading of the kubelet's records nor a later one has shown the holders
        self._holders_unknown = False
        # the kubelet has reported all that was held when this process started
        self.rebuilt = False

    # -- facts -------------------------------------------------------------------------------------

    def observe(self, inventory: Inventory) -> None:
        """Take over what `gpu` has seen. A device that is no longer mentioned stays as long as it
        has a holder, as not available.
        """
        seen = with_gone(
            devices_of(inventory),
            before=self._devices,
            mig_instances=self.mig_instances,
            held=self._grants.held_devices(),
        )
        if seen != self._devices:
            self._devices = seen
            self._changed()

    def offer(
        self,
        resources: Iterable[Resource],
        stand_for: Callable[[Grant], tuple[Share, ...]] = lambda grant: grant.shares,
        *,
        paused: Collection[str] = (),
    ) -> None:
        """Replace what this node offers.

        Grants stay: an id that is no longer offered stays with its container and is reported as
        foreign. Ids that name devices and are still offered have the shares that ``stand_for``
        returns now, as they would after a restart. Families in ``paused`` start no container for
        the time being, and no GPU is offered to them in turn.

        Raises:
            ValueError: a name occurs twice, or an id in two resources of a family (kubelet V17).
        """
        # the resources with a grant that was decided for a container, under the limits of that time
        held = {grant.resource for grant in self._grants.by_number.values() if grant.decided_for}
        changed = self._offers.replace(resources, held)
        self._arbitration.serve(paused)  # all families that offer something, but for these
        if self._grants.restate(stand_for) or changed:
            self._changed()

    def withhold(self, families: Iterable[str]) -> None:
        """Give no turns to ``families``, whose resources are not offered
        to the kubelet at the moment. In a turn, a returned GPU is offered to one family alone.
        """
        if self._arbitration.withhold(families):
            self._changed()

    def cordon(self, device: str, reason: str, *, by: str = "") -> None:
        """Give nothing of ``device`` to new containers until ``by`` lifts this;
        its holders keep it. ``by`` names the part of the agent that asks; each has its own cordon.
        """
        self._cordons.set(device, by, reason)
        self._changed()

    def uncordon(self, device: str, *, by: str = "") -> None:
        """Take the cordon of ``by`` back."""
        if self._cordons.lift(device, by):
            self._changed()

    def claim(self, claims: Iterable[Claim]) -> None:
        """Keep GPUs for exactly ``claims`` from now on."""
        if self._arbitration.claim(claims):
            self._changed()

    def end_turns(self) -> None:
        """Offer each GPU whose turn is over to the next family, or to all, and end the withdrawals
        whose time is over. In a withdrawal the kubelet still has ids that schedulers are no longer
        to know of.
        """
        if self._arbitration.move_on():
            self._changed()

    def note_written_counts(self, number: int | None) -> None:
        """Take note that the Node's status has the counts (`offered_ids`) as they were when
        `withdrawn` was ``number``, or, with None, that no one but the kubelet can write them.

        Until then the kubelet keeps what is withdrawn, for the pods that schedulers bind by the
        older counts.
        """
        if self._arbitration.note_written_counts(number):
            self.revision.advance()  # wakes a loop that waits for `turn_ends_in_seconds`

    def has_settled(self, device: str) -> bool:
        """Tell whether the ledger knows ``device``, such as a new MIG instance, and no cordon keeps
        it back, regardless of its health.
        """
        return device in self._devices and not self._cordons.reason(device)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The offered resources, by name."""
        return self._offers.in_order

    @property
    def grants(self) -> tuple[Grant, ...]:
        """All grants that are not released, oldest first."""
        return tuple(map(self._grants.by_number.__getitem__, sorted(self._grants.by_number)))

    @property
    def newest(self) -> int:
        """The number of the grant that was booked last, whether it is still there or not;
        0 before the first.
        """
        return self._grants.last_number

    @property
    def in_doubt(self) -> bool:
        """Tell whether the next reconciliation decides something: there were no records of the
        kubelet yet, or a grant was missing in the last complete ones.
        """
        return not self.rebuilt or bool(self._grants.misses)

    @property
    def foreign_ids(self) -> tuple[str, ...]:
        """Ids that containers hold and that this node does not offer (any more)."""
        return tuple(
            sorted(
                {
                    id_
                    for grant in self._grants.by_number.values()
                    for id_ in self._grants.foreign_ids(grant)
                }
            )
        )

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The GPUs that are kept for pods, the oldest claim first."""
        return self._arbitration.claims

    def why_kept(self, gpu: str, family: str) -> str:
        """Explain why ``family`` gets no new share of ``gpu`` because of a claim;
        empty when none keeps it away.
        """
        return self._arbitration.why_kept(gpu, family)

    @property
    def serves_several_families(self) -> bool:
        """Tell whether families may race for a GPU."""
        return self._arbitration.serves_several_families

    @property
    def turn_ends_in_seconds(self) -> float | None:
        """Seconds until the offer of a GPU changes because of the time alone;
        None when none does.
        """
        return self._arbitration.seconds_left

    @property
    def all_turns_end_in_seconds(self) -> float | None:
        """Seconds until all GPUs that were returned by now are offered to all;
        None when they are.
        """
        return self._arbitration.turns_over_in_seconds

    def free_ids(self, resource: str) -> int:
        """Return how many ids of ``resource`` could be granted now."""
        offered, held = self.resource(resource), self._grants.number_of.get(resource, {})
        trouble = self._troubles(offered)
        if isinstance(offered.ids, NumberedIds):  # very many, kept as one block for each device
            usable = sum(block.count for block in offered.ids.blocks if not trouble[block.device])
            if not any(trouble.values()):
                return (
                    usable
                    - len(held)
                    + sum(
                        len(self._grants.foreign_ids(grant))
                        for grant in self.grants
                        if grant.resource == resource
                    )
                )
            held_devices = (offered.ids.device(id_) for id_ in held)
            return usable - sum(
                device is not None and not trouble[device] for device in held_devices
            )
        return sum(not trouble[entry.device] and entry.id not in held for entry in offered.ids)

    def resource(self, name: str) -> Resource:
        """The offer of that name.

        Raises:
            UnknownDeviceError: there is none.
        """
        if resource := self._offers.by_name.get(name):
            return resource
        raise UnknownDeviceError(
            f"resource {name} is not offered by this node; it offers "
            f"{', '.join(self._offers.by_name) or 'nothing'}"
        )

    def listing(self, name: str) -> Sequence[ListedDevice]:
        """The complete list that the kubelet must see now:
        every offered id, and held ids that are not offered any more and whose device has a fault
        or is gone (kubelet V16).
        """
        resource = self.resource(name)
        self._listed = True
        trouble = self._troubles(resource, at_kubelet=True)
        gone = [
            ListedDevice(DeviceId(id_, device), healthy=False)
            for grant in self._grants.by_number.values()
            if grant.resource == name
            for id_ in self._grants.foreign_ids(grant)
            if availability.illness(self._devices, device := self._grants.device_behind(grant, id_))
        ]
        if isinstance(resource.ids, NumberedIds):
            # each block with True where its ids are healthy, and the other ids
            return NumberedList(
                tuple((block, not trouble[block.device]) for block in resource.ids.blocks),
                tuple(gone),
            )
        return [*(ListedDevice(entry, not trouble[entry.device]) for entry in resource.ids), *gone]

    def free_ids_by_gpu(self, name: str) -> tuple[dict[str, int], dict[str, int]]:
        """Count the ids of ``name`` without a holder:
        on GPUs that serve its family, and on free GPUs, claimed ones included.

        Raises:
            UnknownDeviceError: the resource is not offered.
        """
        # `holding`: GPU of which something is held → the family that has it
        resource, holding = self.resource(name), self._arbitration.families_by_gpu()
        held, trouble = self._grants.number_of.get(name, {}), self._troubles(resource, turns=False)
        serving, free = dict[str, int](), dict[str, int]()
        for device in self._offers.devices(resource):
            if self.gpu_of(device) not in holding:  # a free GPU: only its own faults count
                trouble[device] = availability.own_trouble(
                    device, resource, self._devices, self._cordons
                )
        for entry in resource.ids:
            if entry.id not in held and not trouble[entry.device]:
                gpu = self.gpu_of(entry.device)
                by_gpu = serving if gpu in holding else free
                by_gpu[gpu] = by_gpu.get(gpu, 0) + 1
        return serving, free

    def is_first(self, gpu: str, family: str) -> bool:
        """Tell whether ``family`` alone is offered the GPU now, because it is its turn."""
        return self._arbitration.is_first(gpu, family)

    def offered_ids(self, name: str) -> int:
        """Count the ids of resource ``name`` that schedulers are to know of, those in use included.

        The kubelet has more while some are withdrawn.

        Raises:
            UnknownDeviceError: the resource is not offered.
        """
        resource = self.resource(name)
        trouble = self._troubles(resource)
        if isinstance(resource.ids, NumberedIds):
            return sum(block.count for block in resource.ids.blocks if not trouble[block.device])
        return sum(not trouble[entry.device] for entry in resource.ids)

    def shared_gpus(self, family: str) -> frozenset[str]:
        """GPUs that families other than ``family`` are offered as well;
        empty where it is the only one.
        """
        return self._arbitration.shared_gpus(family)

    def gpu_of(self, device: str) -> str:
        """The GPU of a MIG instance; any other device is its own."""
        return known.gpu if (known := self._devices.get(device)) else device

    def rooms(
        self, name: str, *, excluding: Iterable[int] = (), pod_uid: str = ""
    ) -> tuple[DeviceRoom, ...]:
        """Return what each device of resource ``name`` has left, in the order of its ids.

        Args:
            name: the resource.
            excluding: numbers of grants that are not counted, because they are about to be decided
                again.
            pod_uid: the kubelet's UID of the asking pod, if there is one; a pod that has a part of
                what it needs gets the rest before others.

        Raises:
            UnknownDeviceError: the resource is not offered.
        """
        resource, left_out = self.resource(name), set(excluding)
        grants = [
            grant for grant in self._grants.by_number.values() if grant.number not in left_out
        ]
        booked = accounting.usage(resource, grants, self._offers.device)
        trouble = self._troubles(resource, claims=not self._has_part_of_its_shares(pod_uid))
        return tuple(
            accounting.room(
                resource,
                booked,
                self._devices.get(uuid) or Device(uuid, gpu=uuid, memory_mib=0),
                trouble[uuid],
            )
            for uuid in trouble
        )

    def find(self, name: str, ids: Iterable[str]) -> Grant | None:
        """Return the grant of exactly these ids, in any order; None when there is none."""
        wanted = set(ids)
        holders = self._grants.holders(name, wanted)
        grant = self._grants.by_number[next(iter(holders))] if len(holders) == 1 else None
        return grant if grant is not None and set(grant.ids) == wanted else None

    def holders(self, name: str, ids: Iterable[str]) -> tuple[Grant, ...]:
        """The grants that have any of ``ids``, oldest first."""
        return tuple(
            self._grants.by_number[number] for number in sorted(self._grants.holders(name, ids))
        )

    @property
    def overcommitted(self) -> tuple[Overcommit, ...]:
        """The devices of which schedulers have assigned more compute,
        or to more holders, than there is room for.
        """
        # `at_its_widest`: with the widest limits under which any of its grants was made
        return tuple(
            each
            for resource in self._offers.in_order
            if resource.decided_by is Decider.POD
            for each in accounting.overcommitted(
                self._offers.at_its_widest(resource), self._booked(resource)
            )
        )

    @property
    def uses(self) -> tuple[GpuUse, ...]:
        """The use of each GPU."""
        return uses(self._devices, self.grants, self.claims)

    def held_back(self, name: str) -> tuple[HeldBack, ...]:
        """The ids of resource ``name`` that are not granted now, by reason.

        Raises:
            UnknownDeviceError: the resource is not offered.
        """
        resource = self.resource(name)
        return held_back(
            resource, self._troubles(resource), self._devices, {use.gpu: use for use in self.uses}
        )

    def audit(self) -> list[str]:
        """List every invariant that does not hold, as sentences; empty when the ledger is sound."""
        problems = accounting.unsound(
            self._grants.by_number.values(), self._grants.number_of, self._devices
        )
        for resource in self._offers.by_name.values():
            # `firm`: compute and holders that a scheduler has decided do not count
            excess = self._overbooked(self._offers.at_its_widest(resource), firm=True)
            problems += [f"{device}: {each.text}" for device, each in excess.items()]
        return problems

    # -- booking -----------------------------------------------------------------------------------

    def reserve(
        self,
        name: str,
        ids: Sequence[str],
        shares: Sequence[Share],
        decided_for: tuple[str, str] | None = None,
        *,
        may_overcommit: bool = False,
    ) -> Grant:
        """Book ``ids`` of resource ``name`` for a container that the kubelet has not named yet.

        The kubelet decides on the holder of an id, so an id that another grant holds moves to this
        one: its pod has ended and the kubelet has not reported it, an init container made room for
        the next one, or, rarely, the kubelet has given the id to two pods (kubelet §7). Asking
        again for ids without a named holder gives the same grant (kubelet V15). Where the pod
        decides, ``shares`` are empty (late binding) or those of the pod that Allocate guessed
        (early), and ``decided_for`` is that pod's UID and the container. With ``may_overcommit`` a
        scheduler decided them, and more compute or holders than a device has are booked.

        Raises:
            UnknownDeviceError: the resource or an id is not offered; nothing is booked.
            UnhealthyDeviceError: a device is unhealthy, cordoned, or in use through another
                resource; nothing is booked.
            CapacityError: an id is named twice, or a device would hold more than it has; nothing is
                booked.
        """
        resource = self.resource(name)
        by_ids = resource.decided_by is Decider.IDS
        behind: dict[str, str] = {}  # device → the first of ``ids`` that stands for it
        for id_ in ids:
            if (device := self._offers.device(name, id_)) is None:
                raise UnknownDeviceError(f"invalid request: unknown device: {id_}")
            behind.setdefault(device, id_)
        if len(set(ids)) != len(ids):
            raise CapacityError(f"invalid request: an id is named twice in {listed(ids)}")
        # Where the pod decides, the ids' own devices mean nothing: the pod names its GPU.
        booked = behind if by_ids else {share.device: share.device for share in shares}
        # Where ids name devices, the kubelet fails the pod for a refusal. So the pod gets its ids,
        # and the claim waits for its end.
        claims = not by_ids and (
            decided_for is None or not self._has_part_of_its_shares(decided_for[0])
        )
        self._refuse_troubled(resource, booked, claims=claims)

        holders = self._grants.holders(name, ids)
        if (same := self._still_open(holders, set(ids), covering=not by_ids)) and (
            by_ids or not shares
        ):
            again = msgspec.structs.replace(
                same, reserved_at=self._wall_clock(), reserved_at_monotonic=self._clock()
            )
            self._grants.by_number[same.number] = again
            return self._grants.by_number[same.number]

        before = self._grants.saved()
        for number in holders:
            self._grants.take_from(self._grants.by_number[number], set(ids))
        grant = Grant(
            self._grants.next_number(),
            resource.family,
            name,
            tuple(ids),
            tuple(shares),
            reserved_at=self._wall_clock(),
            decided_for=decided_for,
            reserved_at_monotonic=self._clock(),
            may_overcommit=may_overcommit,
        )
        self._grants.add(grant)
        self._check_capacity(resource, grant, booked, before, firm=may_overcommit)
        self._changed()
        return grant

    def decide(
        self,
        name: str,
        ids: Sequence[str],
        shares: Sequence[Share],
        owner: Owner,
        *,
        evidence: tuple[str, ...] = (),
        ended: Iterable[int] = (),
        may_overcommit: bool = False,
    ) -> Grant:
        """Book ``shares`` for the container that is proven to hold ``ids``;
        again with the same shares it changes nothing.

        The kubelet's records of the ids are final, so other holders lose those ids: an init
        container that has ended, or a pod that has. Device and room are checked unless these very
        shares were decided for the container before, and not only found in records. Grants in
        ``ended`` keep their ids and lose their shares: their containers must have ended before this
        one starts. ``evidence`` says how the owner was proven, and what decided the shares.

        With ``may_overcommit`` a scheduler decided, and more compute or holders than a device has
        are booked; memory never. The same applies to shares that the ledger has for this container
        already, by records: later grants of others take nothing from it.

        Raises:
            UnknownDeviceError: the resource, or a share's device, is not offered; nothing is
                booked.
            UnhealthyDeviceError: a device must not be given to any container now; nothing is
                booked.
            CapacityError: a device would hold more than it has; nothing is booked.
        """
        resource = self.resource(name)
        decided_for = (owner.pod_uid, owner.container)
        same = self.find(name, ids)
        decided = Grant(
            same.number if same else self._grants.last_number + 1,
            resource.family,
            name,
            tuple(ids),
            tuple(shares),
            GrantState.IDENTIFIED,
            owner,
            same.reserved_at if same else self._wall_clock(),
            decided_for,
            evidence,
            reserved_at_monotonic=same.reserved_at_monotonic if same else self._clock(),
            may_overcommit=may_overcommit,
            found=same is not None and same.found,  # in the kubelet's records
        )
        # the ledger has these very shares for this container already
        known = (
            same is not None and same.shares == decided.shares and same.decided_for == decided_for
        )
        if (
            same
            and same.shares == decided.shares
            and same.decided_for == decided_for
            and same.evidence
            and not set(ended) - {same.number}
        ):
            if msgspec.structs.replace(same, evidence=evidence) != decided:
                self._changed()
            self._grants.by_number[same.number] = decided
            return decided
        offered = self._offers.devices(resource)
        if strangers := availability.strangers(shares, offered, self._devices):
            raise UnknownDeviceError(
                f"{name}: this node does not offer {listed(strangers)}; it offers "
                f"{listed(sorted(offered))}"
            )
        wanted = {share.device: share.device for share in shares}
        self._refuse_troubled(
            resource, wanted, claims=not known and not self._has_part_of_its_shares(owner.pod_uid)
        )

        before = self._grants.saved()
        for number in ended:
            self._grants.clear_shares(number)
        for number in self._grants.holders(name, ids):
            self._grants.take_from(self._grants.by_number[number], set(ids))
        self._grants.last_number = max(self._grants.last_number, decided.number)
        self._grants.add(decided)
        self._check_capacity(resource, decided, wanted, before, firm=may_overcommit or known)
        self._changed()
        return decided

    def fill(
        self,
        number: int,
        shares: Sequence[Share],
        decided_for: tuple[str, str],
        *,
        may_overcommit: bool = False,
    ) -> None:
        """Book ``shares`` for a reservation that had none,
        because there was no room for them when its ids were granted.

        ``may_overcommit`` is as for `decide`.

        Raises:
            UnhealthyDeviceError: a device must not be given to any container now; nothing is
                booked.
            CapacityError: a device would hold more than it has; nothing is booked.
        """
        grant = self._grants.by_number[number]
        resource = self.resource(grant.resource)
        wanted = {share.device: share.device for share in shares}
        self._refuse_troubled(
            resource, wanted, claims=not self._has_part_of_its_shares(decided_for[0])
        )
        before = self._grants.saved()
        filled = msgspec.structs.replace(
            grant, shares=tuple(shares), decided_for=decided_for, may_overcommit=may_overcommit
        )
        self._grants.by_number[number] = filled
        self._check_capacity(resource, filled, wanted, before, firm=may_overcommit)
        self._changed()

    def redirect(self, number: int, decided_for: tuple[str, str]) -> None:
        """Record that the shares of grant ``number`` are another container's,
        for two pods that got each other's equal shares.
        """
        self._grants.by_number[number] = msgspec.structs.replace(
            self._grants.by_number[number], decided_for=decided_for
        )
        self._changed()

    def release(self, number: int) -> Grant | None:
        """Remove grant ``number`` and return it; None when it is not in the ledger."""
        if not (grant := self._grants.by_number.get(number)):
            return None
        self._grants.remove(grant)
        self._changed()
        return msgspec.structs.replace(grant, state=GrantState.RELEASED)

    def reconcile(
        self,
        records: KubeletRecords,
        interpret: Callable[[Holding], InterpretedHolding | None],
        *,
        reservation_seconds: float,
        newest: float = math.inf,
        initial: bool = False,
        serving: bool = True,
        may_release: bool = True,
        still_runs: Callable[[Grant], bool] = lambda _: False,
        has_ended: Callable[[Grant], bool] = lambda _: False,
        ended_only: bool = False,
    ) -> list[Correction]:
        """Bring the ledger in line with the kubelet's records.

        Args:
            records: the kubelet's records; when incomplete, they may add grants and name owners,
                and never release a grant.
            interpret: returns the meaning of a holding, None when its resource is not ours or is
                only there to be counted.
            reservation_seconds: how long a reservation may stay that no records have shown.
            newest: `newest` from before the records were read; they do not cover ids that were
                booked since.
            initial: the ledger is being rebuilt, so it is no drift to adopt a grant, that is to
                enter one that only the records show.
            serving: False while another agent may serve the node, whose pods may change: it is no
                drift then to name another holder.
            may_release: False while the kubelet itself is still finding its pods again after a
                restart.
            still_runs: tells whether a grant stays although the records do not show it.
            has_ended: tells whether the pod of a grant has ended according to the API server.
            ended_only: release nothing but grants of ended pods, and do not count this reading for
                other grants.

        Returns:
            What was changed. A grant is released after two complete readings in a row that do not
            show it, because a single one may have a gap. For an ended pod one is enough: the
            kubelet and the API server are two independent sources.
        """
        corrections = self._reconciliation.run(
            records,
            interpret,
            reservation_seconds=reservation_seconds,
            newest=newest,
            initial=initial or not self.rebuilt,
            serving=serving,
            may_release=may_release,
            still_runs=still_runs,
            has_ended=has_ended,
            ended_only=ended_only,
        )
        self._passes += not ended_only
        # A kubelet that was started a moment ago lists no pod at first; it has its checkpoint
        # (`entries`) from the beginning. `complete`: it has answered with its list.
        lists_pods = bool(records.holdings) or self._passes > 1
        self.rebuilt = (
            self.rebuilt or records.entries is not None or (records.complete and lists_pods)
        )
        unknown_before, self._holders_unknown = (
            self._holders_unknown,
            not self.rebuilt and (initial or self._holders_unknown),
        )
        if corrections:
            # devices that the records show as held, and NVML no longer: entered as not available
            self._devices |= gone(
                self._grants.held_devices() - self._devices.keys(), self.mig_instances
            )
        if corrections or self._holders_unknown != unknown_before:
            self._changed()
        return corrections

    # -- how it is done ----------------------------------------------------------------------------

    def _troubles(
        self,
        resource: Resource,
        devices: Iterable[str] | None = None,
        *,
        claims: bool = True,
        turns: bool = True,
        at_kubelet: bool = False,
    ) -> dict[str, str]:
        """Return device → why nothing of it may be granted now, or empty when it may; for
        ``devices``, or for all that ``resource`` offers, in their order.

        Without ``claims``, claims of pods do not count. Without ``turns``, turns of other families
        do not count. With ``at_kubelet`` a device counts as available for a moment longer than
        schedulers are to know of it.
        """
        asked = self._offers.devices(resource) if devices is None else devices
        if self._holders_unknown and self.serves_several_families:
            # with one family the kubelet itself gives no id twice
            return dict.fromkeys(asked, _HOLDERS_UNKNOWN)
        # those that can keep the resource from a device, such as grants of other families
        grants = availability.in_the_way(resource, self._grants.by_number.values())
        known = availability.Context(
            self._devices,
            self._cordons,
            grants,
            self._grants.all_ids_offered,  # tells a grant that was made under earlier settings
            self._arbitration.oldest_claims if claims else {},
            self._arbitration.why_waits if turns else _never,
            self._arbitration.still_at_kubelet if at_kubelet else _no,
        )
        return {device: availability.why_unavailable(device, resource, known) for device in asked}

    def _has_part_of_its_shares(self, pod_uid: str) -> bool:
        """Tell whether a container of the pod has shares.

        Such a pod does not wait for claims: the claim could wait for it, and neither would ever
        have all that it needs.
        """
        return bool(pod_uid) and any(
            grant.decided_for is not None and grant.decided_for[0] == pod_uid and grant.shares
            for grant in self._grants.by_number.values()
        )

    def _refuse_troubled(
        self, resource: Resource, wanted: Mapping[str, str], *, claims: bool
    ) -> None:
        """Raise for the first device of ``wanted`` (device → what the message calls it) of
        which nothing may be granted.
        """
        for device, trouble in (
            self._troubles(resource, wanted, claims=claims, turns=False).items() if wanted else ()
        ):
            if trouble:
                raise UnhealthyDeviceError(
                    f"{_called(device, wanted)} is not available: {trouble}", device=device
                )

    def _check_capacity(
        self,
        resource: Resource,
        grant: Grant,
        wanted: Mapping[str, str],
        before: Saved,
        *,
        firm: bool = False,
    ) -> None:
        """Go back to the grants ``before`` and raise when ``grant`` is too much for a device of
        ``wanted``. With ``firm``, of the compute and the holders only those count that no scheduler
        decided.
        """
        excess = self._overbooked(resource, firm=firm) if wanted else {}
        for device in wanted:
            if too_much := excess.get(device):
                self._grants.restore(before)
                # `decidable`: a scheduler may exceed it
                refused = CapacityError if not too_much.decidable else OvercommitError
                raise refused(
                    f"{_called(device, wanted)} has no room: "
                    f"{too_much.refusal(self._part(resource, grant, device))}",
                    device=device,
                )

    def _part(self, resource: Resource, grant: Grant, device: str) -> accounting.Part:
        """Return what ``grant`` has of ``device``."""
        shares = [share for share in grant.shares if share.device == device]
        by_ids = resource.decided_by is Decider.IDS
        return accounting.Part(
            memory_mib=sum(share.memory_mib for share in shares),
            cores_percent=sum(share.cores_percent for share in shares),
            holders=sum(self._offers.device(resource.name, id_) == device for id_ in grant.ids)
            if by_ids
            else len(shares),
            exclusive=any(share.exclusive for share in shares),
        )

    def _still_open(self, holders: set[int], ids: set[str], *, covering: bool) -> Grant | None:
        """Return the open reservation of these ids, whose holder is not named yet.

        Where the pod decides (``covering``), an init container's reservation also covers the
        containers that take over some of its ids.
        """
        grant = self._grants.by_number[next(iter(holders))] if len(holders) == 1 else None
        if (
            grant is None
            or grant.state is not GrantState.RESERVED
            or grant.owner is not None
            or (covering and grant.decided_for)
        ):
            return None
        return grant if set(grant.ids) == ids or (covering and ids < set(grant.ids)) else None

    def _overbooked(self, resource: Resource, *, firm: bool) -> dict[str, Excess]:
        if resource.decided_by is Decider.NOBODY:  # only there to be counted, and never booked
            return {}
        return accounting.overbooked(resource, self._booked(resource), self._devices, firm=firm)

    def _booked(self, resource: Resource) -> Usage:
        return accounting.usage(resource, self._grants.by_number.values(), self._offers.device)

    def _changed(self) -> None:
        # the second argument numbers the withdrawals that begin with this change
        if self._arbitration.follow(
            self._devices,
            self.withdrawn.value + 1,
            holders_unknown=self._holders_unknown,
            listed=self._listed,
        ):
            self.withdrawn.advance()
        self.revision.advance()


def _never(_gpu: str, _family: str) -> str:
    """No family waits for another."""
    return ""


def _no(_gpu: str, _family: str) -> bool:
    """Tell that nothing is granted longer than it is offered."""
    return False


def _called(device: str, wanted: Mapping[str, str]) -> str:
    """The name of ``device`` in a message: the id through which it is wanted,
    with the device's own name where the id lacks that.
    """
    called = wanted[device]
    return called if device in called else f"{called} of {device}"
