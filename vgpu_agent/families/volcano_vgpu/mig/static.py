"""MIG instances that an administrator has made, under Volcano's names:
``volcano.sh/gpu`` or ``volcano.sh/mig-1g.10gb``.

The replaced plugin offers them and then answers nothing, because their names are not that of its
count resource (volcano-vgpu §4.3, volcano-vgpu D16); up to 1.11 it had ``nvidia.com/mig-…`` and
passed the instances to containers. Here the ids name the instances, and the answer is complete in
Allocate. No scheduler decides anything about them: they are counted like any resource. A family of
its own beside `volcano_vgpu`, so that the ledger keeps both apart: whole GPUs are shared there,
GPUs in MIG mode are given out here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import CapacityError
from vgpu_agent.families.device_lists import ListOptions, answer_number, edits_of, visible_device
from vgpu_agent.families.family import Ownership, Shortfall
from vgpu_agent.families.volcano_vgpu.offer import visible_gpus
from vgpu_agent.families.volcano_vgpu.settings import MIG_FAMILY
from vgpu_agent.model import Resource, Share
from vgpu_agent.placement.mixing import ALONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.model import Gpu, Inventory, MigInstance
    from vgpu_agent.placement.mixing import Neighbours

SINGLE, MIXED = "single", "mixed"
_ALL_CORES = 100


@dataclasses.dataclass(frozen=True, slots=True)
class StaticMigOptions:
    """The settings by which MIG instances are offered.

    Attributes:
        strategy: `SINGLE` or `MIXED`.
        prefix: ``volcano.sh``, or ``nvidia.com`` as up to 1.11.
        hidden_uuids: GPUs that are not offered.
        hidden_indices: the same, by NVML index.
        lists: how containers get their devices.
    """

    strategy: str
    prefix: str = "volcano.sh"
    hidden_uuids: frozenset[str] = frozenset()
    hidden_indices: frozenset[int] = frozenset()
    lists: ListOptions = dataclasses.field(default_factory=ListOptions)


class VolcanoStaticMigFamily:
    """The family with one id for each MIG instance, which is its holder's alone."""

    name = MIG_FAMILY

    def __init__(self, options: StaticMigOptions) -> None:
        self._options = options

    def owns(self, resource: str) -> Ownership:
        """The names of both strategies: one may be in the kubelet's records since before a
        change.
        """
        ours = resource == f"{self._options.prefix}/gpu" or resource.startswith(
            f"{self._options.prefix}/mig-"
        )
        return Ownership.CERTAIN if ours else Ownership.NONE

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """The instances by name, in the order of their GPUs;
        what `shortfall` refuses is left out.
        """
        offered: dict[str, list[DeviceId]] = {}
        for gpu, instance in self._offered(inventory):
            offered.setdefault(self._name_of(instance), []).append(
                DeviceId(instance.uuid, instance.uuid, gpu.numa_node)
            )
        if self._refusal(inventory):
            offered = {}
        return tuple(
            Resource(name, MIG_FAMILY, tuple(ids)) for name, ids in sorted(offered.items())
        )

    def shortfall(self, inventory: Inventory) -> Shortfall:
        """Instances of several sizes under the one name of `SINGLE`, and those that are left out:
        they share theirs, or cannot be read.
        """
        refusal = self._refusal(inventory)
        odd = tuple(
            f"MIG instance {instance.uuid} of GPU {gpu.uuid} is a {instance.profile}: it has a "
            "part of a GPU instance only, whose memory nothing divides, so it is not offered; make "
            "one compute instance in each GPU instance"
            for gpu, instance in self._instances(inventory)
            if instance.compute_slices != instance.gpu_slices
        )
        unread = tuple(
            f"slices of GPU {gpu.index} ({gpu.uuid}) cannot be read, so they are not offered: "
            f"{gpu.mig_trouble}"
            for gpu in self._gpus(inventory)
            if gpu.mig_trouble
        )
        return Shortfall({self._single_name: refusal} if refusal else {}, (*odd, *unread))

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """Any number of instances makes sense."""

    def shares(self, resource: str, ids: Sequence[str], inventory: Inventory) -> tuple[Share, ...]:
        """Return all of each instance, for its holder alone;
        an instance that is gone is still held, as an empty share.
        """
        del resource  # every name of this family means the same
        return tuple(
            Share(uuid, _memory_mib(uuid, inventory), _ALL_CORES, exclusive=True)
            for uuid in dict.fromkeys(ids)
        )

    def edits(self, resource: Resource, ids: Sequence[str], inventory: Inventory) -> Edits:
        """The instances by the list strategies of the node (volcano-vgpu §4.2),
        by UUID unless indices are asked for.
        """
        devices = [
            device for uuid in dict.fromkeys(ids) if (device := visible_device(uuid, inventory))
        ]
        return edits_of(devices, self._options.lists, number=answer_number(resource.name, ids))

    def prefer(
        self,
        resource: Resource,
        available: Sequence[str],
        required: Sequence[str],
        size: int,
        inventory: Inventory,
        neighbours: Neighbours = ALONE,
    ) -> list[str]:
        """Choose on GPUs of the lowest rank, and there on those that have a holder;
        in node order else.
        """
        place = {entry.id: number for number, entry in enumerate(resource.ids)}
        gpu_of = {instance.uuid: gpu.uuid for gpu, instance in self._offered(inventory)}
        free = [gpu_of.get(id_, "") for id_ in available]
        in_use = {
            gpu for gpu in gpu_of.values() if free.count(gpu) < list(gpu_of.values()).count(gpu)
        }

        def order(id_: str) -> tuple[int, bool, int]:
            gpu = gpu_of.get(id_, "")
            return neighbours.rank(gpu), gpu not in in_use, place.get(id_, 0)

        left = sorted((id_ for id_ in available if id_ not in required), key=order)
        if len(chosen := [*required, *left][:size]) < size:
            raise CapacityError(
                f"{size} of {resource.name} are asked for, and {len(chosen)} available"
            )
        return chosen

    @property
    def _single_name(self) -> str:
        return f"{self._options.prefix}/gpu"

    def _name_of(self, instance: MigInstance) -> str:
        if self._options.strategy == SINGLE:
            return self._single_name
        return f"{self._options.prefix}/mig-{instance.profile.replace('+', '.')}"

    def _refusal(self, inventory: Inventory) -> str:
        profiles = sorted({instance.profile for _, instance in self._offered(inventory)})
        if self._options.strategy != SINGLE or len(profiles) < 2:
            return ""
        return (
            f"the MIG strategy is {SINGLE}, and this node has instances of {', '.join(profiles)}, "
            f"which one name cannot tell apart; make them alike, or choose {MIXED} "
            "(volcanoVgpu.migStrategy)"
        )

    def _offered(self, inventory: Inventory) -> list[tuple[Gpu, MigInstance]]:
        return [
            (gpu, each)
            for gpu, each in self._instances(inventory)
            if each.compute_slices == each.gpu_slices
        ]

    def _instances(self, inventory: Inventory) -> list[tuple[Gpu, MigInstance]]:
        return [
            (gpu, instance)
            for gpu in self._gpus(inventory)
            for instance in sorted(gpu.mig_instances, key=lambda each: each.index)
        ]

    def _gpus(self, inventory: Inventory) -> list[Gpu]:
        options = self._options
        return [
            gpu
            for gpu in visible_gpus(inventory, options.hidden_uuids, options.hidden_indices)
            if gpu.mig_enabled
        ]


def _memory_mib(uuid: str, inventory: Inventory) -> int:
    found = inventory.device(uuid)
    return found[1].memory_mib if found is not None and found[1] is not None else 0
