"""Pods that have ended according to the API server, but still have grants in the ledger.

`verification` calls `pending` to decide when to read the kubelet's records, and then `has_ended` to
find the grants of the ended pods.
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

# Minimum age of a grant before the end of its pod is inferred by exclusion: the kubelet lists ids
# right after Allocate, but the watch may show the pod later.
_LISTED_SECONDS = 1.0


class PodEnds:
    """The ends of pods, joined with the grants.

    State: the number of pods that had ended at the last moment when every grant's pod was known. It
    is lost with the process, without harm: after a restart all grants come with their pods.
    """

    def __init__(
        self, ledger: Ledger, pod_cache: PodCache, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Join ``ledger`` and ``pod_cache``; ``clock`` is the ledger's."""
        self._ledger, self._pod_cache, self._clock = ledger, pod_cache, clock
        # `PodCache.ends`, the number of pods that were seen to end, at that moment
        self._ends_when_all_known = 0

    def pending(self) -> frozenset[str]:
        """Return keys for the ends of pods that the ledger may not have followed yet.

        The key of an ended pod with grants is its UID. While the pod of some grant is not known,
        any end may be the end of that pod: one further key stands for all these ends, and changes
        with each. While the pod of every grant is known, the number of ends is noted for
        `has_ended`.
        """
        holders = {grant.owner.pod_uid for grant in self._ledger.grants if grant.owner is not None}
        found = {uid for uid in holders if uid and self._pod_cache.has_ended(uid)}
        if not any(self._is_unnamed(grant) for grant in self._ledger.grants):
            self._ends_when_all_known = self._pod_cache.ends
        elif self._pod_cache.ends != self._ends_when_all_known:
            found.add(f"end {self._pod_cache.ends}")
        return frozenset(found)

    def has_ended(self, grant: Grant, records: KubeletRecords) -> bool:
        """Tell whether the pod of ``grant`` has ended according to the API server.

        A pod may end before the kubelet's records have named it. Then its grant is found by
        exclusion: the records show no live holder of the ids, and list other ids for every live pod
        that asks for the resource. A pod without listed ids may be the holder: the kubelet may be
        admitting it, or only a plain init container of it has ids, which pod-resources hides.
        """
        if grant.owner is not None:
            return bool(grant.owner.pod_uid) and self._pod_cache.has_ended(grant.owner.pod_uid)
        if (
            not self._is_unnamed(grant)
            or self._clock() - grant.reserved_at_monotonic < _LISTED_SECONDS
        ):
            return False
        if (
            not self._pod_cache.synced.is_set()
            or self._pod_cache.left_out  # a pod outside the cache may be the holder
            or self._pod_cache.ends == self._ends_when_all_known
        ):
            return False
        if records.entries is None:
            return False  # the checkpoint, which shows init containers too, could not be read
        wanted = set(grant.ids)
        entries = (
            entry
            for entry in records.entries
            if entry.resource == grant.resource and not wanted.isdisjoint(entry.ids)
        )
        if not all(self._pod_cache.has_ended(entry.owner.pod_uid) for entry in entries):
            return False
        # `holdings`, not `entries`: `entries` are the lines of the checkpoint, which lack the names
        # of pods, and may be of pods that have ended
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
        """Tell whether ids that name their device are booked for a pod that is not known yet.
        ``decided_for`` is the container that a decision was made for, where pods decide.
        """
        if grant.owner is not None or grant.decided_for is not None:
            return False
        return any(
            offer.name == grant.resource and offer.decided_by is Decider.IDS
            for offer in self._ledger.resources
        )


def _asks(pod: Pod, resource: str) -> bool:
    """Tell whether the pod has not ended and asks for ``resource``. The kubelet admits no mirror
    pods.
    """
    return (
        not pod.ended
        and not pod.mirror
        and any(container.limits.get(resource) for container in pod.containers)
    )
