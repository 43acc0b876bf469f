"""Find the container of a pod that starts, where several of its containers have the same ids.

The kubelet reuses the ids of an init container for the containers after it, and announces each
start by the ids alone. If all of them have the same shares, that makes no difference. If init
containers have shares of their own (`Resource.init_shares`), each start needs the right ones. The
starting container follows from the last recorded start, and from the end of that container in the
pod's status. The kubelet makes that status before it starts the next container, and the API server
has it a moment later. Pure functions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vgpu_agent.allocation.carrier import GrantRecord
    from vgpu_agent.pods import Pod, PodContainer


def starting_container(
    pod: Pod,
    names: Collection[str],
    last: GrantRecord | None,
    *,
    status_is_current: bool,
    booted_at: float = 0.0,
) -> str | None:
    """Return the one of ``names`` that starts now; None while the pod's status does not show it.

    Args:
        pod: the pod; its status may be out of date.
        names: the containers of the pod that have the same ids.
        last: the record of the last start with these ids in this pod. That start may have failed
            after the agent had accepted it.
        status_is_current: the status counts as up to date: what it does not show has not happened.
            But one that shows the last container with these ids as running is out of date all the
            same.
        booted_at: unix seconds of the host's last boot.
    """
    order = [each for each in pod.containers if each.name in names]
    first = order[0]
    places = {each.name: place for place, each in enumerate(order)}
    if last is None or last.owner.container not in places:
        return _first_after_loss(pod, order, booted_at).name
    place = places[last.owner.container]
    previous = order[place]
    # The status has whole seconds.
    ended = previous.ended_at >= math.floor(last.decided_at)
    if place and _ended_since(pod, first.name, last):
        return first.name  # all containers start again
    if pod.in_new_sandbox:  # at the last status, the kubelet was about to create a sandbox
        # Either all containers start again, or the status is older than the last start.
        return first.name if ended or status_is_current else None
    if previous.kind is not ContainerKind.INIT or place + 1 == len(order):
        return previous.name
    if previous.completed and ended:
        return order[place + 1].name
    failed = previous.ended_at > last.decided_at and not previous.completed
    # The kubelet starts no running container, so a status that shows it running is out of date.
    return previous.name if failed or (status_is_current and not previous.running) else None


def has_containers_waiting_behind_init(pods: Iterable[Pod], resource: str) -> bool:
    """Tell whether a pod has an init container with ``resource``, followed by containers with it
    that have not started. Under the CDI name of their ids these may find the init container's spec,
    so no container may start with ``resource`` while there is no agent to be asked at its start.
    """
    for pod in pods:
        asking = [each for each in pod.containers if each.limits.get(resource, 0) > 0]
        waiting = any(not each.started for each in asking[1:])
        if not pod.ended and waiting and asking[0].kind is ContainerKind.INIT:
            return True
    return False


def _first_after_loss(pod: Pod, order: list[PodContainer], booted_at: float) -> PodContainer:
    """Return the container that starts when there is no record of an earlier start.

    That is the first one, unless init containers of the pod have completed: then the records were
    lost while the pod ran. After a boot, and in a new sandbox, the first container starts again.
    """
    if not pod.in_new_sandbox:
        for each in order:
            done = each.kind is ContainerKind.INIT and each.completed
            if not done or each.ended_at <= booted_at:
                return each
    return order[0]


def _ended_since(pod: Pod, first: str, last: GrantRecord) -> bool:
    """Tell whether an init container before ``first`` has ended after the start of ``last``. Init
    containers run again in a new sandbox only.
    """
    for each in pod.containers:
        if each.name == first:
            return False
        if each.kind is ContainerKind.INIT and each.ended_at > last.decided_at:
            return True
    return False
