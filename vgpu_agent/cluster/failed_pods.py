"""Pods that the kubelet failed at their admission: all that a node has, for `rescue`, and those of
the time in which no agent was registered.

While a device plugin is away, the kubelet fails each pod that asks for its resource and is admitted
at that moment. Such a pod never recovers, and the watch of pods does not show it. So each start of
the agent asks once for those of the last minutes, in the background. The log of a restart then
names the pods that failed because of it.

Built and run by `agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.cluster import retrying
from vgpu_agent.cluster.lists import ListReader
from vgpu_agent.cluster.retrying import Backoff, is_permanent
from vgpu_agent.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection

    from vgpu_agent.cluster.api import ListingApi
    from vgpu_agent.cluster.events import Events
    from vgpu_agent.journal import Journal
    from vgpu_agent.nodes import Node

REASON = "VgpuPodsFailedWhileDown"  # of the event about our Node

# How long before our start a pod may have failed to be reported. Longer is not needed: the kubelet
# forgets a plugin that is away for five minutes, and the scheduler sends the node no pods for it
# from the first second on.
_BEFORE_START_SECONDS = 600.0
# Pods that are admitted between our start and our registration fail as well.
_SETTLING_SECONDS = 5.0
_TRIES = 8
_MAX_NAMES = 20
_LONGEST_NAME = 128
# Pods in one answer of the API server, and answers in a row. By default Kubernetes keeps 12,500
# ended pods in a cluster, and removes the oldest of more.
_PAGE, _MAX_PAGES = 100, 1000

ADMISSION_ERROR = "UnexpectedAdmissionError"  # the reason in the status of such a pod
# parts of the kubelet's message when the plugin of a resource is away
_AWAY = ("no healthy devices present", "cannot allocate unregistered device")


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    creation_timestamp: str | None = None


class _Resources(msgspec.Struct):
    limits: dict[str, str | int | float] | None = None


class _Container(msgspec.Struct):
    resources: _Resources | None = None


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None


class _Status(msgspec.Struct, rename="camel"):
    reason: str | None = None
    message: str | None = None
    start_time: str | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec
    status: _Status


_pods = msgspec.json.Decoder(_Pod)


class FailedPods:
    """Look once for pods that failed because the agent was away.

    State: the number found, for metrics. A restart looks again, at the ten minutes before it.

    Attributes:
        found: how many pods failed for that reason before this start.
    """

    def __init__(
        self,
        api: ListingApi,
        node_name: str,
        node: Callable[[], Node | None],
        resources: Callable[[], Collection[str]],
        events: Events,
        journal: Journal,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Build it.

        Args:
            api: the API server.
            node_name: our Node's name.
            node: our Node, under which the event will be shown; None while it is not known.
            resources: the names of this agent's resources.
            events: the queue of the Kubernetes events to be written.
            journal: the pods are named there.
            clock: unix seconds.
        """
        self._api, self._node_name, self._node, self._resources = api, node_name, node, resources
        self._events, self._journal = events, journal
        self._since = clock() - _BEFORE_START_SECONDS
        self.found = 0

    async def run(self, beat: Callable[[], None]) -> None:
        """Ask until there is an answer, a few times at most; then return. ``beat`` sends a
        heartbeat.
        """
        await asyncio.sleep(_SETTLING_SECONDS)
        backoff = Backoff()
        for _ in range(_TRIES):
            beat()
            try:
                names = await self._names(beat)
            except ClusterError as err:
                backoff.failed(err)
                self._journal.record(
                    "pods.failed_while_down_unknown",
                    error=str(err),
                    again_in_seconds=round(backoff.seconds_left, 1),
                )
                if is_permanent(err):
                    return
                await asyncio.sleep(min(backoff.seconds_left, retrying.BACKOFF_MAX_SECONDS))
            else:
                self._report(names)
                return

    async def _names(self, beat: Callable[[], None]) -> list[str]:
        """Return the pods, as ``namespace/name``.

        Raises:
            ClusterError: no answer, or one that cannot be read.
        """
        ours, names = frozenset(self._resources()), []
        pods = failed_at_admission(self._api, self._node_name, beat)
        async with contextlib.aclosing(pods):
            async for raw in pods:
                try:
                    pod = _pods.decode(raw)
                except (msgspec.MsgspecError, ValueError, RecursionError):
                    continue  # an object that cannot be read is not one of ours
                if self._failed_meanwhile(pod, ours):
                    names.append(f"{pod.metadata.namespace}/{pod.metadata.name}"[:_LONGEST_NAME])
        return sorted(names)

    def _failed_meanwhile(self, pod: _Pod, ours: frozenset[str]) -> bool:
        """Tell whether the pod asks for one of our resources, and failed at admission because the
        plugin was away, not longer than `_BEFORE_START_SECONDS` before our start.
        """
        if pod.status.reason != ADMISSION_ERROR or not any(
            text in (pod.status.message or "") for text in _AWAY
        ):
            return False
        containers = (*(pod.spec.containers or ()), *(pod.spec.init_containers or ()))
        asks = any(
            not ours.isdisjoint(one.resources.limits or ())
            for one in containers
            if one.resources is not None
        )
        return (
            asks
            and _unix_seconds(pod.status.start_time or pod.metadata.creation_timestamp)
            >= self._since
        )

    def _report(self, names: list[str]) -> None:
        self.found = len(names)
        if not names:
            return
        named = names[:_MAX_NAMES]
        which = "among them " if len(names) > len(named) else ""
        # The names come last: the journal and events cut long texts.
        text = (
            f"{len(names)} pods failed at admission while no vgpu-agent was registered on this "
            f"node: {which}{', '.join(named)}"
        )
        self._journal.record(
            "pods.failed_while_down", level="warning", pods=named, number=len(names), error=text
        )
        if (node := self._node()) is not None:
            self._events.raise_event(node, REASON, text)


async def failed_at_admission(
    api: ListingApi, node_name: str, beat: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    """Yield the failed pods of a node as JSON, and of these only pods in which `ADMISSION_ERROR`
    stands somewhere, since to decode thousands would take seconds. All are read, however many and
    large they are: most may be of one tenant, and must not hide those of the others.

    Raises:
        ClusterError: no answer, or one that is not a list.
    """
    path, selector = "/api/v1/pods", f"spec.nodeName={node_name},status.phase=Failed"
    params = {"fieldSelector": selector, "limit": str(_PAGE)}
    for _ in range(_MAX_PAGES):
        page = ListReader(path)
        async with contextlib.aclosing(api.chunks(path, params)) as chunks:
            async for chunk in chunks:
                beat()
                for raw in page.feed(chunk):
                    if ADMISSION_ERROR.encode() in raw:
                        yield raw
        _, token = page.end()
        if not token:
            return
        params = {**params, "continue": token}
    raise ClusterError(
        f"GET {path}: the list of failed pods goes on after {_MAX_PAGES} pages of {_PAGE}; look "
        "for a proxy between this node and the API server"
    )


def _unix_seconds(timestamp: str | None) -> float:
    try:
        return dt.datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
    except (ValueError, OverflowError, OSError):
        return 0.0
