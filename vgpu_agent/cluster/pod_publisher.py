"""Keep annotations and labels of our pods in the families' desired state, which shows a scheduler
that its decision was carried out, or that it was not.

No container waits for these writes. They come after its start, are tried until done, and are not
stored anywhere while they wait: a value that is missing after a restart is a difference between the
pods as the watch shows them and the state that the families derive from the ledger.

The writes cost others something. Where memory is counted in MiB, the kubelet reports thousands of
ids in a pod's status. For each write the API server then reads, stores and sends out all of that,
and the kubelet looks at the pod once more and writes its status again: 75 ms of processor time,
measured on a real node, while other pods wait to be started. So annotations that only show a pod's
progress wait until no pod is being started, `STARTS_FIRST_SECONDS` at most. Annotations by which
schedulers count what is in use do not wait. Those held back when the agent stops are written by the
next process, except to a pod that has ended by then: only this process knew its shares, so that pod
stays as it is.

Built and run by `agent`.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.cluster.api import pod_path
from vgpu_agent.cluster.retrying import Backoff, FailureLog, is_permanent
from vgpu_agent.cluster.write_history import WriteHistory
from vgpu_agent.concurrency import Revision, Versions
from vgpu_agent.errors import ClusterError
from vgpu_agent.status import WriterStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.journal import Journal
    from vgpu_agent.pods import DesiredPod, Pod, PodCache

    Changes = Mapping["Entry", str | None]  # the values to write; None removes the entry

PERMISSION = "patch pods"
ANNOTATIONS, LABELS = "annotations", "labels"  # the parts of ``metadata`` that are written

Entry = tuple[str, str]  # one of these parts, and a key in it
# How long annotations that only say how far a pod has come wait, at most, while pods are being
# started: each of these writes costs API server and kubelet as much as a start when a pod holds
# thousands of ids. A pod that does not run after that long waits for something else, such as its
# image, and these writes do not delay it.
STARTS_FIRST_SECONDS = 10.0
_SHORTEST_WAIT_SECONDS = 0.01
# The wait for the next change of a burst, or before looking again whether pods are being started;
# and the longest wait for the end of a burst.
_COALESCING_SECONDS, _LONGEST_COALESCING_SECONDS = 0.1, 1.0


class _Writing(msgspec.Struct):
    """The state of writing to one pod, by its UID."""

    history: WriteHistory
    backoff: Backoff
    # since when something is to be written, on the event loop's clock; None if nothing is
    pending_since: float | None = None
    # a request is under way; there is never a second one, so writes of one pod are in order
    busy: bool = False
    # nothing more is to be written: the API server has no such pod any more, or the pod has ended
    # and has all that was desired
    finished: bool = False
    refused: Changes | None = None  # the changes that the API server refused for good


class _Metadata(msgspec.Struct):
    uid: str = ""


class _PodAnswer(msgspec.Struct):
    metadata: _Metadata


class PodPublisher:
    """The writer of our pods' annotations and labels; one for the process.

    State: the current write to each pod, dropped with the pod. A crash between two writes leaves a
    difference, which the next start sees.

    Attributes:
        counts: for metrics.
    """

    def __init__(
        self,
        api: Api,
        pod_cache: PodCache,
        desired_state: Callable[[], Mapping[str, DesiredPod]],
        wake: Revision,
        journal: Journal,
        *,
        tokens: Callable[[str], Sequence[str]] = lambda _: (),
        starting: Callable[[], bool] = lambda: False,
        progress_annotations: Collection[str] = (),
        at_once: int = 8,
        look_seconds: float = 10.0,
    ) -> None:
        """Build it.

        Args:
            api: the API server.
            pod_cache: our pods as the watch shows them.
            desired_state: the kubelet's UID of a pod (the API server's, except for static pods) →
                its desired state.
            wake: advances whenever the desired state may have changed.
            journal: records failed writes, their end, and that a pod has all its annotations.
            tokens: the kubelet's UID of a pod → the tokens of its grants, which are in all records
                about its start.
            starting: returns True while the kubelet is starting pods.
            progress_annotations: those that only show a pod's progress; where nothing else differs,
                the write waits while pods are being started.
            at_once: how many pods are written to at the same time.
            look_seconds: how often the loop sends a heartbeat.
        """
        self._api, self._pod_cache, self._desired_state, self._wake = (
            api,
            pod_cache,
            desired_state,
            wake,
        )
        self._journal = journal
        self._tokens, self._at_once, self._look_seconds = tokens, at_once, look_seconds
        self._starting, self._progress = (
            starting,
            frozenset((ANNOTATIONS, key) for key in progress_annotations),
        )
        self._failure_log = FailureLog(journal, "pods")  # its events are named ``pods.…``
        self._writings: dict[str, _Writing] = {}
        # for failures that are not one pod's, such as an outage; each pod has its own besides
        self._outage = Backoff()
        self._done = Revision()  # advances with each request that has ended
        self._backlog = False  # writes are due that were not begun
        self.counts = WriterStatus("pods")

    async def run(self, beat: Callable[[], None]) -> None:
        """Publish until cancelled; send a heartbeat at least every ``look_seconds``."""
        self._writings.clear()
        self._outage.succeeded()
        async with asyncio.TaskGroup() as requests:
            while True:
                beat()
                # taken first, so that no change is missed
                versions = Versions(self._pod_cache.revision, self._wake, self._done)
                pause = self._begin(requests)
                await versions.passed(timeout_seconds=pause)  # until one has a newer version
                await self._coalesce(beat)

    async def _coalesce(self, beat: Callable[[], None]) -> None:
        """Wait for more changes of a burst, for a shorter time while there is a backlog."""
        loop, seen = asyncio.get_running_loop(), -1
        end = loop.time() + (_COALESCING_SECONDS if self._backlog else _LONGEST_COALESCING_SECONDS)
        while seen != self._wake.version and (left := end - loop.time()) > 0:
            seen = self._wake.version
            beat()
            await asyncio.sleep(min(_COALESCING_SECONDS, left))

    def _begin(self, requests: asyncio.TaskGroup) -> float:
        """Begin the writes that are due; return the seconds after which to look again,
        if nothing happens before.
        """
        pause, due = self._due()
        if due and self._outage.seconds_left:
            return max(min(pause, self._outage.seconds_left), _SHORTEST_WAIT_SECONDS)
        # After a failure one request finds out whether the API server is back. Pods with the fewest
        # failures are first, so that it is not always a pod whose own writes fail.
        free = (1 if self._outage.failures else self._at_once) - sum(
            writing.busy for writing in self._writings.values()
        )
        self._backlog = len(due) > free
        for pod, changes, writing in sorted(due, key=lambda one: one[2].backoff.failures)[
            : max(0, free)
        ]:
            writing.busy = True
            requests.create_task(
                self._write(pod, changes, writing), name=f"annotate {pod.full_name}"
            )
        return max(pause, _SHORTEST_WAIT_SECONDS)

    def _due(self) -> tuple[float, list[tuple[Pod, Changes, _Writing]]]:
        """Return the seconds after which more may be due, and the writes due now: for each the pod,
        its changes, and the state of writing to it.
        """
        try:
            desired_state = self._desired_state()
        except Exception as err:  # noqa: BLE001
            # a bug in one family must not stop the writer of the others
            text = f"{type(err).__name__}: {err}"
            self._failure_log.record(
                "desired state", "pods.desired_state_failed", text, level="error", error=text
            )
            return self._look_seconds, []
        self._failure_log.recovered("desired state")
        present = [
            (pod, desired_state[pod.kubelet_uid])
            for pod in self._pod_cache.pods
            if pod.kubelet_uid in desired_state
        ]
        self._forget_absent({pod.uid for pod, _ in present})
        pause, due = self._look_seconds, []
        starting = functools.cache(self._starting)
        for pod, desired in present:
            writing = self._writings.setdefault(pod.uid, _Writing(WriteHistory(), Backoff()))
            seconds, changes = self._compared(pod, desired, writing)
            if changes and not seconds and changes.keys() <= self._progress and starting():
                seconds = self._seconds_held_back(writing)
            if changes and not seconds:
                due.append((pod, changes, writing))
            elif seconds:
                pause = min(pause, seconds)
        self._count()
        return pause, due

    def _seconds_held_back(self, writing: _Writing) -> float:
        """Return the seconds after which to check again if pods are still being started;
        0 for what has waited for them long enough.
        """
        now = asyncio.get_running_loop().time()
        since = now if writing.pending_since is None else writing.pending_since
        return max(0.0, min(_COALESCING_SECONDS, since + STARTS_FIRST_SECONDS - now))

    def _compared(
        self, pod: Pod, desired_state: DesiredPod, writing: _Writing
    ) -> tuple[float, Changes]:
        """Return the changes to write to ``pod``, and the seconds until they may be written.
        Without changes, the seconds until there may be some (0: unknown): after a write, the same
        value is not written again for a while.
        """
        changes: dict[Entry, str | None] = {}
        wait = 0.0
        for entry, present, desired in _entries(pod, desired_state):
            seconds = writing.history.seconds_until_due("/".join(entry), present, desired)
            if seconds == 0.0:
                changes[entry] = desired
            elif seconds is not None:  # None where the pod has it already
                wait = min(wait or seconds, seconds)
        if not changes or writing.finished:
            writing.pending_since = None
            return wait, {}
        if writing.pending_since is None:
            writing.pending_since = asyncio.get_running_loop().time()
        if writing.busy:
            return 0.0, {}
        if changes != writing.refused and writing.refused is not None:
            writing.refused = None
            writing.backoff.succeeded()
        return writing.backoff.seconds_left, changes

    async def _write(self, pod: Pod, changes: Changes, writing: _Writing) -> None:
        """Send one merge patch of what differs, for this very pod and not for another
        that took its name.
        """
        path = pod_path(pod.namespace, pod.name)
        try:
            await self._api.patch(path, {"metadata": {"uid": pod.uid, **_by_section(changes)}})
        except ClusterError as err:
            await self._failed(pod, changes, writing, err)
        else:
            self.counts.written += 1
            self._outage.succeeded()
            writing.backoff.succeeded()
            now = asyncio.get_running_loop().time()
            waited = now - (now if writing.pending_since is None else writing.pending_since)
            writing.pending_since, writing.refused = None, None
            self._failure_log.recovered("annotations")
            self._note(pod, changes, writing)
            # The watch leaves out pods that have ended, so it will never show this write, which
            # would be repeated for ever.
            writing.finished = writing.finished or pod.ended
            # All differences that were due went into one request, so now the pod has all that it
            # should have, unless another client keeps changing it back.
            self._journal.record(
                "pods.written", **self._about(pod), **_keys(changes), seconds=round(waited, 3)
            )
        finally:
            writing.busy = False
            self._done.advance()

    def _note(self, pod: Pod, changes: Changes, writing: _Writing) -> None:
        for entry, value in changes.items():
            section, key = entry
            if writing.history.note_write("/".join(entry), _present(pod, section).get(key), value):
                text = (
                    f"another client keeps changing the annotation {key} of pod {pod.full_name}; "
                    "find that client"
                )
                if section == LABELS:
                    text = (
                        f"another client keeps changing the label {key} of pod {pod.full_name}; "
                        "find that client"
                    )
                self._failure_log.record(
                    f"contest of {pod.uid}/{key}",
                    "pods.contested",
                    text,
                    level="warning",
                    **self._about(pod),
                    error=text,
                )

    async def _failed(
        self, pod: Pod, changes: Changes, writing: _Writing, err: ClusterError
    ) -> None:
        self.counts.failed += 1
        # The API server calls another UID a conflict, or, in a patch, an attempt to change what
        # cannot be changed.
        if err.status == 404 or (err.status in {409, 422} and await self._replaced(pod)):
            writing.finished = True
            self.counts.dropped += 1
            self._journal.record(
                "pods.gone",
                level="debug",
                **self._about(pod),
                uid=pod.uid,
                unwritten=sorted(key for _, key in changes),
            )
            return
        writing.backoff.failed(err)
        # 403: the permission is missing, for all pods and until somebody grants it
        if is_permanent(err) and err.status != 403:
            writing.refused = changes
            self._failure_log.failed(
                f"pod {pod.uid}", err, PERMISSION, **self._about(pod), **_keys(changes)
            )
        else:
            if err.status != 409:
                self._outage.failed(err)
            self._failure_log.failed("annotations", err, PERMISSION, **self._about(pod))

    def _about(self, pod: Pod) -> dict[str, Any]:
        """Return the facts that link a log line about this pod to those of its grants."""
        return {"pod": pod.full_name, "tokens": list(self._tokens(pod.kubelet_uid))}

    async def _replaced(self, pod: Pod) -> bool:
        """Tell whether another pod has the name now, or none; False when that is unknown."""
        try:
            answer = await self._api.get(pod_path(pod.namespace, pod.name))
            return msgspec.json.decode(answer, type=_PodAnswer).metadata.uid != pod.uid
        except ClusterError as err:
            return err.status == 404
        except msgspec.MsgspecError:
            return False  # an answer of a proxy in between; the patch is tried again

    def _forget_absent(self, uids: set[str]) -> None:
        for uid in [
            uid for uid, writing in self._writings.items() if uid not in uids and not writing.busy
        ]:
            del self._writings[uid]
            self._failure_log.forget(uid)  # of all keys that contain it

    def _count(self) -> None:
        now = asyncio.get_running_loop().time()
        since = [
            writing.pending_since
            for writing in self._writings.values()
            if writing.pending_since is not None
        ]
        self.counts.pending = len(since)
        self.counts.oldest_pending_seconds = now - min(since, default=now)


def _present(pod: Pod, section: str) -> Mapping[str, str]:
    return pod.annotations if section == ANNOTATIONS else pod.labels


def _entries(pod: Pod, desired_state: DesiredPod) -> Iterator[tuple[Entry, str | None, str | None]]:
    """Yield each desired entry with its present and its desired value."""
    for section, desired in (
        (ANNOTATIONS, desired_state.annotations),
        (LABELS, desired_state.labels),
    ):
        for key, value in desired.items():
            yield (section, key), _present(pod, section).get(key), value


def _by_section(changes: Changes) -> dict[str, dict[str, str | None]]:
    """The changes as the API server takes them."""
    sections: dict[str, dict[str, str | None]] = {}
    for (section, key), value in changes.items():
        sections.setdefault(section, {})[key] = value
    return sections


def _keys(changes: Changes) -> dict[str, Any]:
    """The keys of each section, for the log."""
    return {section: sorted(values) for section, values in _by_section(changes).items()}
