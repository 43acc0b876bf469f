"""Replacement of pods that have failed on this node (setting ``binding.rescheduleFailed``).

The kubelet fails a pod for good when its admission goes wrong (`UnexpectedAdmissionError`). It
repeats without end a start that the agent refuses for good (`Refusal.final`). Such a pod never runs
although another node, or the same one a moment later, would have room. So this module replaces it:

* A pod with a controller, which creates another pod, is evicted. The Eviction API respects
  PodDisruptionBudgets.
* A pod without an owner is deleted and recreated. In between it exists only in a file of the agent
  (`pod_copies`), with which a restarted agent continues.
* A pod that is critical, or has owners but no controller, is left alone. An event says so.

A pod that fails again waits for longer each time, and is left alone after `MAX_TRIES`.

Built and run by `agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from vgpu_agent.cluster import decode, recreation
from vgpu_agent.cluster.api import pod_path, pods_path
from vgpu_agent.cluster.failed_pods import ADMISSION_ERROR, failed_at_admission
from vgpu_agent.cluster.pod_copies import Copy, State, Tries
from vgpu_agent.cluster.reschedule import EVICTED, PERMISSION, eviction
from vgpu_agent.cluster.retrying import Backoff, FailureLog
from vgpu_agent.concurrency import Versions
from vgpu_agent.errors import ClusterError
from vgpu_agent.pods import Pod
from vgpu_agent.status import WriteFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from vgpu_agent.allocation.refusals import Refusal
    from vgpu_agent.cluster.api import ListingApi
    from vgpu_agent.cluster.events import Events
    from vgpu_agent.cluster.pod_copies import PodCopies
    from vgpu_agent.concurrency import Revision
    from vgpu_agent.journal import Journal
    from vgpu_agent.pods import PodCache

# the reasons of the events
DELETED, RECREATED, LEFT_ALONE = "VgpuDeleted", "VgpuRecreated", "VgpuNotRescheduled"
DELETE_PERMISSION, CREATE_PERMISSION = "delete pods", "create pods"
# How often in a row the pods of one owner, or of one name, are replaced.
MAX_TRIES = 5
# The pause before the second replacement; it doubles for each further one.
PAUSE_SECONDS = 10.0
# The replacements are counted from zero again when the last one is this long ago.
FORGET_SECONDS = 3600.0
# A pod that cannot be created for that long is given up.
GIVE_UP_SECONDS = 24 * 3600.0

_MAX_COPIES = 16  # pods at once that are deleted and not recreated yet
_LONGEST_BODY_BYTES = 2 * 1024 * 1024
_MAX_KEYS, _MAX_DONE = 512, 2000  # entries of `State.tries`, and of `Rescue._done`
# The pause before the next check whether a deleted pod is gone; it doubles up to the maximum.
_CHECK_SECONDS, _CHECK_MAX_SECONDS = 0.5, 5.0
# The pause after a list of the failed pods, and how many times as long as the list it is at least.
_LIST_SECONDS, _LIST_PAUSES = 5.0, 10.0
# A pod that was created so soon after another one is not the replacement of that one.
_TOGETHER_SECONDS = 2.0
_NO_TRIES = Tries(number=0, last=0.0)

_Value = TypeVar("_Value")


class _Case(msgspec.Struct):
    """A pod that failed, and has not been handled yet.

    Attributes:
        why: the reason why it cannot run, for its owner.
        failed: the kubelet has failed it; otherwise its start is refused again and again.
        backoff: the pauses after failed requests.
        due: when the pod is handled next, by the event loop's clock.
    """

    pod: Pod
    why: str
    failed: bool
    backoff: Backoff = msgspec.field(default_factory=Backoff)
    due: float = 0.0


class _Recreation(msgspec.Struct):
    """The next try to create the pod of a copy.

    Attributes:
        backoff: the pauses after failed requests.
        pause: seconds until the next check, while the deleted pod is still there.
        due: when the next try begins, by the event loop's clock.
    """

    backoff: Backoff = msgspec.field(default_factory=Backoff)
    pause: float = _CHECK_SECONDS
    due: float = 0.0


class Rescue:
    """The handling of failed and refused pods, whenever there are new ones.

    State: the file of `PodCopies`. Everything else is in memory. After a restart it is found again
    by listing this node's failed pods.

    Attributes:
        counts: pods by result, for metrics.
    """

    def __init__(
        self,
        api: ListingApi,
        node_name: str,
        pod_cache: PodCache,
        resources: Callable[[], Collection[str]],
        refusals: Callable[[], Iterable[Refusal]],
        wake: Revision,
        stale: Collection[str],
        events: Events,
        copies: PodCopies,
        journal: Journal,
        *,
        clock: Callable[[], float] = time.time,
        look_seconds: float = 10.0,
    ) -> None:
        """Build it.

        Args:
            api: the API server.
            node_name: our Node's name.
            pod_cache: the pods of this node; when one has ended, failed pods are listed.
            resources: the names of the resources whose pods are replaced.
            refusals: the starts that are refused at the moment; only final ones count.
            wake: advances with each change of ``refusals``.
            stale: names of annotations and labels that are removed from a pod before it is
                recreated: what schedulers and the agent have written about the one that failed.
            events: writes events for the owners.
            copies: the file of the pods between deletion and creation.
            journal: records what is done, and failures.
            clock: unix seconds.
            look_seconds: how often the loop sends a heartbeat.
        """
        self._api, self._node_name, self._pod_cache, self._wake = api, node_name, pod_cache, wake
        self._resources, self._refusals, self._stale = resources, refusals, frozenset(stale)
        self._events, self._copies, self._journal, self._clock = events, copies, journal, clock
        self._look_seconds = look_seconds
        # the names of its events in the journal begin with `rescue.`
        self._failure_log = FailureLog(journal, "rescue")
        self._state = State()
        self._cases: dict[str, _Case] = {}  # by UID
        self._recreations: dict[str, _Recreation] = {}  # of copies, by UID
        self._refused: frozenset[str] = frozenset()  # UIDs of the pods with a final refusal
        self._done: dict[str, None] = {}  # UIDs of handled pods; the latest at the end
        # when failed pods were listed last: how many pods had ended, and how many complete lists of
        # pods had been read (`PodCache.ends` and `PodCache.lists`)
        self._seen = (-1, -1)
        self._list_backoff, self._list_due = Backoff(), 0.0
        self._beat: Callable[[], None] = lambda: None
        # why the copies could not be written at the last attempt; None once they were
        self.write_failure: WriteFailure | None = None
        self.counts = {"evicted": 0, "recreated": 0, "left_alone": 0}

    async def run(self, beat: Callable[[], None]) -> None:
        """Continue with the copies of an earlier process, and handle pods until cancelled."""
        self._beat = beat
        self._state = await self._copies.read()
        while True:
            beat()
            # taken first, so that no change is missed
            versions = Versions(self._wake, self._pod_cache.revision)
            pause = await self.check_once()
            await versions.passed(timeout_seconds=pause)  # until one of them has a newer version

    async def check_once(self) -> float:
        """Do the due work; return the seconds until the next check, if nothing happens before."""
        pause = min(self._look_seconds, await self._find_failed())
        self._find_refused()
        for uid, case in tuple(self._cases.items()):
            if (left := case.due - _now()) <= 0:
                self._beat()
                left = await self._handle(uid, case)
            pause = min(pause, left)
        for copy in tuple(self._state.copies.values()):
            next_try = self._recreations.setdefault(copy.uid, _Recreation())
            if (left := next_try.due - _now()) <= 0:
                self._beat()
                left = await self._recreate(copy, next_try)
            pause = min(pause, left)
        return max(pause, 0.01)

    # -- the failed pods ---------------------------------------------------------------------------

    async def _find_failed(self) -> float:
        """List the failed pods if any pod has ended, or may have; return the seconds until the next
        check.
        """
        if self._seen == (self._pod_cache.ends, self._pod_cache.lists):
            return self._look_seconds
        if (left := max(self._list_due - _now(), self._list_backoff.seconds_left)) > 0:
            return left
        seen, began = (self._pod_cache.ends, self._pod_cache.lists), _now()
        try:
            await self._list_failed()
        except ClusterError as err:
            self._list_backoff.failed(err)
            self._failure_log.failed("list", err, "list pods")
            return self._list_backoff.seconds_left
        self._failure_log.recovered("list")
        self._list_backoff.succeeded()
        pause = max(_LIST_SECONDS, _LIST_PAUSES * (_now() - began))
        self._seen, self._list_due = seen, _now() + pause
        return self._look_seconds

    async def _list_failed(self) -> None:
        ours = frozenset(self._resources())
        pods = failed_at_admission(self._api, self._node_name, self._beat)
        async with contextlib.aclosing(pods):
            async for raw in pods:
                if (pod := _readable(raw)) is not None and _failed_admission(pod, ours):
                    status = pod["status"]
                    self._add(pod, f"{ADMISSION_ERROR}: {status.get('message', '')}", failed=True)

    def _find_refused(self) -> None:
        ours, refused = frozenset(self._resources()), set[str]()
        for refusal in self._refusals():
            pod = refusal.pod
            if not refusal.final or refusal.resource not in ours or pod.deleting or pod.ended:
                continue
            refused.add(pod.uid)
            if pod.uid not in self._cases and not self._is_done(pod.uid):
                why = f"container {refusal.container} may not start: {refusal.reason}"
                self._cases[pod.uid] = _Case(pod, why, failed=False)
        self._refused = frozenset(refused)
        for uid in [uid for uid, case in self._cases.items() if not case.failed]:
            if uid not in refused:  # it has started after all, or is gone
                self._drop(uid)

    def _add(self, pod: dict[str, Any], why: str, *, failed: bool) -> None:
        try:
            known = decode.pod(msgspec.json.encode(pod))
        except ClusterError:
            return  # names that Kubernetes does not allow
        if known.uid not in self._cases and not self._is_done(known.uid):
            self._cases[known.uid] = _Case(known, why, failed)

    def _is_done(self, uid: str) -> bool:
        return uid in self._done or uid in self._state.copies

    # -- eviction and recreation -------------------------------------------------------------------

    async def _handle(self, uid: str, case: _Case) -> float:
        """Replace the pod, or leave it alone; return the seconds until there is more to do."""
        case.due = 0.0
        try:
            pod = await self._current_object(case)
            if pod is None:
                self._drop(uid)
                return self._look_seconds
            left = await self._evict_or_delete(case, pod)
        except ClusterError as err:
            case.backoff.failed(err)
            case.due = _now() + case.backoff.seconds_left
            if err.status in (404, 409):  # gone, or another pod has its name
                self._drop(uid)
            elif err.status == 429:
                self._report_postponed(case, err)
            else:
                self._failure_log.failed("pods", err, _permission(err), pod=case.pod.full_name)
            left = case.backoff.seconds_left
        return left

    async def _evict_or_delete(self, case: _Case, pod: dict[str, Any]) -> float:
        """Evict, delete or leave alone the pod; return the seconds until there is more to do.

        Raises:
            ClusterError: the API server refuses, or does not answer.
        """
        controller, owners = recreation.owners(pod)
        key = _key(case.pod, controller)
        wait = self._wait(key, pod, counts_each=controller is None)
        if why := _why_not(pod, controller, owners, wait):
            return self._leave(case, why)
        if wait:
            case.due = _now() + wait
            return wait
        if controller is not None:
            return await self._evict(case, key, recreation.created_at(pod), controller)
        return await self._delete(case, key, pod)

    async def _current_object(self, case: _Case) -> dict[str, Any] | None:
        """Return the pod as it is now; None if it need not be replaced any more.

        Raises:
            ClusterError: no answer.
        """
        pod = _readable(await self._api.get(pod_path(case.pod.namespace, case.pod.name)))
        if (
            pod is None
            or pod["metadata"].get("uid") != case.pod.uid
            or pod["metadata"].get("deletionTimestamp")
            or _of(pod, "spec").get("nodeName") != self._node_name
        ):
            return None
        failed = _failed_admission(pod, frozenset(self._resources()))
        return pod if failed or not case.failed else None

    async def _evict(
        self, case: _Case, key: str, created: float, controller: dict[str, Any]
    ) -> float:
        pod = case.pod
        await self._api.post(pod_path(pod.namespace, pod.name) + "/eviction", eviction(pod))
        if created > self._state.tries.get(key, _NO_TRIES).created + _TOGETHER_SECONDS:
            self._count(key, created)
        await self._store_state()
        self.counts["evicted"] += 1
        text = f"evicted, so that {_named(controller)} makes another: {case.why}"
        self._finish(pod.uid)
        self._failure_log.recovered("pods")
        self._journal.record(
            "rescue.evicted", level="warning", pod=pod.full_name, uid=pod.uid, reason=text
        )
        self._events.raise_event(pod, EVICTED, text)
        return self._look_seconds

    async def _delete(self, case: _Case, key: str, pod: dict[str, Any]) -> float:
        """Store the pod and delete it; `_recreate` does the rest."""
        if len(self._state.copies) >= _MAX_COPIES:
            case.due = _now() + _CHECK_MAX_SECONDS
            return _CHECK_MAX_SECONDS
        before = self._state.tries.get(key)
        tries = self._count(key, recreation.created_at(pod))
        body = recreation.with_tries(recreation.copy_of(pod, self._stale), tries, self._clock())
        if len(msgspec.json.encode(body)) > _LONGEST_BODY_BYTES:
            return self._leave(case, "it is too large to be kept until it is created again")
        copy = Copy(
            case.pod.uid, case.pod.namespace, case.pod.name, self._clock(), body, reason=case.why
        )
        self._state.copies[copy.uid] = copy
        try:
            await self._copies.write(self._state)
        except OSError as err:
            del self._state.copies[copy.uid]
            self._uncount(key, before)
            self._report_not_stored(err)
            case.due = _now() + PAUSE_SECONDS
            return PAUSE_SECONDS
        self._stored()
        try:
            await self._api.delete(pod_path(copy.namespace, copy.name), uid=copy.uid)
        except ClusterError as err:
            if 400 <= err.status < 500:  # it was not deleted by us, and maybe by its owner
                self._uncount(key, before)
                await self._forget(copy)
                raise
            # It may have been deleted nevertheless; `_recreate` checks that.
            self._drop(case.pod.uid)
            return 0.0
        self._finish(case.pod.uid)
        self._report_deleted(copy)
        return 0.0

    async def _recreate(self, copy: Copy, next_try: _Recreation) -> float:
        """Create the pod once the old one is gone; return the seconds until there is more to do."""
        pod = Pod(copy.uid, copy.namespace, copy.name)
        if self._clock() - copy.since > GIVE_UP_SECONDS:
            await self._forget(copy)
            self._report_left_alone(
                pod, "the agent has tried to create it again for a day; create it"
            )
            return self._look_seconds
        path = pod_path(copy.namespace, copy.name)
        try:
            found = await self._found(path)
            if found is None:
                made = _readable(await self._api.post(pods_path(copy.namespace), copy.body))
                await self._forget(copy)
                self._report_recreated(copy, made)
                return self._look_seconds
            metadata = found["metadata"]
            if metadata.get("uid") != copy.uid:  # it was created meanwhile, perhaps by this agent
                await self._forget(copy)
                return self._look_seconds
            if not metadata.get("deletionTimestamp"):
                if not self._cannot_run(found):
                    self._count_one_less(f"{copy.namespace}/{copy.name}")
                    await self._forget(copy)
                    return self._look_seconds
                await self._api.delete(path, uid=copy.uid)
                self._report_deleted(copy)
            next_try.backoff.succeeded()
            pause, next_try.pause = next_try.pause, min(2 * next_try.pause, _CHECK_MAX_SECONDS)
        except ClusterError as err:
            next_try.backoff.failed(err)
            if err.status not in (404, 409):
                self._failure_log.failed("pods", err, _permission(err), pod=pod.full_name)
            pause = next_try.backoff.seconds_left
        next_try.due = _now() + pause
        return pause

    def _cannot_run(self, pod: dict[str, Any]) -> bool:
        """Tell whether a pod with a copy must still be deleted. A pod whose start was refused may
        run by now: its first DELETE has failed, or the agent has ended before it.
        """
        failed = _of(pod, "status").get("phase") == "Failed"
        return failed or pod["metadata"].get("uid") in self._refused

    async def _found(self, path: str) -> dict[str, Any] | None:
        """Return the object at ``path``, None where there is none.

        Raises:
            ClusterError: no answer.
        """
        try:
            found = _readable(await self._api.get(path))
        except ClusterError as err:
            if err.status == 404:
                return None
            raise
        if found is None:
            raise ClusterError(f"GET {path}: the API server sent no pod")
        return found

    # -- limits on repetition ----------------------------------------------------------------------

    def _wait(self, key: str, pod: dict[str, Any], *, counts_each: bool) -> float | None:
        """Return the seconds until the pod may be replaced again; None after `MAX_TRIES`.

        With ``counts_each`` false, pods of one owner that were created together with the last
        counted one, or before it, count as one failure: none of them is the replacement of another.
        """
        now, known = self._clock(), self._state.tries.get(key, _NO_TRIES)
        # a recreated pod has an annotation with its tries, which may have been on other nodes
        number, last = recreation.tries_of(pod) if counts_each else (0, 0.0)
        if number > known.number and 0 <= now - last <= FORGET_SECONDS:
            known = self._state.tries[key] = Tries(number, last)
        if not 0 <= now - known.last <= FORGET_SECONDS:
            self._state.tries.pop(key, None)
            return 0.0
        if not counts_each and recreation.created_at(pod) <= known.created + _TOGETHER_SECONDS:
            return 0.0
        if known.number >= MAX_TRIES:
            return None
        return max(0.0, known.last + PAUSE_SECONDS * 2.0 ** (known.number - 1) - now)

    def _count(self, key: str, created: float) -> int:
        """Count one more replacement under ``key``, of a pod that was created at ``created``;
        return how many there are.
        """
        known = self._state.tries.pop(key, _NO_TRIES)
        self._state.tries[key] = Tries(known.number + 1, self._clock(), created)
        _shorten(self._state.tries, _MAX_KEYS)
        return known.number + 1

    def _uncount(self, key: str, before: Tries | None) -> None:
        """Undo `_count`; ``before`` is what was counted before it."""
        if before is None:
            self._state.tries.pop(key, None)
        else:
            self._state.tries[key] = before

    def _count_one_less(self, key: str) -> None:
        """Undo the last `_count` of an earlier process, or of a deletion long ago."""
        if (known := self._state.tries.pop(key, None)) is not None and known.number > 1:
            self._state.tries[key] = msgspec.structs.replace(known, number=known.number - 1)

    async def _store_state(self) -> None:
        """Write the copies and the tries to the file; a failure is only recorded."""
        try:
            await self._copies.write(self._state)
        except OSError as err:
            self._report_not_stored(err)
        else:
            self._stored()

    async def _forget(self, copy: Copy) -> None:
        """Drop the copy. Where that cannot be written, the next start finds the pod under another
        UID and drops it then.
        """
        self._state.copies.pop(copy.uid, None)
        self._recreations.pop(copy.uid, None)
        await self._store_state()

    # -- events ------------------------------------------------------------------------------------

    def _leave(self, case: _Case, why: str) -> float:
        self._finish(case.pod.uid)
        self._report_left_alone(case.pod, f"{why}. It cannot run here: {case.why}")
        return self._look_seconds

    def _report_left_alone(self, pod: Pod, text: str) -> None:
        self.counts["left_alone"] += 1
        self._journal.record(
            "rescue.left_alone", level="warning", pod=pod.full_name, uid=pod.uid, reason=text
        )
        self._events.raise_event(pod, LEFT_ALONE, f"left alone: {text}")

    def _report_recreated(self, copy: Copy, made: dict[str, Any] | None) -> None:
        self.counts["recreated"] += 1
        self._failure_log.recovered("pods")
        uid = str(made["metadata"].get("uid", "")) if made else ""
        text = f"created in the place of {copy.uid}, which failed: {copy.reason}"
        self._journal.record(
            "rescue.recreated",
            level="warning",
            pod=f"{copy.namespace}/{copy.name}",
            uid=uid,
            reason=text,
        )
        self._events.raise_event(Pod(uid, copy.namespace, copy.name), RECREATED, text, "Normal")

    def _report_deleted(self, copy: Copy) -> None:
        self._failure_log.recovered("pods")
        pod = Pod(copy.uid, copy.namespace, copy.name)
        text = f"deleted, and will be created again: {copy.reason}"
        self._journal.record(
            "rescue.deleted", level="warning", pod=pod.full_name, uid=pod.uid, reason=text
        )
        self._events.raise_event(pod, DELETED, text)

    def _report_postponed(self, case: _Case, err: ClusterError) -> None:
        self._failure_log.record(
            f"budget {case.pod.uid}",
            "rescue.postponed",
            "429",  # recorded once for each pod while this stays the same
            level="info",
            pod=case.pod.full_name,
            error=str(err),
        )

    def _stored(self) -> None:
        self._failure_log.recovered("copies")
        self.write_failure = None

    def _report_not_stored(self, err: OSError) -> None:
        directory, name = os.path.split(self._copies.path)
        self.write_failure = WriteFailure(
            directory,
            name,
            err.strerror or str(err),
            meanwhile="no pod is deleted to be created again",
        )
        self._failure_log.record(
            "copies",
            "rescue.not_stored",
            "write",
            level="error",
            error=str(err),
            remedy="make stateDirectory a directory with room in which the agent can write; until "
            "then no pod is deleted to be created again",
        )

    def _finish(self, uid: str) -> None:
        """Remember that the pod has been handled, and drop its case."""
        self._drop(uid)
        self._done[uid] = None
        _shorten(self._done, _MAX_DONE)

    def _drop(self, uid: str) -> None:
        self._cases.pop(uid, None)
        self._failure_log.forget(uid)  # the keys that contain it: `budget <uid>`


def _now() -> float:
    return asyncio.get_running_loop().time()


def _shorten(kept: dict[str, _Value], most: int) -> None:
    """Remove the oldest of more than ``most`` entries."""
    while len(kept) > most:
        del kept[next(iter(kept))]


def _readable(raw: bytes | msgspec.Raw) -> dict[str, Any] | None:
    """Return the pod, None where it is not an object with metadata."""
    try:
        pod = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return pod if isinstance(pod, dict) and isinstance(pod.get("metadata"), dict) else None


def _failed_admission(pod: dict[str, Any], ours: frozenset[str]) -> bool:
    """Tell whether the kubelet has failed the pod at its admission, and a container or init
    container of the pod asks for one of ``ours``, the resources whose pods are replaced.
    """
    status, spec = _of(pod, "status"), _of(pod, "spec")
    if (status.get("phase"), status.get("reason")) != ("Failed", ADMISSION_ERROR):
        return False
    containers = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    return any(
        not ours.isdisjoint(_of(_of(one, "resources"), "limits"))
        for one in containers
        if isinstance(one, dict)
    )


def _why_not(
    pod: dict[str, Any],
    controller: dict[str, Any] | None,
    owners: list[dict[str, Any]],
    wait: float | None,
) -> str:
    """Say why the pod is left alone, with the remedy; empty where it is not.

    ``wait`` is the answer of `_wait`: None where the pod has been replaced too often.
    """
    if recreation.is_critical(pod):
        return "it is critical, so the agent does not delete it"
    if controller is None and owners:
        named = ", ".join(map(_named, owners[:3]))
        return (
            f"its owner {named} is not its controller, so no replacement is sure; delete the pod "
            "to let its owner act"
        )
    if wait is None:
        return (
            f"it was replaced {MAX_TRIES} times and failed each time; find out why, and create it "
            "again"
        )
    return ""


def _of(thing: dict[str, Any], key: str) -> dict[str, Any]:
    part = thing.get(key)
    return part if isinstance(part, dict) else {}


def _key(pod: Pod, controller: dict[str, Any] | None) -> str:
    """Return the key by which replacements are counted: a controller's UID, or a pod's name."""
    return (
        f"{pod.namespace}/{pod.name}"
        if controller is None
        else f"{pod.namespace} {str(controller.get('uid', ''))[:64]}"
    )


def _named(owner: dict[str, Any]) -> str:
    return f"{str(owner.get('kind', ''))[:63]} {str(owner.get('name', ''))[:253]}"


def _permission(err: ClusterError) -> str:
    """Return the right that the failed request needs."""
    text = str(err)
    if "/eviction" in text:
        return PERMISSION
    return DELETE_PERMISSION if text.startswith("DELETE") else CREATE_PERMISSION
