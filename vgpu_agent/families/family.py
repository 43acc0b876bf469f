"""The interface of a family; `allocation` and `agent` know families only through this.

There are two kinds. In an `IdFamily` each id names its device, so `Allocate` can answer completely
(`nvidia`, `aws`). In a `PodFamily` ids are only counted. What a container gets is written in its
pod, so it is decided once the pod is identified (`volcano-vgpu`, …).

To add a family: write a package with a class of one of these shapes, translate its golden vectors
(the examples with exact results in docs/contracts) into tests, and add it to `registry`. Everything
here is a pure function of its arguments.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.node_lock import NodeLocks
from vgpu_agent.placement.mixing import ALONE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.isolation.edits import Edits, Provision
    from vgpu_agent.model import DeviceRoom, Grant, Inventory, Resource, Share
    from vgpu_agent.nodes import DesiredNode, Node
    from vgpu_agent.placement.mixing import GpuUses
    from vgpu_agent.pods import DesiredPod, Pod, PodContainer


class Shortfall(msgspec.Struct, frozen=True):
    """The configured resources that cannot be offered as they are.

    Attributes:
        refused: resources that are not offered at all, and why.
        cautions: what is odd with the rest, one sentence each.
    """

    refused: Mapping[str, str] = msgspec.field(default_factory=dict)
    cautions: tuple[str, ...] = ()


class Ownership(enum.IntEnum):
    """The certainty with which a resource's name belongs to a family. Where several families may
    own a name, the surest is the first that tries to read the ids.
    """

    NONE = 0
    POSSIBLE = 1
    """A name in the family's domain, which it may have offered under earlier settings.
    The ids decide.
    """
    CERTAIN = 2
    """A name of the family's vocabulary, or of today's settings."""


class Family(Protocol):
    """Pure translation between one vocabulary and the types in `model`."""

    @property
    def name(self) -> str:
        """The glossary's name of the family, e.g. ``nvidia``."""
        ...

    def owns(self, resource: str) -> Ownership:
        """Tell how surely the kubelet's records of ``resource`` are about this family's devices, by
        its name alone.
        """
        ...

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """Return the resources that a node with these GPUs offers, deterministic for the same
        inventory.

        Raises:
            OfferError: a resource cannot be offered as configured.
        """
        ...

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """Refuse a request that is nonsense in this family's terms, whichever pod it comes from.

        Raises:
            RequestRefusedError: with the text that the pod's status will show.
        """
        ...


class IdFamily(Family, Protocol):
    """A family whose ids name the device."""

    def shortfall(self, inventory: Inventory) -> Shortfall:
        """Return what `resources` leaves out, and why."""
        ...

    def shares(self, resource: str, ids: Sequence[str], inventory: Inventory) -> tuple[Share, ...]:
        """Return what the holder of ``ids`` has of each device; also for ids of earlier settings,
        as far as they can be read.
        """
        ...

    def edits(self, resource: Resource, ids: Sequence[str], inventory: Inventory) -> Edits:
        """Return the edits of the container for these ids."""
        ...

    def prefer(
        self,
        resource: Resource,
        available: Sequence[str],
        required: Sequence[str],
        size: int,
        inventory: Inventory,
        gpu_uses: GpuUses = ALONE,
    ) -> list[str]:
        """Return the ids that suit best, for GetPreferredAllocation; only called for resources with
        ``Resource.offers_preference``.

        Args:
            resource: as it is offered.
            available: ids that may be chosen.
            required: ids that must be in the answer.
            size: how many ids the container wants.
            inventory: the node's GPUs.
            gpu_uses: which GPUs other families may use or have, `ALONE` for none; GPUs that already
                serve this family come first.

        Raises:
            CapacityError: there are not enough; the caller then answers with the first ids that are
                free.
        """
        ...


class Question(msgspec.Struct, frozen=True):
    """The question of what a container gets.

    Attributes:
        container: the one that the kubelet's records name; an init container only when no later
            container has the same ids.
        node: our node's name.
        rooms: what the devices have left, in the order of the inventory; a grant that this
            container already has is not counted.
        siblings: other container of this pod → the shares that were decided for it, because in some
            vocabularies these determine which devices this one may have.
        taken: device → a grant with a part of it, of any family; without the grants of this
            container and of containers that have ended before it. A GPU with a grant cannot be
            divided anew, and refusals name its holder.
        gpu_uses: which GPUs other families may use or have, for the agent's own placement.
        node_annotations: those of our Node now, where operators set defaults for its pods; empty
            while the Node has not been read.
    """

    resource: Resource
    pod: Pod
    container: str
    ids: tuple[str, ...]
    node: str
    inventory: Inventory
    rooms: tuple[DeviceRoom, ...]
    siblings: Mapping[str, tuple[Share, ...]] = msgspec.field(default_factory=dict)
    taken: Mapping[str, Grant] = msgspec.field(default_factory=dict)
    gpu_uses: GpuUses = ALONE
    node_annotations: Mapping[str, str] = msgspec.field(default_factory=dict)


def requesting_container(question: Question) -> PodContainer:
    """Return the container that the question is about, from the pod's specification.

    Raises:
        RequestRefusedError: the pod has no such container.
    """
    if container := question.pod.container(question.container):
        return container
    raise RequestRefusedError(
        f"pod {question.pod.full_name}: the kubelet gave {len(question.ids)} × "
        f"{question.resource.name} to container {question.container}, and the pod's specification "
        "has no container of that name"
    )


class MigLayout(msgspec.Struct, frozen=True):
    """The division of a GPU: UUID, and the profile of each instance, e.g.
    ``("3g.20gb", "3g.20gb")``.
    """

    gpu: str
    profiles: tuple[str, ...]


class Remark(NamedTuple):
    """A message of a family to a pod's owner: an event's reason, and its text without the
    container's name.
    """

    reason: str
    text: str


class Decision(msgspec.Struct, frozen=True):
    """The shares that a container gets.

    Attributes:
        shares: in the order in which the family's vocabulary lists them; empty while ``layouts`` is
            not.
        by: the decider, as text for people (`Grant.evidence`): ``the scheduler, in
            volcano.sh/vgpu-ids-new`` or ``the agent, binpack``.
        layouts: how GPUs must be divided before shares can be decided; no container has a part of
            these GPUs.
        why_not_named: why the devices are not those that the scheduler has named; empty when they
            are, or when it has named none.
        by_scheduler: a scheduler decided, according to the pod.
        kept: the container has had these shares before, and gets them again.
        remarks: annotations of the pod that were not followed; each becomes an event after the
            start.
    """

    shares: tuple[Share, ...]
    by: str
    layouts: tuple[MigLayout, ...] = ()
    why_not_named: str = ""
    by_scheduler: bool = False
    kept: bool = False
    remarks: tuple[Remark, ...] = ()

    @property
    def by_agent(self) -> bool:
        """Tell whether the agent decided, because no scheduler did."""
        return self.by.startswith("the agent")


class NodeView(msgspec.Struct, frozen=True):
    """The facts from which a family derives the desired state of our Node.

    Attributes:
        node: the Node as it is now.
        inventory: the node's GPUs.
        rooms: resource → what each device has left for it, in the order of the inventory.
        allocated_at: resource → unix seconds of the last Allocate, which ends a lock that was taken
            before it; missing when there was none.
        now: unix seconds.
        locks: what is remembered of the schedulers' locks of this node, annotations with which a
            scheduler keeps the Node for one pod.
        offered: the names of all resources of this node, of any family. A family that removes from
            the Node what nothing offers any more leaves these.
    """

    node: Node
    inventory: Inventory
    rooms: Mapping[str, tuple[DeviceRoom, ...]]
    allocated_at: Mapping[str, float]
    now: float
    locks: NodeLocks = msgspec.field(default_factory=NodeLocks)
    offered: frozenset[str] = frozenset()


class PodFamily(Family, Protocol):
    """A family whose vocabulary names in the pod what each container gets."""

    def cautions(self, inventory: Inventory) -> tuple[str, ...]:
        """List what `resources` leaves out, and what is odd about the rest, one sentence each with
        the remedy.
        """
        ...

    def decide(self, question: Question) -> Decision:
        """Decide what the container gets: as a scheduler decided in the pod's annotations;
        otherwise, by the room on this node.

        Health and room are not checked for a scheduler's decision; the ledger does that.

        Raises:
            RequestRefusedError: the pod's limits or annotations cannot be followed; the text names
                pod, key, value and remedy.
            CapacityError: no scheduler decided and no device has room; the text names how much was
                asked and how much there is.
        """
        ...

    def named_gpus(self, pod: Pod, inventory: Inventory) -> Mapping[str, tuple[str, ...]]:
        """Return the GPUs that a scheduler has given to containers of the pod, by container: UUIDs.
        Never raises.

        These GPUs are claimed for them. Where the resource has ``offers_preference``, the kubelet
        is advised (GetPreferredAllocation) to give ids of them.

        The result has only containers that the pod's annotations allow to start. It is empty where
        these are not for this node or cannot be followed at all. Init containers are left out where
        they work on GPUs of the containers after them.
        """
        ...

    def recall(self, question: Question) -> Decision | None:
        """Return what a running container must have got, read from its pod alone; None when the pod
        does not say. Never raises.
        """
        ...

    def provision(self, question: Question, shares: tuple[Share, ...]) -> Provision:
        """Return what puts ``shares`` in force: the container's edits, and what must be on the host
        before it starts.
        """
        ...

    def desired_pod(self, pod: Pod, grants: Mapping[str, Grant], *, failed: bool) -> DesiredPod:
        """Return the desired state of the pod.

        Args:
            pod: as the API server has it.
            grants: those of the pod's containers, by container, whose shares were decided.
            failed: the agent has given up: the pod will never start here.
        """
        ...

    def desired_node(self, view: NodeView) -> DesiredNode:
        """Return the desired state of our Node."""
        ...

    def cleanup(self, now: float) -> DesiredNode:
        """Return the desired state of a Node that the agent leaves for good, at unix seconds
        ``now``. Some families write ``now`` into an annotation for schedulers.
        """
        ...
