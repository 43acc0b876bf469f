"""The pod that is created in place of one that has failed on this node, as plain JSON.

Pure functions for `rescue`: the owners of a pod, and its copy without the fields that belong to one
pod only.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from vgpu_agent.pods import MIRROR_POD

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    Json = dict[str, Any]

# The annotation that says how often a pod has been recreated, and when last. The pod may fail on
# another node next, whose agent must not begin to count at zero.
TRIES = "vgpu-agent.internal/recreated"
_LONGEST_TRIES = 40  # characters of that annotation
# From this priority on a pod is critical to the kubelet.
_CRITICAL_PRIORITY = 2_000_000_000
_CRITICAL_CLASSES = ("system-node-critical", "system-cluster-critical")
# Metadata that the API server sets, or that must not be in a new pod.
_OF_ONE_POD = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "selfLink",
    "managedFields",
    "ownerReferences",
)
# Fields of the specification that are set after or at the creation, from other fields. A priority
# class may have other values by now.
_CHOSEN = ("nodeName", "priority", "preemptionPolicy", "ephemeralContainers")


def is_critical(pod: Json) -> bool:
    """Tell whether the cluster depends on the pod, so that only its owner may delete it."""
    spec = _part(pod, "spec")
    priority = spec.get("priority")
    return (
        MIRROR_POD in _part(_part(pod, "metadata"), "annotations")
        or spec.get("priorityClassName") in _CRITICAL_CLASSES
        or (isinstance(priority, int) and priority >= _CRITICAL_PRIORITY)
    )


def owners(pod: Json) -> tuple[Json | None, list[Json]]:
    """Return the controller that creates a replacement of this pod, None where there is none; and
    all owners. A pod as an owner is no such controller.
    """
    listed = _part(pod, "metadata").get("ownerReferences")
    every = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    controller = next(
        (one for one in every if one.get("controller") is True and one.get("kind") != "Pod"), None
    )
    return controller, every


def copy_of(pod: Json, stale: Collection[str]) -> Json:
    """Return the body of the request that creates the pod again: the same name, specification and
    metadata, without a node, a status and a UID. The annotations and labels in ``stale`` are left
    out, because they assign the shares that the pod could not get.
    """
    metadata = {
        key: value for key, value in _part(pod, "metadata").items() if key not in _OF_ONE_POD
    }
    for kind in ("annotations", "labels"):
        if kind in metadata:
            kept = _part(metadata, kind)
            metadata[kind] = {key: text for key, text in kept.items() if key not in stale}
    spec = {key: value for key, value in _part(pod, "spec").items() if key not in _CHOSEN}
    if spec.get("runtimeClassName"):  # at the creation, the overhead is set from it
        spec.pop("overhead", None)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def with_tries(pod: Json, tries: int, now: float) -> Json:
    """Return the pod with the annotation `TRIES`: it is recreated for the ``tries``-th time."""
    metadata = _part(pod, "metadata")
    annotations = {**_part(metadata, "annotations"), TRIES: f"{tries} {int(now)}"}
    return {**pod, "metadata": {**metadata, "annotations": annotations}}


def tries_of(pod: Json) -> tuple[int, float]:
    """Return how often the pod has been recreated, and the unix seconds of the last time;
    zeros where no agent has.
    """
    text = _part(_part(pod, "metadata"), "annotations").get(TRIES)
    if not isinstance(text, str) or len(text) > _LONGEST_TRIES or not text.isascii():
        return 0, 0.0
    number, _, at = text.partition(" ")
    return (int(number), float(int(at))) if number.isdigit() and at.isdigit() else (0, 0.0)


def created_at(pod: Json) -> float:
    """Return the unix seconds of the pod's creation; 0 where they cannot be read."""
    try:
        return dt.datetime.fromisoformat(_part(pod, "metadata")["creationTimestamp"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return 0.0


def _part(thing: Mapping[str, Any], key: str) -> Json:
    """Return the object under ``key``, an empty one where there is none."""
    part = thing.get(key)
    return part if isinstance(part, dict) else {}
