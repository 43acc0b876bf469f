"""The free GPUs kept for bound pods whose ids name GPUs, until the kubelet has admitted them.

Their scheduler has counted ids and named no GPU. So a pod that the kubelet has not admitted yet is
demand for as many ids as it asks for. The GPUs that serve its family cover it first; free GPUs are
kept for the rest. What the pods before it need is *older* demand. A pod claims nothing that the
kubelet cannot give it, and nothing after admission. In other families a scheduler has named the GPU
in an annotation of the pod: a claim *by annotation*. Pure; used by `claims`.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.ledger.claims import Claim
from vgpu_agent.model import Decider
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Resource
    from vgpu_agent.pods import Pod

EQUAL_AGE_SECONDS = 2.0
"""Claims by annotation that are no older than this give way:
their pods wait, while the kubelet would fail the pods of the demand for good.
"""


class _Left(msgspec.Struct):
    """The ids of one resource that have no holder and that no pod before needs: how many on GPUs
    that serve its family, and GPU → how many on free ones.
    """

    serving: int
    free: dict[str, int]


class Demand:
    """The demand at one moment. State: what is left for the pods that come after those
    that were asked about.
    """

    def __init__(
        self, ledger: Ledger, named: Iterable[Claim], *, priority: int, now: float
    ) -> None:
        """Begin without demand.

        Args:
            ledger: the ledger.
            named: the claims by annotation.
            priority: a number larger than any pod's position in the order of binds. It is
                subtracted from that position, so that claims of demand come before claims by
                annotation of pods that have no share yet, whenever the pods were bound.
            now: unix seconds.
        """
        self._ledger, self._priority, self._now = ledger, priority, now
        # resources whose ids name the devices
        self._offers = {
            offer.name: offer for offer in ledger.resources if offer.decided_by is Decider.IDS
        }
        # without resources that are only there for schedulers and quotas to count: a container may
        # name those beside any other
        self._families = {
            offer.name: offer.family
            for offer in ledger.resources
            if offer.decided_by is not Decider.NOBODY
        }
        # (UID of the pod, GPU) → since when it has a claim, in unix seconds
        self._before = {(claim.pod_uid, claim.gpu): claim.since for claim in ledger.claims}
        # GPU → the families of claims by annotation: the young ones, which give way to demand
        # (`EQUAL_AGE_SECONDS`), and the older ones, to which demand gives way
        self._young: dict[str, set[str]] = {}
        self._older: dict[str, set[str]] = {}
        for claim in named:
            young = now - claim.since <= EQUAL_AGE_SECONDS
            (self._young if young else self._older).setdefault(claim.gpu, set()).add(claim.family)
        self._taken: dict[str, str] = {}  # GPU → the family that older demand keeps it for
        self._left: dict[str, _Left] = {}
        # resource → how many ids were granted a moment ago, to pods that are not known yet
        self._unnamed = collections.Counter[str]()
        # (resource, pod that holds ids of it: by its UID, and again by ``namespace/name``)
        self._holders = set[tuple[str, str]]()
        for grant in ledger.grants:
            if grant.owner is None:
                self._unnamed[grant.resource] += len(grant.ids)
            else:
                self._holders |= {
                    (grant.resource, grant.owner.pod_uid),
                    (grant.resource, grant.owner.pod_name),
                }

    def claims(self, pod: Pod) -> list[Claim]:
        """Return the claims of the pod, on what the pods that were asked about before have left."""
        needs = _needs(pod, self._offers, self._families)
        return [
            claim
            for name, count in needs.items()
            for claim in self._of_resource(pod, self._offers[name], count)
        ]

    def _of_resource(self, pod: Pod, resource: Resource, count: int) -> list[Claim]:
        """Return the pod's claims for ``count`` ids of one resource."""
        name, family = resource.name, resource.family
        if not self._holders.isdisjoint({(name, pod.kubelet_uid), (name, pod.full_name)}):
            return []
        granted = min(count, self._unnamed[name])
        self._unnamed[name] -= granted
        if name not in self._left:
            serving, free = self._ledger.free_ids_by_gpu(name)
            self._left[name] = _Left(sum(serving.values()), free)
        left = self._left[name]
        missing = count - granted - left.serving
        chosen = self._choose(pod, family, left.free, missing)
        if missing > sum(chosen.values()):
            return []  # the kubelet cannot admit it in any case
        left.serving = max(0, -missing)
        for gpu, ids in chosen.items():
            left.free[gpu] -= ids
            self._taken[gpu] = family
        # `bound` is the pod's position in the order of binds. `kubelet_uid` is the UID that grants
        # and claims have; the API server has another one for static pods only.
        uid, order = pod.kubelet_uid, pod.bound - self._priority
        return [
            Claim(
                gpu=gpu,
                family=family,
                pod=pod.full_name,
                pod_uid=uid,
                since=self._before.get((uid, gpu), self._now),
                order=order,
                named=False,  # no scheduler has named the GPU
            )
            for gpu in chosen
        ]

    def _choose(
        self, pod: Pod, family: str, free: Mapping[str, int], missing: int
    ) -> dict[str, int]:
        """Choose free GPUs for ``missing`` ids: first those that pods of the family before this one
        need, last those that a scheduler has named for another family a moment ago. ``free`` has
        the ids left on each free GPU. Return GPU → ids of it.
        """

        def rank(gpu: str) -> tuple[bool, ...]:
            kept_before = (pod.kubelet_uid, gpu) in self._before
            named = bool(self._young.get(gpu, set()) - {family})
            return (
                gpu not in self._taken,
                not kept_before,
                not self._ledger.is_first(gpu, family),  # only this family is offered it just now
                named,
            )

        open_to = [
            gpu
            for gpu in free
            if self._taken.get(gpu, family) == family and not self._older.get(gpu, set()) - {family}
        ]
        chosen = dict[str, int]()
        for gpu in sorted(open_to, key=rank):
            if (ids := min(free[gpu], missing)) > 0:
                chosen[gpu] = ids
                missing -= ids
        return chosen


def is_expected(pod: Pod) -> bool:
    """Tell whether a scheduler has bound the pod and the kubelet has yet to admit it."""
    # `mirror`: by its annotations it stands for a static pod, which no scheduler binds
    return pod.scheduled and not (pod.reported or pod.ended or pod.deleting or pod.mirror)


def _needs(
    pod: Pod, offers: Mapping[str, Resource], family_of: Mapping[str, str]
) -> dict[str, int]:
    """Return resource → number of ids that the pod needs at a time. The ids of init containers go
    to the containers after them. ``family_of`` has the family of each resource whose ids are
    granted.
    """
    needs = dict[str, int]()
    if any(
        len(asked) > 1
        for asked in (
            {family_of[name] for name in each.limits if name in family_of}
            for each in pod.containers
        )
    ):
        return needs  # such a container cannot start
    for name in offers:
        asked: Sequence[tuple[ContainerKind, int]] = [
            (each.kind, each.limits[name]) for each in pod.containers if each.limits.get(name)
        ]
        kept = sum(count for kind, count in asked if kind is not ContainerKind.INIT)
        if count := max([kept, *(count for kind, count in asked if kind is ContainerKind.INIT)]):
            needs[name] = count
    return needs
