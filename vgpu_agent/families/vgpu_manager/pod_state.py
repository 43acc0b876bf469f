"""The annotations and labels of a pod once its containers have started,
which vgpu-manager's schedulers and monitors read back (vgpu-manager §4.3).

They are expressed as desired state, from the pod and the grants alone: the result is the same after
any restart, empty once it is written, and does not touch a pod without a started container. A pod
that the agent itself has placed gets the scheduler's keys too, so that schedulers count its GPUs as
taken. Called by `family` for `cluster.pod_publisher`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vgpu_agent.families.vgpu_manager.claims import (
    ClaimsTextError,
    ContainerClaim,
    DeviceClaim,
    by_container,
    parse_claims,
    write_claims,
)
from vgpu_agent.families.vgpu_manager.requests import asks
from vgpu_agent.pods import ContainerKind, DesiredPod

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.families.vgpu_manager.keys import Keys
    from vgpu_agent.model import Grant
    from vgpu_agent.pods import Pod

FINISHED = "9223372036854775807"
"""The ``predicate-time`` of a pod whose allocation has ended, with success or not."""

ALLOCATING, SUCCEED, FAILED = "allocating", "succeed", "failed"
"""The values of the label ``phase``: how far the allocation to the pod's containers is."""

# The form of a label's value in Kubernetes. A node's name may be longer (vgpu-manager §4.2).
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def desired_pod(
    pod: Pod,
    grants: Mapping[str, Grant],
    keys: Keys,
    *,
    indices: Mapping[str, int],
    failed: bool,
) -> DesiredPod:
    """Return the desired state of ``pod``; only keys that differ from the present ones.

    Args:
        pod: as the API server has it.
        grants: those of this family whose shares are decided, by container.
        keys: the names of the annotations and labels. ``pre_allocated`` has the claims as a
            scheduler planned them, ``real_allocated`` those of the containers that have started,
            ``predicate_node`` the Node that was chosen, and ``predicate_time`` when, or `FINISHED`.
            The label ``phase`` has one of the words above, and ``metrics_node`` the Node where the
            pod's use is measured.
        indices: UUID → the card's index on the node.
        failed: the pod will never start here.
    """
    desired = _failed(pod, keys) if failed else _started(pod, grants, keys, indices)
    return DesiredPod(
        _differing(desired.annotations, pod.annotations), _differing(desired.labels, pod.labels)
    )


def _differing(
    desired: Mapping[str, str | None], present: Mapping[str, str]
) -> dict[str, str | None]:
    return {key: value for key, value in desired.items() if present.get(key) != value}


def _failed(pod: Pod, keys: Keys) -> DesiredPod:
    """Return the desired state after a failure. ``pre-allocated`` stays, and a pod without a
    scheduler's claim is not changed.
    """
    if keys.pre_allocated not in pod.annotations and keys.phase not in pod.labels:
        return DesiredPod()
    return DesiredPod(
        {keys.predicate_time: FINISHED}, {keys.phase: FAILED, keys.metrics_node: None}
    )


def _started(
    pod: Pod, grants: Mapping[str, Grant], keys: Keys, indices: Mapping[str, int]
) -> DesiredPod:
    """Return the desired state of a pod with started containers; an empty one for other pods."""
    asking = [each for each in pod.containers if asks(each, keys)]
    granted = {
        each.name: _claim(each.name, grants[each.name], indices)
        for each in asking
        if each.name in grants
    }
    if not granted:
        return DesiredPod()
    claimed = _readable(pod.annotations.get(keys.pre_allocated, ""))
    known = {**granted, **claimed}  # a scheduler's claim replaces that made from the grant
    order = [each.name for each in asking if each.name in known]
    annotations: dict[str, str | None] = {}
    if granted.keys() - claimed.keys():
        annotations[keys.pre_allocated] = write_claims(known[name] for name in order)
        annotations[keys.predicate_node] = pod.node
    # A user may have written it, so only claims that ``pre-allocated`` has, too, count.
    written = _readable(pod.annotations.get(keys.real_allocated, ""))
    real = {name: claim for name, claim in written.items() if claimed.get(name) == claim}
    last = max(place for place, each in enumerate(asking) if each.name in granted)
    real |= {
        each.name: claimed[each.name]
        for each in asking[:last]
        if each.kind is ContainerKind.INIT and each.name in claimed and each.name not in real
    }  # they ended before a container that has started, so they have no grant any more
    real |= granted
    annotations[keys.real_allocated] = write_claims(real[name] for name in order if name in real)
    complete = all(each.name in real for each in asking)
    if complete:
        annotations[keys.predicate_time] = FINISHED
    return DesiredPod(
        annotations,
        {
            keys.phase: SUCCEED if complete else ALLOCATING,
            keys.metrics_node: node_label(pod.node),
        },
    )


def node_label(node: str) -> str | None:
    """Return the name of a Node as the value of a label, None where it is too long for one."""
    return node if _LABEL.fullmatch(node) else None


def _claim(name: str, grant: Grant, indices: Mapping[str, int]) -> ContainerClaim:
    return ContainerClaim(
        name,
        tuple(
            DeviceClaim(
                index=indices.get(share.device, 0),
                uuid=share.device,
                cores_percent=share.cores_percent,
                memory_mib=share.memory_mib,
            )
            for share in grant.shares
        ),
    )


def _readable(text: str) -> Mapping[str, ContainerClaim]:
    """The claims in an annotation; none where it is malformed."""
    try:
        return by_container(parse_claims(text))
    except ClaimsTextError:
        return {}
