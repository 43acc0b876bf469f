"""Healthy counts of our resources on our Node as soon as the kubelet has them.

The kubelet counts the healthy ids of each resource and writes them into the Node every ten seconds
(nodeStatusUpdateFrequency). Where several families share GPUs the counts change with each handover.
A scheduler that uses an old count sends a pod that the kubelet can only fail. So the same number is
written here when the kubelet has received the list. The kubelet's next look finds nothing to
change. A count that is about to go down is written at once, and the kubelet gets the list a moment
after the API server has the count. So no pod is sent to ids that are Healthy only for pods that are
on their way already.

The kubelet's own counts win: each count is written once for each list, only over a count that the
kubelet has written before, and only while the kubelet has as many ids as the list. A count that the
kubelet changes back stays, except one that it writes shortly before a new list, or at its very
moment: that is the count of the list before. Built and run by `agent`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.cluster import api as cluster_api
from vgpu_agent.cluster.api import node_path
from vgpu_agent.cluster.node_difference import same_quantity
from vgpu_agent.cluster.quantities import whole_number
from vgpu_agent.cluster.retrying import Backoff, Complaints, lasting
from vgpu_agent.concurrency import Versions
from vgpu_agent.errors import ClusterError
from vgpu_agent.status import WriterStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.concurrency import Latest, Revision
    from vgpu_agent.journal import Journal
    from vgpu_agent.nodes import Node, SentCounts

_LOOK_SECONDS = 10.0
# The kubelet takes over a list in milliseconds, and the lists of several resources change together.
_COALESCING_SECONDS = 0.1
# A Node is a large object that every scheduler and kubelet proxy of the cluster watches. A handover
# is a few writes within seconds, and a turn lasts one. Counts that go down do not wait.
_APART_SECONDS = 0.5
_AT_ONCE = 8
# Writes of the kubelet later than this are counted with the new list.
_CROSSES_SECONDS = 1.0


@dataclasses.dataclass
class _Write:
    """The last write of one count.

    Attributes:
        healthy: the count.
        sent: the last list that the kubelet had been sent by then.
        at: when it was written (loop time).
        shown: the watch has shown it since.
        before: the list before that; empty once the kubelet can no longer have counted it.
    """

    healthy: int
    sent: int
    at: float
    shown: bool = False
    before: str = ""


class AllocatableWriter:
    """The writer of ``status.allocatable`` for resources with a changed list.

    State: the last count written of each resource. A new agent sends the kubelet new lists, and
    leaves all before to the kubelet.

    Attributes:
        counts: for metrics.
    """

    def __init__(
        self,
        api: Api,
        node_name: str,
        node: Latest[Node | None],
        sent: Callable[[], Mapping[str, SentCounts]],
        lists: Revision,
        withdrawn: Revision,
        counted: Callable[[int | None], None],
        journal: Journal,
    ) -> None:
        """Build it.

        Args:
            api: the API server.
            node_name: our Node's name.
            node: our Node as the watch shows it; None while there is none.
            sent: resource → the last list that the kubelet was sent over a stream that is open.
            lists: advances when that changes.
            withdrawn: advances when schedulers must see fewer ids than the kubelet has.
            counted: is told up to which value of ``withdrawn`` the Node has the counts, or None
                when the API server refuses them for good.
            journal: a lasting refusal is recorded there.
        """
        self._api, self._path, self._node = api, f"{node_path(node_name)}/status", node
        self._sent, self._lists, self._withdrawn = sent, lists, withdrawn
        self._counted = counted
        self._complaints = Complaints(journal, "allocatable")
        self._uid = ""
        self._writes: dict[str, _Write] = {}
        self._backoffs: dict[str, Backoff] = {}
        # loop time at which a write would be due if all were equally far apart
        self._next_at = float("-inf")
        self.counts = WriterStatus("allocatable")

    async def run(self, beat: Callable[[], None]) -> None:
        """Follow the lists until cancelled."""
        while True:
            beat()
            versions = Versions(self._node, self._lists, self._withdrawn)
            withdrawn = self._withdrawn.version
            pause = await self.write_once()
            await versions.passed(timeout_seconds=pause)
            if self._withdrawn.version == withdrawn:  # pods are bound by the old count until then
                await asyncio.sleep(_COALESCING_SECONDS)

    async def write_once(self) -> float:
        """Write the counts that are due and may be written now;
        seconds after which to look again, if nothing happens before.
        """
        node = self._node.value
        if node is None:
            return _LOOK_SECONDS
        sent, withdrawn = self._sent(), self._withdrawn.value
        if node.uid != self._uid:
            self._uid = node.uid
            self._writes.clear()
        self._writes = {
            resource: write for resource, write in self._writes.items() if resource in sent
        }
        due = {
            resource: counts
            for resource, counts in sent.items()
            if self._is_due(node, resource, counts)
        }
        self.counts.pending = len(due)
        if not due:
            if not any(_has_other_list(node, resource, sent[resource]) for resource in sent):
                self._counted(withdrawn)
            return _LOOK_SECONDS
        apart = self._next_at - _APART_SECONDS * (_AT_ONCE - 1) - asyncio.get_running_loop().time()
        if apart > 0 and not any(
            counts.offered < (whole_number(node.allocatable[resource]) or 0)
            for resource, counts in due.items()
        ):
            return apart
        waits = {resource: self._backoff(resource).seconds_left for resource in due}
        if ready := {resource: counts for resource, counts in due.items() if not waits[resource]}:
            if await self._write(ready) and len(ready) == len(due):
                self._counted(withdrawn)
            return _APART_SECONDS
        return min(*waits.values(), _LOOK_SECONDS)

    def _is_due(self, node: Node, resource: str, sent: SentCounts) -> bool:
        allocatable = node.allocatable.get(resource)
        if (
            allocatable is None
            or resource not in node.capacity
            or _has_other_list(node, resource, sent)
        ):
            return False
        last = self._writes.get(resource)
        age_seconds = 0.0
        if last is not None:
            age_seconds = asyncio.get_running_loop().time() - last.at
            last.shown = (
                last.shown
                or same_quantity(allocatable, str(last.healthy))
                or age_seconds > cluster_api.REQUEST_TIMEOUT_SECONDS
            )
        if (last is None or last.shown) and same_quantity(allocatable, str(sent.offered)):
            self._note(resource, sent, shown=True)
            return False
        if last is None or (last.healthy, last.sent) != (sent.offered, sent.healthy):
            return True
        if not last.shown:
            return False
        if sent.offered < sent.healthy and same_quantity(allocatable, str(sent.healthy)):
            return True  # the kubelet does not have the shorter list yet
        return (
            bool(last.before)
            and same_quantity(allocatable, last.before)
            and age_seconds < _CROSSES_SECONDS
        )

    def _note(self, resource: str, sent: SentCounts, *, shown: bool = False) -> None:
        last = self._writes.get(resource)
        before = str(last.sent) if last is not None and last.sent != sent.healthy else ""
        self._writes[resource] = _Write(
            sent.offered, sent.healthy, asyncio.get_running_loop().time(), shown, before
        )

    def _backoff(self, resource: str) -> Backoff:
        return self._backoffs.setdefault(resource, Backoff())

    async def _write(self, due: Mapping[str, SentCounts]) -> bool:
        """One merge patch for all counts, or one for each when one of them spoils it;
        whether all are written.
        """
        now = asyncio.get_running_loop().time()
        # However many writes did not wait, the next one waits no longer than this.
        self._next_at = min(
            max(self._next_at, now) + _APART_SECONDS, now + _APART_SECONDS * _AT_ONCE
        )
        err = await self._send(due)
        if err is not None and lasting(err) and len(due) > 1:
            written = [
                self._done([resource], due, await self._send({resource: counts}))
                for resource, counts in due.items()
            ]
            return all(written)
        return self._done(list(due), due, err)

    async def _send(self, due: Mapping[str, SentCounts]) -> ClusterError | None:
        try:
            counts = {resource: str(sent.offered) for resource, sent in due.items()}
            await self._api.patch(self._path, {"status": {"allocatable": counts}})
        except ClusterError as err:
            self.counts.failed += 1
            return err
        self.counts.written += 1
        return None

    def _done(
        self, resources: Sequence[str], due: Mapping[str, SentCounts], err: ClusterError | None
    ) -> bool:
        """Take note of the outcome of a write; whether it was one."""
        for resource in resources:
            if err is None:
                self._note(resource, due[resource])
                self._backoff(resource).succeeded()
                self._complaints.over(resource)
                continue
            self._backoff(resource).failed(err)
            if lasting(err):
                self._counted(None)
                text = (
                    f"the API server refuses the count of {resource} in this Node's status "
                    f"({err}), so the kubelet alone writes it, every ten seconds; apply the "
                    "ClusterRole and the policy in manifests/ of this version"
                )
                self._complaints.say(
                    resource,
                    "allocatable.refused",
                    "refused",
                    level="warning",
                    resource=resource,
                    error=text,
                )
        return err is None


def _has_other_list(node: Node, resource: str, sent: SentCounts) -> bool:
    """Tell whether the kubelet has yet to write the last list of the resource to the Node."""
    capacity = node.capacity.get(resource)
    return capacity is not None and not same_quantity(capacity, str(sent.listed))
