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
from typing import TYPE_CHECKING

from vgpu_agent.concurrency import Latest
from vgpu_agent.device_ids import DeviceId, ListedDevice
from vgpu_agent.errors import CapacityError, UnhealthyDeviceError, UnknownDeviceError
from vgpu_agent.model import Correction, Grant, GrantState, Inventory, Resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vgpu_agent.model import Holding, KubeletRecords, Owner, Share


@dataclasses.dataclass
class _Device:
    """A GPU or a MIG instance in the book."""

    uuid: str
    gpu: str
    memory_mib: int
    trouble: str = ""  # why nobody may get it now: health, or gone


class Ledger:
    """Devices, offers and grants.

    State: everything is rebuilt after a restart from NVML and from kubelet's records; nothing is written to disk. `revision` moves on
    when a list that kubelet should see, or a grant, has changed.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self.revision: Latest[int] = Latest(0)
        self._clock = clock
        self._devices: dict[str, _Device] = {}
        self._cordoned: dict[str, str] = {}
        self._resources: dict[str, Resource] = {}
        self._ids: dict[str, tuple[Resource, DeviceId]] = {}
        self._grants: dict[int, Grant] = {}
        # (resource, id) → number of its grant; by resource, since one that was renamed keeps its ids, and kubelet counts anew.
        self._holder: dict[tuple[str, str], int] = {}
        self._misses: collections.Counter[int] = collections.Counter()
        self._last_number = 0

    # -- facts ------------------------------------------------------------------------------------------------------------------------

    def observe(self, inventory: Inventory) -> None:
        """Take over what `gpu` has seen. A device that is no longer mentioned stays as long as somebody holds it, as not available."""
        seen: dict[str, _Device] = {}
        for gpu in inventory.gpus:
            trouble = "" if gpu.health.ok and gpu.present else gpu.health.reason or "the GPU does not answer"
            seen[gpu.uuid] = _Device(gpu.uuid, gpu.uuid, gpu.memory_mib, trouble)
            for instance in gpu.mig_instances:
                seen[instance.uuid] = _Device(instance.uuid, gpu.uuid, instance.memory_mib, trouble)
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
        for resource in offered.values():
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
        trouble = {device: self._trouble(device, resource) for device in {entry.device for entry in resource.ids}}
        listed = [ListedDevice(entry, not trouble[entry.device]) for entry in resource.ids]
        for grant in self.grants:
            if grant.resource == name:
                listed += [
                    ListedDevice(DeviceId(id_, self._device_behind(grant, id_)), healthy=False)
                    for id_ in grant.ids
                    if id_ not in self._ids and self._ill(self._device_behind(grant, id_))
                ]
        return listed

    def audit(self) -> list[str]:
        """Every invariant that does not hold, as sentences; empty when the book is sound."""
        problems = []
        for uuid in {*self._devices, *self._held_devices()}:
            shares = [(grant, share) for grant in self.grants for share in grant.shares if share.device == uuid]
            if any(share.exclusive for _, share in shares) and len(shares) > 1:
                problems.append(f"{uuid} has an exclusive holder and {len(shares) - 1} more")
            if len({grant.family for grant, _ in shares}) > 1:
                problems.append(f"{uuid} serves several families at once")
        for resource in self._resources.values():
            problems += [f"{device}: {text}" for device, text in self._overbooked(resource).items()]
        counted = collections.Counter((grant.resource, id_) for grant in self.grants for id_ in grant.ids)
        problems += [f"id {id_} of {name} has {count} holders" for (name, id_), count in counted.items() if count > 1]
        if counted.keys() != self._holder.keys():
            problems.append("the index of holders does not match the grants")
        return problems

    # -- booking ----------------------------------------------------------------------------------------------------------------------

    def reserve(self, name: str, ids: Sequence[str], shares: Sequence[Share]) -> Grant:
        """Book ``ids`` of resource ``name`` for a container that kubelet has not named yet.

        kubelet decides who holds an id, so an id that another grant holds changes hands: its pod has ended and kubelet has not said
        so, or an init container made room for the next one. Asking again for ids that nobody is named for yet gives the same grant (V15).

        Raises:
            UnknownDeviceError: the resource or an id is not offered; nothing is booked.
            UnhealthyDeviceError: a device is unhealthy, cordoned, or serves somebody on other terms; nothing is booked.
            CapacityError: an id is named twice, or a device would hold more than it has; nothing is booked.
        """
        resource = self.resource(name)
        for id_ in ids:
            if not self._is_offered(name, id_):
                raise UnknownDeviceError(f"invalid request: unknown device: {id_}")
        if len(set(ids)) != len(ids):
            raise CapacityError(f"invalid request: an id is named twice in {', '.join(ids)}")
        devices = {self._ids[id_][1].device: id_ for id_ in reversed(ids)}
        for device, id_ in devices.items():
            if trouble := self._trouble(device, resource):
                raise UnhealthyDeviceError(f"invalid request: device {id_} is not available: {trouble}")

        holders = self._holders(name, ids)
        if len(holders) == 1:
            held = self._grants[next(iter(holders))]
            if held.state is GrantState.RESERVED and set(held.ids) == set(ids):
                self._grants[held.number] = dataclasses.replace(held, reserved_at=self._clock())
                return self._grants[held.number]

        before = dict(self._grants), dict(self._holder)
        for number in holders:
            self._take_from(self._grants[number], set(ids))
        self._last_number += 1
        grant = self._enter(Grant(self._last_number, resource.family, name, tuple(ids), tuple(shares), reserved_at=self._clock()))
        if excess := [(device, text) for device, text in self._overbooked(resource).items() if device in devices]:
            self._grants, self._holder = before
            device, text = excess[0]
            raise CapacityError(f"invalid request: device {device} cannot take {', '.join(ids)}: {text}")
        self._changed()
        return grant

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
        interpret: Callable[[Holding], tuple[str, tuple[Share, ...]] | None],
        *,
        reservation_seconds: float,
        newest: float = math.inf,
        initial: bool = False,
        may_release: bool = True,
    ) -> list[Correction]:
        """Bring the book in line with kubelet's records.

        Args:
            records: what kubelet says; when incomplete, it may add and name but never take away.
            interpret: (family, shares) of a holding, None when its resource is not ours.
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
            if max(holders, default=0) <= newest and (correction := self._confirm(holding, holders, *meaning, initial=initial)):
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

    def _confirm(self, holding: Holding, holders: set[int], family: str, shares: tuple[Share, ...], *, initial: bool) -> Correction | None:
        state = GrantState.PROVEN if holding.owner.pod_uid and holding.owner.pod else GrantState.GRANTED
        if len(holders) == 1:
            grant = self._grants[next(iter(holders))]
            if set(grant.ids) == set(holding.ids):
                # A GPU that did not answer when its grant was made may be known by now.
                grant = dataclasses.replace(grant, shares=grant.shares if any(share.memory_mib for share in grant.shares) else shares)
                return self._name(grant, holding.owner, state)
        for number in holders:
            self._take_from(self._grants[number], set(holding.ids))
        self._last_number += 1
        adopted = self._enter(Grant(self._last_number, family, holding.resource, holding.ids, shares, state, holding.owner, self._clock()))
        reason = "found in kubelet's records at start" if initial else "kubelet's records name a holder that the ledger did not know"
        return Correction("ledger.adopted", drift=not initial, grant=adopted, reason=reason)

    def _name(self, grant: Grant, owner: Owner, state: GrantState) -> Correction | None:
        known = grant.owner
        same_container = known is None or known.may_be(owner)
        # A source that was silent this time takes no knowledge away.
        merged = owner if known is None or not same_container else owner.filled_from(known)
        proven = GrantState.PROVEN if merged.pod_uid and merged.pod else state
        named = self._grants[grant.number] = dataclasses.replace(grant, owner=merged, state=proven)
        if known == merged and grant.state is proven:
            return None
        if same_container:
            return Correction("ledger.named", drift=False, grant=named, reason="kubelet's records name the container")
        reason = f"the ids belong to {owner.pod_name}, the ledger had {known.pod_name if known else 'nobody'}"
        return Correction("ledger.renamed", drift=True, grant=named, reason=reason)

    def _outlived(self, grant: Grant, reservation_seconds: float) -> str:
        if grant.state is GrantState.RESERVED:
            expired = self._clock() - grant.reserved_at > reservation_seconds
            return f"kubelet did not confirm the reservation within {reservation_seconds:g} s" if expired else ""
        self._misses[grant.number] += 1
        return "the pod has ended" if self._misses[grant.number] >= 2 else ""

    def _trouble(self, device: str, resource: Resource) -> str:
        """Why nothing of ``device`` may be given out through ``resource`` now; empty when it may."""
        if illness := self._ill(device):
            return illness
        gpu = self._devices[device].gpu
        if reason := self._cordoned.get(device) or self._cordoned.get(gpu):
            return f"cordoned: {reason}"
        for grant in self._grants.values():
            for share in grant.shares:
                holds = self._devices.get(share.device)
                if holds is None or holds.gpu != gpu:
                    continue
                if grant.family != resource.family:
                    return f"the GPU serves {grant.family} until its last share is returned"
                # Ids from before a change of replicas: whole and shared holders never mix on one device.
                mixed = share.device == device and (share.exclusive or resource.holders_per_device == 1)
                if mixed and not self._offers_all_of(grant):
                    return f"a container admitted under earlier settings still holds it ({', '.join(grant.ids)})"
        return ""

    def _ill(self, device: str) -> str:
        known = self._devices.get(device)
        return known.trouble if known else "the device is gone"

    def _overbooked(self, resource: Resource) -> dict[str, str]:
        """Devices of ``resource`` that hold more than they have, with a sentence each; ids from earlier settings do not count."""
        memory: collections.Counter[str] = collections.Counter()
        cores: collections.Counter[str] = collections.Counter()
        slots: collections.Counter[str] = collections.Counter()
        exclusive: collections.Counter[str] = collections.Counter()
        for grant in self._grants.values():
            if grant.family != resource.family or not self._offers_all_of(grant):
                continue
            for share in grant.shares:
                memory[share.device] += share.memory_mib
                cores[share.device] += share.cores_percent
                exclusive[share.device] += share.exclusive
            if grant.resource == resource.name:
                slots.update(self._ids[id_][1].device for id_ in grant.ids)
        excess = {}
        for device in memory.keys() | slots.keys():
            known = self._devices.get(device)
            if known and memory[device] > known.memory_mib * resource.memory_scaling:
                excess[device] = f"{memory[device]} MiB booked of {known.memory_mib * resource.memory_scaling:.0f}"
            elif cores[device] > 100 * resource.cores_scaling:
                excess[device] = f"{cores[device]} % of the cores booked of {100 * resource.cores_scaling:.0f}"
            elif slots[device] > resource.holders_per_device:
                excess[device] = f"{slots[device]} holders of {resource.holders_per_device}"
            elif exclusive[device] and slots[device] > 1:
                excess[device] = "an exclusive holder would not be alone"
        return excess

    def _device_behind(self, grant: Grant, id_: str) -> str:
        if entry := self._ids.get(id_):
            return entry[1].device
        devices = [share.device for share in grant.shares]
        return next((device for device in devices if id_.startswith(device)), devices[0] if devices else "")

    def _is_offered(self, resource: str, id_: str) -> bool:
        return (entry := self._ids.get(id_)) is not None and entry[0].name == resource

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
        if rest:
            devices = {self._device_behind(grant, id_) for id_ in rest}
            shares = tuple(share for share in grant.shares if share.device in devices)
            self._enter(dataclasses.replace(grant, ids=rest, shares=shares))

    def _changed(self) -> None:
        self.revision.publish(self.revision.value + 1)
