"""Choose the MIG instances of a container:
those that a scheduler has chosen, others of the same size, or those that the agent finds.

Two pods of one scheduling round can be given the same instance, because the scheduler counts
instances only after it has seen the pods bound (volcano-vgpu D15). An annotation names a GPU, a
*group* (one of the divisions that ``knownMigGeometries`` has for the GPU's model) and a position in
it; a *slot* is such a position. Only the GPU, the group and the size of the instance count, and the
ledger's grants decide which instance of that size it is. A GPU that must be divided first is named
in the decision, instead of shares. No container has a part of it then, and the package
`vgpu_agent.allocation` has it divided before it asks again. Called by `mig.family`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import CapacityError, quoted
from vgpu_agent.families.family import Decision, MigLayout
from vgpu_agent.families.volcano_vgpu.decisions import DECISION, refused
from vgpu_agent.families.volcano_vgpu.mig.layouts import (
    division,
    group_in_force,
    groups_of,
    holder_names,
    holder_of,
    instances_by_slot,
    is_divided_as,
    layout_of,
    read_place,
    slots_of,
)
from vgpu_agent.model import Share
from vgpu_agent.placement.mixing import OTHERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.families.family import Question
    from vgpu_agent.families.volcano_vgpu.geometries import MigGroup, ModelGeometries
    from vgpu_agent.families.volcano_vgpu.mig.layouts import Slot
    from vgpu_agent.families.volcano_vgpu.pod_devices import Assigned
    from vgpu_agent.model import Gpu, MigInstance


class _Place(msgspec.Struct, frozen=True):
    """The place of one instance of a decision:
    existing already, or only once its GPU is divided.
    """

    slot: Slot
    gpu: Gpu
    group: MigGroup  # the division that the slot is a position of


def followed(
    question: Question, segment: Sequence[Assigned], known: Sequence[ModelGeometries], factor: int
) -> Decision:
    """Follow a scheduler's decision (the annotation `DECISION`), on the instances that are free.

    Args:
        question: the container with its pod, and who holds which device (``taken``).
        segment: the container's part of the scheduler's annotation, one element for each GPU;
            checked against the pod's limits.
        known: the groups of each model of GPU.
        factor: MiB in one unit in which the scheduler counts memory.

    Raises:
        RequestRefusedError: the segment names a device in another form, a group or a position that
            does not exist, or an instance that is smaller than what was asked for.
        CapacityError: the GPU is missing, no instance of that size is free there, or the GPU is
            divided differently and has a holder.
    """
    by, shares, layouts, changed = (
        f"the scheduler, in {DECISION}",
        list[Share](),
        list[MigLayout](),
        list[str](),
    )
    for assigned in segment:
        place = _place_of(question, assigned, known, factor)
        if not is_divided_as(place.gpu, place.group):
            layouts.append(_layout(place, question))  # the division that must come first
            continue
        # what the container has got by this decision so far
        mine = {share.device for share in shares}
        slot, instance = _free_alike(place, question, mine)
        shares.append(share_of(instance))
        if slot != place.slot:
            changed.append(
                f"{place.slot.text} is held by {_holder(place, question)}, so it is {slot.text} "
                f"({instance.uuid})"
            )
    if layouts:
        return Decision(shares=(), by=by, layouts=tuple(layouts))
    # `why_not_named`: why it is not the scheduler's choice
    return Decision(tuple(shares), "; ".join([by, *changed]), why_not_named="; ".join(changed))


def remembered(
    segment: Sequence[Assigned], question: Question, known: Sequence[ModelGeometries]
) -> tuple[Share, ...] | None:
    """Return what a running container must have, by ``segment`` alone, its part of the annotation;
    None where that does not say so: it names no MIG instance, or a group or position that does not
    exist; or its GPU is missing or divided differently.
    """
    shares = []
    for assigned in segment:
        place = read_place(assigned.device)
        gpu = question.inventory.gpu(assigned.gpu)
        if place is None or gpu is None:
            return None
        _, group_name, position = place
        group = next((group for group in groups_of(gpu, known) if group.name == group_name), None)
        if group is None or not is_divided_as(gpu, group):
            return None
        instance = next(
            (
                each
                for slot, each in instances_by_slot(gpu, group).items()
                if slot.position == position
            ),
            None,
        )
        if instance is None:
            return None
        shares.append(share_of(instance))
    return tuple(shares)


def placed(
    question: Question,
    wanted_mib: Mapping[str, int],
    unwanted: Mapping[str, str],
    known: Sequence[ModelGeometries],
) -> Decision:
    """Choose free instances, of as many GPUs as the container has ids, where the agent decides.

    The rules of fit are the scheduler's (volcano-vgpu §4.3): the smallest instance that is large
    enough, and a GPU that has a holder keeps its group. GPUs that have such an instance already
    come before those that would have to be divided again. Within both a GPU that serves this family
    comes before one that serves none (its rank, see `placement.mixing`). A GPU that another family
    has, or that is claimed for a pod of one, comes last.

    Args:
        question: the container with its pod, ids and what each GPU has left.
        wanted_mib: GPU → memory asked for.
        unwanted: GPU → why the container must not have it; empty where it may.
        known: the groups of each model of GPU.

    Raises:
        CapacityError: too few GPUs have such an instance, or can be divided for it; the text
            explains why not.
    """
    ready: dict[str, MigInstance] = {}
    divisible: dict[str, MigLayout] = {}
    lacks: dict[str, str] = {}  # GPU → why it has no such instance and cannot be divided
    rank = question.gpu_uses.rank  # by the other families that use the node's GPUs
    for room in sorted(question.rooms, key=lambda room: rank(room.device)):
        gpu = question.inventory.gpu(room.device)
        if gpu is None or room.device not in wanted_mib:
            continue
        # `room.trouble`: why nothing of the GPU is granted now, such as that it is Unhealthy
        trouble = unwanted.get(room.device) or room.trouble
        fitting = None if trouble else _smallest_free(gpu, wanted_mib[gpu.uuid], question, known)
        group = (
            None
            if trouble
            else next(
                (each for each in groups_of(gpu, known) if _fits(each, gpu, wanted_mib[gpu.uuid])),
                None,
            )
        )
        if fitting is not None:
            ready[gpu.uuid] = fitting
        elif not trouble and group is not None and not holder_of(gpu, question.taken):
            divisible[gpu.uuid] = MigLayout(gpu.uuid, layout_of(group))
        else:
            lacks[gpu.uuid] = trouble or _why_not(gpu, wanted_mib[gpu.uuid], question)
    count = len(question.ids)
    if len(ready) + len(divisible) < count:
        others = "; ".join(f"{uuid}: {text}" for uuid, text in lacks.items())
        raise CapacityError(
            f"{count} × {question.resource.name} cannot be placed on this node: "
            f"{len(ready) + len(divisible)} GPUs have a MIG instance for it or can be divided "
            f"for it; {others or 'the node has no other GPU to share'}"
        )
    # `OTHERS`: another family has the GPU, or it is claimed for a pod of one
    chosen = sorted([*ready, *divisible], key=lambda uuid: rank(uuid) == OTHERS)[:count]
    if layouts := tuple(divisible[uuid] for uuid in chosen if uuid in divisible):
        return Decision(shares=(), by="the agent, MIG", layouts=layouts)
    return Decision(tuple(share_of(ready[uuid]) for uuid in chosen), "the agent, MIG")


def share_of(instance: MigInstance) -> Share:
    """Return the share of a whole MIG instance,
    regardless of the part that was asked for (volcano-vgpu G12).
    """
    return Share(instance.uuid, instance.memory_mib, cores_percent=100, exclusive=True)


def _place_of(
    question: Question, assigned: Assigned, known: Sequence[ModelGeometries], factor: int
) -> _Place:
    """Return the place that one element of the scheduler's annotation names."""
    pod, text, place = question.pod, question.pod.annotations[DECISION], read_place(assigned.device)
    if place is None:
        raise refused(
            pod,
            DECISION,
            text,
            f"{quoted(assigned.device)} is not of the form <UUID>[<group>-<position>]",
        )
    gpu = question.inventory.gpu(assigned.gpu)
    if gpu is None:
        raise CapacityError(
            f"GPU {quoted(assigned.gpu)} was decided for the container and is missing; the start "
            "is tried again when the GPU answers"
        )
    _, group_name, position = place
    groups = groups_of(gpu, known)
    group = next((group for group in groups if group.name == group_name), None)
    if group is None:
        names = ", ".join(group.name for group in groups)
        remedy = (
            "let scheduler and agent read the same ConfigMap volcano-vgpu-device-config; the "
            "scheduler reads it once, at its start"
        )
        raise refused(
            pod,
            DECISION,
            text,
            f"knownMigGeometries has no group {quoted(group_name)} for {gpu.name}, it has {names}",
            remedy,
        )
    slots = slots_of(gpu.uuid, group)
    if position >= len(slots):
        raise refused(
            pod,
            DECISION,
            text,
            f"group {group.name} has {len(slots)} instances, and position {position} is none of "
            "them",
        )
    slot = slots[position]
    if slot.memory_mib < assigned.memory_units * factor:
        problem = (
            f"{slot.text} is a {slot.profile} of {slot.memory_mib} MiB, and "
            f"{assigned.memory_units * factor} MiB were asked for"
        )
        raise refused(pod, DECISION, text, problem)
    return _Place(slot, gpu, group)


def _layout(place: _Place, question: Question) -> MigLayout:
    """Return the division that must come first; no container may have any part of the GPU."""
    if holder := holder_of(place.gpu, question.taken):
        raise CapacityError(
            f"GPU {place.gpu.uuid} is {division(place.gpu)}, and {holder} has a part of it, so it "
            f"cannot be divided as group {place.group.name} for {place.slot.text}; it is tried "
            "again"
        )
    return MigLayout(place.gpu.uuid, layout_of(place.group))


def _free_alike(place: _Place, question: Question, mine: set[str]) -> tuple[Slot, MigInstance]:
    """Return the instance at ``place``, which the scheduler meant, or the first free one of the
    same profile. ``mine`` are the devices that the container itself has got already.
    """
    alike = {
        slot: each
        for slot, each in instances_by_slot(place.gpu, place.group).items()
        if slot.profile == place.slot.profile
    }
    free = {
        slot: each
        for slot, each in alike.items()
        if each.uuid not in question.taken and each.uuid not in mine
    }
    if not free:
        holders = holder_names((each.uuid for each in alike.values()), question.taken)
        raise CapacityError(
            f"{place.slot.text} is a {place.slot.profile}, and all {len(alike)} of GPU "
            f"{place.gpu.uuid} are held, by {holders}; it is tried again"
        )
    slot = place.slot if place.slot in free else next(iter(free))
    return slot, free[slot]


def _holder(place: _Place, question: Question) -> str:
    """Name the holder of the instance at ``place``, for a sentence."""
    instance = instances_by_slot(place.gpu, place.group)[place.slot]
    return holder_names((instance.uuid,), question.taken) or "the same container"


def _smallest_free(
    gpu: Gpu, wanted_mib: int, question: Question, known: Sequence[ModelGeometries]
) -> MigInstance | None:
    if gpu.uuid in question.taken or (group := group_in_force(gpu, groups_of(gpu, known))) is None:
        return None
    fitting = [
        (slot.memory_mib, slot.position, instance)
        for slot, instance in instances_by_slot(gpu, group).items()
        if slot.memory_mib >= wanted_mib and instance.uuid not in question.taken
    ]
    return min(fitting, key=lambda entry: entry[:2])[2] if fitting else None


def _fits(group: MigGroup, gpu: Gpu, wanted_mib: int) -> bool:
    return any(slot.memory_mib >= wanted_mib for slot in slots_of(gpu.uuid, group))


def _why_not(gpu: Gpu, wanted_mib: int, question: Question) -> str:
    holder = holder_of(gpu, question.taken)
    return f"{division(gpu)}, none free with {wanted_mib} MiB" + (
        f", and {holder} has a part of it" if holder else ""
    )
