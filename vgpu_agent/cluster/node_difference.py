"""The difference between our Node and its desired state, key by key,
and the merge patches that express it.

Pure translation for `node_publisher`, which decides when such a patch is sent. Merge patches are
RFC 7386: null removes a key.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.cluster.api import timestamp
from vgpu_agent.cluster.quantities import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vgpu_agent.nodes import DesiredNode, Node


class Section(enum.StrEnum):
    """The parts of a Node in which this agent writes."""

    ANNOTATIONS = "annotations"
    LABELS = "labels"
    CAPACITY = "capacity"
    ALLOCATABLE = "allocatable"
    CONDITIONS = "conditions"
    TAINTS = "taints"


class DesiredEntry(msgspec.Struct, frozen=True):
    """One key of the Node.

    Attributes:
        shown: the value that the watch shows; a quantity that equals ``desired`` is given in the
            spelling of ``desired``. None where the key is not there.
        desired: the value to be there: a text, (status, reason, message) of a condition, or the
            effect of a taint. None where the key must not be there.
        apart_seconds: the least time between two writes of it.
        guarded: to be removed only if the Node has not changed since the watch showed it.
    """

    section: Section
    key: str
    shown: Any
    desired: Any
    apart_seconds: float = 0.0
    guarded: bool = False

    @property
    def name(self) -> str:
        """A name that is unique in the Node: ``annotations/volcano.sh/node-vgpu-register``."""
        return f"{self.section}/{self.key}"


def compared(node: Node, desired_state: DesiredNode) -> Iterator[DesiredEntry]:
    """Yield all desired entries, each beside the value that ``node`` shows."""
    for key, value in desired_state.annotations.items():
        guarded = value is None and key in desired_state.guarded
        yield DesiredEntry(
            Section.ANNOTATIONS,
            key,
            node.annotations.get(key),
            value,
            desired_state.min_write_interval_seconds.get(key, 0.0),
            guarded,
        )
    for key, value in desired_state.labels.items():
        yield DesiredEntry(Section.LABELS, key, node.labels.get(key), value)
    for resource, quantity in desired_state.capacity.items():
        yield DesiredEntry(
            Section.CAPACITY, resource, _as_desired(node.capacity.get(resource), quantity), quantity
        )
        yield DesiredEntry(
            Section.ALLOCATABLE,
            resource,
            _as_desired(node.allocatable.get(resource), quantity),
            quantity,
        )
    for kind, condition in desired_state.conditions.items():
        yield DesiredEntry(Section.CONDITIONS, kind, node.conditions.get(kind), condition)
    for key, effect in desired_state.taints.items():
        yield DesiredEntry(Section.TAINTS, key, node.taints.get(key), effect)


def metadata_patch(
    desired_state: Iterable[DesiredEntry], *, resource_version: str = ""
) -> dict[str, Any]:
    """Return annotations and labels as one merge patch;
    with ``resource_version``, one that fails if the Node has changed since that version.
    """
    metadata: dict[str, Any] = {"resourceVersion": resource_version} if resource_version else {}
    for entry in desired_state:
        metadata.setdefault(entry.section.value, {})[entry.key] = entry.desired
    return {"metadata": metadata}


def capacity_patch(desired_state: Iterable[DesiredEntry]) -> dict[str, Any]:
    """Return capacity and allocatable as one merge patch of the status subresource."""
    status: dict[str, Any] = {}
    for entry in desired_state:
        status.setdefault(entry.section.value, {})[entry.key] = entry.desired
    return {"status": status}


def with_conditions(
    standing: Sequence[Mapping[str, Any]], desired_state: Iterable[DesiredEntry], now: float
) -> list[dict[str, Any]] | None:
    """Join the conditions with ours, because a merge patch replaces the whole list;
    None when all are there already.

    Args:
        standing: the conditions of the Node as the API server has them; those of other writers stay
            as they are.
        desired_state: ours, each (status, reason, message), or None to be removed.
        now: unix seconds; the transition time moves with the status only (API conventions,
            conditions).
    """
    complete = [dict(condition) for condition in standing]
    by_type = {condition.get("type"): condition for condition in complete}
    changed = False
    for entry in desired_state:
        condition = by_type.get(entry.key)
        if entry.desired is None:
            if condition is not None:
                complete.remove(condition)
                changed = True
            continue
        status, reason, message = entry.desired
        if condition is None:
            condition = {"type": entry.key}
            complete.append(condition)
        if (condition.get("status"), condition.get("reason"), condition.get("message")) == (
            status,
            reason,
            message,
        ):
            continue
        changed = True
        if condition.get("status") != status:
            condition["lastTransitionTime"] = timestamp(now)
        condition |= {
            "status": status,
            "reason": reason,
            "message": message,
            "lastHeartbeatTime": timestamp(now),
        }
    return complete if changed else None


def with_taints(
    standing: Sequence[Mapping[str, Any]], desired_state: Iterable[DesiredEntry]
) -> list[dict[str, Any]] | None:
    """Join the taints with ours, because a merge patch replaces the whole list;
    None when all are there already.

    Args:
        standing: the taints of the Node as the API server has them; those of other keys stay as
            they are.
        desired_state: ours, each an effect, or None to be removed.
    """
    complete = [dict(taint) for taint in standing]
    for entry in desired_state:
        ours = [taint for taint in complete if taint.get("key") == entry.key]
        if [taint.get("effect") for taint in ours] == ([entry.desired] if entry.desired else []):
            continue
        complete = [taint for taint in complete if taint.get("key") != entry.key]
        if entry.desired is not None:
            complete.append({"key": entry.key, "effect": entry.desired})
    return complete if complete != list(standing) else None


def same_quantity(one: str, other: str) -> bool:
    """Tell whether two quantities are the same number: the API server writes ``1000`` as ``1k``."""
    if one == other:
        return True
    number = whole_number(one)
    return number is not None and number == whole_number(other)


def _as_desired(shown: str | None, desired: str | None) -> str | None:
    """Return ``shown``, in the spelling of ``desired`` where both are the same quantity."""
    if shown is None or desired is None:
        return shown
    return desired if same_quantity(shown, desired) else shown
