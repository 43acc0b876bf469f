"""``/debug/cluster`` and the pods in ``/debug/pods``:
the data from the API server, and the state of the connection.

Used by `debug`. Nothing here is secret: credentials are named by their origin, annotations are
those that families read or write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_agent.errors import shortened
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.model import GrantState
from vgpu_agent.web import views
from vgpu_agent.web.shapes import shown, when

if TYPE_CHECKING:
    from vgpu_agent.pods import Pod, PodContainer
    from vgpu_agent.status import AgentStatus, WatchStatus

# The domains of all keys that the families' vocabularies have, and the agent's own.
_ANNOTATIONS_OF = (
    *{
        key.partition("/")[0]
        for family in FAMILIES
        for key in (*family.resource_prefixes, *family.annotations)
    },
    "vgpu-agent.internal",
)
_LONGEST_VALUE = 400  # characters of an annotation; a pod may bring 256 KiB of them


def answer(status: AgentStatus, now: float) -> dict[str, Any]:
    """Show the connection, the watches, the writers, and the remembered objects."""
    cluster = status.cluster
    return {
        "connected": cluster.connected,
        "disconnected_reason": cluster.disconnected_reason,
        "needed": cluster.needed,
        "credentials": cluster.origin,
        "waiting_for": cluster.waiting_for,
        "watches": [watch(one, now) for one in cluster.watches],
        "writers": cluster.writers,
        "evictions": cluster.evictions,
        "requests": [
            {"verb": verb, "resource": resource, "outcome": outcome, "count": count}
            for (verb, resource, outcome), count in sorted(cluster.requests.items())
        ],
        "config_map": cluster.config_map,
        "restored": cluster.remembered,
    }


def watch(one: WatchStatus, now: float) -> dict[str, Any]:
    """One watch."""
    return {name: value for name, value in shown(one, now).items() if name != "essential"}


def book(status: AgentStatus, now: float) -> dict[str, Any]:
    """The pods of this node as the watch shows them, in the order in which they were seen bound."""
    watching = next(
        (one for one in status.cluster.watches if one.name == "pods of this node"), None
    )
    return {
        "synced": status.cluster.pods_synced,
        "watch": watch(watching, now) if watching else None,
        "watched_pods": [_pod(status, pod, now) for pod in status.cluster.pods],
    }


def our_resources(status: AgentStatus) -> frozenset[str]:
    """The resources that this node offers, or would offer if nothing was in the way."""
    return frozenset(
        (*status.ledger.free, *(plugin.resource for plugin in status.plugins), *status.unavailable)
    )


def _pod(status: AgentStatus, pod: Pod, now: float) -> dict[str, Any]:
    return {
        "pod": pod.full_name,
        "uid": pod.uid,
        "kubelet_uid": pod.kubelet_uid,
        "phase": pod.phase,
        "deleting": pod.deleting,
        "scheduler": pod.scheduler,
        "created": when(pod.created_at, now),
        "bound": pod.bound,
        "annotations": {
            key: shortened(value, _LONGEST_VALUE)
            for key, value in sorted(pod.annotations.items())
            if key.partition("/")[0].endswith(_ANNOTATIONS_OF)
        },
        "containers": [_container(status, pod, container) for container in pod.containers],
    }


def _container(status: AgentStatus, pod: Pod, container: PodContainer) -> dict[str, Any]:
    ours, key = our_resources(status), (pod.kubelet_uid, container.name)
    return {
        "name": container.name,
        "kind": container.kind,
        "limits": {name: count for name, count in container.limits.items() if name in ours},
        "unreadable": {name: text for name, text in container.unreadable.items() if name in ours},
        "started": container.started,
        "served": any(
            grant.owner is not None
            and (grant.owner.pod_uid, grant.owner.container) == key
            and bool(grant.shares)
            and grant.state is not GrantState.RESERVED
            for grant in views.live_grants(status)
        ),
        "refused": next(
            (
                one.reason
                for one in status.binding.refusals
                if (one.pod.kubelet_uid, one.container) == key
            ),
            "",
        ),
    }
