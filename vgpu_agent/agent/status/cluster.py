"""The state of the connection to the API server, for `report`: watches, writers, and what was remembered.

`web` may not look into `cluster`, so its counts are put into plain words here. No secret gets in: only the source of
the credentials is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.status import ClusterStatus, WatchStatus, WriterStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.agent.api_server import ClusterSide
    from vgpu_agent.cluster.reflector import ReflectorStatus


class ClusterReport:
    """The reader of all parts for the report; keeps nothing."""

    def __init__(self, cluster: ClusterSide) -> None:
        self._cluster = cluster

    def status(self) -> ClusterStatus:
        """Everything at this moment."""
        cluster = self._cluster
        return ClusterStatus(
            connected=cluster.connected,
            without=cluster.without,
            needed=cluster.needed,
            origin=cluster.origin,
            waiting_for=cluster.waiting_for if cluster.needed else "",
            requests=dict(cluster.client.requests) if cluster.client else {},
            watches=tuple(self._watches()),
            writers=tuple(self._writers()),
            evictions=self._evictions(),
            config_map=self._config_map(),
            remembered=self._remembered(),
            pods=cluster.book.pods,
            pods_synced=cluster.book.synced.is_set(),
            failed_while_away=cluster.failed_pods.found if cluster.failed_pods else 0,
        )

    def _watches(self) -> Iterator[WatchStatus]:
        cluster = self._cluster
        if cluster.pods is not None:
            yield _watch("pods of this node", cluster.pods.status)
        if cluster.nodes is not None:
            yield _watch("this node", cluster.nodes.status)
        for config_map in cluster.config_maps.values():
            for namespace, status in config_map.statuses.items():
                if status.lists or status.errors:  # a later namespace is not watched while an earlier one has the ConfigMap
                    # In one of the usual namespaces the role may be missing; in the one that was asked for that is a mistake.
                    yield _watch(f"ConfigMap {namespace}/{config_map.name}", status, essential=namespace == config_map.expected_in)

    def _writers(self) -> Iterator[WriterStatus]:
        cluster = self._cluster
        writers = {
            "node": cluster.node_publisher,
            "allocatable": cluster.allocatable,
            "pods": cluster.pod_publisher,
            "events": cluster.events,
        }
        for name, writer in writers.items():
            if writer is not None:
                counts = writer.counts
                yield WriterStatus(
                    name,
                    counts.written,
                    counts.failed,
                    counts.dropped,
                    counts.pending,
                    oldest_pending_seconds=counts.oldest_pending_seconds,
                )

    def _evictions(self) -> dict[str, int]:
        if self._cluster.reschedule is None:
            return {}
        counts = self._cluster.reschedule.counts
        return {"evicted": counts.evicted, "postponed": counts.postponed, "failed": counts.failed}

    def _config_map(self) -> str:
        return ", ".join(f"{found.namespace}/{found.name}" for found in self._cluster.config_maps.values() if found.namespace)

    def _remembered(self) -> dict[str, object]:
        facts, nodes = self._cluster.remembered, self._cluster.nodes
        if facts is None:
            return {}
        return {
            "kubelet_version": facts.kubelet_version,
            "runtime_version": facts.runtime_version,
            "files": sorted(name for name, texts in facts.texts.items() if texts),
            "in_use": nodes is None or nodes.node.value is None,
        }


def _watch(name: str, status: ReflectorStatus, *, essential: bool = True) -> WatchStatus:
    return WatchStatus(
        name=name,
        synced=status.synced,
        failing_since=status.failing_since if status.failing else 0.0,
        essential=essential,
        lists=status.lists,
        watches=status.watches,
        events=status.events,
        errors=status.errors,
        unreadable=status.unreadable,
        last_event_at=status.last_event_at,
        last_error=status.last_error,
    )
