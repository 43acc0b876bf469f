"""Kubernetes events for the owner of a pod, or the operator of a node,
where they look first (``kubectl describe``).

Raising an event never waits and never fails. It is queued, written when the API server takes it,
and given up after an hour, when it would only puzzle. Raised by `reschedule` and by `agent`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import secrets
import time
from typing import TYPE_CHECKING, Any, Literal

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

# API validation of core/v1 Event: message and reason; a name is a DNS subdomain of 253, of which
# the suffix takes 17.
_MESSAGE_BYTES = 1024
_REASON_BYTES = 128
_NAME_LENGTH = 236
_NODE_NAMESPACE = "default"
# How long the API server keeps an event by default (kube-apiserver --event-ttl); also how long we
# try to write one.
_HOUR_SECONDS = 3600.0
# Repetitions are added up in between.
_COUNT_SECONDS = 60.0
_SHORTEST_WAIT_SECONDS = 0.01


@dataclasses.dataclass(slots=True, eq=False)
class _Event:
    """One text about one object, and its number of repetitions."""

    name: str
    namespace: str
    regarding: dict[str, str]
    reason: str
    message: str
    kind: str
    first: float  # unix seconds
    last: float
    count: int
    began: float  # the event loop's clock
    asked: float  # when something was last queued for it
    queued: bool = True
    written: int = 0  # the count that the API server has; 0 when it does not have the event


class Events:
    """The queue of events, and the texts of the last hour.

    State: memory only. Events that were not written when the agent ends are lost, and raised again
    while their reason lasts.

    Attributes:
        counts: for metrics; ``dropped`` are those that were too many, too old or refused.
    """

    def __init__(
        self,
        api: Api,
        component: str,
        node_name: str,
        journal: Journal,
        clock: Callable[[], float] = time.time,
        *,
        longest_queue: int = 256,
        look_seconds: float = 10.0,
    ) -> None:
        """Build it.

        Args:
            api: the API server.
            component: the source of the events, e.g. ``vgpu-agent``.
            node_name: our Node's name.
            journal: troubles and their end are recorded there.
            clock: unix seconds, for the time stamps.
            longest_queue: how many may wait; the oldest goes when there are more.
            look_seconds: how often the loop sends a heartbeat.
        """
        self._api, self._component, self._node_name, self._clock = api, component, node_name, clock
        self._failure_log = FailureLog(journal, "events")
        self._longest_queue, self._look_seconds = longest_queue, look_seconds
        # by object, reason and message; the one that began first comes first
        self._events: dict[tuple[str, str, str], _Event] = {}
        self._queue: collections.deque[_Event] = collections.deque()
        self._backoff = Backoff()
        self._raised = Revision()
        self.counts = WriterStatus("events")

    def raise_event(
        self,
        regarding: Pod | Node,
        reason: str,
        message: str,
        kind: Literal["Warning", "Normal"] = "Warning",
    ) -> None:
        """Raise an event about a pod or a node; the same again within an hour only counts.

        Args:
            regarding: the object under which ``kubectl describe`` will show it.
            reason: one word in CamelCase, e.g. ``VgpuStartRefused``.
            message: for humans; cut after 1024 bytes.
            kind: ``Warning`` when something is wrong.
        """
        now = asyncio.get_running_loop().time()
        message = _cut(message, _MESSAGE_BYTES)
        key = (regarding.uid or regarding.name, reason, message)
        self._forget_old(now)
        known = self._events.get(key)
        if known is None:
            known = self._events[key] = self._new(regarding, reason, message, kind, now)
            self._put(known)
        else:
            known.count += 1
            known.last = self._clock()
            if not known.queued:
                self._put(known)
        self._count()

    async def run(self, beat: Callable[[], None]) -> None:
        """Write until cancelled; send a heartbeat at least every ``look_seconds`` and
        before each request.
        """
        while True:
            beat()
            versions = Versions(self._raised)
            pause = await self.write_once()
            if pause > 0:
                await versions.passed(timeout_seconds=min(pause, self._look_seconds))

    async def write_once(self) -> float:
        """Write the event that may be written now and has waited longest;
        seconds after which to look again, 0 for now.
        """
        now = asyncio.get_running_loop().time()
        while self._queue and now - self._queue[0].asked > _HOUR_SECONDS:
            self._drop(self._queue[0])
        self._count()
        if self._backoff.seconds_left:
            return max(_SHORTEST_WAIT_SECONDS, self._backoff.seconds_left)
        due = next((event for event in self._queue if self._due_at(event) <= now), None)
        if due is None:
            return max(
                _SHORTEST_WAIT_SECONDS,
                min(
                    (self._due_at(event) - now for event in self._queue), default=self._look_seconds
                ),
            )
        await self._write(due)
        self._count()
        return 0.0

    def _due_at(self, event: _Event) -> float:
        return event.asked + _COUNT_SECONDS if event.written else event.began

    async def _write(self, event: _Event) -> None:
        path, count = events_path(event.namespace), event.count
        try:
            if event.written:
                permission = "patch events"
                await self._api.patch(
                    f"{path}/{event.name}", {"count": count, "lastTimestamp": timestamp(event.last)}
                )
            else:
                permission = "create events"
                await self._api.post(path, self._body(event))
        except ClusterError as err:
            self.counts.failed += 1
            self._failed(event, err, permission, count)
        else:
            self._written(event, count)

    def _failed(self, event: _Event, err: ClusterError, permission: str, count: int) -> None:
        if event.written and err.status == 404:  # the API server has forgotten it before its time
            event.written, event.name = 0, _name(event.regarding["name"])
        elif not event.written and err.status == 409:
            # our own, whose answer was lost: the name is unique
            self._written(event, count)
        elif is_permanent(err) or err.status == 404:
            # forbidden, invalid, or its namespace is gone: the next event may still be welcome
            self._failure_log.failed(
                "event", err, permission, regarding=event.regarding["name"], reason=event.reason
            )
            self._drop(event)
        else:
            self._backoff.failed(err)
            self._failure_log.failed("event", err, permission)

    def _written(self, event: _Event, count: int) -> None:
        self._backoff.succeeded()
        self._failure_log.recovered("event")
        self.counts.written += 1
        event.written = count
        self._remove(event)
        if event.count > count:  # raised again meanwhile
            self._put(event)

    def _put(self, event: _Event) -> None:
        event.queued, event.asked = True, asyncio.get_running_loop().time()
        self._queue.append(event)
        if len(self._queue) > self._longest_queue:
            self._drop(self._queue[0])
        self._raised.advance()

    def _drop(self, event: _Event) -> None:
        """Give the event up. It stays among the texts of the last hour,
        so that it is not tried again at once.
        """
        self.counts.dropped += 1
        self._remove(event)

    def _remove(self, event: _Event) -> None:
        event.queued = False
        if event in self._queue:
            self._queue.remove(event)

    def _forget_old(self, now: float) -> None:
        """Forget events after an hour, so that the same text is raised again."""
        spare = len(self._events) - 4 * self._longest_queue
        old = [
            key
            for key, event in self._events.items()
            if (now - event.began >= _HOUR_SECONDS or spare > 0) and not event.queued
        ]
        for key in old:
            del self._events[key]

    def _new(
        self, regarding: Pod | Node, reason: str, message: str, kind: str, now: float
    ) -> _Event:
        unix = self._clock()
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
            name=_name(regarding.name),
            namespace=namespace,
            regarding=reference,
            reason=_cut(reason, _REASON_BYTES),
            message=message,
            kind=kind,
            first=unix,
            last=unix,
            count=1,
            began=now,
            asked=now,
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
            "firstTimestamp": timestamp(event.first),
            "lastTimestamp": timestamp(event.last),
            "count": event.count,
            "reportingComponent": self._component,
            "reportingInstance": self._node_name,
        }

    def _count(self) -> None:
        now = asyncio.get_running_loop().time()
        self.counts.pending = len(self._queue)
        self.counts.oldest_pending_seconds = now - min(
            (event.asked for event in self._queue), default=now
        )


def _name(regarding: str) -> str:
    """A name that no other event has: the object's, and 64 random bits."""
    return f"{regarding[:_NAME_LENGTH].rstrip('-.')}.{secrets.token_hex(8)}"


def _cut(text: str, longest_bytes: int) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= longest_bytes:
        return encoded.decode()
    return encoded[: longest_bytes - 3].decode("utf-8", "ignore") + "…"
