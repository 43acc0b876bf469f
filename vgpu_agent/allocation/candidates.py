"""Guess the container that a call of Allocate is for.

The pods are narrowed down to those whose next container asks for as many ids, and the one that was
bound first is the likeliest. It stays a guess until the start (PreStartContainer), when the
kubelet's records prove which pod it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from vgpu_agent.pods import Pod, PodContainer


class Candidate(msgspec.Struct, frozen=True):
    """A container that the call may be for."""

    pod: Pod
    container: PodContainer

    @property
    def key(self) -> tuple[str, str]:
        """(UID of the pod, container). The UID is the one that the kubelet has: for a static pod,
        its mirror in the API server has another.
        """
        return self.pod.kubelet_uid, self.container.name


def candidates(
    pods: Iterable[Pod],
    answered: Collection[tuple[str, str]],
    resource: str,
    *,
    count: int,
    node: str,
    id_counts: Mapping[str, int] | None = None,
    admitted_up_to: int = 0,
) -> list[Candidate]:
    """List the containers that may be asking for ``count`` ids of ``resource`` now,
    the likeliest first.

    The kubelet admits the containers of a pod one after the other, so only the first one without an
    answer can be the one that asks. The kubelet never asks for a pod that claims to be a mirror,
    nor for one that wants more than exists. A pod that its owner has placed (``spec.nodeName``)
    comes last once the kubelet has admitted a pod that was bound later: the kubelet has probably
    rejected it.

    Args:
        pods: in the order in which they were bound.
        answered: the containers that have an answer to Allocate already, see `Candidate.key`.
        resource: the name of the resource whose ids are allocated.
        count: how many ids.
        node: the node's name.
        id_counts: how many ids there are of each of our resources; None: whether a pod wants more
            is not checked.
        admitted_up_to: the highest `Pod.bound` (the position in the order of binds) of the pods to
            which the kubelet is known to have given ids.
    """
    found: list[Candidate] = []
    overtaken: list[Candidate] = []
    for pod in pods:
        if (
            pod.node != node
            or pod.ended
            or pod.deleting
            or pod.phase != "Pending"
            or _never_admitted(pod, id_counts or {})
        ):
            continue
        waiting = [
            container
            for container in pod.containers
            if container.limits.get(resource, 0) > 0
            and not container.started
            and (pod.kubelet_uid, container.name) not in answered
        ]
        if waiting and waiting[0].limits[resource] == count:
            # not `scheduled`: no scheduler has bound it, but its owner has set its Node
            passed_over = not pod.scheduled and pod.bound < admitted_up_to
            (overtaken if passed_over else found).append(Candidate(pod, waiting[0]))
    return found + overtaken


def _never_admitted(pod: Pod, id_counts: Mapping[str, int]) -> bool:
    """Tell whether the kubelet never admits the pod:
    a fake mirror pod, or one that asks for more of our resources than exist, or for an amount that
    cannot be read.
    """
    if pod.mirror and not pod.static_uid:  # `static_uid` is set once the mirror is confirmed
        return True
    return any(
        container.limits.get(name, 0) > count or name in container.unreadable_limits
        for container in pod.containers
        for name, count in id_counts.items()
    )
