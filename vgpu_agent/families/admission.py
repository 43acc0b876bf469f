"""The interface between the admission webhook and a family whose pods a scheduler places.

A family whose new pods are completed and checked has an `AdmissionFamily`. The webhook knows
nothing else of families. Pods here are new: they have no UID and no status yet, and perhaps only a
``generateName``.
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
        domain: the part before the slash in the names of the family's resources, annotations and
            labels; empty for the default one.
        scheduler_name: for pods that have not chosen a scheduler.
        node_policy: how a scheduler distributes pods over Nodes (``binpack``, ``spread`` or
            ``none``), for pods that name no such policy.
        device_policy: the same, over the GPUs of a Node.
        topology_mode: how GPUs of one container belong together (``numa``, ``link``, …), for pods
            that have none and a container that asks for several GPUs.
        runtime_class: for pods that have none.
        completes_limits: complete the limits of a container that asks for GPUs without amounts of
            them, or for amounts without a number of GPUs.
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
        limits: for each container in the order of `Pod.containers`, resource → the amount to add or
            to set; empty to change no container.
        scheduler: ``spec.schedulerName`` of a pod that has not chosen one.
        runtime_class: ``spec.runtimeClassName`` of a pod that has none.
        needs_scheduler: a pod with ``spec.nodeName`` must go through a scheduler nevertheless,
            because only a scheduler gives it GPUs. So the webhook may replace the name with a
            condition that only this Node fulfils.
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
        warnings: its requests that have no effect, or that no Node can serve now.
    """

    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class LargestNode(msgspec.Struct, frozen=True):
    """The largest amounts that a Node of the cluster offers; 0 where that is not known.

    Attributes:
        gpus: the most GPUs of one Node.
        memory_units: the most memory of one GPU, in the units in which pods ask for memory; the
            Node says how many MiB a unit is.
        is_limit: the operator has stated that no Node has or will have more GPUs. Otherwise the
            amounts are those of the Nodes seen so far. These differ between replicas of the
            webhook, so nothing is refused because of them.
    """

    gpus: int = 0
    memory_units: int = 0
    is_limit: bool = False

    def joined(self, other: LargestNode) -> LargestNode:
        """Return the larger of the two for each amount; a limit if one of them is."""
        return LargestNode(
            max(self.gpus, other.gpus),
            max(self.memory_units, other.memory_units),
            is_limit=self.is_limit or other.is_limit,
        )


class AdmissionFamily(Protocol):
    """The rules of one family for new pods. Its methods raise nothing."""

    def changes(self, pod: Pod) -> PodChanges:
        """Return the changes to a new pod."""
        ...

    def judge(self, pod: Pod, largest: LargestNode) -> Judgement:
        """Judge a new pod to which `changes` have been made."""
        ...

    def size_of(self, node_annotations: Mapping[str, str]) -> LargestNode:
        """Return the amounts that a Node offers, by its annotations; zeros where they name none."""
        ...
