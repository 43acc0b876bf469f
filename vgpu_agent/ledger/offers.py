"""The offers of this node: resources by name, and the device behind each id.
Kept by `book`, the module of the ledger itself, which alone changes it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.device_ids import NumberedIds
from vgpu_agent.model import Decider

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from vgpu_agent.device_ids import DeviceId
    from vgpu_agent.model import Resource


def alike(resources: Iterable[Resource]) -> Iterator[tuple[Resource, Resource, str]]:
    """Return each pair of resources that have an id in common, and one such id.

    Such a pair is tolerated in two families, because the replaced plugins never ran on one node and
    some give their ids the same form: a device serves one family at a time, so only one of the two
    can have a holder, whose pod shows the id's health in its status (KEP-4680). Pairs of resources
    that are only there for schedulers to count (`Decider.NOBODY`) are left out, because they have
    no holders.
    """
    for one, other in itertools.combinations(resources, 2):
        if one.decided_by is Decider.NOBODY is other.decided_by:
            continue
        few, many = sorted((one, other), key=lambda each: isinstance(each.ids, NumberedIds))
        if (id_ := _common(few.ids, many.ids)) is not None:
            yield one, other, id_


def _common(few: Sequence[DeviceId], many: Sequence[DeviceId]) -> str | None:
    # `NumberedIds` are kept as one block for each device: a prefix, and how many numbers follow it
    if not isinstance(many, NumberedIds):
        known = {entry.id for entry in many}
        return next((entry.id for entry in few if entry.id in known), None)
    if not isinstance(few, NumberedIds):
        return next((entry.id for entry in few if many.device(entry.id) is not None), None)
    # If two blocks have ids in common, the first id of one of the blocks is in both.
    return next(
        (
            first
            for one, other in ((few, many), (many, few))
            for block in one.blocks
            if block.count and other.device(first := block.text(0)) is not None
        ),
        None,
    )


class Offers:
    """The offered resources. Tens of thousands of numbered ids are looked up by arithmetic,
    the others in an index.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Resource] = {}
        self.in_order: tuple[Resource, ...] = ()  # by name
        # resource name → the resource with the widest limits under which some of today's grants
        # were made; only where the pod decides what a container gets
        self._wider: dict[str, Resource] = {}
        self.version = 0  # advances when what is offered has changed
        self._devices: dict[str, dict[str, str]] = {}  # resource → id → device

    def replace(self, resources: Iterable[Resource], held: Collection[str] = ()) -> bool:
        """Offer exactly ``resources`` from now on; tell whether that changed anything. For the
        resource names in ``held``, those with grants, wider limits that applied before are
        remembered (`at_its_widest`).

        Raises:
            ValueError: a name, or within one family an id (kubelet V17), is offered twice, see
                `alike`: the kubelet would mix their health up.
        """
        offered: dict[str, Resource] = {}
        for resource in resources:
            if (twin := offered.setdefault(resource.name, resource)) is not resource:
                raise ValueError(
                    f"{resource.name} is offered by {twin.family} and by {resource.family}"
                )
        for one, other, id_ in alike(offered.values()):
            if one.family == other.family:
                raise ValueError(f"device id {id_} is offered by {one.name} and by {other.name}")
        devices = {
            resource.name: {device_id.id: device_id.device for device_id in resource.ids}
            for resource in offered.values()
            if not isinstance(resource.ids, NumberedIds)
        }
        for name, listed in devices.items():
            if len(listed) < len(offered[name].ids):
                raise ValueError(f"{name} offers a device id twice")
        changed = offered != self.by_name
        if changed:
            known = (resource for name, resource in self.by_name.items() if name in held)
            wider = {
                resource.name: self.at_its_widest(resource)
                for resource in known
                if resource.decided_by is Decider.POD
            }
            self._wider = {
                name: resource
                for name, resource in {**self._wider, **wider}.items()
                if name in held
            }
            self.in_order = tuple(offered[name] for name in sorted(offered))
        self.by_name, self._devices = offered, devices
        self.version += changed
        return changed

    def device(self, resource: str, id_: str) -> str | None:
        """The device behind an id that ``resource`` offers; None when it does not."""
        offered = self.by_name.get(resource)
        if offered is not None and isinstance(offered.ids, NumberedIds):
            return offered.ids.device(id_)
        return self._devices.get(resource, {}).get(id_)

    def at_its_widest(self, resource: Resource) -> Resource:
        """``resource`` with the widest limits under which any of its grants may have been made,
        so that grants which exceed narrower settings of today do not count as an error.
        """
        wider = self._wider.get(resource.name)
        if wider is None:
            return resource
        return msgspec.structs.replace(
            resource,
            holders_per_device=max(resource.holders_per_device, wider.holders_per_device),
            memory_scaling=max(resource.memory_scaling, wider.memory_scaling),
            cores_scaling=max(resource.cores_scaling, wider.cores_scaling),
        )

    @staticmethod
    def devices(resource: Resource) -> tuple[str, ...]:
        """The devices of ``resource``, in the order of its ids."""
        ids = resource.ids
        return (
            ids.devices
            if isinstance(ids, NumberedIds)
            else tuple(dict.fromkeys(entry.device for entry in ids))
        )
