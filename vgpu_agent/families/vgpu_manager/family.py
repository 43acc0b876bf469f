"""The `vgpu-manager` family: ``nvidia.com/vgpu-number``, ``-cores`` and ``-memory``, as
coldzerofear/vgpu-manager offers them.

Names, ids, annotations and environment are those of vgpu-manager §2 to §7, so a cluster can switch
without touching a pod or its scheduler. The ids decide nothing: vgpu-manager's extender writes into
the pod what each container gets, and under the plain kube-scheduler the agent itself chooses the
GPUs.

This file is the interface for `allocation` and `agent`. Each part of the vocabulary has a file of
its own: the offer (`offer`), a container's request (`requests`), the claims (`claims`,
`decisions`), the pod's annotations afterwards (`pod_state`), and the state of the Node
(`node_state`).
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from vgpu_agent.errors import RequestRefusedError, UnhealthyDeviceError
from vgpu_agent.families.device_lists import answer_id, edits_of, visible_device
from vgpu_agent.families.family import Decision, Ownership, Question, requesting_container
from vgpu_agent.families.vgpu_manager import node_state, pod_state
from vgpu_agent.families.vgpu_manager.claims import MAX_CARDS
from vgpu_agent.families.vgpu_manager.decisions import (
    claimed_cards,
    disagreement,
)
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.offer import (
    cautions_of,
    memory_mib,
    resources_of,
)
from vgpu_agent.families.vgpu_manager.placing import place
from vgpu_agent.families.vgpu_manager.requests import (
    DISABLED,
    OVERSOLD,
    compute_policy,
    sets,
)
from vgpu_agent.families.vgpu_manager.settings import FAMILY
from vgpu_agent.isolation.edits import Provision
from vgpu_agent.isolation.vgpu_control import CardLimit, ControlTarget
from vgpu_agent.model import Resource, Share
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.families.family import NodeView
    from vgpu_agent.families.vgpu_manager.claims import ContainerClaim
    from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
    from vgpu_agent.isolation.vgpu_control import ControlBackend
    from vgpu_agent.model import Gpu, Grant, Inventory
    from vgpu_agent.nodes import DesiredNode
    from vgpu_agent.pods import DesiredPod, Pod


class VgpuManagerFamily:
    """Shares of GPUs by memory and compute under vgpu-manager's names.

    State: the indices of the cards that were offered last, because pods' annotations name them.
    """

    name = FAMILY

    def __init__(self, options: VgpuManagerOptions, backend: ControlBackend) -> None:
        self._options = options
        self._backend = backend
        self._indices: dict[str, int] = {}

    # -- offers ------------------------------------------------------------------------------------

    def owns(self, resource: str) -> Ownership:
        """Return CERTAIN (a name is this family's, whatever the ids are) for the names in the
        configured domain, and for those in the default domain, which may be in the kubelet's
        records from before a change of the configuration.
        """
        names = {
            name
            for keys in (self._options.keys, Keys())
            for name in (keys.number, keys.cores, keys.memory)
        }
        return Ownership.CERTAIN if resource in names else Ownership.NONE

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """Return what the node offers: ``vgpu-number``, and where they are switched on,
        ``vgpu-cores`` and ``vgpu-memory``, which only schedulers and quotas count.

        Raises:
            OfferError: a list would not fit into a message of the kubelet.
        """
        self._indices = {gpu.uuid: number for number, gpu in inventory.numbered.items()}
        return resources_of(inventory, self._options)

    def cautions(self, inventory: Inventory) -> tuple[str, ...]:
        """Return a sentence for each list that is too long to be offered, for cards that the
        isolation library cannot limit, and for each text that would not fit beside the Node's other
        annotations.
        """
        return (
            *cautions_of(inventory, self._options),
            *node_state.too_long_texts(inventory, self._options),
        )

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """Refuse more ids than a container can have GPUs: each id must be of another GPU."""
        if resource.name != self._options.keys.number:
            return
        most = min(MAX_CARDS, len({entry.device for entry in resource.ids}))
        if len(ids) > most:
            raise RequestRefusedError(
                f"{resource.name}: {len(ids)} are asked for, and each must be another GPU; a "
                f"container gets at most {most} on this node"
            )

    # -- decisions ---------------------------------------------------------------------------------

    def decide(self, question: Question) -> Decision:
        """Follow a scheduler's claim in the pod's annotations; without one, place the container."""
        claim = claimed_cards(question, self._options)
        if claim is None:
            return self._place(question)
        by = f"the scheduler, in {self._options.keys.pre_allocated}"
        # `disagreement`: the indices in the claim that do not belong to its UUIDs, in words
        return Decision(_shares(claim), by + disagreement(claim, question), by_scheduler=True)

    def named_gpus(self, pod: Pod, inventory: Inventory) -> Mapping[str, tuple[str, ...]]:
        """Return the cards in each container's claim, without claims that would be refused. The
        agent keeps these cards from other families until the containers have started.
        """
        named = {}
        memory = collections.Counter[str]()
        for container in pod.containers:
            count = container.limits.get(self._options.keys.number, 0)
            if not 0 < count <= MAX_CARDS:  # users may write any number there
                continue
            resource = Resource(self._options.keys.number, FAMILY, ids=())
            asked = Question(
                resource,
                pod,
                container.name,
                ids=("",) * count,  # only their number counts here
                node=pod.node,
                inventory=inventory,
                rooms=(),
            )
            try:
                claim = claimed_cards(asked, self._options)
            except RequestRefusedError:
                continue
            if claim is None:
                continue
            named[container.name] = tuple(card.uuid for card in claim.cards)
            if container.kind is not ContainerKind.INIT:
                memory.update({card.uuid: card.memory_mib for card in claim.cards})
        offered = {gpu.uuid: memory_mib(gpu, self._options) for gpu in inventory.gpus}
        if any(claimed > offered[uuid] for uuid, claimed in memory.items()):
            return {}  # more than a card has, so the containers can never all start
        return named

    def recall(self, question: Question) -> Decision | None:
        """Return the claim in the pod's annotations, as `decide` would read it, for a container
        that runs already; None where there is none that can be followed.
        """
        try:
            claim = claimed_cards(question, self._options)
        except RequestRefusedError:
            return None
        if claim is None:
            return None
        by = f"the annotation {self._options.keys.pre_allocated}"
        return Decision(_shares(claim), by, by_scheduler=True)

    def _place(self, question: Question) -> Decision:
        placed = place(question, requesting_container(question), self._options)
        return Decision(placed.shares, f"the agent, {placed.rules}", remarks=placed.remarks)

    # -- enforcement -------------------------------------------------------------------------------

    def provision(self, question: Question, shares: tuple[Share, ...]) -> Provision:
        """Return the edits that give the container its GPUs, in the ways that the operator has
        chosen (NVIDIA's device list strategies), together with the additions of the isolation
        backend (vgpu-manager §7.3, §7.4).

        Raises:
            UnhealthyDeviceError: a GPU of the decision is gone.
        """
        pod, options = question.pod, self._options
        container = pod.container(question.container)
        held = tuple((_present(share.device, question.inventory), share) for share in shares)
        devices = [
            device
            for share in shares
            if (device := visible_device(share.device, question.inventory))
        ]
        numbers = {gpu.uuid: number for number, gpu in question.inventory.numbered.items()}
        target = ControlTarget(
            pod_uid=pod.kubelet_uid,  # for a static pod, not the API server's
            pod=pod.name,
            namespace=pod.namespace,
            container=question.container,
            ids=question.ids,
            cards=tuple(
                CardLimit(
                    index=numbers[gpu.uuid],
                    uuid=gpu.uuid,
                    cores_percent=share.cores_percent,
                    memory_mib=share.memory_mib,
                    # all that the card offers, which may be more than it has
                    card_cores_percent=int(100 * options.cores_scaling),
                    card_memory_mib=memory_mib(gpu, options),
                )
                for gpu, share in held
            ),
            # how strictly compute is limited
            policy=compute_policy(pod, question.node_annotations, options.keys),
            memory_ratio=options.memory_scaling,
            # variables by which a container asks for more memory than the card has, and to run
            # without the library
            oversold=sets(container, OVERSOLD),
            disabled=sets(container, DISABLED),
            driver_version=question.inventory.driver_version,
            cuda_version=question.inventory.cuda_version,
        )
        # `answer_id`: a UUID that keeps CDI annotations of several resources of a container apart
        edits = edits_of(
            devices, options.lists, answer_id=answer_id(question.resource.name, question.ids)
        )
        return Provision(edits).joined(self._backend.provision(target))

    # -- state in the cluster ----------------------------------------------------------------------

    def desired_pod(self, pod: Pod, grants: Mapping[str, Grant], *, failed: bool) -> DesiredPod:
        """Return the annotations and labels of a pod whose containers have started, or that will
        never start here (``failed``), for vgpu-manager's schedulers and monitors.
        """
        keys = self._options.keys
        ours = {
            container: grant
            for container, grant in grants.items()
            if grant.resource == keys.number and grant.shares
        }
        return pod_state.desired_pod(pod, ours, keys, indices=self._indices, failed=failed)

    def desired_node(self, view: NodeView) -> DesiredNode:
        """Return the Node's annotations and labels, from which schedulers know the cards."""
        return node_state.desired_node(view, self._options)

    def cleanup(self, now: float) -> DesiredNode:
        """Return the Node, which the agent leaves for good, without the annotations by which
        schedulers send pods.
        """
        del now
        return node_state.cleanup(self._options)


def _shares(claim: ContainerClaim) -> tuple[Share, ...]:
    return tuple(Share(card.uuid, card.memory_mib, card.cores_percent) for card in claim.cards)


def _present(uuid: str, inventory: Inventory) -> Gpu:
    if gpu := inventory.gpu(uuid):
        return gpu
    raise UnhealthyDeviceError(
        f"GPU {uuid} was decided for the container and is missing; the start is tried again when "
        "the GPU answers"
    )
