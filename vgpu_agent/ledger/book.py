"""The book: which devices this node has, which ids it offers for them, and which container holds what.

One instance lives on the event loop and is changed by synchronous methods only, so every change is atomic without a lock. It is a cache of
the truth, never the only copy: kubelet's records win every disagreement (`reconcile`), at start as well as every 30 seconds.

Called by `allocation` (book, release), by `agent` (new inventory, new offers, verification) and read by the plugin servers and `web`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.concurrency import Latest
from vgpu_agent.device_ids import DeviceId, ListedDevice, NumberedIds
from vgpu_agent.errors import CapacityError, UnhealthyDeviceError, UnknownDeviceError
from vgpu_agent.ledger import accounting
from vgpu_agent.ledger.accounting import Device
from vgpu_agent.model import Correction, Decider, Grant, GrantState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.model import DeviceRoom, Holding, Inventory, KubeletRecords, Owner, Resource, Share


_Holders = dict[tuple[str, str], int]


class Meaning(NamedTuple):
    """What a line of kubelet's records means to us.

    Attributes:
        family: whose ids these are.
        shares: what the holder has; empty where the pod decides and nobody has decided yet.
        by_pod: the pod decides (`Decider.POD`).
        decided_for: see `Grant.decided_for`.
    """

    family: str
    shares: tuple[Share, ...]
    by_pod: bool = False
    decided_for: tuple[str, str] | None = None


class Ledger:
    """Devices, offers and grants.

    State: everything is rebuilt after a restart from NVML and from kubelet's records; nothing is written to disk. `revision` moves on
    when a list that kubelet should see, or a grant, has changed.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self.revision: Latest[int] = Latest(0)
        self._clock = clock
        self._devices: dict[str, Device] = {}
        self._cordoned: dict[str, str] = {}
        self._resources: dict[str, Resource] = {}
        self._ids: dict[str, tuple[Resource, DeviceId]] = {}
        self._grants: dict[int, Grant] = {}
        # (resource, id) → number of its grant; by resource, since one that was renamed keeps its ids, and kubelet counts anew.
        self._holder: _Holders = {}
        self._misses: collections.Counter[int] = collections.Counter()
        self._last_number = 0

    # -- facts ------------------------------------------------------------------------------------------------------------------------

    def observe(self, inventory: Inventory) -> None:
        """Take over what `gpu` has seen. A device that is no longer mentioned stays as long as somebody holds it, as not available."""
        seen: dict[str, Device] = {}
        for gpu in inventory.gpus:
            trouble = "" if gpu.health.ok and gpu.present else gpu.health.reason or "the GPU does not answer"
            seen[gpu.uuid] = Device(gpu.uuid, gpu.uuid, gpu.memory_mib, trouble)
            for instance in gpu.mig_instances:
                seen[instance.uuid] = Device(instance.uuid, gpu.uuid, instance.memory_mib, trouble)
        for uuid in self._held_devices() - seen.keys():
            if known := self._devices.get(uuid):
                seen[uuid] = dataclasses.replace(known, trouble="the device is gone")
        if seen != self._devices:
            self._devices = seen
            self._changed()

    def offer(self, resources: Iterable[Resource]) -> None:
        """Replace what this node offers.

        Grants stay: an id that is no longer offered remains in its container's hands and is reported as foreign.

        Raises:
            ValueError: an id occurs in two resources (kubelet contract V17): kubelet would mix their health up.
        """
        offered = {resource.name: resource for resource in resources}
        ids: dict[str, tuple[Resource, DeviceId]] = {}
        blocks: dict[str, str] = {}
        for resource in offered.values():
            if isinstance(resource.ids, NumberedIds):
                for block in resource.ids.blocks:
                    if (other := blocks.setdefault(block.prefix, resource.name)) != resource.name:
                        raise ValueError(f"device ids {block.prefix}… are offered by {other} and by {resource.name}")
                continue
            for device_id in resource.ids:
                if device_id.id in ids:
                    raise ValueError(f"device id {device_id.id} is offered by {ids[device_id.id][0].name} and by {resource.name}")
                ids[device_id.id] = (resource, device_id)
        if offered != self._resources:
            self._resources, self._ids = offered, ids
            self._changed()

    def cordon(self, device: str, reason: str) -> None:
        """Give nothing of ``device`` to new containers; who holds it keeps it."""
        self._cordoned[device] = reason
        self._changed()

    def uncordon(self, device: str) -> None:
        """Take a cordon back."""
        if self._cordoned.pop(device, None) is not None:
            self._changed()

    # -- reading ----------------------------------------------------------------------------------------------------------------------

    @property
    def resources(self) -> tuple[Resource, ...]:
        """What is offered, by name."""
        return tuple(self._resources[name] for name in sorted(self._resources))

    @property
    def grants(self) -> tuple[Grant, ...]:
        """All grants that are not released, oldest first."""
        return tuple(self._grants[number] for number in sorted(self._grants))

    @property
    def newest(self) -> int:
        """The number of the grant that was booked last, whether it is still there or not; 0 before the first."""
        return self._last_number

    @property
    def in_doubt(self) -> bool:
        """Whether a grant was missing in kubelet's last complete records; the next pass decides."""
        return bool(self._misses)

    @property
    def foreign_ids(self) -> tuple[str, ...]:
        """Ids in containers' hands that this node does not offer (any more)."""
        return tuple(sorted({id_ for name, id_ in self._holder if not self._is_offered(name, id_)}))

    def free_ids(self, resource: str) -> int:
        """How many ids of ``resource`` could be given out now."""
        return sum(entry.healthy and (resource, entry.id.id) not in self._holder for entry in self.listing(resource))

    def resource(self, name: str) -> Resource:
        """The offer of that name.

        Raises:
            UnknownDeviceError: there is none.
        """
        if resource := self._resources.get(name):
            return resource
        raise UnknownDeviceError(f"resource {name} is not offered by this node; it offers {', '.join(self._resources) or 'nothing'}")

    def listing(self, name: str) -> list[ListedDevice]:
        """The complete list that kubelet must see now: every offered id, and held ids of devices that went away (never dropped: V16)."""
        resource = self.resource(name)
        trouble = self._troubles(resource)
        listed = [ListedDevice(entry, not trouble[entry.device]) for entry in resource.ids]
        for grant in self._grants.values():
            if grant.resource == name:
                listed += [
                    ListedDevice(DeviceId(id_, device), healthy=False)
                    for id_ in grant.ids
                    if not self._is_offered(name, id_) and self._ill(device := self._device_behind(grant, id_))
                ]
        return listed

    def rooms(self, name: str, *, besides: Iterable[int] = ()) -> tuple[DeviceRoom, ...]:
        """What each device of resource ``name`` has left, in the order of its ids.

        Args:
            name: the resource.
            besides: numbers of grants that are not counted, because they are about to be decided anew.

        Raises:
            UnknownDeviceError: the resource is not offered.
        """
        resource, left_out = self.resource(name), set(besides)
        grants = [grant for grant in self._grants.values() if grant.number not in left_out]
        booked = accounting.usage(resource, grants, self._offered_device)
        trouble = self._troubles(resource)
        return tuple(accounting.room(resource, booked, self._devices.get(uuid) or Device(uuid, uuid, 0), trouble[uuid]) for uuid in trouble)

    def find(self, name: str, ids: Iterable[str]) -> Grant | None:
        """The grant of exactly these ids, in whatever order; None when there is none."""
        wanted = set(ids)
        holders = self._holders(name, wanted)
        grant = self._grants[next(iter(holders))] if len(holders) == 1 else None
        return grant if grant is not None and set(grant.ids) == wanted else None

    def audit(self) -> list[str]:
        """Every invariant that does not hold, as sentences; empty when the book is sound."""
        problems = accounting.unsound(self._grants.values(), self._holder)
        for resource in self._resources.values():
            problems += [f"{device}: {text}" for device, text in self._overbooked(resource).items()]
        return problems

    # -- booking ----------------------------------------------------------------------------------------------------------------------

    def reserve(self, name: str, ids: Sequence[str], shares: Sequence[Share], decided_for: tuple[str, str] | None = None) -> Grant:
        """Book ``ids`` of resource ``name`` for a container that kubelet has not named yet.

        kubelet decides who holds an id, so an id that another grant holds changes hands: its pod has ended and kubelet has not said
        so, or an init container made room for the next one. Asking again for ids that nobody is named for yet gives the same grant (V15).
        Where the pod decides, ``shares`` are empty (late binding) or those of the pod that Allocate took it for (early).

        Raises:
            UnknownDeviceError: the resource or an id is not offered; nothing is booked.
            UnhealthyDeviceError: a device is unhealthy, cordoned, or serves somebody on other terms; nothing is booked.
            CapacityError: an id is named twice, or a device would hold more than it has; nothing is booked.
        """
        resource = self.resource(name)
        by_ids = resource.decided_by is Decider.IDS
        behind: dict[str, str] = {}
        for id_ in ids:
            if (device := self._offered_device(name, id_)) is None:
                raise UnknownDeviceError(f"invalid request: unknown device: {id_}")
            behind.setdefault(device, id_)
        if len(set(ids)) != len(ids):
            raise CapacityError(f"invalid request: an id is named twice in {', '.join(ids)}")
        # Where the pod decides, the ids' own devices mean nothing: which GPU it gets stands in the pod.
        booked = behind if by_ids else {share.device: share.device for share in shares}
        self._refuse_troubled(resource, booked)

        holders = self._holders(name, ids)
        if (same := self._still_open(holders, set(ids), covering=not by_ids)) and (by_ids or not shares):
            self._grants[same.number] = dataclasses.replace(same, reserved_at=self._clock())
            return self._grants[same.number]

        before = dict(self._grants), dict(self._holder)
        for number in holders:
            self._take_from(self._grants[number], set(ids))
        self._last_number += 1
        grant = Grant(
            self._last_number, resource.family, name, tuple(ids), tuple(shares), reserved_at=self._clock(), decided_for=decided_for
        )
        self._enter(grant)
        self._check_capacity(resource, booked, before)
        self._changed()
        return grant

    def decide(self, name: str, ids: Sequence[str], shares: Sequence[Share], owner: Owner, *, evidence: tuple[str, ...] = ()) -> Grant:
        """Book ``shares`` for the container that is proven to hold ``ids``; again with the same shares it changes nothing.

        kubelet's word is final about the ids, so whoever else had some of them loses those: an init container that has ended, or a
        pod that has. Device and room are checked unless the container has these very shares already.

        Raises:
            UnknownDeviceError: the resource, or a share's device, is not offered; nothing is booked.
            UnhealthyDeviceError: a device must not be given to anybody now; nothing is booked.
            CapacityError: a device would hold more than it has; nothing is booked.
        """
        resource = self.resource(name)
        decided_for = (owner.pod_uid, owner.container)
        same = self.find(name, ids)
        decided = Grant(
            same.number if same else self._last_number + 1,
            resource.family,
            name,
            tuple(ids),
            tuple(shares),
            GrantState.PROVEN,
            owner,
            same.reserved_at if same else self._clock(),
            decided_for,
            evidence,
        )
        if same and same.shares == decided.shares and same.decided_for == decided_for:
            if dataclasses.replace(same, evidence=evidence) != decided:
                self._changed()
            self._grants[same.number] = decided
            return decided
        offered = {entry.device for entry in resource.ids} if not isinstance(resource.ids, NumberedIds) else resource.ids.devices
        if strangers := [share.device for share in shares if share.device not in offered]:
            raise UnknownDeviceError(f"{name}: this node does not offer {', '.join(strangers)}; it offers {', '.join(sorted(offered))}")
        wanted = {share.device: share.device for share in shares}
        self._refuse_troubled(resource, wanted)

        before = dict(self._grants), dict(self._holder)
        for number in self._holders(name, ids):
            self._take_from(self._grants[number], set(ids))
        self._last_number = max(self._last_number, decided.number)
        self._enter(decided)
        self._check_capacity(resource, wanted, before)
        self._changed()
        return decided

    def redirect(self, number: int, decided_for: tuple[str, str]) -> None:
        """Say that the shares of grant ``number`` are those of another container: two pods that got each other's equal shares."""
        self._grants[number] = dataclasses.replace(self._grants[number], decided_for=decided_for)
        self._changed()

    def release(self, number: int) -> Grant | None:
        """Take grant ``number`` out of the book; None when it is not in it."""
        if not (grant := self._grants.get(number)):
            return None
        self._leave(grant)
        self._changed()
        return dataclasses.replace(grant, state=GrantState.RELEASED)

    def reconcile(
        self,
        records: KubeletRecords,
        interpret: Callable[[Holding], Meaning | None],
        *,
        reservation_seconds: float,
        newest: float = math.inf,
        initial: bool = False,
        may_release: bool = True,
    ) -> list[Correction]:
        """Bring the book in line with kubelet's records.

        Args:
            records: what kubelet says; when incomplete, it may add and name but never take away.
            interpret: what a holding means, None when its resource is not ours or is only there to be counted.
            reservation_seconds: how long a reservation may stay unconfirmed.
            newest: `newest` from before the records were read; they say nothing about ids that were booked since.
            initial: the book is being rebuilt at start, so adopting is no drift.
            may_release: False while kubelet itself is still finding its pods again after a restart.

        Returns:
            What was changed. A grant leaves after two passes in a row that do not know it: one alone may be kubelet's own gap.
        """
        corrections: list[Correction] = []
        confirmed: set[int] = set()
        for holding in records.holdings:
            if (meaning := interpret(holding)) is None:
                continue
            holders = self._holders(holding.resource, holding.ids)
            if max(holders, default=0) <= newest and (correction := self._confirm(holding, holders, meaning, initial=initial)):
                corrections.append(correction)
            confirmed |= self._holders(holding.resource, holding.ids)
        if records.complete and may_release:
            for grant in self.grants:
                if grant.number not in confirmed and (reason := self._outlived(grant, reservation_seconds)):
                    self._leave(grant)
                    gone = dataclasses.replace(grant, state=GrantState.RELEASED)
                    corrections.append(Correction("ledger.released", drift=False, grant=gone, reason=reason))
        for number in confirmed:
            self._misses.pop(number, None)
        if corrections:
            self._changed()
        return corrections

    # -- how it is done ---------------------------------------------------------------------------------------------------------------

    def _confirm(self, holding: Holding, holders: set[int], meaning: Meaning, *, initial: bool) -> Correction | None:
        owner = holding.owner
        grants = [self._grants[number] for number in sorted(holders)]
        if len(grants) == 1 and set(grants[0].ids) == set(holding.ids):
            return self._name(grants[0], owner, meaning)
        open_ = all(grant.owner is None and grant.decided_for is None for grant in grants)
        if meaning.by_pod and grants and not open_ and all(grant.owner is None or grant.owner.may_be_in(owner) for grant in grants):
            # The containers of one pod hand ids on to each other; which of them has them now is decided before each start.
            return None
        for grant in grants:
            self._take_from(grant, set(holding.ids))
        self._last_number += 1
        adopted = self._enter(
            Grant(
                self._last_number,
                meaning.family,
                holding.resource,
                holding.ids,
                meaning.shares,
                self._state(owner, meaning),
                owner,
                self._clock(),
                meaning.decided_for,
            )
        )
        if meaning.by_pod and grants and open_:
            return Correction("ledger.named", drift=False, grant=adopted, reason="kubelet's records name the container")
        reason = "found in kubelet's records at start" if initial else "kubelet's records name a holder that the ledger did not know"
        return Correction("ledger.adopted", drift=not initial, grant=adopted, reason=reason)

    def _name(self, grant: Grant, owner: Owner, meaning: Meaning) -> Correction | None:
        known = grant.owner
        same_container = known is None or known.may_be(owner)
        if meaning.by_pod and known is not None and not same_container and known.may_be_in(owner):
            return None  # handed on inside its pod, see `_confirm`
        # A source that was silent this time takes no knowledge away.
        merged = owner if known is None or not same_container else owner.filled_from(known)
        shares, decided_for = grant.shares, grant.decided_for
        if not same_container and meaning.by_pod:
            shares, decided_for = meaning.shares, meaning.decided_for  # what was decided, was for another pod
        elif not any(share.memory_mib for share in shares) and meaning.shares:
            # A GPU that did not answer when its grant was made may be known by now, or a pod that had not been seen.
            shares, decided_for = meaning.shares, meaning.decided_for
        named = dataclasses.replace(grant, owner=merged, shares=shares, decided_for=decided_for)
        named = self._grants[grant.number] = dataclasses.replace(named, state=self._state(merged, meaning, named))
        if known == merged and named == grant:
            return None
        if same_container:
            return Correction("ledger.named", drift=False, grant=named, reason="kubelet's records name the container")
        reason = f"the ids belong to {owner.pod_name}, the ledger had {known.pod_name if known else 'nobody'}"
        return Correction("ledger.renamed", drift=True, grant=named, reason=reason)

    @staticmethod
    def _state(owner: Owner, meaning: Meaning, grant: Grant | None = None) -> GrantState:
        if meaning.by_pod:
            decided_for = grant.decided_for if grant else meaning.decided_for
            if decided_for is None:
                return GrantState.RESERVED
            return GrantState.PROVEN if decided_for == (owner.pod_uid, owner.container) else GrantState.GRANTED
        return GrantState.PROVEN if owner.pod_uid and owner.pod else GrantState.GRANTED

    def _outlived(self, grant: Grant, reservation_seconds: float) -> str:
        if grant.owner is None:
            expired = self._clock() - grant.reserved_at > reservation_seconds
            return f"kubelet did not confirm the reservation within {reservation_seconds:g} s" if expired else ""
        self._misses[grant.number] += 1
        return "the pod has ended" if self._misses[grant.number] >= 2 else ""

    def _troubles(self, resource: Resource) -> dict[str, str]:
        """`_trouble` of every device of ``resource``, in the order of its ids."""
        ids = resource.ids
        devices = ids.devices if isinstance(ids, NumberedIds) else tuple(dict.fromkeys(entry.device for entry in ids))
        return {device: self._trouble(device, resource) for device in devices}

    def _refuse_troubled(self, resource: Resource, wanted: Mapping[str, str]) -> None:
        """Raise for the first device of ``wanted`` (device → what the message calls it) of which nothing may be given out."""
        for device, called in wanted.items():
            if trouble := self._trouble(device, resource):
                raise UnhealthyDeviceError(f"invalid request: device {called} is not available: {trouble}")

    def _check_capacity(self, resource: Resource, wanted: Mapping[str, str], before: tuple[dict[int, Grant], _Holders]) -> None:
        """Go back to ``before`` and raise when a device of ``wanted`` now holds more than it has."""
        excess = self._overbooked(resource)
        for device, called in wanted.items():
            if text := excess.get(device):
                self._grants, self._holder = before
                raise CapacityError(f"invalid request: device {device} cannot take {called}: {text}")

    def _still_open(self, holders: set[int], ids: set[str], *, covering: bool) -> Grant | None:
        """The reservation that stands for these ids although nobody is named for it.

        Where the pod decides, an init container's reservation also covers the containers that take over some of its ids.
        """
        grant = self._grants[next(iter(holders))] if len(holders) == 1 else None
        if grant is None or grant.state is not GrantState.RESERVED or grant.owner is not None or (covering and grant.decided_for):
            return None
        return grant if set(grant.ids) == ids or (covering and ids < set(grant.ids)) else None

    def _trouble(self, device: str, resource: Resource) -> str:
        """Why nothing of ``device`` may be given out through ``resource`` now; empty when it may."""
        if illness := self._ill(device):
            return illness
        gpu = self._devices[device].gpu
        if reason := self._cordoned.get(device) or self._cordoned.get(gpu):
            return f"cordoned: {reason}"
        by_ids = resource.decided_by is Decider.IDS
        for grant in self._grants.values():
            for share in grant.shares:
                holds = self._devices.get(share.device)
                if holds is None or holds.gpu != gpu:
                    continue
                if grant.family != resource.family:
                    return f"the GPU serves {grant.family} until its last share is returned"
                # Ids from before a change of replicas: whole and shared holders never mix on one device.
                mixed = by_ids and share.device == device and (share.exclusive or resource.holders_per_device == 1)
                if mixed and not self._offers_all_of(grant):
                    return f"a container admitted under earlier settings still holds it ({', '.join(grant.ids)})"
        return ""

    def _ill(self, device: str) -> str:
        known = self._devices.get(device)
        return known.trouble if known else "the device is gone"

    def _overbooked(self, resource: Resource) -> dict[str, str]:
        if resource.decided_by is Decider.NOBODY:
            return {}
        booked = accounting.usage(resource, self._grants.values(), self._offered_device)
        return accounting.overbooked(resource, booked, self._devices)

    def _device_behind(self, grant: Grant, id_: str) -> str:
        if device := self._offered_device(grant.resource, id_):
            return device
        devices = [share.device for share in grant.shares]
        return next((device for device in devices if id_.startswith(device)), devices[0] if devices else "")

    def _offered_device(self, resource: str, id_: str) -> str | None:
        """The device behind an id that ``resource`` offers today; None when it does not."""
        offered = self._resources.get(resource)
        if offered is not None and isinstance(offered.ids, NumberedIds):
            found = offered.ids.find(id_)
            return found.device if found else None
        entry = self._ids.get(id_)
        return entry[1].device if entry and entry[0].name == resource else None

    def _is_offered(self, resource: str, id_: str) -> bool:
        return self._offered_device(resource, id_) is not None

    def _offers_all_of(self, grant: Grant) -> bool:
        """Whether the grant was made under today's settings."""
        return all(self._is_offered(grant.resource, id_) for id_ in grant.ids)

    def _holders(self, resource: str, ids: Iterable[str]) -> set[int]:
        return {number for id_ in ids if (number := self._holder.get((resource, id_))) is not None}

    def _held_devices(self) -> set[str]:
        return {share.device for grant in self._grants.values() for share in grant.shares}

    def _enter(self, grant: Grant) -> Grant:
        self._grants[grant.number] = grant
        self._holder.update({(grant.resource, id_): grant.number for id_ in grant.ids})
        return grant

    def _leave(self, grant: Grant) -> None:
        self._grants.pop(grant.number)
        self._misses.pop(grant.number, None)
        for id_ in grant.ids:
            self._holder.pop((grant.resource, id_), None)

    def _take_from(self, grant: Grant, ids: set[str]) -> None:
        """Take ``ids`` out of ``grant``; it leaves when nothing remains."""
        self._leave(grant)
        rest = tuple(id_ for id_ in grant.ids if id_ not in ids)
        if not rest:
            return
        offered = self._resources.get(grant.resource)
        if grant.decided_for or (offered and offered.decided_by is Decider.POD):
            # The container that had been decided for has ended: its shares went with the ids that the next one took.
            left = dataclasses.replace(grant, ids=rest, shares=(), decided_for=None, state=GrantState.RESERVED)
            self._enter(left)
            return
        devices = {self._device_behind(grant, id_) for id_ in rest}
        shares = tuple(share for share in grant.shares if share.device in devices)
        self._enter(dataclasses.replace(grant, ids=rest, shares=shares))

    def _changed(self) -> None:
        self.revision.publish(self.revision.value + 1)
