"""A family that offers existing MIG instances, one id for each, named by its UUID.

Nothing about an instance is shared, so the ids name devices and the answer is complete in Allocate.
Families differ in the names of their resources and in the GPUs whose instances they offer. Those
that offer nothing else derive from `MigInstancesFamily`.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import CapacityError
from vgpu_agent.families.device_lists import answer_id, edits_of, visible_device
from vgpu_agent.families.family import Shortfall
from vgpu_agent.model import Resource, Share
from vgpu_agent.placement.mixing import ALONE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.families.device_lists import ListOptions
    from vgpu_agent.families.family import Ownership
    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.model import Gpu, Inventory, MigInstance
    from vgpu_agent.placement.mixing import GpuUses

SINGLE, MIXED, NONE = "single", "mixed", "none"
"""The strategies of the replaced plugins. The instances of a node must be alike, may differ, or are
not offered.
"""

_ALL_CORES = 100  # percent of the instance's compute


class MigInstancesFamily(abc.ABC):
    """The parts that all such families have in common; an `IdFamily`."""

    name: str

    def __init__(self, lists: ListOptions) -> None:
        """Make it; ``lists`` has the device-list strategies by which containers get devices."""
        self._lists = lists

    # -- what differs between families -------------------------------------------------------------

    @abc.abstractmethod
    def owns(self, resource: str) -> Ownership:
        """Tell by its name how surely ``resource`` is, or was, one of this family: not, possibly or
        certainly.
        """

    @abc.abstractmethod
    def resource_name(self, instance: MigInstance) -> str:
        """Return the resource that offers the instance."""

    @abc.abstractmethod
    def divided_gpus(self, inventory: Inventory) -> Sequence[Gpu]:
        """Return the GPUs in MIG mode whose instances this family may offer."""

    @abc.abstractmethod
    def refusals(self, inventory: Inventory) -> Mapping[str, str]:
        """Return resources that cannot be offered, and why; nothing is offered if there are any."""

    def why_never_granted(self, gpu: Gpu, inventory: Inventory) -> str:
        """Explain why the instances of ``gpu`` are in the kubelet's list and never granted; empty
        where they may be granted.
        """
        del gpu, inventory
        return ""

    # -- what is the same for all ------------------------------------------------------------------

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """The resources with the instances in `offered`, in the order of their GPUs; none at all if
        there are `refusals`.
        """
        offered: dict[str, list[DeviceId]] = {}
        never_granted: dict[str, dict[str, str]] = {}
        for gpu, instance in () if self.refusals(inventory) else self.offered(inventory):
            name = self.resource_name(instance)
            offered.setdefault(name, []).append(
                DeviceId(instance.uuid, device=instance.uuid, numa_node=gpu.numa_node)
            )
            if why := self.why_never_granted(gpu, inventory):
                never_granted.setdefault(name, {})[instance.uuid] = why
        return tuple(
            Resource(name, self.name, tuple(ids), never_granted=never_granted.get(name, {}))
            for name, ids in sorted(offered.items())
        )

    def shortfall(self, inventory: Inventory) -> Shortfall:
        """List what is refused, and the instances that are left out because they have only a part
        of the compute of their GPU instance, or cannot be read.
        """
        partial = tuple(
            f"MIG instance {instance.uuid} of GPU {gpu.uuid} is a {instance.profile}: it has only "
            "a part of the compute of its GPU instance, and no limit of its own on the memory, so "
            "it is not offered; make one compute instance in each GPU instance, with all of its "
            "compute"
            for gpu, instance in self._instances(inventory)
            if instance.compute_slices != instance.gpu_slices
        )
        unread = tuple(
            f"MIG instances of GPU {gpu.index} ({gpu.uuid}) cannot be read, so they are not "
            f"offered: {gpu.mig_trouble}"
            for gpu in self.divided_gpus(inventory)
            if gpu.mig_trouble
        )
        return Shortfall(self.refusals(inventory), (*partial, *unread))

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """Accept any number of instances."""
        del resource, ids

    def shares(self, resource: str, ids: Sequence[str], inventory: Inventory) -> tuple[Share, ...]:
        """Return one exclusive share for each instance, of all its memory and compute. An instance
        that is gone is still held, as a share of unknown memory (0 MiB).
        """
        del resource  # every name of such a family means the same
        return tuple(
            Share(uuid, _memory_mib(uuid, inventory), _ALL_CORES, exclusive=True)
            for uuid in dict.fromkeys(ids)
        )

    def edits(self, resource: Resource, ids: Sequence[str], inventory: Inventory) -> Edits:
        """Return the edits that name the instances, by the list strategies of the node; by UUID
        unless indices are asked for. `answer_id` gives the annotations of a container's resources
        different keys.
        """
        devices = [
            device for uuid in dict.fromkeys(ids) if (device := visible_device(uuid, inventory))
        ]
        return edits_of(devices, self._lists, answer_id=answer_id(resource.name, ids))

    def prefer(
        self,
        resource: Resource,
        available: Sequence[str],
        required: Sequence[str],
        size: int,
        inventory: Inventory,
        gpu_uses: GpuUses = ALONE,
    ) -> list[str]:
        """Choose ``size`` instances: first on GPUs that serve this family already or are offered to
        no other family (`GpuUses.rank`), among these on GPUs that have a holder of the resource,
        and then in the order of ``resource.ids``. ``gpu_uses`` says which families use the node's
        GPUs; by default this one is alone there.
        """
        place = {entry.id: number for number, entry in enumerate(resource.ids)}
        gpu_of = {instance.uuid: gpu.uuid for gpu, instance in self.offered(inventory)}
        free = [gpu_of.get(id_, "") for id_ in available]
        all_gpus = [gpu_of.get(entry.id, "") for entry in resource.ids]
        in_use = {gpu for gpu in all_gpus if free.count(gpu) < all_gpus.count(gpu)}

        def order(id_: str) -> tuple[int, bool, int]:
            gpu = gpu_of.get(id_, "")
            return gpu_uses.rank(gpu), gpu not in in_use, place.get(id_, 0)

        left = sorted((id_ for id_ in available if id_ not in required), key=order)
        if len(chosen := [*required, *left][:size]) < size:
            raise CapacityError(
                f"{size} of {resource.name} are asked for, and {len(chosen)} available"
            )
        return chosen

    def offered(self, inventory: Inventory) -> list[tuple[Gpu, MigInstance]]:
        """Return the instances with all compute of their GPU instance, each with its GPU."""
        return [
            (gpu, each)
            for gpu, each in self._instances(inventory)
            if each.compute_slices == each.gpu_slices
        ]

    def _instances(self, inventory: Inventory) -> list[tuple[Gpu, MigInstance]]:
        return [
            (gpu, instance)
            for gpu in self.divided_gpus(inventory)
            for instance in sorted(gpu.mig_instances, key=lambda each: each.index)
        ]


def _memory_mib(uuid: str, inventory: Inventory) -> int:
    found = inventory.device(uuid)  # the GPU, and its instance where the UUID names one
    return found[1].memory_mib if found is not None and found[1] is not None else 0
