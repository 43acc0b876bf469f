"""The admission webhook's view of a family whose pods are placed by a scheduler.

A family whose new pods are completed and checked has an `AdmissionFamily`; the webhook knows
families by nothing else. Pods here are new: they have no UID and no status yet, and perhaps only
the beginning of a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.pods import Pod


class AdmissionOptions(msgspec.Struct, frozen=True):
    """The operator's defaults for new pods. An empty text adds nothing.

    Attributes:
        domain: of the family's keys; empty for its usual one.
        scheduler_name: for pods that have not chosen a scheduler.
        node_policy: for pods that have none.
        device_policy: the same.
        topology_mode: for pods without one of which a container asks for several GPUs.
        runtime_class: for pods that have none.
        completes_limits: write out the amounts that a container leaves open.
    """

    domain: str = ""
    scheduler_name: str = ""
    node_policy: str = ""
    device_policy: str = ""
    topology_mode: str = ""
    runtime_class: str = ""
    completes_limits: bool = True


class PodChanges(msgspec.Struct, frozen=True):
    """The changes to a new pod. All else stays.

    Attributes:
        annotations: key → value; None for a key that must not be there.
        labels: the same.
        limits: for each container in the order of `Pod.containers`, resource → amount.
        scheduler: ``spec.schedulerName`` of a pod that has not chosen one.
        runtime_class: ``spec.runtimeClassName`` of a pod that has none.
        needs_scheduler: a pod that names its Node must reach it through a scheduler all the same,
            because only a scheduler gives it GPUs.
    """

    annotations: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    labels: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    limits: tuple[Mapping[str, int], ...] = ()
    scheduler: str = ""
    runtime_class: str = ""
    needs_scheduler: bool = False


class Judgement(msgspec.Struct, frozen=True):
    """The faults of a new pod, in sentences for its owner.

    Attributes:
        refusals: why it can never run; empty for a pod that is admitted.
        warnings: what it asks for in vain.
    """

    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class LargestNode(msgspec.Struct, frozen=True):
    """The largest of what the Nodes of the cluster offer; 0 where that is not known.

    Attributes:
        gpus: on one Node.
        memory_units: of one GPU, in units of a request.
        is_bound: no Node with more GPUs will come, as the operator has said. Otherwise this is what
            was seen, which differs between replicas, and refuses nothing.
    """

    gpus: int = 0
    memory_units: int = 0
    is_bound: bool = False

    def joined(self, other: LargestNode) -> LargestNode:
        """Return the larger of each, which is a bound if one of them is."""
        return LargestNode(
            max(self.gpus, other.gpus),
            max(self.memory_units, other.memory_units),
            is_bound=self.is_bound or other.is_bound,
        )


class AdmissionFamily(Protocol):
    """The rules of one family for new pods. Its methods raise nothing."""

    def changes(self, pod: Pod) -> PodChanges:
        """Return what a new pod is to have."""
        ...

    def judge(self, pod: Pod, largest: LargestNode) -> Judgement:
        """Judge a new pod that has what `changes` asks for."""
        ...

    def size_of(self, node_annotations: Mapping[str, str]) -> LargestNode:
        """Return what a Node offers, by its annotations; zeros where they do not say."""
        ...
