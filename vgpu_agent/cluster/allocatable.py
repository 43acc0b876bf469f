"""Write the healthy counts of our resources into our Node as soon as the kubelet has them.

The kubelet counts the healthy ids of each resource, and writes the counts into the Node every ten
seconds (nodeStatusUpdateFrequency). Where several families share GPUs, the counts change whenever a
GPU goes from one family to another. A scheduler with an old count assigns pods that the kubelet
then fails. So the agent writes the new count itself, and the kubelet's next write changes nothing.
A count that increases is written once the kubelet has had time to process the new list of ids
(ListAndWatch). A count that decreases is written before the kubelet gets the shorter list.
Meanwhile the ids that the list will lose are only for pods that are already bound.

The kubelet's own counts have priority. The agent writes each count once for each list, only over a
count that the kubelet has written before, and only while the kubelet has as many ids as the list.
If the kubelet changes the count back, the kubelet's value stays. The exception is a value that the
kubelet writes around the moment of a new list, because that is the count of the previous list.
`agent` creates and runs the writer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.cluster import api as cluster_api
from vgpu_agent.cluster.api import node_path
from vgpu_agent.cluster.node_difference import same_quantity
from vgpu_agent.cluster.quantities import whole_number
from vgpu_agent.cluster.retrying import Backoff, FailureLog, is_permanent
from vgpu_agent.concurrency import Versions
from vgpu_agent.errors import ClusterError
from vgpu_agent.status import WriterStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.concurrency import Latest, Revision
    from vgpu_agent.journal import Journal
    from vgpu_agent.nodes import Node, SentCounts

_POLL_SECONDS = 10.0  # the longest pause while no input changes
# The wait for further changes: the lists of several resources change together, and the kubelet
# processes each in milliseconds.
_COALESCING_SECONDS = 0.1
# A count that has increased is written no earlier than this after the list was sent, also when a
# withdrawal is written meanwhile: a pod that is bound by it before the kubelet has the list is
# failed. The kubelet needs milliseconds; and a family whose turn it is has a second for its pods.
PROCESSING_SECONDS = 0.1
# The rate limit of the writes: one in this interval, after a burst of several. A Node is a large
# object that many components of the cluster watch. When a GPU goes to another family, there are a
# few writes within seconds. Counts that decrease are written without waiting.
_WRITE_INTERVAL_SECONDS = 0.5
_BURST_WRITES = 8
# A count that the kubelet writes later than this after a new list is the count of that list.
_LATE_WRITE_SECONDS = 1.0


class _Write(msgspec.Struct):
    """The last write of one count.

    Attributes:
        count: the count that was written.
        list_healthy: the number of healthy ids in the last list that the kubelet had at that time.
        written_at: the time of the write, on the event loop's clock.
        shown: the watch has shown the count since, or had enough time to do so.
        previous_healthy: `list_healthy` of the list before that one, as text; "" if the number is
            the same.
    """

    count: int
    list_healthy: int
    written_at: float
    shown: bool = False
    previous_healthy: str = ""


class AllocatableWriter:
    """The writer of ``status.allocatable`` for resources whose list has changed.

    State: the last count written of each resource, in memory. A new agent begins without it, and
    does not change counts until it has sent the kubelet a list.

    Attributes:
        counts: the counters of writes, for metrics.
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
        """Create the writer.

        Args:
            api: the API server.
            node_name: our Node's name.
            node: our Node as the watch shows it; None while there is none.
            sent: returns resource → the counts of the last list that the kubelet was sent over a
                stream that is still open: ``listed`` counts all ids, ``healthy`` the Healthy ones,
                ``offered`` the latter without those that schedulers must no longer see. The
                ``offered`` ones are written.
            lists: advances when the result of ``sent`` changes.
            withdrawn: advances when schedulers must see fewer ids than the kubelet has.
            counted: called with the value of ``withdrawn`` up to which the Node has the counts, or
                with None if the API server refuses them permanently.
            journal: receives permanent refusals.
        """
        self._api, self._path, self._node = api, f"{node_path(node_name)}/status", node
        self._sent, self._lists, self._withdrawn = sent, lists, withdrawn
        self._counted = counted
        # "allocatable" begins the names of the journal's events about failures
        self._failure_log = FailureLog(journal, "allocatable")
        self._uid = ""  # of the Node that `_writes` are about
        # by resource
        self._writes: dict[str, _Write] = {}
        # the number of healthy ids that the kubelet was sent last, and since when it is that number
        self._lists_since: dict[str, tuple[int, float]] = {}
        self._backoffs: dict[str, Backoff] = {}
        # the loop time at which the next write would be due if there were no bursts
        self._next_at = float("-inf")
        self.counts = WriterStatus("allocatable")

    async def run(self, beat: Callable[[], None]) -> None:
        """Write the counts of each new list until cancelled; ``beat`` sends a heartbeat."""
        while True:
            beat()
            # taken first, so that no change is missed
            versions = Versions(self._node, self._lists, self._withdrawn)
            withdrawn = self._withdrawn.version
            pause = await self.write_once()
            await versions.passed(timeout_seconds=pause)  # until one of them has a newer version
            self._note_lists(self._sent())
            # A withdrawal is written without delay, since schedulers bind pods by the old count.
            if self._withdrawn.version == withdrawn:
                await asyncio.sleep(_COALESCING_SECONDS)

    async def write_once(self) -> float:
        """Write the counts that are due, if the rate limit and the back-off allow it.

        Returns:
            the seconds after which to call it again if no input changes before.
        """
        node = self._node.value
        if node is None:
            return _POLL_SECONDS
        sent, withdrawn = self._sent(), self._withdrawn.value
        self._note_lists(sent)
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
        # the counts that increase wait while the kubelet may not have the list
        processing = {
            resource: seconds
            for resource, counts in due.items()
            if self._shown(node, resource) < counts.offered
            and (seconds := self._processing_seconds_left(resource)) > 0
        }
        due = {resource: counts for resource, counts in due.items() if resource not in processing}
        pause = min(processing.values(), default=_POLL_SECONDS)
        if not due:
            if not any(
                _kubelet_has_other_list(node, resource, sent[resource]) for resource in sent
            ):
                self._counted(withdrawn)
            return pause
        burst_seconds = _WRITE_INTERVAL_SECONDS * (_BURST_WRITES - 1)
        wait = self._next_at - burst_seconds - asyncio.get_running_loop().time()
        if wait > 0 and not any(
            self._shown(node, resource) > counts.offered for resource, counts in due.items()
        ):
            return min(wait, pause)
        waits = {resource: self._backoff(resource).seconds_left for resource in due}
        if ready := {resource: counts for resource, counts in due.items() if not waits[resource]}:
            if await self._write(ready) and len(ready) == len(due):
                self._counted(withdrawn)
            return min(_WRITE_INTERVAL_SECONDS, pause)
        return min(*waits.values(), pause)

    def _note_lists(self, sent: Mapping[str, SentCounts]) -> None:
        """Note since when the kubelet has had so many healthy ids of each resource."""
        now = asyncio.get_running_loop().time()
        known, self._lists_since = self._lists_since, {}
        for resource, counts in sent.items():
            healthy, since = known.get(resource, (counts.healthy, now))
            self._lists_since[resource] = (
                counts.healthy,
                since if healthy == counts.healthy else now,
            )

    def _processing_seconds_left(self, resource: str) -> float:
        """The seconds until the kubelet can be taken to have the list that it was sent last."""
        _, since = self._lists_since[resource]
        return since + PROCESSING_SECONDS - asyncio.get_running_loop().time()

    def _shown(self, node: Node, resource: str) -> int:
        """The count that schedulers see: the Node's, or ours that the watch is yet to show."""
        last = self._writes.get(resource)
        if last is not None and not last.shown:
            return last.count
        return whole_number(node.allocatable[resource]) or 0

    def _is_due(self, node: Node, resource: str, sent: SentCounts) -> bool:
        """Tell whether the count of ``resource`` must be written now."""
        allocatable = node.allocatable.get(resource)
        if (
            allocatable is None
            or resource not in node.capacity
            or _kubelet_has_other_list(node, resource, sent)
        ):
            return False
        last = self._writes.get(resource)
        age_seconds = 0.0
        if last is not None:
            age_seconds = asyncio.get_running_loop().time() - last.written_at
            last.shown = (
                last.shown
                or same_quantity(allocatable, str(last.count))
                or age_seconds > cluster_api.REQUEST_TIMEOUT_SECONDS
            )
        if (last is None or last.shown) and same_quantity(allocatable, str(sent.offered)):
            # the Node has the count already, as if it had been written
            self._note_write(resource, sent, shown=True)
            return False
        if last is None or (last.count, last.list_healthy) != (sent.offered, sent.healthy):
            return True
        if not last.shown:
            return False
        if sent.offered < sent.healthy and same_quantity(allocatable, str(sent.healthy)):
            return True  # the kubelet does not have the shorter list yet
        return (
            bool(last.previous_healthy)
            and same_quantity(allocatable, last.previous_healthy)
            and age_seconds < _LATE_WRITE_SECONDS
        )

    def _note_write(self, resource: str, sent: SentCounts, *, shown: bool = False) -> None:
        last = self._writes.get(resource)
        previous_healthy = ""
        if last is not None and last.list_healthy != sent.healthy:
            previous_healthy = str(last.list_healthy)
        self._writes[resource] = _Write(
            sent.offered,
            sent.healthy,
            asyncio.get_running_loop().time(),
            shown,
            previous_healthy,
        )

    def _backoff(self, resource: str) -> Backoff:
        return self._backoffs.setdefault(resource, Backoff())

    async def _write(self, due: Mapping[str, SentCounts]) -> bool:
        """Write all counts by one merge patch, or by one patch each if the API server refuses it.

        Returns:
            True if all counts were written.
        """
        now = asyncio.get_running_loop().time()
        # After any number of writes without waiting, the next one waits at most for a whole burst.
        self._next_at = min(
            max(self._next_at, now) + _WRITE_INTERVAL_SECONDS,
            now + _WRITE_INTERVAL_SECONDS * _BURST_WRITES,
        )
        err = await self._send(due)
        if err is not None and is_permanent(err) and len(due) > 1:
            written = [
                self._finish_write([resource], due, await self._send({resource: counts}))
                for resource, counts in due.items()
            ]
            return all(written)
        return self._finish_write(list(due), due, err)

    async def _send(self, due: Mapping[str, SentCounts]) -> ClusterError | None:
        try:
            counts = {resource: str(sent.offered) for resource, sent in due.items()}
            await self._api.patch(self._path, {"status": {"allocatable": counts}})
        except ClusterError as err:
            self.counts.failed += 1
            return err
        self.counts.written += 1
        return None

    def _finish_write(
        self, resources: Sequence[str], due: Mapping[str, SentCounts], err: ClusterError | None
    ) -> bool:
        """Record the outcome ``err`` of a write for each resource; return True if it succeeded."""
        for resource in resources:
            if err is None:
                self._note_write(resource, due[resource])
                self._backoff(resource).succeeded()
                self._failure_log.recovered(resource)
                continue
            self._backoff(resource).failed(err)
            if is_permanent(err):
                self._counted(None)
                text = (
                    f"the API server refuses the count of {resource} in this Node's status "
                    f"({err}), so only the kubelet writes it, every ten seconds; apply the "
                    "ClusterRole and the policy in manifests/ of this version"
                )
                self._failure_log.record(
                    resource,
                    "allocatable.refused",
                    "refused",  # recorded once for each resource while this stays the same
                    level="warning",
                    resource=resource,
                    error=text,
                )
        return err is None


def _kubelet_has_other_list(node: Node, resource: str, sent: SentCounts) -> bool:
    """Tell whether the Node's capacity differs from the list of the resource that was sent last.

    If so, the kubelet has not yet written that list to the Node.
    """
    capacity = node.capacity.get(resource)
    # the kubelet counts all ids of a list as capacity, and the healthy ones as allocatable
    return capacity is not None and not same_quantity(capacity, str(sent.listed))
