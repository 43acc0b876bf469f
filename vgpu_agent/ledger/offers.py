"""What this node offers: resources by name, and the device behind each id. Kept by `book`, which alone changes it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.device_ids import NumberedIds
from vgpu_agent.model import Decider

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vgpu_agent.device_ids import DeviceId
    from vgpu_agent.model import Resource


class Offers:
    """The offered resources. Tens of thousands of numbered ids are looked up by arithmetic, the others in an index."""

    def __init__(self) -> None:
        self.by_name: dict[str, Resource] = {}
        self._wider: dict[str, Resource] = {}  # as they were when some of today's grants were made, where the pod decides
        self.version = 0  # moves on when what is offered has changed
        self._ids: dict[str, tuple[str, DeviceId]] = {}  # id → (resource, id)

    def replace(self, resources: Iterable[Resource], held: Collection[str] = ()) -> bool:
        """Offer exactly ``resources`` from now on; whether that changed anything. Of those in ``held``, wider limits are remembered.

        Raises:
            ValueError: a name, or an id (kubelet contract V17), is offered twice: kubelet would mix their health up.
        """
        offered: dict[str, Resource] = {}
        for resource in resources:
            if (twin := offered.setdefault(resource.name, resource)) is not resource:
                raise ValueError(f"{resource.name} is offered by {twin.family} and by {resource.family}")
        ids: dict[str, tuple[str, DeviceId]] = {}
        prefixes: dict[str, str] = {}
        for resource in offered.values():
            if isinstance(resource.ids, NumberedIds):
                for block in resource.ids.blocks:
                    if (other := prefixes.setdefault(block.prefix, resource.name)) != resource.name:
                        raise ValueError(f"device ids {block.prefix}… are offered by {other} and by {resource.name}")
                continue
            for device_id in resource.ids:
                if device_id.id in ids:
                    raise ValueError(f"device id {device_id.id} is offered by {ids[device_id.id][0]} and by {resource.name}")
                ids[device_id.id] = (resource.name, device_id)
        changed = offered != self.by_name
        if changed:
            known = (resource for name, resource in self.by_name.items() if name in held)
            wider = {resource.name: self.at_its_widest(resource) for resource in known if resource.decided_by is Decider.POD}
            self._wider = {name: resource for name, resource in {**self._wider, **wider}.items() if name in held}
        self.by_name, self._ids = offered, ids
        self.version += changed
        return changed

    def device(self, resource: str, id_: str) -> str | None:
        """The device behind an id that ``resource`` offers; None when it does not."""
        offered = self.by_name.get(resource)
        if offered is not None and isinstance(offered.ids, NumberedIds):
            return offered.ids.device(id_)
        name, device_id = self._ids.get(id_, ("", None))
        return device_id.device if device_id and name == resource else None

    def at_its_widest(self, resource: Resource) -> Resource:
        """``resource`` with the widest limits under which any of its grants may have been made; those grants are not unsound now."""
        wider = self._wider.get(resource.name)
        if wider is None:
            return resource
        return dataclasses.replace(
            resource,
            holders_per_device=max(resource.holders_per_device, wider.holders_per_device),
            memory_scaling=max(resource.memory_scaling, wider.memory_scaling),
            cores_scaling=max(resource.cores_scaling, wider.cores_scaling),
        )

    @staticmethod
    def devices(resource: Resource) -> tuple[str, ...]:
        """The devices of ``resource``, in the order of its ids."""
        ids = resource.ids
        return ids.devices if isinstance(ids, NumberedIds) else tuple(dict.fromkeys(entry.device for entry in ids))
