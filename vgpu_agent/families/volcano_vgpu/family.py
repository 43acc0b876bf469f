"""The `volcano-vgpu` family: ``volcano.sh/vgpu-number``, ``-memory`` and ``-cores``, as
volcano-vgpu-device-plugin offers them.

Names, ids, annotations and environment are those of volcano-vgpu G1 to G9 and G13, so a cluster can
switch without touching a pod or its scheduler, whichever version that is. The ids are only counted:
what a container gets, Volcano's scheduler writes into its pod, and under the plain kube-scheduler
the agent itself places the pod on its node. The defects in volcano-vgpu §9 are not copied.

This file is the interface for `allocation` and `agent`. Each part of the vocabulary has a file of
its own: the offer (`offer`), a container's request (`requests`), the decision (`decisions`), the
pod's annotations afterwards (`pod_state`), and the state of the Node (`node_state`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.errors import RequestRefusedError, UnhealthyDeviceError
from vgpu_agent.families.device_lists import answer_number, edits_of, visible_device
from vgpu_agent.families.family import Decision, Ownership, asking_container
from vgpu_agent.families.volcano_vgpu.decisions import (
    IDS,
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
from vgpu_agent.families.volcano_vgpu.node_state import cleanup as leave
from vgpu_agent.families.volcano_vgpu.offer import (
    VolcanoVgpuOptions,
    left_out,
    offer_of,
    resources_of,
    shared_gpus,
)
from vgpu_agent.families.volcano_vgpu.pod_state import desired_annotations
from vgpu_agent.families.volcano_vgpu.requests import Names, read_ask
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

# What users write on their pods (volcano-vgpu §3.1).
USE_TYPE, NO_TYPE = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
USE_UUID, NO_UUID = "volcano.sh/vgpu-use-gpuuuid", "volcano.sh/vgpu-nouse-gpuuuid"
WANTED_MODE = "volcano.sh/vgpu-mode"

# For operators, in `kubectl get nodes -L`.
UNIT_LABEL = "vgpu-agent.internal/volcano-vgpu-memory-unit-mib"
ISOLATION_LABEL = "vgpu-agent.internal/volcano-vgpu-isolation"


class VolcanoVgpuFamily:
    """Shares of GPUs by memory and compute under Volcano's names.

    State: the unit of memory that was offered last, because what is written onto pods is counted in
    it.
    """

    name = FAMILY

    def __init__(self, options: VolcanoVgpuOptions, backend: Backend) -> None:
        self._options = options
        self._backend = backend
        self._factor = options.factor

    # -- what is offered ---------------------------------------------------------------------------

    def owns(self, resource: str) -> Ownership:
        """Today's names and the default ones, which kubelet's records may have from
        before a change.
        """
        names = {*dataclasses.astuple(self._options.names), *dataclasses.astuple(Names())}
        return Ownership.CERTAIN if resource in names else Ownership.NONE

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """Return what the node offers (volcano-vgpu G2); see `resources_of`.

        Raises:
            ConfigError: a list would not fit into a message of the kubelet.
        """
        resources = resources_of(inventory, self._options)
        self._factor = offer_of(inventory, self._options).factor
        return resources

    def cautions(self, inventory: Inventory) -> tuple[str, ...]:
        """See `left_out`."""
        return left_out(inventory, self._options)

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """A number of k means k different GPUs,
        so more than the node has can never be had (volcano-vgpu §8).
        """
        if resource.name != self._options.names.number or len(ids) < 2:
            return
        if len(ids) > (gpus := len({entry.device for entry in resource.ids})):
            raise RequestRefusedError(
                f"{resource.name}: {len(ids)} are asked for, and each must be another GPU; this "
                f"node shares {gpus}; ask for at most {gpus}"
            )

    # -- what a container gets ---------------------------------------------------------------------

    def decide(self, question: Question) -> Decision:
        """Follow a scheduler's decision in the pod's annotations;
        without one, place the container.
        """
        shares = decided_shares(question, offer_of(question.inventory, self._options))
        return (
            self._place(question)
            if shares is None
            else Decision(shares, f"the scheduler, in {IDS}", by_scheduler=True)
        )

    def named(self, pod: Pod, inventory: Inventory) -> Mapping[str, tuple[str, ...]]:
        """See `decided_gpus`; of MIG instances the GPU that they are, or will be, a part of."""
        return decided_gpus(pod, inventory, offer_of(inventory, self._options))

    def recall(self, question: Question) -> Decision | None:
        """Return the decision in the pod's annotations, as `decide` would read them."""
        try:
            shares = decided_shares(question, offer_of(question.inventory, self._options))
        except RequestRefusedError:
            return None
        return (
            None if shares is None else Decision(shares, f"the annotation {IDS}", by_scheduler=True)
        )

    def _place(self, question: Question) -> Decision:
        pod, container = question.pod, asking_container(question)
        self._require_mode(pod)
        offer, ask = (
            offer_of(question.inventory, self._options),
            read_ask(pod, container, self._options.names),
        )

        def memory_mib(room: DeviceRoom) -> int:
            return max(1, ask.units_on(offer.units[room.device])) * offer.factor

        count, rooms = (
            len(question.ids),
            [room for room in question.rooms if room.device in offer.units],
        )
        demand = DeviceDemand(
            count,
            memory_mib,
            ask.cores_percent,
            f"{count} × {question.resource.name} ({ask.text(offer.names)})",
        )
        chosen = choose_rooms(
            rooms,
            demand,
            policy=self._options.policy,
            refused=self._unwanted(question),
            neighbours=question.neighbours,
        )
        shares = tuple(Share(room.device, memory_mib(room), ask.cores_percent) for room in chosen)
        return Decision(shares, f"the agent, {self._options.policy}")

    def _require_mode(self, pod: Pod) -> None:
        mode = self._options.mode
        if (wanted := pod.annotations.get(WANTED_MODE, mode)) != mode:
            raise refused(
                pod,
                WANTED_MODE,
                wanted,
                f"this node shares GPUs as {mode}",
                "choose another node, or take the annotation away",
            )

    def _unwanted(self, question: Question) -> dict[str, str]:
        """Map each GPU to why the pod does not want it, empty where it does."""
        asked = question.pod.annotations.get
        return {
            gpu.uuid: uuid_refusal(gpu.uuid, wanted=asked(USE_UUID), unwanted=asked(NO_UUID))
            or type_refusal(card_type(gpu), wanted=asked(USE_TYPE), unwanted=asked(NO_TYPE))
            for gpu in shared_gpus(question.inventory, self._options)
        }

    # -- what puts it in force ---------------------------------------------------------------------

    def provision(self, question: Question, shares: tuple[Share, ...]) -> Provision:
        """Name the GPUs to the container by the list strategies; the isolation backend adds its
        part (volcano-vgpu §4.1, G4, G6, G10).

        Raises:
            UnhealthyDeviceError: a GPU of the decision is gone.
        """
        held = tuple((_present(share.device, question.inventory), share) for share in shares)
        uuids = dict.fromkeys(share.device for share in shares)
        devices = [device for uuid in uuids if (device := visible_device(uuid, question.inventory))]
        container = question.pod.container(question.container)
        target = Target(
            pod_uid=question.pod.kubelet_uid,
            container=question.container,
            grant=f"{question.pod.kubelet_uid}/{question.container}/{question.resource.name}",
            environment=container.environment if container else frozenset(),
            shares=held,
            oversubscribed=max(self._options.memory_scaling, self._options.cores_scaling) > 1,
            limit_cores=self._options.limit_cores,
            unit_mib=self._factor or 1,
        )
        number = answer_number(question.resource.name, question.ids)
        return Provision(edits_of(devices, self._options.lists, number=number)).joined(
            self._backend.provision(target)
        )

    # -- state in the cluster ----------------------------------------------------------------------

    def desired_pod(self, pod: Pod, grants: Mapping[str, Grant], *, failed: bool) -> DesiredPod:
        """The state machine's annotations (volcano-vgpu G5, G8),
        and the scheduler's where the agent has placed it.
        """
        ours = {
            container: grant
            for container, grant in grants.items()
            if grant.resource == self._options.names.number
        }
        return DesiredPod(
            desired_annotations(
                pod, ours, self._options.names, failed=failed, factor=self._factor or 1
            )
        )

    def cleanup(self, now: float) -> DesiredNode:
        """Nothing that makes a scheduler send pods (volcano-vgpu D24), and none of our labels."""
        return leave(now=now).joined(DesiredNode(labels={UNIT_LABEL: None, ISOLATION_LABEL: None}))

    def desired_node(self, view: NodeView) -> DesiredNode:
        """Return the register annotation (volcano-vgpu G1), an answer to a handshake, the removal
        of a lock, and two labels for people.

        A GPU that is unhealthy, serves another family, or whose resource is not offered now is
        announced as full.
        """
        gpus, options = shared_gpus(view.inventory, self._options), self._options
        if not gpus:
            # Before the driver has answered, the value from before the agent's restart is still the
            # best one.
            return (
                DesiredNode(annotations={REGISTER: None})
                if view.inventory.version
                else DesiredNode()
            )
        offer = offer_of(view.inventory, options)
        free = {room.device: not room.trouble for room in view.rooms.get(options.names.number, ())}
        available = {gpu.uuid: free.get(gpu.uuid, False) for gpu in gpus}
        text = register_text(
            gpus, offer.units, split=options.split, available=available, mode=options.mode
        )
        desired_state = DesiredNode(
            annotations={REGISTER: text},
            labels={UNIT_LABEL: str(offer.factor), ISOLATION_LABEL: self._backend.name},
        )
        standing = view.node.annotations
        handshake = desired_handshake(
            standing.get(HANDSHAKE), now=view.now, pause_seconds=options.handshake_seconds
        )
        lock = view.locks.desired_state(
            view.node, LOCK, allocated_at=view.allocated_at.get(options.names.number), now=view.now
        )
        return desired_state.joined(handshake).joined(lock)


def _present(uuid: str, inventory: Inventory) -> Gpu:
    if gpu := inventory.gpu(uuid):
        return gpu
    raise UnhealthyDeviceError(
        f"GPU {uuid} was decided for the container and is gone; it is tried again when the GPU "
        "answers"
    )
