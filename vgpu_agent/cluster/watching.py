"""The watches of this node's pods and of our own Node. Of the rest of the cluster the agent watches
single ConfigMaps only (`config_map`).

Built by `agent`, which runs each watch as a supervised loop. `allocation` reads the `PodCache` that
`PodWatch` fills. The writers of this package compare with the Node that `NodeWatch` shows. While
the API server is away, both keep what they have seen.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from vgpu_agent.cluster import decode
from vgpu_agent.cluster.api import pod_path
from vgpu_agent.cluster.reflector import Reflector, Scope
from vgpu_agent.concurrency import Latest
from vgpu_agent.errors import ClusterError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    import msgspec

    from vgpu_agent.cluster.reflector import Source
    from vgpu_agent.journal import Journal
    from vgpu_agent.nodes import Node
    from vgpu_agent.pods import Pod, PodCache
    from vgpu_agent.status import WatchStatus

_NOT_FOUND = 404
_NOT_ENDED = "status.phase!=Succeeded,status.phase!=Failed"


class _Watch:
    """The loop of one watch, and the state of that watch."""

    _reflector: Reflector[Any]

    @property
    def status(self) -> WatchStatus:
        """The state of the watch."""
        return self._reflector.status

    @property
    def longest_silence_seconds(self) -> float:
        """The longest time between two heartbeats of a healthy `run`, for
        ``Supervisor.start(stuck_after_seconds=…)``.
        """
        return self._reflector.longest_silence_seconds

    async def run(self, beat: Callable[[], None]) -> None:
        """Keep the copy of the watched objects up to date, until cancelled; ``beat`` sends a
        heartbeat.
        """
        await self._reflector.run(beat)


class PodWatch(_Watch):
    """The watch that fills a `PodCache` with the pods that are bound to one node and have not
    ended.

    Pods that have ended are kept by the API server for long, sometimes thousands on a node, and
    nothing here needs them: they hold nothing.
    """

    def __init__(
        self,
        source: Source,
        node_name: str,
        pod_cache: PodCache,
        *,
        journal: Journal,
        decode_pod: Callable[[bytes | msgspec.Raw], Pod] = decode.pod,
    ) -> None:
        """Fill ``pod_cache`` from ``source``, the client of the API server; ``decode_pod`` is a
        decoder made by `decode.pods_with`, which keeps only the annotations and labels in use.
        """
        self._source = source
        self._decode = decode_pod
        scope = Scope(
            "pods of this node", "/api/v1/pods", f"spec.nodeName={node_name},{_NOT_ENDED}"
        )
        self._reflector = Reflector(
            source,
            scope,
            decode_pod,
            _Living(pod_cache),
            journal=journal,
            trim=pod_cache.fitting,  # those of a long list that the cache has room for
        )

    @property
    def reachable_seconds(self) -> float:
        """The seconds for which the API server has answered without a failure."""
        return self._reflector.reachable_seconds

    async def fetch(self, namespace: str, name: str) -> Pod | None:
        """Ask the API server for one pod; None when there is none.

        One GET, for a pod that the watch has not shown yet. The pod cache is left alone: the answer
        may be older than the watch's next event.

        Raises:
            ClusterError: no answer, a refusal, or an answer that cannot be read.
        """
        try:
            return self._decode(await self._source.get(pod_path(namespace, name)))
        except ClusterError as err:
            if err.status == _NOT_FOUND:
                return None
            raise


class _Living:
    """The receiver (`reflector.Sink`) of a watch that selects pods that have not ended. A pod that
    ends is no longer selected, so the watch reports its end as a deletion.
    """

    def __init__(self, pod_cache: PodCache) -> None:
        self._pod_cache = pod_cache

    def replace(self, items: Iterable[Pod]) -> None:
        self._pod_cache.replace(pod for pod in items if not pod.ended)

    def put(self, item: Pod) -> None:
        if item.ended:  # a server that does not know the selector
            self._pod_cache.end(item)
        else:
            self._pod_cache.put(item)

    def remove(self, item: Pod) -> None:
        # The event shows the pod as it was before it was no longer selected. One that was not being
        # deleted has ended, and still exists. The cache keeps it for a while.
        if item.deleting:
            self._pod_cache.remove(item)
        else:
            self._pod_cache.end(item)


class NodeWatch(_Watch):
    """The watch of our own Node.

    Attributes:
        node: the Node as it is now; None before the first answer (see ``synced``), and while there
            is no such Node. A Node that was deleted and created again under its name has another
            UID.
        synced: the API server has answered once, even if only that there is no such Node.
    """

    def __init__(
        self,
        source: Source,
        node_name: str,
        *,
        journal: Journal,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Watch the Node ``node_name``; ``clock`` in unix seconds."""
        self.node: Latest[Node | None] = Latest(None)
        scope = Scope.single("this node", "/api/v1/nodes", node_name)
        self._reflector = Reflector(
            source,
            scope,
            decode.node,
            _Only(self.node, clock),
            journal=journal,
            from_cache=False,  # what was written just before must be in it
        )
        self.synced: asyncio.Event = self._reflector.synced


class _Only:
    """The receiver (`reflector.Sink`) of our Node. The times of `_dated` are noted here and not by
    the readers of ``latest``: a reader may miss a version, the receiver sees each.
    """

    def __init__(self, latest: Latest[Node | None], clock: Callable[[], float]) -> None:
        self._latest = latest
        self._clock = clock

    def replace(self, items: Iterable[Node]) -> None:
        self._publish(next(iter(items), None))

    def put(self, item: Node) -> None:
        self._publish(item)

    def remove(self, item: Node) -> None:
        if self._latest.value is not None and self._latest.value.uid == item.uid:
            self._publish(None)

    def _publish(self, node: Node | None) -> None:
        if self._latest.value != node:
            self._latest.publish(None if node is None else self._dated(node))

    def _dated(self, node: Node) -> Node:
        """Add the times since which each annotation has had its value without interruption. They
        tell how long a scheduler's lock, which is an annotation, has been there.
        """
        before, now = self._latest.value, self._clock()
        known, dates = (
            ({}, {})
            if before is None or before.uid != node.uid
            else (before.annotations, before.seen_at)
        )
        seen_at = {
            key: dates.get(key, now) if known.get(key) == value else now
            for key, value in node.annotations.items()
        }
        return dataclasses.replace(node, seen_at=seen_at)
