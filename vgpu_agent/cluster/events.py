"""Kubernetes events about a pod or a node, shown by ``kubectl describe``.

Raising an event never waits and never fails. The event is queued, and written as soon as the API
server accepts it. After an hour in the queue it is dropped, because an old event would mislead.
Raised by other modules of this package, and by the scheduler extender.
"""

from __future__ import annotations

import asyncio
import collections
import secrets
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from vgpu_agent.cluster.api import events_path, timestamp
from vgpu_agent.cluster.retrying import Backoff, FailureLog, is_permanent
from vgpu_agent.concurrency import Revision, Versions
from vgpu_agent.errors import ClusterError
from vgpu_agent.pods import Pod
from vgpu_agent.status import WriterStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.journal import Journal
    from vgpu_agent.nodes import Node

# The limits of the API server's validation of core/v1 Event. A name is a DNS subdomain of at most
# 253 characters, and the suffix from `_unique_name` takes 17 of them.
_MESSAGE_BYTES = 1024
_REASON_BYTES = 128
_NAME_LENGTH = 236
_NODE_NAMESPACE = "default"  # of events about Nodes, which have no namespace
# The default time that the API server keeps an event (kube-apiserver --event-ttl), and the time
# that the agent tries to write one.
_LIFETIME_SECONDS = 3600.0
# The pause before the count of an event that the API server has is written again.
_COUNT_SECONDS = 60.0
_SHORTEST_WAIT_SECONDS = 0.01


class _Event(msgspec.Struct, eq=False):
    """One message about one object, and the number of times that it was raised; ``regarding`` is
    the reference to that object (``involvedObject``), ``kind`` the event's ``type``.
    """

    name: str
    namespace: str
    regarding: dict[str, str]
    reason: str
    message: str
    kind: str
    first_at: float  # Unix seconds, as is `last_at`
    last_at: float
    count: int
    created_at: float  # seconds of the event loop's clock, as is `queued_at`
    queued_at: float  # the last time that the event was put into the queue
    queued: bool = True
    written_count: int = 0  # the count that the API server has; 0 when it does not have the event


class Events:
    """The queue of events to write, and the events of the last hour.

    State: in memory only. Events that are still queued when the agent ends are lost. The next agent
    raises them again if their cause persists.

    Attributes:
        counts: the counters for metrics. ``dropped`` counts the events that did not fit into the
            queue, were too old, or were refused by the API server.
    """

    def __init__(
        self,
        api: Api,
        component: str,
        node_name: str,
        journal: Journal,
        clock: Callable[[], float] = time.time,
        *,
        max_queued: int = 256,
        heartbeat_seconds: float = 10.0,
    ) -> None:
        """Start with an empty queue.

        Args:
            api: the API server.
            component: the source of the events, e.g. ``vgpu-agent``.
            node_name: the name of this agent's Node.
            journal: receives failures, and the end of them.
            clock: returns Unix seconds, for the time stamps.
            max_queued: the size of the queue; a further event replaces the oldest one.
            heartbeat_seconds: the longest time between two heartbeats of the loop.
        """
        self._api, self._component, self._node_name, self._clock = api, component, node_name, clock
        # `events` is the first part of the names that failures have in the journal
        self._failure_log = FailureLog(journal, "events")
        self._max_queued, self._heartbeat_seconds = max_queued, heartbeat_seconds
        # by object, reason and message, in the order of creation
        self._events: dict[tuple[str, str, str], _Event] = {}
        self._queue: collections.deque[_Event] = collections.deque()
        self._backoff = Backoff()
        # namespace → failures in a row that may end by themselves
        self._failures: collections.Counter[str] = collections.Counter()
        self._raised = Revision()  # advances with each event that is put into the queue
        self.counts = WriterStatus("events")

    def raise_event(
        self,
        regarding: Pod | Node,
        reason: str,
        message: str,
        kind: Literal["Warning", "Normal"] = "Warning",
    ) -> None:
        """Raise an event about a pod or a node. The same event within an hour adds to the count.

        Args:
            regarding: the object whose ``kubectl describe`` shows the event.
            reason: one word in CamelCase, e.g. ``VgpuStartRefused``.
            message: the text for people, cut to 1024 bytes.
            kind: the event's ``type``: ``Warning`` when something is wrong.
        """
        now = asyncio.get_running_loop().time()
        message = _truncated(message, _MESSAGE_BYTES)
        key = (regarding.uid or regarding.name, reason, message)
        self._forget_old(now)
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = self._new(regarding, reason, message, kind, now)
            self._enqueue(event)
        else:
            event.count += 1
            event.last_at = self._clock()
            if not event.queued:
                self._enqueue(event)
        self._update_counts()

    async def run(self, beat: Callable[[], None]) -> None:
        """Write events until cancelled.

        Args:
            beat: sends a heartbeat; called before each request, and at least every
                ``heartbeat_seconds``.
        """
        while True:
            beat()
            versions = Versions(self._raised)  # taken first, so that no change is missed
            pause = await self.write_once()
            if pause > 0:
                # until an event is raised
                await versions.passed(timeout_seconds=min(pause, self._heartbeat_seconds))

    async def write_once(self) -> float:
        """Write one event of the queue that is due, if there is one: the first of the namespaces
        with the fewest failures in a row. So a namespace for which the API server accepts no
        events, or only a few, delays those of others by the pause after a failure at most.

        Returns:
            the seconds until the next call is useful; 0 after a write.
        """
        now = asyncio.get_running_loop().time()
        while self._queue and now - self._queue[0].queued_at > _LIFETIME_SECONDS:
            self._drop(self._queue[0])
        self._update_counts()
        if self._backoff.seconds_left:
            return max(_SHORTEST_WAIT_SECONDS, self._backoff.seconds_left)
        due = min(
            (event for event in self._queue if self._due_at(event) <= now),
            key=lambda event: self._failures[event.namespace],
            default=None,
        )
        if due is None:
            return max(
                _SHORTEST_WAIT_SECONDS,
                min(
                    (self._due_at(event) - now for event in self._queue),
                    default=self._heartbeat_seconds,
                ),
            )
        await self._write(due)
        self._update_counts()
        return 0.0

    def _due_at(self, event: _Event) -> float:
        return event.queued_at + _COUNT_SECONDS if event.written_count else event.created_at

    async def _write(self, event: _Event) -> None:
        path, count = events_path(event.namespace), event.count
        try:
            if event.written_count:
                permission = "patch events"
                await self._api.patch(
                    f"{path}/{event.name}",
                    {"count": count, "lastTimestamp": timestamp(event.last_at)},
                )
            else:
                permission = "create events"
                await self._api.post(path, self._body(event))
        except ClusterError as err:
            self.counts.failed += 1
            self._handle_failure(event, err, permission, count)
        else:
            self._note_written(event, count)

    def _handle_failure(
        self, event: _Event, err: ClusterError, permission: str, count: int
    ) -> None:
        if event.written_count and err.status == 404:
            # the API server has deleted the event early: create it again under a new name
            event.written_count, event.name = 0, _unique_name(event.regarding["name"])
        elif not event.written_count and err.status == 409:
            # names are unique, so an earlier try has created the event and its answer was lost
            self._note_written(event, count)
        elif is_permanent(err) or err.status == 404:
            # forbidden or invalid, or the namespace is gone; other events may still be accepted
            self._failure_log.failed(
                "event", err, permission, regarding=event.regarding["name"], reason=event.reason
            )
            self._drop(event)
        else:
            self._failures[event.namespace] += 1
            self._backoff.failed(err)
            self._failure_log.failed("event", err, permission)

    def _note_written(self, event: _Event, count: int) -> None:
        self._backoff.succeeded()
        self._failures.pop(event.namespace, None)
        # that of a namespace whose events were dropped meanwhile is over, too
        if self._failures.keys().isdisjoint(each.namespace for each in self._queue):
            self._failures.clear()
            self._failure_log.recovered("event")
        self.counts.written += 1
        event.written_count = count
        self._dequeue(event)
        if event.count > count:  # raised again during the request
            self._enqueue(event)

    def _enqueue(self, event: _Event) -> None:
        event.queued, event.queued_at = True, asyncio.get_running_loop().time()
        self._queue.append(event)
        if len(self._queue) > self._max_queued:
            self._drop(self._queue[0])
        self._raised.advance()

    def _drop(self, event: _Event) -> None:
        """Remove the event from the queue without writing it.

        It stays among the events of the last hour.
        """
        self.counts.dropped += 1
        self._dequeue(event)

    def _dequeue(self, event: _Event) -> None:
        event.queued = False
        if event in self._queue:
            self._queue.remove(event)

    def _forget_old(self, now: float) -> None:
        """Forget events after an hour, or all that are not queued when there are too many.

        When a forgotten event is raised again, it becomes a new object in the API server.
        """
        excess = len(self._events) - 4 * self._max_queued
        old = [
            key
            for key, event in self._events.items()
            if (now - event.created_at >= _LIFETIME_SECONDS or excess > 0) and not event.queued
        ]
        for key in old:
            del self._events[key]

    def _new(
        self, regarding: Pod | Node, reason: str, message: str, kind: str, now: float
    ) -> _Event:
        unix_seconds = self._clock()
        if isinstance(regarding, Pod):
            namespace = regarding.namespace
            reference = {
                "kind": "Pod",
                "namespace": namespace,
                "name": regarding.name,
                "uid": regarding.uid,
            }
        else:
            namespace = _NODE_NAMESPACE
            reference = {
                "kind": "Node",
                "name": regarding.name,
                "uid": regarding.uid or regarding.name,
            }
        reference["apiVersion"] = "v1"
        return _Event(
            name=_unique_name(regarding.name),
            namespace=namespace,
            regarding=reference,
            reason=_truncated(reason, _REASON_BYTES),
            message=message,
            kind=kind,
            first_at=unix_seconds,
            last_at=unix_seconds,
            count=1,
            created_at=now,
            queued_at=now,
        )

    def _body(self, event: _Event) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": event.name, "namespace": event.namespace},
            "involvedObject": event.regarding,
            "reason": event.reason,
            "message": event.message,
            "type": event.kind,
            "source": {"component": self._component, "host": self._node_name},
            "firstTimestamp": timestamp(event.first_at),
            "lastTimestamp": timestamp(event.last_at),
            "count": event.count,
            "reportingComponent": self._component,
            "reportingInstance": self._node_name,
        }

    def _update_counts(self) -> None:
        now = asyncio.get_running_loop().time()
        self.counts.pending = len(self._queue)
        self.counts.oldest_pending_seconds = now - min(
            (event.queued_at for event in self._queue), default=now
        )


def _unique_name(object_name: str) -> str:
    """Return the name of a new event: the name of its object, and 64 random bits."""
    return f"{object_name[:_NAME_LENGTH].rstrip('-.')}.{secrets.token_hex(8)}"


def _truncated(text: str, max_bytes: int) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - 3].decode("utf-8", "ignore") + "…"
