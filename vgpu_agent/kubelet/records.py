"""The kubelet's own records of what containers hold:
its pod-resources and its checkpoint, joined into one picture.

`agent` reads them at start, shortly after each Allocate and every half minute. The ledger follows
them, because the kubelet wins every disagreement. How the two sources are weighed:

* pod-resources decides which containers are *alive*. A listed id is held, whatever the checkpoint
  contains.
* The checkpoint adds the pod's *UID*, found by container name and ids. As a rule one pod holds an
  id at a time, so an id leads to one UID. Where the file names two (kubelet §7), the UID stays
  empty rather than wrong. (While a container with several resources is being admitted, the
  file may still name the pod that had the ids before. It is right again once the admission is over,
  so before any PreStartContainer.)
* An entry of the checkpoint that pod-resources does not confirm is either a plain init container of
  a live pod (pod-resources hides those) or left behind by an ended pod (the kubelet rewrites the
  file late). It counts only if its pod is known to be alive by another container, and only with the
  ids that no listed container has taken over. A pod whose *only* holder is an init container is
  therefore not seen while that container runs. The kubelet keeps its ids from other pods all the
  same, and a false entry in the ledger after each ended pod would be worse.
* Without pod-resources the checkpoint alone is a picture that may contain ended pods: ``complete``
  is False, nothing may be released.
* Without the checkpoint (corrupt, of an unknown format, from a future kubelet) pod-resources alone
  still decides which containers are alive: ``complete`` stays True, owners have no UID, and
  ``trouble`` gives the reason. Otherwise a new format would keep every ended pod's share booked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent.errors import CheckpointError, KubeletError
from vgpu_agent.kubelet.checkpoint import read_checkpoint
from vgpu_agent.model import Holding, KubeletRecords, Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from vgpu_agent.kubelet.checkpoint import CheckpointEntry
    from vgpu_agent.kubelet.pod_resources import PodResources


async def read_records(
    pod_resources: PodResources | None,
    checkpoint: Path,
    is_wanted: Callable[[str], bool] = lambda _: True,
) -> KubeletRecords:
    """Read the picture of the resources whose names ``is_wanted`` accepts;
    never raises, because the agent continues with its ledger.

    Without ``pod_resources`` the checkpoint alone is read, and ``trouble`` does not mention that.
    """
    trouble = []
    listed: tuple[Holding, ...] | None = None
    try:
        if pod_resources is not None:
            listed = await pod_resources.list(is_wanted)
    except KubeletError as err:
        trouble.append(str(err))
    entries: tuple[CheckpointEntry, ...] | None = None
    try:
        # After List, which makes the kubelet forget ended pods, so that fewer of them are still in
        # the file.
        entries = await read_checkpoint(checkpoint, is_wanted)
    except CheckpointError as err:
        trouble.append(str(err))
    holdings = await asyncio.to_thread(join, listed, entries or ())
    # the checkpoint as it is, with ended pods; None: not readable
    lines = None if entries is None else tuple(as_holding(entry) for entry in entries)
    return KubeletRecords(
        holdings, complete=listed is not None, trouble="; ".join(trouble), entries=lines
    )


def as_holding(entry: CheckpointEntry) -> Holding:
    """Return one entry of the checkpoint as a `Holding`."""
    return Holding(entry.resource_name, entry.ids, Owner(entry.container_name, entry.pod_uid))


def join(
    listed: Iterable[Holding] | None, entries: Iterable[CheckpointEntry]
) -> tuple[Holding, ...]:
    """One picture from pod-resources (None when it did not answer) and the checkpoint,
    by the rules above.
    """
    entries = tuple(entries)
    if listed is None:
        return _of_checkpoint_alone(entries)
    uids = _uids_by_id(entries)
    joined = [_with_uid(holding, uids) for holding in listed]
    alive = {holding.owner.pod_uid: holding.owner for holding in joined if holding.owner.pod_uid}
    taken = {(holding.resource, id_) for holding in joined for id_ in holding.ids}
    for entry in entries:
        pod = alive.get(entry.pod_uid)
        left = tuple(id_ for id_ in entry.ids if (entry.resource_name, id_) not in taken)
        if pod is not None and left:
            joined.append(
                Holding(
                    entry.resource_name,
                    left,
                    Owner(entry.container_name, entry.pod_uid, pod.namespace, pod.pod),
                )
            )
    return tuple(joined)


def unlisted(records: KubeletRecords) -> tuple[Holding, ...]:
    """Return what only the checkpoint shows: ids that no holding has, each once.

    They are what an ended pod left behind, or a live pod's: a kubelet that was started a moment ago
    lists its pods one after the other.
    """
    taken = {(holding.resource, id_) for holding in records.holdings for id_ in holding.ids}
    found = []
    # of entries with the same ids the largest keeps them, as in `_of_checkpoint_alone`
    for entry in sorted(
        records.entries or (),
        key=lambda each: (-len(each.ids), each.owner.pod_uid, each.owner.container),
    ):
        left = tuple(id_ for id_ in entry.ids if (entry.resource, id_) not in taken)
        taken.update((entry.resource, id_) for id_ in left)
        if left:
            found.append(Holding(entry.resource, left, entry.owner))
    return tuple(found)


def _uids_by_id(entries: Iterable[CheckpointEntry]) -> dict[tuple[str, str, str], set[str]]:
    """Return (resource, container's name, id) → UIDs of the pods whose entries have it."""
    uids: dict[tuple[str, str, str], set[str]] = {}
    for entry in entries:
        for id_ in entry.ids:
            uids.setdefault((entry.resource_name, entry.container_name, id_), set()).add(
                entry.pod_uid
            )
    return uids


def _with_uid(holding: Holding, uids: dict[tuple[str, str, str], set[str]]) -> Holding:
    uids_of_ids = [
        uids.get((holding.resource, holding.owner.container, id_), set()) for id_ in holding.ids
    ]
    agreed = set.intersection(*uids_of_ids) if uids_of_ids else set()
    if len(agreed) != 1:
        return holding
    owner = holding.owner
    return Holding(
        holding.resource,
        holding.ids,
        Owner(owner.container, agreed.pop(), owner.namespace, owner.pod),
    )


def _of_checkpoint_alone(entries: Iterable[CheckpointEntry]) -> tuple[Holding, ...]:
    """List each id once. The file does not show which of two holders is the init container,
    so the larger entry comes first and keeps the ids that both have.
    """
    holdings = []
    taken: set[tuple[str, str]] = set()
    for entry in sorted(
        entries,
        key=lambda each: (-len(each.ids), each.pod_uid, each.container_name, each.resource_name),
    ):
        left = tuple(id_ for id_ in entry.ids if (entry.resource_name, id_) not in taken)
        taken.update((entry.resource_name, id_) for id_ in left)
        if left:
            holdings.append(
                Holding(entry.resource_name, left, Owner(entry.container_name, entry.pod_uid))
            )
    return tuple(holdings)
