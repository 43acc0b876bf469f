"""The later life of a `Place`: verification, restarts of the agent,
containers that have started.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from tests.allocation.binding_parts import Place
from vgpu_agent.kubelet.checkpoint import CheckpointEntry
from vgpu_agent.kubelet.records import as_holding, join
from vgpu_agent.ledger.reconciliation import Correction
from vgpu_agent.model import KubeletRecords
from vgpu_agent.pods import Pod


def confirm(place: Place, *, times: int = 1, initial: bool = False) -> list[Correction]:
    """Let the ledger follow kubelet's records ``times`` over;
    the drift that the last pass has found.
    """
    drift: list[Correction] = []
    for _ in range(times):
        lines = place.checkpoint or []
        entries = [
            CheckpointEntry(line.owner.pod_uid, line.owner.container, line.resource, list(line.ids))
            for line in lines
        ]
        holdings = join(place.pod_resources, entries)
        records = KubeletRecords(
            holdings,
            complete=place.pod_resources is not None,
            entries=(
                tuple(as_holding(entry) for entry in entries)
                if place.checkpoint is not None
                else None
            ),
        )
        drift = place.allocator.confirm(records, reservation_seconds=60, initial=initial)
    return drift


def restarted(place: Place, *pods: Pod, late: bool = True) -> Place:
    """An agent that starts on the node of ``place`` and has listed ``pods``;
    with none of them, it has not listed anything yet.
    """
    after = Place(late=late, carrier=place.carrier)
    after.checkpoint, after.pod_resources, after.answers = (
        place.checkpoint,
        place.pod_resources,
        place.answers,
    )
    if pods:
        after.book.replace(pods)
    return after


def running(pod: Pod) -> Pod:
    """``pod`` when all its containers have started."""
    return msgspec.structs.replace(
        pod,
        phase="Running",
        containers=tuple(msgspec.structs.replace(each, started=True) for each in pod.containers),
    )


def booked(place: Place) -> dict[str, int]:
    """GPU → MiB that the ledger has given away."""
    shares = [share for grant in place.ledger.grants for share in grant.shares]
    return dict(sum((Counter({share.device: share.memory_mib}) for share in shares), Counter()))
