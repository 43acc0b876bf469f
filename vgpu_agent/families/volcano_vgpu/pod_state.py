"""The annotations of a pod once its containers have started,
which Volcano's schedulers read back (volcano-vgpu §3.3).

They are expressed as desired state, from the pod and the grants alone: the result is the same after
any restart, empty once it is written, and does not touch a pod without a started container, unless
it has failed. A pod that the agent itself has placed gets the scheduler's keys too, so that
schedulers count its GPUs as taken. Called by `family` for `cluster.pod_publisher`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.volcano_vgpu.decisions import DECISION, NODE, TO_ALLOCATE
from vgpu_agent.families.volcano_vgpu.pod_devices import SEGMENT_END, Assigned, write_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.families.volcano_vgpu.requests import Names
    from vgpu_agent.model import Grant
    from vgpu_agent.pods import Pod, PodContainer

PHASE = "volcano.sh/bind-phase"
TIME = "volcano.sh/vgpu-time"  # when the GPUs were decided, in unix seconds; `NEVER` at the end
BIND_TIME = (
    "volcano.sh/bind-time"  # unix seconds; schedulers write it beside `DECISION`, nobody reads it
)
ALLOCATING = "allocating"
SUCCESS = "success"
FAILED = "failed"
NEVER = str(2**64 - 1)  # the ``vgpu-time`` of a pod whose allocation has ended


def desired_annotations(
    pod: Pod,
    grants: Mapping[str, Grant],
    names: Names,
    *,
    factor: int,
    failed: bool,
    segment_of: Callable[[PodContainer, Grant, str], str] | None = None,
) -> dict[str, str | None]:
    """Return the desired annotations of ``pod``; only keys that differ from the present ones.

    Args:
        pod: as the API server has it.
        grants: those of this family whose shares are decided, by container.
        names: of the resources.
        factor: MiB in one unit of memory.
        failed: the pod will never start here.
        segment_of: the desired segment (the container's part of `DECISION`, which names its GPUs)
            of a container with a grant, from the present one. By default a scheduler's decision
            stays, and without one the grant's shares are written.
    """
    if failed:
        # `TO_ALLOCATE` stays as it was; a pod without a scheduler's decision is left alone.
        desired_state = (
            {PHASE: FAILED, TIME: NEVER}
            if PHASE in pod.annotations or DECISION in pod.annotations
            else {}
        )
    else:
        asking = names.asking(pod)  # the containers that ask for GPUs, in the order of segments
        segments = _segments(
            pod,
            asking,
            grants,
            segment_of or (lambda _, grant, present: present or _segment(grant, factor)),
        )
        desired_state = _served(pod, grants, asking, names, segments)
    return {key: value for key, value in desired_state.items() if pod.annotations.get(key) != value}


def _served(
    pod: Pod,
    grants: Mapping[str, Grant],
    asking: Sequence[PodContainer],
    names: Names,
    segments: Mapping[str, str],
) -> dict[str, str]:
    """Return the desired annotations of a pod that has not failed; none as long as no container of
    it has started. ``segments`` are those of its GPUs, empty if they need no change.
    """
    started = [container.name in grants for container in asking]
    if not any(started):
        return {}
    desired_state = dict(segments)
    # The kubelet does not call Allocate for containers without a number of GPUs, so they are not
    # waited for.
    complete = all(
        done or container.limits.get(names.number, 0) < 1
        for done, container in zip(started, asking, strict=True)
    )
    if TO_ALLOCATE in pod.annotations:
        desired_state[TO_ALLOCATE] = _left(pod.annotations[TO_ALLOCATE], started, complete=complete)
    if complete:
        desired_state |= {PHASE: SUCCESS, TIME: NEVER}
    return desired_state


def _left(text: str, started: Sequence[bool], *, complete: bool) -> str:
    """Return what is still to be allocated:
    the segments of started containers are empty (volcano-vgpu G5, G8).
    """
    if complete:
        return SEGMENT_END * (len(started) - 1)
    segments = text.split(SEGMENT_END)
    if len(segments) != len(started):
        return text  # not a scheduler's; it is replaced when all are started
    return SEGMENT_END.join(
        "" if done else segment for done, segment in zip(started, segments, strict=True)
    )


def _segments(
    pod: Pod,
    asking: Sequence[PodContainer],
    grants: Mapping[str, Grant],
    segment_of: Callable[[PodContainer, Grant, str], str],
) -> dict[str, str]:
    """Return the annotations `NODE` and `DECISION` (the GPUs of all containers) if they must
    change; nothing when a scheduler's decision may stay.
    """
    text = pod.annotations.get(DECISION, "")
    present = text.split(SEGMENT_END) if text else [""] * len(asking)
    if len(present) != len(asking):
        return {}
    filled = [
        segment_of(container, grants[container.name], segment)
        if container.name in grants
        else segment
        for container, segment in zip(asking, present, strict=True)
    ]
    return {NODE: pod.node, DECISION: SEGMENT_END.join(filled)} if filled != present else {}


def _segment(grant: Grant, factor: int) -> str:
    # UUID, memory in units (rounded up), percent of compute
    return write_segment(
        Assigned(share.device, -(-share.memory_mib // factor), share.cores_percent)
        for share in grant.shares
    )
