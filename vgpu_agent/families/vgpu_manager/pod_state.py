"""The annotations and labels of a pod once its containers have started,
which vgpu-manager's schedulers and monitors read back (vgpu-manager §4.3).

They are expressed as desired state, from the pod and the grants alone: the result is the same after
any restart, empty once it is written, and does not touch a pod without a started container. A pod
that the agent itself has placed gets the scheduler's keys too, so that schedulers count its GPUs as
taken. Called by `family` for the pod publisher.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vgpu_agent.families.vgpu_manager.claims import (
    Claims,
    ClaimsTextError,
    ContainerClaim,
    DeviceClaim,
    parse_claims,
    write_claims,
)
from vgpu_agent.families.vgpu_manager.requests import asks
from vgpu_agent.pods import DesiredPod

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.families.vgpu_manager.keys import Keys
    from vgpu_agent.model import Grant
    from vgpu_agent.pods import Pod

FINISHED = "9223372036854775807"
"""The time of a pod that waits for nothing any more."""

ALLOCATING, SUCCEED, FAILED = "allocating", "succeed", "failed"

# What Kubernetes takes as a label's value. A node's name may be longer (vgpu-manager §4.2).
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
        grants: by container, decided ones of this family only.
        keys: the names.
        indices: UUID → the card's index on the node.
        failed: the pod will never start here.
    """
    desired = _failed(pod, keys) if failed else _served(pod, grants, keys, indices)
    return DesiredPod(
        _differing(desired.annotations, pod.annotations), _differing(desired.labels, pod.labels)
    )


def _differing(
    desired: Mapping[str, str | None], standing: Mapping[str, str]
) -> dict[str, str | None]:
    return {key: value for key, value in desired.items() if standing.get(key) != value}


def _failed(pod: Pod, keys: Keys) -> DesiredPod:
    """``pre-allocated`` stays; a pod without a scheduler's claim is left alone."""
    if keys.pre_allocated not in pod.annotations and keys.phase not in pod.labels:
        return DesiredPod()
    return DesiredPod(
        {keys.predicate_time: FINISHED}, {keys.phase: FAILED, keys.metrics_node: None}
    )


def _served(
    pod: Pod, grants: Mapping[str, Grant], keys: Keys, indices: Mapping[str, int]
) -> DesiredPod:
    asking = [each.name for each in pod.containers if asks(each, keys)]
    served = [name for name in asking if name in grants]
    if not served:
        return DesiredPod()
    given = {
        name: ContainerClaim(
            name,
            tuple(
                DeviceClaim(
                    indices.get(share.device, 0),
                    share.device,
                    share.cores_percent,
                    share.memory_mib,
                )
                for share in grants[name].shares
            ),
        )
        for name in served
    }
    claimed = _readable(pod.annotations.get(keys.pre_allocated, ""))
    named = {each.container for each in claimed}
    order = [each.container for each in claimed]
    annotations: dict[str, str | None] = {}
    if missing := [name for name in asking if name in given and name not in named]:
        # In the order of the pod, as a scheduler writes it.
        standing = {each.container: each for each in claimed}
        whole = standing | {name: given[name] for name in missing}
        order = [name for name in asking if name in whole]
        annotations[keys.pre_allocated] = write_claims(whole[name] for name in order)
        annotations[keys.predicate_node] = pod.node
    earlier = {
        each.container: each
        for each in _readable(pod.annotations.get(keys.real_allocated, ""))
        if each.container in order
    }
    real = earlier | given
    annotations[keys.real_allocated] = write_claims(real[name] for name in order if name in real)
    complete = all(name in real for name in asking)
    if complete:
        annotations[keys.predicate_time] = FINISHED
    return DesiredPod(
        annotations,
        {
            keys.phase: SUCCEED if complete else ALLOCATING,
            keys.metrics_node: pod.node if _LABEL.fullmatch(pod.node) else None,
        },
    )


def _readable(text: str) -> Claims:
    try:
        return parse_claims(text)
    except ClaimsTextError:
        return ()
