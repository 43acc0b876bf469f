"""Keep our Node in the families' desired state, with as few writes as that takes.

Schedulers see this node's GPUs only through annotations, labels and quantities of its Node object.
Old plugins wrote them every 30 seconds, which made clusters of 200 nodes unschedulable. Here the
Node as the watch shows it is compared with the desired state, and only a difference is written.
Nothing needs to be remembered over a restart: a missing value is a difference again.

Built and run by `agent`, which waits for `first` before it registers with the kubelet.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.cluster import api as cluster_api
from vgpu_agent.cluster.api import node_path
from vgpu_agent.cluster.node_difference import (
    DesiredEntry,
    Section,
    capacity_patch,
    compared,
    metadata_patch,
    with_conditions,
    with_taints,
)
from vgpu_agent.cluster.retrying import Backoff, FailureLog, is_permanent, slow_seconds
from vgpu_agent.cluster.write_history import WriteHistory
from vgpu_agent.concurrency import Versions
from vgpu_agent.errors import ClusterError
from vgpu_agent.log import ChangeFilter
from vgpu_agent.status import WriterStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.concurrency import Latest, Revision
    from vgpu_agent.journal import Journal
    from vgpu_agent.nodes import DesiredNode, Node

# Conflicts in a row after which trying at once gives way to pauses.
_CONFLICTS = 3
_SHORTEST_WAIT_SECONDS = 0.01
_WORTH_A_LINE_SECONDS = 1.0  # shorter waits of a write are not journalled
_LOG_AGAIN_SECONDS = 600.0
_KUBELET_FORGETS_SECONDS = 360.0
"""The kubelet goes on writing the quantities of a resource for five minutes after its plugin has
gone, and forgets them when it next checks.
"""
_COALESCING_SECONDS = 0.1
"""The wait for further changes. Each call of the kubelet changes the desired state,
and a write takes as long as the call.
"""


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Spec(msgspec.Struct):
    taints: list[dict[str, Any]] | None = None


class _Status(msgspec.Struct):
    conditions: list[dict[str, Any]] = []


class _NodeAnswer(msgspec.Struct):
    """The fields of a Node that are needed to write its conditions and taints."""

    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class NodePublisher:
    """The writer of our Node; one for the process.

    Five kinds of write may fail independently, each with its own pauses: guarded removals (of
    annotations, only if the Node is as it was seen), metadata, quantities and conditions (status
    subresource), and taints.

    State: the latest writes and failures. A crash between two writes leaves a difference, which the
    next start sees.

    Attributes:
        first: set as soon as all desired annotations and labels have been written once.
        counts: how many writes were accepted, have failed and wait, for metrics.
    """

    def __init__(
        self,
        api: Api,
        node_name: str,
        node: Latest[Node | None],
        desired_state: Callable[[Node, float], DesiredNode],
        wake: Revision,
        journal: Journal,
        clock: Callable[[], float] = time.time,
        *,
        look_seconds: float = 10.0,
    ) -> None:
        """Build it.

        Args:
            api: the API server.
            node_name: our Node's name.
            node: our Node as the watch shows it; None while there is none.
            desired_state: the desired Node, given the Node as it is and unix seconds.
            wake: advances whenever the desired state may have changed.
            journal: failures and their end are recorded there.
            clock: unix seconds.
            look_seconds: how often the desired state is computed without a change, as it may depend
                on the time; makes no request.
        """
        self._api, self._name, self._node, self._desired_state, self._wake = (
            api,
            node_name,
            node,
            desired_state,
            wake,
        )
        self._clock, self._look_seconds = clock, look_seconds
        self._failure_log = FailureLog(journal, "node")  # the prefix of its events in the journal
        self._journal = journal
        self._write_history = WriteHistory()
        self._backoffs = {
            kind: Backoff()
            for kind in ("guarded", "metadata", "quantities", "conditions", "taints")
        }
        # entry → value that the API server does not accept, until when it is left alone
        self._refused: dict[str, tuple[Any, float]] = {}
        self._uid = ""
        # The version of the Node after which another client has written, or we have removed guarded
        # annotations; and until when to wait for a newer one.
        self._outdated = ("", 0.0)
        self._removed: frozenset[str] = frozenset()  # the keys that we removed from that version
        # entry → the reason why its write waits, which is logged when it changes
        self._changes = ChangeFilter(again_seconds=_LOG_AGAIN_SECONDS)
        self._conflicts = 0
        self._pending_since: float | None = None
        self._all_written = False
        self._beat: Callable[[], None] = lambda: None
        self.first = asyncio.Event()
        self.counts = WriterStatus("node")

    async def run(self, beat: Callable[[], None]) -> None:
        """Publish until cancelled; send a heartbeat at least every ``look_seconds`` and
        before each request.
        """
        self._beat = beat
        while True:
            beat()
            versions = Versions(self._node, self._wake)  # taken first, so that no change is missed
            pause = await self.publish_once()
            await versions.passed(timeout_seconds=pause)  # until one of them has a newer version
            await asyncio.sleep(_COALESCING_SECONDS)

    async def publish_all(self) -> None:
        """Publish until the whole desired state has been written, with as many tries as that takes;
        for an agent that shuts down.
        """
        while True:
            versions = Versions(self._node)
            pause = await self.publish_once()
            if self._all_written:
                return
            await versions.passed(timeout_seconds=pause)

    async def publish_once(self) -> float:
        """Write what differs and may be written now.

        Returns:
            Seconds after which to look again, if nothing happens before.
        """
        self._all_written = False
        node = self._node.value
        if node is None:
            self._counted(0)
            return self._look_seconds
        if node.uid != self._uid:  # another Node of the same name: it has nothing that we wrote
            self._uid = node.uid
            self._write_history.forget()
            self._refused.clear()
            self._removed = frozenset()
        desired = self._desired_entries(node)
        if desired is None:
            return self._look_seconds
        pause, due, later = self._look_seconds, [], False
        for entry in desired:
            seconds = self._seconds_until_due(entry)
            if seconds == 0.0:
                due.append(entry)
            elif seconds is not None:  # None where the Node has it already
                pause, later = min(pause, seconds), True
            self._say_why_it_waits(entry, seconds)
        left = await self._write(node, due)
        self._all_written = not left and not later
        # Guarded removals concern schedulers' locks, not what this node offers.
        if not self._refused and all(
            entry.guarded or entry.section not in {Section.ANNOTATIONS, Section.LABELS}
            for entry in left
        ):
            self.first.set()
        self._counted(len(left))
        waits = (
            [backoff.seconds_left for backoff in self._backoffs.values() if backoff.seconds_left]
            if left
            else []
        )
        return max(min(pause, *waits) if waits else pause, _SHORTEST_WAIT_SECONDS)

    def _desired_entries(self, node: Node) -> Sequence[DesiredEntry] | None:
        """Return the desired entries; None when they cannot be computed now."""
        try:
            desired = list(compared(node, self._desired_state(node, self._clock())))
        except Exception as err:  # noqa: BLE001
            # a bug in one family must not stop the writer of the others
            text = f"{type(err).__name__}: {err}"
            self._failure_log.record(
                "desired state", "node.desired_state_failed", text, level="error", error=text
            )
            return None
        self._failure_log.recovered("desired state")
        return desired

    def _seconds_until_due(self, entry: DesiredEntry) -> float | None:
        """Return the time until an entry may be written; None if nothing is to be written.

        ``entry.shown`` is the value that the watch shows, ``entry.desired`` the one to be there,
        and ``entry.apart_seconds`` the least time between two writes of it.
        """
        if entry.guarded:
            # The guarded annotations are schedulers' locks of this node. A value after the watch
            # has shown the removal is a new lock, even with the same text: the next one of a
            # burst, not the removed one again.
            return (
                None
                if entry.shown is None or entry.name in self._removed_from(self._node.value)
                else 0.0
            )
        seconds = self._write_history.seconds_until_due(
            entry.name, entry.shown, entry.desired, apart_seconds=entry.apart_seconds
        )
        value, until = self._refused.get(entry.name, (None, 0.0))
        if seconds is None or value != entry.desired:
            self._refused.pop(entry.name, None)
            return seconds
        return max(seconds, until - asyncio.get_running_loop().time())

    def _removed_from(self, node: Node | None) -> frozenset[str]:
        """Return the entries that the watch still shows although they were removed,
        for as long as the watch may be late.
        """
        version, until = self._outdated
        late = (
            node is not None
            and node.resource_version == version
            and asyncio.get_running_loop().time() < until
        )
        return self._removed if late else frozenset()

    def _say_why_it_waits(self, entry: DesiredEntry, seconds: float | None) -> None:
        """Record why a write is held back for longer than a moment;
        the same reason now and then only.
        """
        why = (
            self._refused_why(entry)
            or self._write_history.delay_reason(entry.name, entry.shown, entry.desired)
            if seconds
            else ""
        )
        if not why or (seconds or 0.0) < _WORTH_A_LINE_SECONDS:
            return
        if self._changes.is_new(entry.name, why, now=asyncio.get_running_loop().time()):
            self._journal.record(
                "node.write_waits", key=entry.name, reason=why, seconds=round(seconds or 0.0, 1)
            )

    def _refused_why(self, entry: DesiredEntry) -> str:
        return "the API server refuses this value" if entry.name in self._refused else ""

    async def _write(self, node: Node, due: Sequence[DesiredEntry]) -> list[DesiredEntry]:
        """Send the due entries; return those that could not be written."""
        guarded = [entry for entry in due if entry.guarded]
        metadata = [
            entry
            for entry in due
            if entry.section in {Section.ANNOTATIONS, Section.LABELS} and not entry.guarded
        ]
        quantities = [
            entry for entry in due if entry.section in {Section.CAPACITY, Section.ALLOCATABLE}
        ]
        conditions = [entry for entry in due if entry.section is Section.CONDITIONS]
        taints = [entry for entry in due if entry.section is Section.TAINTS]
        path = node_path(self._name)
        left = []
        # Guarded removals first: any other write of ours would change the version that they need.
        if guarded and not await self._remove_guarded(node, guarded):
            left += guarded
        if metadata:
            left += await self._patch("metadata", "patch nodes", path, metadata, metadata_patch)
        if quantities:
            left += await self._patch(
                "quantities", "patch nodes/status", path + "/status", quantities, capacity_patch
            )
        if conditions and not await self._write_conditions(path, conditions):
            left += conditions
        if taints and not await self._write_taints(path, taints):
            left += taints
        return left

    async def _patch(
        self,
        kind: str,
        permission: str,
        path: str,
        desired_state: Sequence[DesiredEntry],
        body: Callable[[Sequence[DesiredEntry]], Mapping[str, Any]],
    ) -> Sequence[DesiredEntry]:
        """Send one merge patch for all entries, or one for each when the API server does not accept
        one of them; return those that could not be written.

        Args:
            kind: the key of `_backoffs`.
            permission: the RBAC permission that it needs, for messages.
            path: of the patched object: the Node or its status.
            desired_state: the entries.
            body: makes the patch from entries.
        """
        if self._backoffs[kind].seconds_left:
            return desired_state
        err = await self._send(path, body(desired_state))
        if err is None:
            self._done(kind, desired_state)
            return []
        if err.status == 403 or not is_permanent(err):
            self._failed(kind, permission, err)
            return desired_state
        if len(desired_state) > 1:
            return [
                left
                for entry in desired_state
                for left in await self._patch(kind, permission, path, [entry], body)
            ]
        (entry,) = desired_state
        self._refused[entry.name] = (
            entry.desired,
            # the pause after a failure that trying again does not mend
            asyncio.get_running_loop().time() + slow_seconds(),
        )
        self._failure_log.failed(entry.name, err, permission, key=entry.name)
        return desired_state

    async def _remove_guarded(self, node: Node, desired_state: Sequence[DesiredEntry]) -> bool:
        """Remove annotations only if the Node is still as it was seen;
        return True if that was done.
        """
        loop = asyncio.get_running_loop()
        version, until = self._outdated
        if self._backoffs["guarded"].seconds_left or (
            node.resource_version == version and loop.time() < until
        ):
            return False
        err = await self._send(
            node_path(self._name),
            metadata_patch(desired_state, resource_version=node.resource_version),
        )
        if err is None:
            self._conflicts = 0
            self._outdated = (
                node.resource_version,
                loop.time() + cluster_api.REQUEST_TIMEOUT_SECONDS,
            )
            self._removed = frozenset(entry.name for entry in desired_state)
            self._done("guarded", desired_state)
            return True
        if err.status == 409 and self._conflicts < _CONFLICTS:
            # Another client wrote in between; the desired state may differ on the newer Node, which
            # the watch is about to show.
            self._conflicts += 1
            self._removed = frozenset()
            self._outdated = (
                node.resource_version,
                loop.time() + cluster_api.REQUEST_TIMEOUT_SECONDS,
            )
        else:
            self._failed("guarded", "patch nodes", err)
        return False

    async def _write_conditions(self, path: str, desired_state: Sequence[DesiredEntry]) -> bool:
        """Write our conditions together with those of others, because a merge patch replaces the
        whole list; return True if ours are there then.
        """

        def status(answer: _NodeAnswer) -> dict[str, Any] | None:
            found = with_conditions(answer.status.conditions, desired_state, self._clock())
            return None if found is None else {"status": {"conditions": found}}

        return await self._rewrite(
            "conditions", "patch nodes/status", path, path + "/status", desired_state, status
        )

    async def _write_taints(self, path: str, desired_state: Sequence[DesiredEntry]) -> bool:
        """Write our taints together with those of others; return True if ours are there then."""

        def spec(answer: _NodeAnswer) -> dict[str, Any] | None:
            found = with_taints(answer.spec.taints or (), desired_state)
            return None if found is None else {"spec": {"taints": found or None}}

        return await self._rewrite("taints", "patch nodes", path, path, desired_state, spec)

    async def _rewrite(
        self,
        kind: str,
        permission: str,
        path: str,
        target: str,
        desired_state: Sequence[DesiredEntry],
        changes: Callable[[_NodeAnswer], dict[str, Any] | None],
    ) -> bool:
        """Read the Node at ``path`` and patch ``target``, the Node or its status, with ``changes``,
        which returns None when all is there already; begin again when another client has written in
        between. Return True if all is there then. ``kind`` and ``permission`` as in `_patch`.
        """
        if self._backoffs[kind].seconds_left:
            return False
        for _ in range(_CONFLICTS):
            self._beat()
            needed = "get nodes"
            try:
                answer = _decoded(await self._api.get(path), path)
                needed = permission
                body = changes(answer)
                if body is not None:
                    version = {"resourceVersion": answer.metadata.resource_version}
                    await self._api.patch(target, {"metadata": version, **body})
                    self.counts.written += 1
            except ClusterError as err:
                self.counts.failed += 1
                failure = err
                if err.status != 409:
                    break
            else:
                self._done(kind, desired_state)
                return True
        self._failed(kind, needed, failure)
        return False

    async def _send(self, path: str, body: Mapping[str, Any]) -> ClusterError | None:
        self._beat()
        try:
            await self._api.patch(path, body)
        except ClusterError as err:
            self.counts.failed += 1
            return err
        self.counts.written += 1
        return None

    def _done(self, kind: str, desired_state: Sequence[DesiredEntry]) -> None:
        self._backoffs[kind].succeeded()
        self._failure_log.recovered(kind)
        for entry in desired_state:
            self._failure_log.recovered(entry.name)
            # For this long the other writer of the entry may be the kubelet.
            patience = (
                _KUBELET_FORGETS_SECONDS
                if entry.section in {Section.CAPACITY, Section.ALLOCATABLE}
                else 0.0
            )
            # A guarded annotation, or one with a least time between writes, is also written by a
            # scheduler for reasons of its own. That is no contest.
            contested = not entry.guarded and self._write_history.note_write(
                entry.name, entry.shown, entry.desired, patience_seconds=patience
            )
            if contested and not entry.apart_seconds:
                text = (
                    f"another client keeps changing {entry.name} of Node {self._name}; find that "
                    "client (a second device plugin?)"
                )
                self._failure_log.record(
                    f"contest of {entry.name}",
                    "node.contested",
                    text,
                    level="warning",
                    key=entry.name,
                    error=text,
                )

    def _failed(self, kind: str, permission: str, err: ClusterError) -> None:
        self._backoffs[kind].failed(err)
        self._failure_log.failed(
            kind,
            err,
            permission,
            node=self._name,
            again_in_seconds=round(self._backoffs[kind].seconds_left, 1),
        )

    def _counted(self, pending: int) -> None:
        """Put the number of entries that wait for a write into `counts`, and how long some have
        waited.
        """
        now = asyncio.get_running_loop().time()
        if not pending:
            self._pending_since = None
        elif self._pending_since is None:
            self._pending_since = now
        self.counts.pending = pending
        self.counts.oldest_pending_seconds = (
            now - self._pending_since if self._pending_since is not None else 0.0
        )


def _decoded(answer: bytes, path: str) -> _NodeAnswer:
    try:
        return msgspec.json.decode(answer, type=_NodeAnswer)
    except msgspec.MsgspecError as err:
        raise ClusterError(
            f"the API server's answer to GET {path} is not a Node: {err}; is there a proxy in "
            "between?"
        ) from err
