"""The annotations of a pod once its containers are served: what Volcano's schedulers read back (volcano-vgpu contract §3.3).

Said as what should stand there, from the pod and the grants alone: it is the same after any restart, asks for nothing once it stands, and
leaves a pod alone of which nobody has been served. A pod that the agent itself has placed gets the scheduler's keys too, so that schedulers
count its GPUs as taken. Called by `volcano_vgpu` for the pod publisher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.volcano_vgpu_decisions import IDS, NODE, TO_ALLOCATE
from vgpu_agent.families.volcano_vgpu_devices import SEGMENT_END, Assigned, write_segment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.families.volcano_vgpu_asks import Names
    from vgpu_agent.model import Grant
    from vgpu_agent.pods import Pod, PodContainer

PHASE = "volcano.sh/bind-phase"
TIME = "volcano.sh/vgpu-time"
SUCCESS = "success"
FAILED = "failed"
NEVER = str(2**64 - 1)  # the time of a pod that waits for nothing any more


def state_wishes(pod: Pod, grants: Mapping[str, Grant], names: Names, *, factor: int, failed: bool) -> dict[str, str | None]:
    """What should stand on ``pod``; only keys that differ from what stands there.

    Args:
        pod: as the API server has it.
        grants: by container, decided ones of this family only.
        names: of the resources.
        factor: MiB in one unit of memory.
        failed: the pod will never start here.
    """
    if failed:
        # What is left to allocate stays as it was; a pod that no scheduler has decided is none of its business.
        wishes = {PHASE: FAILED, TIME: NEVER} if PHASE in pod.annotations or IDS in pod.annotations else {}
    else:
        wishes = _served(pod, grants, names.counted(pod), names, factor)
    return {key: value for key, value in wishes.items() if pod.annotations.get(key) != value}


def _served(pod: Pod, grants: Mapping[str, Grant], counted: Sequence[PodContainer], names: Names, factor: int) -> dict[str, str]:
    served = [container.name in grants for container in counted]
    if not any(served):
        return {}
    wishes = _placed(pod, [grants.get(container.name) for container in counted], factor)
    # Kubelet asks for nobody who does not name a number of GPUs, so nobody waits for him.
    complete = all(done or container.limits.get(names.number, 0) < 1 for done, container in zip(served, counted, strict=True))
    if TO_ALLOCATE in pod.annotations:
        wishes[TO_ALLOCATE] = _left(pod.annotations[TO_ALLOCATE], served, complete=complete)
    if complete:
        wishes |= {PHASE: SUCCESS, TIME: NEVER}
    return wishes


def _left(text: str, served: Sequence[bool], *, complete: bool) -> str:
    """What is still to be allocated: the segments of served containers are empty (G5, G8)."""
    if complete:
        return SEGMENT_END * (len(served) - 1)
    segments = text.split(SEGMENT_END)
    if len(segments) != len(served):
        return text  # not a scheduler's; it is replaced when all are served
    return SEGMENT_END.join("" if done else segment for done, segment in zip(served, segments, strict=True))


def _placed(pod: Pod, grants: Sequence[Grant | None], factor: int) -> dict[str, str]:
    """The GPUs of containers for which no scheduler has decided; nothing when one has decided for all that were served."""
    text = pod.annotations.get(IDS, "")
    segments = text.split(SEGMENT_END) if text else [""] * len(grants)
    if len(segments) != len(grants):
        return {}
    filled = [segment or _segment(grant, factor) for segment, grant in zip(segments, grants, strict=True)]
    return {NODE: pod.node, IDS: SEGMENT_END.join(filled)} if filled != segments else {}


def _segment(grant: Grant | None, factor: int) -> str:
    if grant is None:
        return ""
    return write_segment(Assigned(share.device, -(-share.memory_mib // factor), share.cores_percent) for share in grant.shares)
