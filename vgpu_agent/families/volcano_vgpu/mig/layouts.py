"""Find the MIG instance that an annotation means, and the free ones:
GPUs, geometries and positions, without pods.

A *group* is one way to divide a GPU into instances of its profiles, and the *geometries* are the
groups that the models of GPUs may have. A scheduler names ``GPU-…[group-position]``; positions
count through the instances of the group in the order of its profiles (volcano-vgpu §4.3). The
replaced plugin takes a position for NVML's index, whose order the driver chooses. Here the k-th
position of a profile is the k-th instance of that profile, so it is always an instance of the size
that was meant. Called by `family`, `decisions` and `volcano_vgpu.offer`.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vgpu_agent.families.volcano_vgpu.geometries import MigGroup, ModelGeometries
    from vgpu_agent.model import Gpu, Grant, MigInstance

_PLACE = re.compile(r"([^\[\]]+)\[([^-\[\]]+)-([0-9]{1,4})\]\Z", re.ASCII)


class Slot(msgspec.Struct, frozen=True):
    """A place for an instance in a group, as a scheduler names it.

    Attributes:
        gpu: UUID of the GPU.
        group: how the GPU is, or is to be, divided.
        position: of the instance in the group.
        profile: e.g. ``2g.10gb``.
        memory_mib: what a scheduler counts for it, regardless of the request (volcano-vgpu G12).
    """

    gpu: str
    group: str
    position: int
    profile: str
    memory_mib: int

    @property
    def text(self) -> str:
        """The form that annotations use."""
        return f"{self.gpu}[{self.group}-{self.position}]"


def read_place(text: str) -> tuple[str, str, int] | None:
    """Return GPU, group and position of ``GPU-…[group-position]``;
    None for anything else, such as a plain UUID.
    """
    match = _PLACE.match(text)
    return (match[1], match[2], int(match[3])) if match else None


def groups_of(gpu: Gpu, known: Sequence[ModelGeometries]) -> tuple[MigGroup, ...]:
    """Return the possible divisions of this GPU model, in the order in which schedulers try them;
    empty when its model is not among ``known``, the geometries in the ConfigMap of Volcano's device
    plugin.
    """
    return next(
        (entry.groups for entry in known if any(model in gpu.name for model in entry.models)), ()
    )


def slots_of(gpu: str, group: MigGroup) -> tuple[Slot, ...]:
    """Return the instances of the GPU of that UUID once it is divided by ``group``, by position."""
    each = [profile for profile in group.profiles for _ in range(profile.count)]
    return tuple(
        Slot(gpu, group.name, position, profile.name, profile.memory_mib)
        for position, profile in enumerate(each)
    )


def layout_of(group: MigGroup) -> tuple[str, ...]:
    """Return the profile of each instance of the group, by position."""
    return tuple(slot.profile for slot in slots_of("", group))


def is_divided_as(gpu: Gpu, group: MigGroup) -> bool:
    """Tell whether the GPU has exactly the instances of the group now."""
    return collections.Counter(
        instance.profile for instance in gpu.mig_instances
    ) == collections.Counter(layout_of(group))


def group_in_force(gpu: Gpu, groups: Iterable[MigGroup]) -> MigGroup | None:
    """Return the first group that has exactly the GPU's present instances; None if no group has."""
    return next((group for group in groups if is_divided_as(gpu, group)), None)


def instances_by_slot(gpu: Gpu, group: MigGroup) -> Mapping[Slot, MigInstance]:
    """Return the instance in each slot of a GPU that is divided by ``group``."""
    # profile → its instances that have no slot yet
    left: dict[str, list[MigInstance]] = collections.defaultdict(list)
    for instance in sorted(
        gpu.mig_instances, key=lambda each: (each.gpu_instance_id, each.compute_instance_id)
    ):
        left[instance.profile].append(instance)
    return {
        slot: left[slot.profile].pop(0) for slot in slots_of(gpu.uuid, group) if left[slot.profile]
    }


def holder_of(gpu: Gpu, taken: Mapping[str, Grant]) -> str:
    """Name the holders of the GPU or of its present instances; empty when there is none.

    Holders of instances that are gone do not count. They cannot be using them, because the driver
    refuses to destroy an instance that is in use.

    Args:
        gpu: as it is divided now.
        taken: UUID of a device → the grant that has it.
    """
    return holder_names((gpu.uuid, *(instance.uuid for instance in gpu.mig_instances)), taken)


def holder_names(devices: Iterable[str], taken: Mapping[str, Grant]) -> str:
    """Name the holders of ``devices`` (UUIDs), for a sentence."""
    return ", ".join(
        dict.fromkeys(_holder_name(taken[device]) for device in devices if device in taken)
    )


def _holder_name(grant: Grant) -> str:
    if grant.owner is None:
        return f"a container that has just been given {grant.resource}"
    return f"{grant.owner.pod_name} (container {grant.owner.container}, {grant.resource})"


def division(gpu: Gpu) -> str:
    """Describe how the GPU is divided now, for a sentence."""
    if not gpu.mig_enabled:
        return "not divided"
    counted = collections.Counter(instance.profile for instance in gpu.mig_instances)
    return "divided into " + (
        ", ".join(f"{count} × {profile}" for profile, count in sorted(counted.items())) or "nothing"
    )
