"""The `volcano-vgpu` family: ``volcano.sh/vgpu-number``, ``-memory`` and ``-cores``, as
volcano-vgpu-device-plugin offers them.

Names, ids, annotations and environment are those of volcano-vgpu G1 to G9 and G13. So a cluster can
switch to the agent without a change of its pods or its scheduler, with any version of the
scheduler. The ids name no device: the kubelet only counts them. Volcano's scheduler writes the
shares of a container into its pod. Under the plain kube-scheduler, the agent chooses the GPUs. The
defects in volcano-vgpu §9 are not reproduced.

This module is the interface for `allocation` and `agent`. Other modules have the parts: the offer
(`offer`), a container's request (`requests`), the decision (`decisions`), the pod's annotations
after the start (`pod_state`), and the state of the Node (`node_state`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import RequestRefusedError, UnhealthyDeviceError
from vgpu_agent.families.device_lists import answer_id, edits_of, visible_device
from vgpu_agent.families.family import Decision, Ownership, requesting_container
from vgpu_agent.families.volcano_vgpu.decisions import (
    DECISION,
    decided_gpus,
    decided_shares,
    refused,
)
from vgpu_agent.families.volcano_vgpu.node_state import (
    HANDSHAKE,
    LOCK,
    REGISTER,
    card_type,
    desired_handshake,
    register_text,
)
from vgpu_agent.families.volcano_vgpu.node_state import cleanup as cleaned_up_node
from vgpu_agent.families.volcano_vgpu.offer import (
    VolcanoVgpuOptions,
    left_out,
    offer_of,
    resources_of,
    shared_gpus,
)
from vgpu_agent.families.volcano_vgpu.pod_state import desired_annotations
from vgpu_agent.families.volcano_vgpu.requests import Names, read_request
from vgpu_agent.families.volcano_vgpu.settings import FAMILY
from vgpu_agent.isolation.backend import Target
from vgpu_agent.isolation.edits import Provision
from vgpu_agent.model import Share
from vgpu_agent.nodes import DesiredNode
from vgpu_agent.placement.rooms import DeviceDemand, choose_rooms, type_refusal, uuid_refusal
from vgpu_agent.pods import DesiredPod

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.families.family import NodeView, Question
    from vgpu_agent.isolation.backend import Backend
    from vgpu_agent.model import DeviceRoom, Gpu, Grant, Inventory, Resource
    from vgpu_agent.pods import Pod

__all__ = ["FAMILY", "VolcanoVgpuFamily", "VolcanoVgpuOptions"]

# The annotations that users set on their pods (volcano-vgpu §3.1).
USE_TYPE, NO_TYPE = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
USE_UUID, NO_UUID = "volcano.sh/vgpu-use-gpuuuid", "volcano.sh/vgpu-nouse-gpuuuid"
WANTED_MODE = "volcano.sh/vgpu-mode"  # how the node must share its GPUs: by HAMi-core, or MIG

# The labels of the Node that show settings to operators (`kubectl get nodes -L`).
UNIT_LABEL = "vgpu-agent.internal/volcano-vgpu-memory-unit-mib"
ISOLATION_LABEL = "vgpu-agent.internal/volcano-vgpu-isolation"


class VolcanoVgpuFamily:
    """Shares of GPUs by memory and compute under Volcano's names.

    State: the unit of memory in the last offer, in MiB; pods' annotations count memory in it. 0
    before the first offer, unless the settings have it.
    """

    name = FAMILY

    def __init__(self, options: VolcanoVgpuOptions, backend: Backend) -> None:
        self._options = options
        self._backend = backend
        self._factor = options.factor

    # -- offers ------------------------------------------------------------------------------------

    def owns(self, resource: str) -> Ownership:
        """Return CERTAIN (a name is this family's, whatever the ids are) for the configured
        resource names, and for the default names, which may be in the kubelet's records from before
        a change of the configuration.
        """
        names = {*msgspec.structs.astuple(self._options.names), *msgspec.structs.astuple(Names())}
        return Ownership.CERTAIN if resource in names else Ownership.NONE

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """Return the resources that the node offers (volcano-vgpu G2); see `resources_of`.

        Raises:
            OfferError: a list would not fit into a message of the kubelet.
        """
        resources = resources_of(inventory, self._options)
        self._factor = offer_of(inventory, self._options).factor
        return resources

    def cautions(self, inventory: Inventory) -> tuple[str, ...]:
        """List the GPU models that are not offered, one sentence each; see `left_out`."""
        return left_out(inventory, self._options)

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """Refuse a number of GPUs above that of the node, because each must be a different
        GPU (volcano-vgpu §8).

        Raises:
            RequestRefusedError: the node has fewer GPUs.
        """
        if resource.name != self._options.names.number or len(ids) < 2:
            return
        if len(ids) > (gpus := len({entry.device for entry in resource.ids})):
            raise RequestRefusedError(
                f"{resource.name}: {len(ids)} are asked for, and each must be another GPU; this "
                f"node shares {gpus}; ask for at most {gpus}"
            )

    # -- decisions ---------------------------------------------------------------------------------

    def decide(self, question: Question) -> Decision:
        """Follow the scheduler's decision in the pod's annotations. If there is none, choose the
        GPUs. ``question`` has the container, its pod and ids, and what each device has left.
        """
        shares = decided_shares(question, offer_of(question.inventory, self._options))
        return (
            self._place(question)
            if shares is None
            else Decision(shares, f"the scheduler, in {DECISION}", by_scheduler=True)
        )

    def named_gpus(self, pod: Pod, inventory: Inventory) -> Mapping[str, tuple[str, ...]]:
        """Return container → the UUIDs of its GPUs, by the scheduler's decision.

        For a MIG instance, this is the GPU that has it or will be divided for it.
        """
        return decided_gpus(pod, inventory, offer_of(inventory, self._options))

    def recall(self, question: Question) -> Decision | None:
        """Return the scheduler's decision in the pod's annotations, for a container that runs
        already; None if there is none, or an invalid one.
        """
        try:
            shares = decided_shares(question, offer_of(question.inventory, self._options))
        except RequestRefusedError:
            return None
        return (
            None
            if shares is None
            else Decision(shares, f"the annotation {DECISION}", by_scheduler=True)
        )

    def _place(self, question: Question) -> Decision:
        """Choose the GPUs of a container for which no scheduler has decided."""
        pod, container = question.pod, requesting_container(question)
        self._require_mode(pod)
        offer = offer_of(question.inventory, self._options)
        request = read_request(pod, container, self._options.names)

        def memory_mib(room: DeviceRoom) -> int:
            # `offer.units`: GPU → its memory in units of the memory resource; a factor is its MiB
            return max(1, request.units_on(offer.units[room.device])) * offer.factor

        count = len(question.ids)
        rooms = [room for room in question.rooms if room.device in offer.units]
        demand = DeviceDemand(
            count,
            memory_mib,
            cores_percent=request.cores_percent,
            text=f"{count} × {question.resource.name} ({request.text(offer.names)})",
        )
        chosen = choose_rooms(
            rooms,
            demand,
            policy=self._options.policy,
            refused=self._refused_gpus(question),
            gpu_uses=question.gpu_uses,  # which GPUs other families have or may use
        )
        shares = tuple(
            Share(room.device, memory_mib(room), request.cores_percent) for room in chosen
        )
        return Decision(shares, f"the agent, {self._options.policy}")

    def _require_mode(self, pod: Pod) -> None:
        mode = self._options.mode
        if (wanted := pod.annotations.get(WANTED_MODE, mode)) != mode:
            raise refused(
                pod,
                WANTED_MODE,
                wanted,
                f"this node shares GPUs as {mode}",
                "choose another node, or remove the annotation",
            )

    def _refused_gpus(self, question: Question) -> dict[str, str]:
        """Return for each GPU the reason why the pod's annotations exclude it, or an empty text."""
        annotation = question.pod.annotations.get
        return {
            gpu.uuid: uuid_refusal(
                gpu.uuid, wanted=annotation(USE_UUID), unwanted=annotation(NO_UUID)
            )
            or type_refusal(
                card_type(gpu), wanted=annotation(USE_TYPE), unwanted=annotation(NO_TYPE)
            )
            for gpu in shared_gpus(question.inventory, self._options)
        }

    # -- enforcement -------------------------------------------------------------------------------

    def provision(self, question: Question, shares: tuple[Share, ...]) -> Provision:
        """Return the edits that give the container its GPUs, by the configured device list
        strategies (a variable, mounts, device nodes or CDI names), together with the additions of
        the isolation backend (volcano-vgpu §4.1, G4, G6, G10).

        Raises:
            UnhealthyDeviceError: a GPU of the decision is missing.
        """
        held = tuple((_present(share.device, question.inventory), share) for share in shares)
        uuids = dict.fromkeys(share.device for share in shares)
        devices = [device for uuid in uuids if (device := visible_device(uuid, question.inventory))]
        container = question.pod.container(question.container)
        target = Target(
            pod_uid=question.pod.kubelet_uid,  # for a static pod, not the API server's
            container=question.container,
            # a name that no other grant has
            grant=f"{question.pod.kubelet_uid}/{question.container}/{question.resource.name}",
            # names of the variables that the pod's specification sets
            environment=container.environment if container else frozenset(),
            shares=held,
            oversubscribed=max(self._options.memory_scaling, self._options.cores_scaling) > 1,
            limit_cores=self._options.limit_cores,
            unit_mib=self._factor or 1,
        )
        # `answer_id`: a UUID that keeps CDI annotations of several resources of a container apart
        edits = edits_of(
            devices, self._options.lists, answer_id=answer_id(question.resource.name, question.ids)
        )
        return Provision(edits).joined(self._backend.provision(target))

    # -- state in the cluster ----------------------------------------------------------------------

    def desired_pod(self, pod: Pod, grants: Mapping[str, Grant], *, failed: bool) -> DesiredPod:
        """Return the annotations for the state of the allocation (volcano-vgpu G5, G8). If the
        agent has placed the pod, add those that the scheduler would have written. ``failed``: the
        pod will never start here.
        """
        own_grants = {
            container: grant
            for container, grant in grants.items()
            if grant.resource == self._options.names.number
        }
        return DesiredPod(
            desired_annotations(
                pod, own_grants, self._options.names, failed=failed, factor=self._factor or 1
            )
        )

    def cleanup(self, now: float) -> DesiredNode:
        """Return the Node without the annotations that make a scheduler send pods (volcano-vgpu
        D24), and without the labels of this family.
        """
        return cleaned_up_node(now=now).joined(
            DesiredNode(labels={UNIT_LABEL: None, ISOLATION_LABEL: None})
        )

    def desired_node(self, view: NodeView) -> DesiredNode:
        """Return the register annotation (volcano-vgpu G1), the answer to a handshake (an
        annotation in which old schedulers ask whether the device plugin is alive), the removal of a
        stale lock (an annotation with which a scheduler keeps other pods from being bound
        meanwhile), and two labels for operators.

        The register annotation shows a GPU as full if the GPU is unhealthy, serves another family,
        or has a resource that is not offered now.
        """
        gpus, options = shared_gpus(view.inventory, self._options), self._options
        if not gpus:
            # Before the first answer of the driver, the annotation from before the agent's restart
            # is kept.
            return (
                DesiredNode(annotations={REGISTER: None})
                if view.inventory.version
                else DesiredNode()
            )
        offer = offer_of(view.inventory, options)
        usable = {
            room.device: not room.trouble for room in view.rooms.get(options.names.number, ())
        }
        available = {gpu.uuid: usable.get(gpu.uuid, False) for gpu in gpus}
        text = register_text(
            gpus,
            offer.units,
            split=options.split,  # how many containers may share one GPU
            available=available,
            mode=options.mode,
        )
        desired_state = DesiredNode(
            annotations={REGISTER: text},
            labels={UNIT_LABEL: str(offer.factor), ISOLATION_LABEL: self._backend.name},
        )
        handshake = desired_handshake(
            view.node.annotations.get(HANDSHAKE),
            now=view.now,
            pause_seconds=options.handshake_seconds,  # the shortest between two answers
        )
        # stale: the last Allocate, at `allocated_at`, came after the lock, or the lock is too old
        lock = view.locks.desired_state(
            view.node, LOCK, allocated_at=view.allocated_at.get(options.names.number), now=view.now
        )
        return desired_state.joined(handshake).joined(lock)


def _present(uuid: str, inventory: Inventory) -> Gpu:
    if gpu := inventory.gpu(uuid):
        return gpu
    raise UnhealthyDeviceError(
        f"GPU {uuid} was decided for the container and is missing; the start is tried again when "
        "the GPU answers"
    )
