"""`volcano-vgpu` in the operating mode `mig`:
the same names, ids and annotations, but each share is a MIG instance.

Volcano's scheduler chooses GPU, group (one of the divisions that the GPU's model can have) and
position (the place of an instance in the group, from 0); a GPU is divided when the first pod that
is placed in a group comes (volcano-vgpu §4.3). A container gets its instance and nothing else: the
hardware limits an instance, so there is no library and no ``CUDA_…`` variable. The replaced
plugin's errors are not copied: no instance is given twice (volcano-vgpu D15), a whole GPU is never
granted (volcano-vgpu D16), and a failure here affects one pod only.

Chosen by `volcano_vgpu.spec` instead of `VolcanoVgpuFamily` where the node is in that mode.
`mig.decisions` chooses the instances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import RequestRefusedError, UnhealthyDeviceError
from vgpu_agent.families.device_lists import answer_id, edits_of, visible_device
from vgpu_agent.families.family import Decision, requesting_container
from vgpu_agent.families.volcano_vgpu.decisions import DECISION, decided_segment
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily
from vgpu_agent.families.volcano_vgpu.mig.decisions import followed, placed, remembered
from vgpu_agent.families.volcano_vgpu.mig.layouts import (
    groups_of,
    instances_by_slot,
    is_divided_as,
    read_place,
)
from vgpu_agent.families.volcano_vgpu.offer import offer_of
from vgpu_agent.families.volcano_vgpu.pod_devices import (
    Assigned,
    DevicesTextError,
    parse_pod_devices,
    write_segment,
)
from vgpu_agent.families.volcano_vgpu.pod_state import desired_annotations
from vgpu_agent.families.volcano_vgpu.requests import read_request
from vgpu_agent.isolation.edits import Provision
from vgpu_agent.model import Inventory
from vgpu_agent.pods import DesiredPod

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.families.family import NodeView, Question
    from vgpu_agent.families.volcano_vgpu.mig.layouts import Slot
    from vgpu_agent.families.volcano_vgpu.offer import VolcanoVgpuOptions
    from vgpu_agent.model import Grant, Resource, Share
    from vgpu_agent.nodes import DesiredNode
    from vgpu_agent.pods import Pod, PodContainer


class MigIsolation:
    """The isolation backend `mig`: the hardware enforces the limits, so it adds nothing."""

    name = "mig"

    def provision(self, target: object) -> Provision:
        """Return no additions."""
        del target
        return Provision()


class VolcanoVgpuMigFamily(VolcanoVgpuFamily):
    """MIG instances under Volcano's names.

    State: the inventory that was offered last, because annotations name an instance by its place in
    its GPU.
    """

    def __init__(self, options: VolcanoVgpuOptions) -> None:
        # The scaling is how many times a GPU's memory or compute is offered. An instance's memory
        # cannot be booked twice, so it is not scaled. All of its compute is its holder's, so cores
        # are scaled by 1 at least.
        own_options = msgspec.structs.replace(
            options, memory_scaling=1.0, cores_scaling=max(1.0, options.cores_scaling)
        )
        super().__init__(own_options, MigIsolation())
        self._inventory = Inventory()

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """Return what the node offers: the same resources and ids as in the other mode,
        for GPUs that can be divided.

        Raises:
            OfferError: a list of ids is too long for the kubelet, or no division of any of the GPUs
                is known.
        """
        self._inventory = inventory
        return super().resources(inventory)

    # -- decisions ---------------------------------------------------------------------------------

    def decide(self, question: Question) -> Decision:
        """Follow a scheduler's decision, on an instance that is free;
        without one, look for an instance.
        """
        offer = offer_of(question.inventory, self._options)
        # the container's part of the annotation with the decision
        segment = decided_segment(question, offer)
        # `geometries`: the divisions that each model of GPU can have
        if segment is not None:
            return followed(question, segment, self._options.geometries, offer.factor)
        self._require_mode(question.pod)  # an annotation may ask for the other operating mode
        request = read_request(question.pod, requesting_container(question), self._options.names)
        # `units`: the memory of each GPU, in units of `factor` MiB
        wanted_mib = {
            gpu: max(1, request.units_on(units)) * offer.factor
            for gpu, units in offer.units.items()
        }
        # `_refused_gpus`: GPU → why the pod's annotations exclude it; empty where they do not
        return placed(question, wanted_mib, self._refused_gpus(question), self._options.geometries)

    def recall(self, question: Question) -> Decision | None:
        """Return what a running container must have got: the decision in the pod's annotation
        `DECISION`, if the GPU is still divided as that says; otherwise None.
        """
        try:
            segment = decided_segment(question, offer_of(question.inventory, self._options))
        except RequestRefusedError:
            return None
        shares = (
            remembered(segment, question, self._options.geometries) if segment is not None else None
        )
        return None if shares is None else Decision(shares, f"the annotation {DECISION}")

    def provision(self, question: Question, shares: tuple[Share, ...]) -> Provision:
        """Return the edits that give the container its instances (volcano-vgpu §4.3.5).

        Raises:
            UnhealthyDeviceError: an instance is gone.
        """
        devices = [
            (share.device, visible_device(share.device, question.inventory)) for share in shares
        ]
        if gone := [uuid for uuid, device in devices if device is None]:
            raise UnhealthyDeviceError(
                f"MIG instance {', '.join(gone)} was decided for the container and is missing; the "
                "start is tried again"
            )
        seen = [device for _, device in devices if device is not None]
        return Provision(
            edits_of(
                seen,
                self._options.lists,  # how containers get their devices
                # tells apart the CDI annotations of several resources of one container
                answer_id=answer_id(question.resource.name, question.ids),
            )
        )

    # -- state in the cluster ----------------------------------------------------------------------

    def desired_pod(self, pod: Pod, grants: Mapping[str, Grant], *, failed: bool) -> DesiredPod:
        """Return the annotations for the state of the allocation (volcano-vgpu G5), with the
        instances that the containers really have.

        A scheduler counts instances by these annotations. If they named an instance that the
        container does not hold, it would give the one that it holds to another container.

        Args:
            pod: as the API server has it.
            grants: those of the pod, by container.
            failed: the agent has given up: the pod will never start here.
        """
        ours = {
            container: grant
            for container, grant in grants.items()
            if grant.resource == self._options.names.number
        }
        annotations = desired_annotations(
            pod,
            ours,
            self._options.names,
            failed=failed,
            factor=self._factor or 1,  # MiB in one unit of memory; may be 0 before the first offer
            segment_of=lambda container, grant, present: self._segment(
                pod, container, grant, present
            ),
        )
        return DesiredPod(annotations)

    def desired_node(self, view: NodeView) -> DesiredNode:
        """Return the same as in the other mode. A GPU of which a container still has a share as a
        whole GPU is announced as full.
        """
        name = self._options.names.number
        # `trouble`: why nothing of the GPU may be granted; such a GPU is announced as full
        rooms = tuple(
            msgspec.structs.replace(
                room,
                trouble=(
                    room.trouble or "a container has a share of the undivided GPU"
                    if room.holders
                    else room.trouble
                ),
            )
            for room in view.rooms.get(name, ())
        )
        return super().desired_node(
            msgspec.structs.replace(view, rooms={**view.rooms, name: rooms})
        )

    def _segment(self, pod: Pod, container: PodContainer, grant: Grant, present: str) -> str:
        """Return the container's segment, its part of the annotation with the scheduler's decision,
        with the place of each held instance. If one of these places is not known, return
        ``present``, the segment that the annotation has now; empty without one.
        """
        try:
            (before,) = parse_pod_devices(present)
            request = read_request(pod, container, self._options.names)
        except (DevicesTextError, RequestRefusedError, ValueError):
            return present
        if before and len(before) != len(grant.shares):
            return present
        units = offer_of(self._inventory, self._options).units
        held = []
        # here, `place` is the index among the devices of the segment
        for place, share in enumerate(grant.shares):
            written = read_place(before[place].device) if before else None
            _, group_name, _ = written or ("", "", 0)
            slot = self._slot_of(share.device, group_name)
            if slot is None or slot.gpu not in units:
                return present
            own = (
                before[place]
                if before
                else Assigned("", request.units_on(units[slot.gpu]), request.cores_percent)
            )
            held.append(msgspec.structs.replace(own, device=slot.text))
        return write_segment(held)

    def _slot_of(self, uuid: str, group_name: str) -> Slot | None:
        """Return the place of the instance; in the group of that name,
        if the instances of its GPU fit several groups.
        """
        found = self._inventory.device(uuid)
        if found is None:
            return None
        gpu, held_instance = found
        if held_instance is None:  # a whole GPU
            return None
        fitting = [
            group for group in groups_of(gpu, self._options.geometries) if is_divided_as(gpu, group)
        ]
        for group in sorted(fitting, key=lambda each: each.name != group_name):
            return next(
                (
                    slot
                    for slot, instance in instances_by_slot(gpu, group).items()
                    if instance.uuid == uuid
                ),
                None,
            )
        return None
