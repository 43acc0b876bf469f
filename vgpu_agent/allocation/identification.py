"""Identify the container about to start, from the kubelet's own records and the known pods;
never guess. A container that they name without doubt is called *proven*.

There are two records. The checkpoint names the pod's UID and the container (plain init containers
too); pod-resources names namespace, pod and container of what is alive. One alone counts where it
is enough. Where they contradict each other, or two pods could be meant, the start is refused and
the kubelet retries.

The records are read after the kubelet's call. A pod that our watch does not show yet is waited
for. If it does not come in time, a container that has started here before is known by the grant
record in its CDI spec; any other pod is requested from the API server once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.allocation.shared_ids import starting_container
from vgpu_agent.errors import AgentError, ClusterError
from vgpu_agent.model import Owner
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from vgpu_agent.allocation.carrier import GrantRecord
    from vgpu_agent.allocation.context import Context
    from vgpu_agent.families.family import PodFamily
    from vgpu_agent.isolation.edits import Edits
    from vgpu_agent.model import Holding, Resource
    from vgpu_agent.pods import Pod, PodCache

# How long the proof of one start may take in all; the kubelet itself waits for 30 seconds.
START_SECONDS = 20.0
# How long a start waits for a pod that the watch has not shown yet, before it asks the API server.
POD_WAIT_SECONDS = 2.0
# How long a start waits for its pod's status to tell that the container before it has ended. The
# kubelet writes the statuses of all its pods one after the other: on a busy node of twenty starting
# pods one came more than two seconds after the next start was announced.
STATUS_WAIT_SECONDS = 15.0
# How long after an outage of the API server a pod's status may be old: at its next round, every 10
# seconds, the kubelet writes what it could not write before.
STALE_STATUS_SECONDS = 20.0
# The kubelet writes its records before it calls us, but a reader may be quicker than the disk.
_REREAD_SECONDS = 0.05


class NotProvenError(AgentError):
    """The owner of the ids is not known yet, or not without doubt; the text is shown in the pod's
    status and the kubelet retries.

    Attributes:
        ambiguous: the records name two holders, which must not be; anything else is a matter of
            time.
        suspects: (pod, container) that may be the one, for an event when it stays so.
    """

    def __init__(self, text: str, *, ambiguous: bool = False) -> None:
        self.ambiguous = ambiguous
        self.suspects: tuple[tuple[Pod, str], ...] = ()
        super().__init__(text)


class KubeletEvidence(msgspec.Struct, frozen=True):
    """The kubelet's records at one moment, after its call.

    Attributes:
        checkpoint: the holders of the ids in question, by UID and container; None when it could not
            be read or understood.
        pod_resources: all holders, by namespace, pod and container; None when it did not answer.
        answers: (UID, container, resource) → the answer of our Allocate, as far as the checkpoint
            kept it; for the ids in question always, for all others in early mode.
        trouble: why a record is missing.
        whole: whether ``pod_resources`` covers every pod; otherwise only those that the checkpoint
            names for the ids in question.
    """

    checkpoint: tuple[Holding, ...] | None
    pod_resources: tuple[Holding, ...] | None
    answers: Mapping[tuple[str, str, str], Edits] = msgspec.field(default_factory=dict)
    trouble: str = ""
    whole: bool = True


class IdRecords(msgspec.Struct, frozen=True):
    """The records about one set of ids.

    Attributes:
        uids: the pods that may be meant, by the kubelet's UID; several only when the checkpoint
            still names ended pods.
        named: (namespace, name) from pod-resources; None when it does not list these ids (an init
            container's) or did not answer.
        containers: by UID, the containers that have exactly these ids, in the order of the records;
            under "" when no UID is known.
        evidence: one sentence for each record, for people (`Grant.evidence`).
    """

    uids: tuple[str, ...]
    named: tuple[str, str] | None
    containers: Mapping[str, tuple[str, ...]]
    evidence: tuple[str, ...]


class Start(msgspec.Struct, frozen=True):
    """One container about to start, proven.

    Attributes:
        offered: the resource.
        ids: the ids of the resource, as the kubelet named them.
        token: the name of the ids, see `carrier.grant_token`.
        family: the resource's family.
        until: the loop's time by which the kubelet must have an answer.
        pod: the container's pod.
        owner: the container.
        id_records: what the kubelet's records say about the ids.
        kubelet_evidence: the records themselves.
    """

    offered: Resource
    ids: tuple[str, ...]
    token: str
    family: PodFamily
    until: float
    pod: Pod
    owner: Owner
    id_records: IdRecords
    kubelet_evidence: KubeletEvidence

    @property
    def key(self) -> tuple[str, str]:
        """The kubelet's UID of the pod, and the container."""
        return self.owner.pod_uid, self.owner.container


class Identification:
    """The identification of containers; no state of its own."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def identify(
        self, offered: Resource, ids: Sequence[str], token: str, family: PodFamily
    ) -> Start | GrantRecord:
        """Return the container that is about to start,
        or the record of its earlier start when the watch does not show its pod.

        Args:
            offered: the resource.
            ids: of the resource.
            token: their name, see `carrier.grant_token`.
            family: the resource's family.

        Raises:
            NotProvenError: it is not certain (yet).
        """
        seconds = START_SECONDS
        until = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(until):
                identified = await self._identify(offered, ids, token)
        except TimeoutError:
            raise NotProvenError(
                f"the kubelet's records and the API server have not answered within {seconds:g} "
                "s; the kubelet will retry"
            ) from None
        if not isinstance(identified, tuple):
            return identified
        pod, owner, id_records, kubelet_evidence = identified
        return Start(
            offered=offered,
            ids=tuple(ids),
            token=token,
            family=family,
            until=until,
            pod=pod,
            owner=owner,
            id_records=id_records,
            kubelet_evidence=kubelet_evidence,
        )

    async def _identify(
        self, offered: Resource, ids: Sequence[str], token: str
    ) -> tuple[Pod, Owner, IdRecords, KubeletEvidence] | GrantRecord:
        loop, pods, resource = asyncio.get_running_loop(), self._context.pods, offered.name
        until = loop.time() + POD_WAIT_SECONDS
        fetched: Pod | None = None
        while True:
            version = pods.revision.version
            kubelet_evidence = await self._context.read_records(resource, ids)
            try:
                found = records_about(resource, ids, kubelet_evidence)
            except NotProvenError as err:
                if err.ambiguous or loop.time() + _REREAD_SECONDS >= until:
                    err.suspects = suspects(resource, ids, kubelet_evidence, pods)
                    raise
                await asyncio.sleep(_REREAD_SECONDS)
                continue
            try:
                if pod_and_owner := holder(found, pods, fetched):
                    return *pod_and_owner, found, kubelet_evidence
                if fetched is None:
                    # `init_shares`: init containers have shares of their own for the same ids
                    record = self._record_of_earlier_start(
                        found, token, must_be_only_holder=offered.init_shares
                    )
                    # While the first list of pods is read, which takes seconds with the largest
                    # pods, this pod may appear at any time.
                    reading = record is None and not pods.synced.is_set()
                    if not reading and await _newer(pods, version, until - loop.time()):
                        continue
                    if record and await self._context.carrier.has_usable_spec(token):
                        return record
                    fetched = await self._ask_for(found)
            except NotProvenError as err:
                err.suspects = suspects(resource, ids, kubelet_evidence, pods)
                raise

    async def with_starting_container(self, start: Start) -> Start:
        """Return ``start`` with the container whose turn it is, of those of its pod that have the
        same ids. If the pod's status does not show that, wait for it, then ask the API server.

        Raises:
            NotProvenError: it is not known (yet).
        """
        pod, pods = start.pod, self._context.pods
        uid = start.owner.pod_uid
        names = start.id_records.containers.get(uid)
        if names is None:
            # Without the checkpoint, init containers with these ids are hidden.
            resource = start.offered.name
            if any(
                each.kind is ContainerKind.INIT and each.limits.get(resource) == len(start.ids)
                for each in pod.containers
            ):
                raise NotProvenError(
                    f"pod {pod.full_name} has init containers with as many of {resource} and other "
                    "shares, and without the kubelet's checkpoint it is not known which container "
                    "starts; the kubelet will retry"
                )
            return start
        if len(names) == 1:
            return start
        last = max(
            (
                record
                for record in self._context.carrier.records
                if record.token == start.token and record.owner.pod_uid == uid
            ),
            key=lambda record: record.decided_at,
            default=None,
        )
        loop = asyncio.get_running_loop()
        until = min(loop.time() + STATUS_WAIT_SECONDS, start.until)
        while True:
            version = pods.revision.version
            pod = pods.get(uid) or pod
            starting = self._starting_container(pod, names, last, status_is_current=False)
            if starting is not None:
                break
            if not await _newer(pods, version, until - loop.time()):
                pod = await self._as_it_is_now(pod)
                starting = self._by_current_status(pod, names, last)
                break
        owner = msgspec.structs.replace(start.owner, container=starting)
        return msgspec.structs.replace(start, pod=pod, owner=owner)

    def _by_current_status(self, pod: Pod, names: Collection[str], last: GrantRecord | None) -> str:
        """Return the container that starts, by the status of a pod that was just read from the API
        server: what it does not show has not happened, unless the API server was away a moment ago.
        """
        starting = self._starting_container(pod, names, last, status_is_current=False)
        if starting is None and self._context.api_reachable_seconds() < STALE_STATUS_SECONDS:
            raise NotProvenError(
                f"the API server was away a moment ago, and the status of pod {pod.full_name} may "
                "not say yet which of its containers have ended; the kubelet will retry"
            )
        starting = starting or self._starting_container(pod, names, last, status_is_current=True)
        if starting is None:
            raise NotProvenError(
                f"the status of pod {pod.full_name} still shows that its last container with these "
                "ids runs, so it does not show yet which one starts; the kubelet will retry"
            )
        return starting

    def _starting_container(
        self, pod: Pod, names: Collection[str], last: GrantRecord | None, *, status_is_current: bool
    ) -> str | None:
        """Call `shared_ids.starting_container` with the time of the last boot, after which the
        pod's containers start again from the first one.
        """
        booted_at = self._context.booted_at()
        return starting_container(
            pod, names, last, status_is_current=status_is_current, booted_at=booted_at
        )

    async def _as_it_is_now(self, pod: Pod) -> Pod:
        try:
            now = await self._context.fetch_pod(pod.namespace, pod.name)
        except ClusterError as err:
            raise NotProvenError(
                f"it is not known whether the last container of pod {pod.full_name} with these ids "
                f"has ended, and {err}; the kubelet will retry"
            ) from err
        if now is None or now.uid != pod.uid:
            raise NotProvenError(
                f"pod {pod.full_name} does not exist any more; the kubelet will notice"
            )
        return now.as_static(pod.static_uid)  # of a mirror pod; empty for all others

    def _record_of_earlier_start(
        self, found: IdRecords, token: str, *, must_be_only_holder: bool
    ) -> GrantRecord | None:
        """The record of the very container that the kubelet's records name for these ids,
        from an earlier start of it; with ``must_be_only_holder`` only if no other container has
        them.
        """
        for record in self._context.carrier.records:
            owner = record.owner
            if (
                record.token == token
                and found.uids == (owner.pod_uid,)
                and owner.container in found.containers[owner.pod_uid]
                and not (must_be_only_holder and len(found.containers[owner.pod_uid]) > 1)
            ):
                return record if found.named in {None, (owner.namespace, owner.pod)} else None
        return None

    async def _ask_for(self, found: IdRecords) -> Pod:
        """The pod from the API server itself, because our watch does not know it."""
        seconds, pods = POD_WAIT_SECONDS, self._context.pods
        known = next((pod for uid in found.uids if (pod := pods.get(uid))), None)
        name = found.named or ((known.namespace, known.name) if known else None)
        missing = f"pod {'/'.join(name)}" if name else f"the pod with UID {' or '.join(found.uids)}"
        if name is None:
            raise NotProvenError(
                f"{missing} did not appear in the watch within {seconds:g} s; the kubelet "
                "will retry"
            )
        try:
            pod = await self._context.fetch_pod(*name)
        except ClusterError as err:
            raise NotProvenError(
                f"{missing} did not appear in the watch within {seconds:g} s, and {err}; the "
                "kubelet will retry"
            ) from err
        if pod is None or pod.node != self._context.node:
            where = f"is bound to {pod.node or 'no node'}" if pod else "does not exist any more"
            raise NotProvenError(f"{missing} {where}; the kubelet will notice")
        return pod


async def _newer(pods: PodCache, version: int, seconds: float) -> bool:
    """Wait for a change of the pod cache; return False when there is none in time."""
    if seconds <= 0:
        return False
    try:
        async with asyncio.timeout(seconds):
            await pods.revision.newer_than(version)
    except TimeoutError:
        return False
    return True


def records_about(
    resource: str, ids: Sequence[str], kubelet_evidence: KubeletEvidence
) -> IdRecords:
    """Return the kubelet's records about exactly these ids.

    Raises:
        NotProvenError: they do not contain them, or name two live pods at once.
    """
    wanted = set(ids)
    if kubelet_evidence.checkpoint is None and kubelet_evidence.pod_resources is None:
        raise NotProvenError(
            f"neither of the kubelet's records can be read ({kubelet_evidence.trouble}); the "
            "kubelet will retry"
        )
    exact = [
        entry
        for entry in kubelet_evidence.checkpoint or ()
        if _has_exactly(entry, resource, wanted)
    ]
    listed = [
        entry
        for entry in kubelet_evidence.pod_resources or ()
        if entry.resource == resource and not wanted.isdisjoint(entry.ids)
    ]
    live = {(entry.owner.namespace, entry.owner.pod) for entry in listed}
    if len(live) > 1:
        pods = " and ".join(sorted("/".join(pod) for pod in live))
        raise NotProvenError(
            (
                f"the kubelet lists ids of {resource} in two pods at once, {pods}; the start is "
                "refused"
            ),
            ambiguous=True,
        )
    named = next(iter(live), None)
    containers: dict[str, tuple[str, ...]] = {}
    for entry in exact:
        containers[entry.owner.pod_uid] = (
            *containers.get(entry.owner.pod_uid, ()),
            entry.owner.container,
        )
    # the containers that pod-resources lists with exactly these ids
    exact_listed = [
        entry.owner.container for entry in listed if _has_exactly(entry, resource, wanted)
    ]
    evidence = []
    if containers:
        evidence.append(
            "checkpoint: "
            + ", ".join(
                f"pod {uid} container {'/'.join(names)}" for uid, names in containers.items()
            )
        )
    if named:
        evidence.append(
            f"pod-resources: {'/'.join(named)}"
            + (f" container {exact_listed[0]}" if exact_listed else "")
        )
    if kubelet_evidence.trouble:
        evidence.append(f"not read: {kubelet_evidence.trouble}")
    if exact_listed and containers:
        # What is listed alive by name must be what the checkpoint has by UID.
        containers = {
            uid: names for uid, names in containers.items() if set(exact_listed) <= set(names)
        }
    if not containers:
        if kubelet_evidence.checkpoint is not None or not exact_listed:
            raise NotProvenError(
                f"the kubelet's records do not say yet who holds {_some(ids)} of {resource}"
                + (f" ({kubelet_evidence.trouble})" if kubelet_evidence.trouble else "")
                + "; the kubelet will retry"
            )
        _refuse_namesakes(resource, wanted, named, kubelet_evidence)
        containers = {"": tuple(exact_listed)}
    return IdRecords(tuple(uid for uid in containers if uid), named, containers, tuple(evidence))


def holder(
    found: IdRecords, pods: PodCache, fetched: Pod | None = None
) -> tuple[Pod, Owner] | None:
    """Return the pod and container of ``found``; None while the pod is not known.

    Args:
        found: see `records_about`.
        pods: the pods of this node.
        fetched: the pod that the API server has under the name of the records now, if it was
            queried.

    Raises:
        NotProvenError: more than one pod can be meant, or the name belongs to another pod by now.
    """
    if not found.uids:
        return _holder_by_name(found, pods, fetched) if fetched is not None else None
    known = {
        uid: pod
        for uid in found.uids
        if (pod := _known(uid, found.named, pods, fetched)) is not None
    }
    strangers = [uid for uid in found.uids if uid not in known]
    if strangers and fetched is None:
        return None  # with a pod unseen, even a known one may be the predecessor that had these ids
    candidates = {uid: pod for uid, pod in known.items() if not pod.ended}
    if found.named:
        candidates = {
            uid: pod for uid, pod in candidates.items() if (pod.namespace, pod.name) == found.named
        }
    if fetched is not None:
        # One name, one pod: an earlier pod of the name that the API server has now is gone.
        same_name = {
            uid
            for uid, pod in candidates.items()
            if (pod.namespace, pod.name) == (fetched.namespace, fetched.name)
        }
        candidates = {
            uid: pod
            for uid, pod in candidates.items()
            if uid not in same_name or pod.uid == fetched.uid
        }
    if len(candidates) > 1 or (candidates and strangers and not found.named):
        several = ", ".join(
            sorted([*(f"{pod.full_name} ({uid})" for uid, pod in candidates.items()), *strangers])
        )
        raise NotProvenError(
            f"the kubelet's checkpoint names several pods for the same ids: {several}; the start "
            "is refused",
            ambiguous=True,
        )
    if not candidates:
        if fetched is not None:
            raise NotProvenError(
                f"the kubelet starts pod {fetched.full_name} with UID {', '.join(found.uids)}, "
                f"but the API server has UID {fetched.alleged_static_uid or fetched.uid} under "
                "that name; the pod was replaced, the kubelet will notice"
            )
        return None
    uid, pod = next(iter(candidates.items()))
    return pod, _owner(pod, found.containers[uid], uid)


def _holder_by_name(found: IdRecords, pods: PodCache, fetched: Pod) -> tuple[Pod, Owner]:
    """Return the pod and container without the checkpoint: only a pod that the API server has just
    named is certain to be the one of that name.

    Raises:
        NotProvenError: there has been another pod of that name.
    """
    if not pods.is_only_one_of_its_name(fetched):
        raise NotProvenError(
            f"there has been another pod named {fetched.full_name}, and without the kubelet's "
            "checkpoint it is not certain which of them starts; the kubelet will retry"
        )
    # pod-resources names it, and the kubelet runs no pod that claims to be a mirror, so it runs the
    # static pod of that name. `alleged_static_uid` is its UID, by the annotations of the mirror.
    pod = fetched.as_static(fetched.alleged_static_uid)
    return pod, _owner(pod, found.containers[""])


def suspects(
    resource: str, ids: Sequence[str], kubelet_evidence: KubeletEvidence, pods: PodCache
) -> tuple[tuple[Pod, str], ...]:
    """The pods and containers that the records name for any of ``ids``,
    as far as they are known and have not ended.
    """
    wanted, found = set(ids), {}
    recorded = {
        entry.owner.pod_uid
        for entry in kubelet_evidence.checkpoint or ()
        if entry.resource == resource and not wanted.isdisjoint(entry.ids)
    }
    for entry in (*(kubelet_evidence.checkpoint or ()), *(kubelet_evidence.pod_resources or ())):
        if entry.resource == resource and not wanted.isdisjoint(entry.ids):
            owner = entry.owner
            pod = (
                pods.get(owner.pod_uid) if owner.pod_uid else pods.named(owner.namespace, owner.pod)
            )
            # a name alone may be that of a successor with other ids
            is_meant = kubelet_evidence.checkpoint is None or (
                pod is not None and pod.kubelet_uid in recorded
            )
            if pod is not None and not pod.ended and is_meant:
                found[pod.kubelet_uid, owner.container] = (pod, owner.container)
    return tuple(found.values())


def _refuse_namesakes(
    resource: str,
    wanted: set[str],
    named: tuple[str, str] | None,
    kubelet_evidence: KubeletEvidence,
) -> None:
    """Refuse when two pods have one name, the older deleted by force:
    without UIDs they cannot be distinguished.
    """
    mine = [
        entry
        for entry in kubelet_evidence.pod_resources or ()
        if entry.resource == resource and set(entry.ids) == wanted
    ]
    same = {(entry.owner.namespace, entry.owner.pod, entry.owner.container) for entry in mine}
    for entry in kubelet_evidence.pod_resources or ():
        owner = entry.owner
        if (
            entry.resource == resource
            and (owner.namespace, owner.pod, owner.container) in same
            and set(entry.ids) != wanted
        ):
            raise NotProvenError(
                f"the kubelet lists two pods named {'/'.join(named or ())}, and without its "
                "checkpoint it is not certain which of them starts",
                ambiguous=True,
            )


def _known(
    uid: str, named: tuple[str, str] | None, pods: PodCache, fetched: Pod | None
) -> Pod | None:
    """Return the pod that the kubelet knows as ``uid``; for a static pod, its mirror.

    A pod's own annotations are no proof. A mirror counts when the kubelet has written its status,
    as the pod cache shows, or when pod-resources has named it: the kubelet runs no pod of the API
    server that claims to be a mirror, so that name is a static pod's.
    """
    known = pods.get(uid)
    if fetched is None:
        return known or (pods.static(uid, *named) if named else None)
    if fetched.uid == uid:
        return fetched
    name = (fetched.namespace, fetched.name)
    # A recreated mirror pod has the same name and a new API-server UID.
    has_name_of_confirmed_mirror = (
        known is not None and known.uid != uid and (known.namespace, known.name) == name
    )
    return (
        fetched.as_static(uid)
        if fetched.alleged_static_uid == uid
        and (has_name_of_confirmed_mirror or (known is None and named == name))
        else known
    )


def _owner(pod: Pod, names: Iterable[str], uid: str = "") -> Owner:
    """Return, of the containers with the same ids, the last in start order:
    the ids are for it, and the others come before it.
    """
    in_pod = {
        container.name: (container.kind is not ContainerKind.INIT, place)
        for place, container in enumerate(pod.containers)
    }
    known = [name for name in names if name in in_pod]
    if not known:
        raise NotProvenError(
            f"pod {pod.full_name} has no container {', '.join(names)}, which the kubelet names; "
            "the start is refused"
        )
    return Owner(
        max(known, key=lambda name: in_pod[name]), uid or pod.kubelet_uid, pod.namespace, pod.name
    )


def _has_exactly(entry: Holding, resource: str, wanted: set[str]) -> bool:
    return entry.resource == resource and len(entry.ids) == len(wanted) and set(entry.ids) == wanted


def _some(ids: Sequence[str]) -> str:
    return f"{ids[0]} and {len(ids) - 1} more ids" if len(ids) > 1 else f"id {ids[0]}"
