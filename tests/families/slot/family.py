"""The vocabulary: ``example.com/slot`` is a place on a GPU, which an annotation of the pod names;
a label says that the pod runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.families.slot.ids import Packed
from tests.families.slot.settings import FAMILY, RESOURCE
from vgpu_agent.device_ids import IdBlock, NumberedIds
from vgpu_agent.errors import RequestRefusedError, quoted
from vgpu_agent.families.family import Decision, NodeView, Ownership, Question
from vgpu_agent.families.spec import Readings
from vgpu_agent.isolation.edits import Edits, HostDirectory, HostFile, Provision
from vgpu_agent.model import Decider, Grant, Inventory, Resource, Share
from vgpu_agent.nodes import DesiredNode
from vgpu_agent.pods import DesiredPod, Pod, container_directory

# annotations: the wanted GPU, and the containers that have one
GPU, SERVED = "example.com/slot-gpu", "example.com/slot-served"
STATE = "example.com/slot-state"  # a label
TOTAL = "example.com/slots"  # an annotation of the Node
LEFT = "pids"  # a file in a container's directory that its next life must not find


class SlotFamily:
    """Slots on GPUs, ``per_gpu`` on each; containers have directories of their own in
    ``directory``.
    """

    name = FAMILY

    def __init__(self, per_gpu: int, directory: str = "") -> None:
        self._per_gpu = per_gpu
        self._directory = directory

    def owns(self, resource: str) -> Ownership:
        return Ownership.CERTAIN if resource == RESOURCE else Ownership.NONE

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        ids = NumberedIds(
            tuple(
                IdBlock("", self._per_gpu, gpu.uuid, gpu.numa_node, Packed(index))
                for index, gpu in enumerate(inventory.gpus)
            )
        )
        return (
            Resource(
                RESOURCE,
                FAMILY,
                ids,
                holders_per_device=self._per_gpu,
                pre_start_required=True,
                decided_by=Decider.POD,
            ),
        )

    def cautions(self, inventory: Inventory) -> tuple[str, ...]:
        return ()

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        if len(ids) > 1:
            raise RequestRefusedError(f"{len(ids)} slots were asked for; ask for 1 of {RESOURCE}")

    def decide(self, question: Question) -> Decision:
        if (decision := self.recall(question)) is None:
            said = quoted(question.pod.annotations.get(GPU, ""))
            raise RequestRefusedError(
                f"pod {question.pod.full_name}: {GPU} is {said}, which is no GPU of this node; "
                "name one by its UUID"
            )
        return decision

    def named_gpus(self, pod: Pod, inventory: Inventory) -> Mapping[str, tuple[str, ...]]:
        gpu = pod.annotations.get(GPU, "")
        if inventory.device(gpu) is None:
            return {}
        return {
            container.name: (gpu,) for container in pod.containers if container.limits.get(RESOURCE)
        }

    def recall(self, question: Question) -> Decision | None:
        gpu = question.pod.annotations.get(GPU, "")
        return (
            Decision((Share(gpu),), f"the pod, in {GPU}")
            if question.inventory.device(gpu)
            else None
        )

    def provision(self, question: Question, shares: tuple[Share, ...]) -> Provision:
        gpus = ",".join(share.device for share in shares)
        name = container_directory(question.pod.kubelet_uid, question.container)
        own = f"{self._directory}/{name}"
        return Provision(
            Edits({"SLOT_GPU": gpus}),
            directories=(HostDirectory(own),),
            files=(HostFile(f"{own}/gpu", len(gpus), ((0, gpus.encode()),)),),
            own_directory=own,
            removed=(LEFT,),
        )

    def desired_pod(self, pod: Pod, grants: Mapping[str, Grant], *, failed: bool) -> DesiredPod:
        return DesiredPod(
            {SERVED: ",".join(sorted(grants)) or None}, {STATE: "failed" if failed else "running"}
        )

    def cleanup(self, now: float) -> DesiredNode:
        return DesiredNode(annotations={TOTAL: None})

    def desired_node(self, view: NodeView) -> DesiredNode:
        return DesiredNode(annotations={TOTAL: str(self._per_gpu * len(view.inventory.gpus))})


def slots_in_use(readings: Readings) -> Iterator[tuple[tuple[str, ...], float]]:
    """Count the slots of each GPU that have a holder."""
    for gpu in readings.inventory.gpus:
        yield (
            (gpu.uuid,),
            sum(share.device == gpu.uuid for grant in readings.grants for share in grant.shares),
        )
