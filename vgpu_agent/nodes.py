"""Our own Node as the API server has it, and its desired state.

`cluster` watches the Node and keeps it in the families' desired state. Families express that state
as plain data and never see the API.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


# A dataclass, because `seen_at` does not count when two are compared.
@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """The Node object of this machine.

    Attributes:
        kubelet_version: ``status.nodeInfo.kubeletVersion``, e.g. ``v1.31.2``.
        runtime_version: ``status.nodeInfo.containerRuntimeVersion``, e.g. ``containerd://2.0.1``.
        capacity: resource → quantity as text, extended resources only.
        allocatable: the same for what pods may ask for.
        conditions: type → (status, reason, message).
        taints: key → its effects, separated by commas in alphabetical order.
        seen_at: annotation → unix seconds at which the watch first showed its present value,
            for the age of schedulers' locks; empty where the Node did not come from the watch.
    """

    name: str
    uid: str = ""
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kubelet_version: str = ""
    runtime_version: str = ""
    capacity: Mapping[str, str] = dataclasses.field(default_factory=dict)
    allocatable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    conditions: Mapping[str, tuple[str, str, str]] = dataclasses.field(default_factory=dict)
    resource_version: str = ""
    taints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seen_at: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)


class SentCounts(msgspec.Struct, frozen=True):
    """The numbers of ids in a resource's list last sent to the kubelet.

    Attributes:
        listed: all ids.
        healthy: the Healthy ids.
        offered: the ids that schedulers are told of: ``healthy`` without ids that are gone for
            schedulers already, but that the kubelet keeps a moment longer, for pods that were bound
            by an earlier count.
    """

    listed: int
    healthy: int
    offered: int


class DesiredNode(msgspec.Struct, frozen=True):
    """The desired state of our Node. The agent leaves alone what is not mentioned.

    Attributes:
        annotations: key → value; None for a key that must not be there.
        labels: the same for labels.
        capacity: resource → quantity, in ``status.capacity`` as well as ``status.allocatable``
            (status subresource); None for a resource that must not be there. The kubelet goes on
            writing one for minutes after its plugin has gone, and leaves it at 0 for ever.
        conditions: type → (status, reason, message); None for a condition that must not be there.
        taints: key → effect; None for a key without a taint.
        min_write_interval_seconds: annotation → the least seconds between two writes of it by the
            agent.
        guarded: annotations whose removal must fail when the Node has changed since it was read:
            schedulers' locks of the Node, which may have been taken again since then.
    """

    annotations: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    labels: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    capacity: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    conditions: Mapping[str, tuple[str, str, str] | None] = msgspec.field(default_factory=dict)
    min_write_interval_seconds: Mapping[str, float] = msgspec.field(default_factory=dict)
    guarded: frozenset[str] = frozenset()
    taints: Mapping[str, str | None] = msgspec.field(default_factory=dict)

    def joined(self, other: DesiredNode) -> DesiredNode:
        """Merge both; for a key that is in both, ``other`` wins."""
        return DesiredNode(
            {**self.annotations, **other.annotations},
            {**self.labels, **other.labels},
            {**self.capacity, **other.capacity},
            {**self.conditions, **other.conditions},
            {**self.min_write_interval_seconds, **other.min_write_interval_seconds},
            self.guarded | other.guarded,
            {**self.taints, **other.taints},
        )
