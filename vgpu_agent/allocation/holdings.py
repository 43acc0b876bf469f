"""Find the holders of ids whose pod decides, from the kubelet's records and the known pods.

Called by `allocator` before the ledger follows the records. The kubelet's records alone do not
distinguish an init container that has ended from one that runs, nor a pod that has ended from one
whose only holder is an init container: pod-resources hides those. The checkpoint keeps every
container that was ever admitted, and containers of one pod may have the same ids. The pods show the
kind of each container and which has started. With them each id has one holder: the container that
it is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.model import Holding, Owner
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vgpu_agent.allocation.carrier import GrantRecord
    from vgpu_agent.model import Grant, KubeletRecords
    from vgpu_agent.pods import Pod, PodCache, PodContainer

# The times in a pod's status are whole seconds.
_STATUS_PRECISION_SECONDS = 1.0


def with_single_holders(
    records: KubeletRecords,
    resources: Collection[str],
    pod_cache: PodCache,
    running_inits: Collection[tuple[str, str]] = (),
    decided: Collection[tuple[str, str, str]] = (),
) -> KubeletRecords:
    """Return ``records`` with one holder for each id of ``resources``, and without pods that the
    checkpoint alone shows and that have ended; unchanged when the checkpoint was not read.

    ``running_inits`` names the last started init container (pod's UID, container) of each pod. It
    holds its ids, whichever other containers have them as well. ``decided`` names the containers
    (pod's UID, container, resource) that have a grant record. One of them, or one that runs by its
    pod's status, holds ids that the kubelet has given to another pod as well (kubelet §7): the
    other cannot start.
    """
    if records.entries is None:  # the lines of the checkpoint
        return records
    holdings = (
        records.holdings
        if records.complete  # pod-resources answered, so these are not of the checkpoint alone
        else [each for each in records.holdings if not pod_cache.has_ended(each.owner.pod_uid)]
    )
    others = [holding for holding in holdings if holding.resource not in resources]
    listed = [
        _with_uid(holding, records.entries, pod_cache)
        for holding in holdings
        if holding.resource in resources
    ]
    # the pods whose holdings are listed: UID → a holder, for the pod's name
    alive = {holding.owner.pod_uid: holding.owner for holding in listed if holding.owner.pod_uid}
    # Of holders without a UID no entry is known, so they keep the ids that pod-resources lists for
    # them.
    found = [holding for holding in listed if not holding.owner.pod_uid]
    taken = {(holding.resource, id_) for holding in found for id_ in holding.ids}
    entries = [
        entry
        for entry in records.entries
        if entry.resource in resources and _lives(entry.owner.pod_uid, alive, records, pod_cache)
    ]
    shown = {
        (holding.resource, holding.owner.pod_uid, holding.owner.container)
        for holding in listed
        if records.complete
    }
    for entry in sorted(
        entries,
        key=lambda entry: _rank(
            entry, pod_cache.get(entry.owner.pod_uid), shown, running_inits, decided
        ),
    ):
        left = tuple(id_ for id_ in entry.ids if (entry.resource, id_) not in taken)
        taken.update((entry.resource, id_) for id_ in left)
        if left:
            found.append(
                Holding(
                    entry.resource,
                    left,
                    _named(
                        entry.owner,
                        alive.get(entry.owner.pod_uid),
                        pod_cache.get(entry.owner.pod_uid),
                    ),
                )
            )
    return msgspec.structs.replace(records, holdings=(*others, *found))


def is_over(pod: Pod, name: str) -> bool:
    """Tell whether an init container must have ended,
    because one that comes after it has started.
    """
    names = [container.name for container in pod.containers]
    container = pod.container(name)
    if container is None or container.kind is not ContainerKind.INIT:
        return False
    return any(later.started for later in pod.containers[names.index(name) + 1 :])


def is_outdated(record: GrantRecord, records: Iterable[GrantRecord], pod: Pod) -> bool:
    """Tell whether an init container of the pod started after ``record`` was made
    for a main container, and the main container has not started since.

    Then nothing of the main container runs, and the decision is made again when it starts. The
    record may be of an earlier init container with the same ids, or of an earlier sandbox. A main
    container that starts again without the agent, or while its pod is not known, keeps its record.
    """
    kinds = {container.name: container.kind for container in pod.containers}
    main = pod.container(record.owner.container)
    return (
        main is not None
        and main.kind is ContainerKind.MAIN
        and any(
            other.owner.pod_uid == record.owner.pod_uid
            and other.decided_at > record.decided_at
            and kinds.get(other.owner.container) is ContainerKind.INIT
            and not has_started_since(main, other.decided_at)
            for other in records
        )
    )


def has_started_since(container: PodContainer, decided_at: float) -> bool:
    """Tell whether the container's last start by the pod's status is certainly later than
    ``decided_at`` (Unix seconds).
    """
    return container.started_at > decided_at + _STATUS_PRECISION_SECONDS


def has_started_before(container: PodContainer, decided_at: float) -> bool:
    """Tell whether the container's last start by the pod's status is certainly earlier than
    ``decided_at`` (Unix seconds).
    """
    return container.started_at + _STATUS_PRECISION_SECONDS < decided_at


def ruled_out(pod: Pod, starting: str) -> tuple[str, ...]:
    """Return the containers of ``pod`` that cannot run when the container ``starting`` starts; none
    if the pod has no such container, as when a mirror pod differs from its static pod.

    Init containers that come before it have ended. While an init container starts, only sidecars
    run beside it: a new sandbox starts all containers again, and each gets the same shares again.
    """
    names = [container.name for container in pod.containers]
    if starting not in names:
        return ()
    place = names.index(starting)
    kind = pod.containers[place].kind
    return tuple(
        other.name
        for other_place, other in enumerate(pod.containers)
        if other_place != place
        and (
            (other.kind is ContainerKind.INIT and other_place < place)
            or (kind is ContainerKind.INIT and other.kind is not ContainerKind.SIDECAR)
        )
    )


def ended_before(grants: Iterable[Grant], pod: Pod, starting: Owner) -> list[int]:
    """Return the numbers (`Grant.number`) of those ``grants`` that were decided for containers of
    ``pod`` which cannot run when ``starting`` starts (`ruled_out`).
    """
    names = ruled_out(pod, starting.container)
    return [
        grant.number
        for grant in grants
        if grant.decided_for  # (pod's UID, container)
        and grant.decided_for[0] == starting.pod_uid
        and grant.decided_for[1] in names
    ]


def _with_uid(holding: Holding, entries: Collection[Holding], pod_cache: PodCache) -> Holding:
    """Return ``holding`` with the UID of its pod, where it has none although the checkpoint has
    that pod: several pods have these ids in containers of the same name, and only one of them has
    the name of the holding.
    """
    owner = holding.owner
    if owner.pod_uid:
        return holding
    found = {
        entry.owner.pod_uid
        for entry in entries
        if entry.resource == holding.resource
        and entry.owner.container == owner.container
        and set(holding.ids) <= set(entry.ids)
        and (pod := pod_cache.get(entry.owner.pod_uid)) is not None
        and (pod.namespace, pod.name) == (owner.namespace, owner.pod)
    }
    if len(found) != 1:
        return holding
    (uid,) = found
    return msgspec.structs.replace(holding, owner=msgspec.structs.replace(owner, pod_uid=uid))


def _lives(uid: str, alive: Collection[str], records: KubeletRecords, pod_cache: PodCache) -> bool:
    """Tell whether the pod of a line of the checkpoint may still have containers."""
    if not records.complete:
        # The checkpoint itself shows no ends, and the pod may be one that was never seen.
        return not pod_cache.has_ended(uid)
    pod = pod_cache.get(uid)
    return uid in alive or (pod is not None and not pod.ended)


def _rank(
    entry: Holding,
    pod: Pod | None,
    shown: Collection[tuple[str, str, str]],
    running_inits: Collection[tuple[str, str]],
    decided: Collection[tuple[str, str, str]],
) -> tuple[int, bool, int, str]:
    """Rank the entries that have the same id; the lowest rank holds it.

    That is the container that runs last in its pod, or, in an unknown pod, the entry with fewer
    ids. An init container that runs comes first: the containers after it have not started.

    Args:
        entry: a line of the checkpoint.
        pod: its pod, if that is known.
        shown: (resource, pod's UID, container) of the lines of pod-resources.
        running_inits: see `with_single_holders`.
        decided: see `with_single_holders`.
    """
    uid, name, resource = entry.owner.pod_uid, entry.owner.container, entry.resource
    if (uid, name) in running_inits:
        return -1, False, 0, name
    container = pod.container(name) if pod else None
    is_init = container is not None and container.kind is ContainerKind.INIT
    is_running = container is not None and container.running
    is_undecided = not is_init and not is_running and (uid, name, resource) not in decided
    if container is None:
        return (0 if (resource, uid, name) in shown else 1), is_undecided, len(entry.ids), name
    return (2 if is_init else 0), is_undecided, len(entry.ids), name


def _named(owner: Owner, listed: Owner | None, pod: Pod | None) -> Owner:
    """Return ``owner``, of a line of the checkpoint, with the names that the line lacks: the pod's
    and its namespace's, from a holding of the same pod or from the pod.
    """
    if listed is not None:
        return Owner(owner.container, owner.pod_uid, listed.namespace, listed.pod)
    return Owner(owner.container, owner.pod_uid, pod.namespace, pod.name) if pod else owner
