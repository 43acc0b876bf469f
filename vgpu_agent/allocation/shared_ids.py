"""Tell which of a pod's containers starts, where several of them have the same ids.

The kubelet hands the ids of an init container on to the containers after it and announces each
start by the ids alone. Where all of them have the same shares that makes no difference. Where init
containers have shares of their own (`Resource.init_shares`), each must get its own, so the order
of starts has to be known: it follows from the last start that was served, and from what the pod's
status says about the end of that container. The kubelet makes that status before it starts the next
container, and the API server has it a moment later. Pure functions.
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
    settled: bool,
    booted_at: float = 0.0,
) -> str | None:
    """Return which of the containers ``names``, which have the same ids, starts now; None while
    the pod's status cannot tell.

    Args:
        pod: with a status that may be a moment old.
        names: containers of it.
        last: the record of the last start with these ids in this pod, also of one that has failed
            after we let it happen.
        settled: the status is as new as it gets. What it does not tell then has not happened.
        booted_at: unix seconds of the host's last boot.
    """
    order = [each for each in pod.containers if each.name in names]
    first = order[0]
    places = {each.name: place for place, each in enumerate(order)}
    if last is None or last.owner.container not in places:
        return _first_after_loss(pod, order, booted_at).name
    place = places[last.owner.container]
    served = order[place]
    # The status has whole seconds.
    ended = served.ended_at >= math.floor(last.decided_at)
    if place and _ended_since(pod, first.name, last):
        return first.name  # all containers start anew
    if pod.in_new_sandbox:
        # They do; or the status is older than that start, and this is its sandbox.
        return first.name if ended or settled else None
    if served.kind is not ContainerKind.INIT or place + 1 == len(order):
        return served.name
    if served.completed and ended:
        return order[place + 1].name
    failed = served.ended_at > last.decided_at and not served.completed
    return served.name if settled or failed else None


def wait_for_init_containers(pods: Iterable[Pod], resource: str) -> bool:
    """Tell whether a pod has an init container with ``resource``, and later containers with it that
    have not started: these may find the spec of the one before under the name of their ids.
    """
    for pod in pods:
        asking = [each for each in pod.containers if each.limits.get(resource, 0) > 0]
        waiting = any(not each.started for each in asking[1:])
        if not pod.ended and waiting and asking[0].kind is ContainerKind.INIT:
            return True
    return False


def _first_after_loss(pod: Pod, order: list[PodContainer], booted_at: float) -> PodContainer:
    """Return the container that starts without a record of a start before: the first one, unless
    the records were lost under a pod whose init containers have done their work. A boot, or a new
    sandbox, begins with the first one again.
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
