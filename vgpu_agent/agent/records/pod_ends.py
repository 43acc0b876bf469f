"""Pods that have ended according to the API server while the ledger still has something for them.

`verification` asks when to look at the kubelet's records for them, and, with the records at hand,
which grants were theirs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vgpu_agent.model import Decider

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Grant, KubeletRecords
    from vgpu_agent.pods import Pod, PodCache

# The kubelet lists a container's ids as soon as Allocate is answered; the watch may show the pod a
# moment later.
_LISTED_SECONDS = 1.0


class PodEnds:
    """The ends of pods, joined with the grants.

    State: how many pods had ended when every grant was last known by its pod. After a restart all
    grants come from the kubelet's records, with their pods.
    """

    def __init__(
        self, ledger: Ledger, pod_cache: PodCache, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Build it; ``clock`` is the ledger's."""
        self._ledger, self._pod_cache, self._clock = ledger, pod_cache, clock
        self._ends_known = 0

    def pending(self) -> frozenset[str]:
        """Return one text for each end that the ledger does not show yet;
        a new end always makes a new text.

        That is the UID of an ended pod with grants. While there are grants whose pod is not known,
        it may be any pod's end.
        """
        holders = {grant.owner.pod_uid for grant in self._ledger.grants if grant.owner is not None}
        found = {uid for uid in holders if uid and self._pod_cache.has_ended(uid)}
        if not any(self._is_unnamed(grant) for grant in self._ledger.grants):
            self._ends_known = self._pod_cache.ends
        elif self._pod_cache.ends != self._ends_known:
            found.add(f"end {self._pod_cache.ends}")
        return frozenset(found)

    def has_ended(self, grant: Grant, records: KubeletRecords) -> bool:
        """Tell whether, by the API server, the pod of ``grant`` has ended;
        ``records`` do not show it alive.

        A pod may end before the kubelet's records have named it. Its grant is found by exclusion:
        the ids have no holder, and every pod that asked for such ids and has not ended has others.
        A pod on its way to the kubelet has none yet, and a plain init container's are hidden.
        """
        if grant.owner is not None:
            return bool(grant.owner.pod_uid) and self._pod_cache.has_ended(grant.owner.pod_uid)
        if not self._is_unnamed(grant) or self._clock() - grant.steady_at < _LISTED_SECONDS:
            return False
        if (
            not self._pod_cache.synced.is_set()
            or self._pod_cache.left_out
            or self._pod_cache.ends == self._ends_known
        ):
            return False
        if records.entries is None:
            return False  # the checkpoint, which alone shows init containers, could not be read
        wanted = set(grant.ids)
        entries = (
            entry
            for entry in records.entries
            if entry.resource == grant.resource and not wanted.isdisjoint(entry.ids)
        )
        if not all(self._pod_cache.has_ended(entry.owner.pod_uid) for entry in entries):
            return False
        listed = {
            (held.owner.namespace, held.owner.pod)
            for held in records.holdings
            if held.resource == grant.resource
        }
        return not any(
            _asks(pod, grant.resource) and (pod.namespace, pod.name) not in listed
            for pod in self._pod_cache.pods
        )

    def _is_unnamed(self, grant: Grant) -> bool:
        """Tell whether ids that name their device are booked for a pod that is not known yet."""
        if grant.owner is not None or grant.decided_for is not None:
            return False
        return any(
            offer.name == grant.resource and offer.decided_by is Decider.IDS
            for offer in self._ledger.resources
        )


def _asks(pod: Pod, resource: str) -> bool:
    """Tell whether the kubelet may be admitting the pod for ``resource``."""
    return (
        not pod.ended
        and not pod.mirror
        and any(container.limits.get(resource) for container in pod.containers)
    )
