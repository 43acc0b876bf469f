"""The answers of ``/debug/cluster`` and the watched pods in ``/debug/pods``.

Used by `debug`. The answers contain no secrets: of credentials only the origin is shown, and of
annotations only those that families or the agent own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_agent.errors import shortened
from vgpu_agent.families.pod_annotations import OF_KUBERNETES
from vgpu_agent.model import GrantState
from vgpu_agent.web import views
from vgpu_agent.web.shapes import shown, when

if TYPE_CHECKING:
    from vgpu_agent.pods import Pod, PodContainer
    from vgpu_agent.status import AgentStatus, WatchStatus

_LONGEST_VALUE = 400  # characters of an annotation; a pod may have 256 KiB of annotations


def answer(status: AgentStatus, now: float) -> dict[str, Any]:
    """Show the connection to the API server, the watches, the writers (the counts of each kind of
    writes to it), and what the previous agent had read from it, which is in use until it answers.
    """
    cluster = status.cluster
    return {
        "connected": cluster.connected,
        "disconnected_reason": cluster.disconnected_reason,
        "needed": cluster.needed,  # by a family that is switched on
        "credentials": cluster.origin,
        "waiting_for": cluster.waiting_for,  # to be read before such a family is offered
        "watches": [watch(one, now) for one in cluster.watches],
        "writers": cluster.writers,
        "evictions": cluster.evictions,  # of pods that cannot start here
        # pods that failed on this node: how many were evicted, recreated or left alone
        "rescued": cluster.rescued,
        "requests": [
            {"verb": verb, "resource": resource, "outcome": outcome, "count": count}
            for (verb, resource, outcome), count in sorted(cluster.requests.items())
        ],
        # where the configuration of a replaced plugin was read, as namespace/name
        "config_map": cluster.config_map,
        "restored": cluster.remembered,
    }


def watch(status: WatchStatus, now: float) -> dict[str, Any]:
    """Show the status of one watch, without the internal field ``essential``, which marks the
    watches that `probes` and `problems` look at.
    """
    return {name: value for name, value in shown(status, now).items() if name != "essential"}


def watched_pods(status: AgentStatus, now: float) -> dict[str, Any]:
    """Show the pods of this node in the pod cache, in the order in which they were bound."""
    watching = next(
        (one for one in status.cluster.watches if one.name == "pods of this node"), None
    )
    return {
        "synced": status.cluster.pods_synced,
        "watch": watch(watching, now) if watching else None,
        "watched_pods": [_pod(status, pod, now) for pod in status.cluster.pods],
    }


def our_resources(status: AgentStatus) -> frozenset[str]:
    """The resources that this node offers, and those that it would offer but cannot now."""
    return frozenset(
        (*status.ledger.free, *(plugin.resource for plugin in status.plugins), *status.unavailable)
    )


def _pod(status: AgentStatus, pod: Pod, now: float) -> dict[str, Any]:
    return {
        "pod": pod.full_name,
        "uid": pod.uid,
        "kubelet_uid": pod.kubelet_uid,  # differs from ``uid`` for a static pod
        "phase": pod.phase,
        "deleting": pod.deleting,
        "scheduler": pod.scheduler,
        "created": when(pod.created_at, now),
        "bound": pod.bound,  # its position in the order of binds
        "annotations": {
            key: shortened(value, _LONGEST_VALUE)
            for key, value in sorted(pod.annotations.items())
            if key not in OF_KUBERNETES  # the marks of static pods
        },
        "containers": [_container(status, pod, container) for container in pod.containers],
    }


def _container(status: AgentStatus, pod: Pod, container: PodContainer) -> dict[str, Any]:
    ours, key = our_resources(status), (pod.kubelet_uid, container.name)
    return {
        "name": container.name,
        "kind": container.kind,
        "limits": {name: count for name, count in container.limits.items() if name in ours},
        "unreadable": {
            name: text for name, text in container.unreadable_limits.items() if name in ours
        },
        "started": container.started,
        "served": any(
            grant.owner is not None
            and (grant.owner.pod_uid, grant.owner.container) == key
            and bool(grant.shares)
            # reserved: the ids are booked, and nothing is decided for the container yet
            and grant.state is not GrantState.RESERVED
            for grant in views.live_grants(status)
        ),
        "refused": next(
            (
                refusal.reason
                for refusal in status.binding.refusals
                if (refusal.pod.kubelet_uid, refusal.container) == key
            ),
            "",
        ),
    }
