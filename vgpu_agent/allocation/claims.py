"""The claims: GPUs that the ledger keeps for bound pods of this node without shares yet.

There are two kinds of claims. For families whose pods carry the decision (Volcano), the scheduler
has named the GPU in an annotation of the pod. For families whose device ids name GPUs, the
scheduler has only counted. A pod that it has bound is *demand* for so many ids, until the kubelet
has admitted it. If the GPUs that serve its family do not cover the demand, free ones are kept for
it. Without them the kubelet would fail that pod for good, while a pod of Volcano's only waits. So
demand goes before claims by annotation of the same age.

The claims follow from the pods, the families and the grants alone, so a restart loses nothing. A
claim begins when the watch shows the bound pod. It ends when the container gets its shares, when
the pod ends or is deleted, when its start is refused for good, or when its family finds that the
annotation cannot be followed. A pod whose image cannot be pulled keeps its claim, just as it keeps
its memory and processors on the node.

Every user who may create pods can write annotations. So a pod claims no more GPUs than the kubelet
counts for it, and nothing before a scheduler has bound it or the kubelet has admitted it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.allocation.demand import Demand, is_expected
from vgpu_agent.ledger.claims import Claim
from vgpu_agent.model import Decider

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu_agent.allocation.context import Context
    from vgpu_agent.families.family import PodFamily
    from vgpu_agent.model import Inventory, Resource
    from vgpu_agent.pods import Pod, PodContainer

# A claim's order is its pod's place in the order of binds (`Pod.bound`). This number is larger than
# any place. It is subtracted for claims that go first: demand, and pods with a part of their
# shares.
_AHEAD = 2**40

_Named = tuple[tuple[str, str, tuple[str, ...]], ...]  # (family, container, UUIDs of GPUs)


class Claims:
    """The source of the ledger's claims.

    State: caches only. The GPUs that the annotations of each pod name are cached until pod,
    families or GPUs change. `refresh` is called before every decision. It compares the versions of
    all inputs first, so it costs next to nothing while they stay the same.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = context.ledger
        self._made_from: tuple[object, ...] = ()
        # pod and named GPUs, by the kubelet's UID of the pod; valid for these families and GPUs
        self._cached: dict[str, tuple[Pod, _Named]] = {}
        self._cached_for: tuple[object, ...] = ()

    def refresh(self) -> None:
        """Give the ledger new claims if any of their inputs has changed."""
        made_from = self._versions()
        if made_from == self._made_from:
            return
        self._ledger.claim(self._claims())
        # read once more, because new claims advance the ledger's revision
        self._made_from = self._versions()

    def _versions(self) -> tuple[object, ...]:
        return (
            self._context.pods.revision.version,
            self._ledger.revision.version,
            self._context.refusals.revision.version,
            self._context.inventory().version,
            self._context.families,
        )

    def _claims(self) -> list[Claim]:
        named = self._named_claims()
        if not self._ledger.serves_several_families:
            return named  # no other family can take a GPU, so demand needs no claim
        expected = [pod for pod in self._context.pods.pods if is_expected(pod)]
        if not expected:
            return named
        demand = Demand(self._ledger, named, ahead=_AHEAD, now=self._context.clock())
        return named + [claim for pod in expected for claim in demand.claims(pod)]

    def _named_claims(self) -> list[Claim]:
        waiting = self._waiting()
        if not waiting:
            return []
        since = {
            (claim.pod_uid, claim.family, claim.gpu): claim.since for claim in self._ledger.claims
        }
        started = {
            grant.decided_for for grant in self._ledger.grants if grant.decided_for and grant.shares
        }
        partly_started = {uid for uid, _ in started}
        refused_for_good = {
            refusal.pod.kubelet_uid for refusal in self._context.refusals.current if refusal.final
        }
        now, claims = self._context.clock(), []
        for pod, named in waiting:
            uid = pod.kubelet_uid
            if uid in refused_for_good:
                continue
            order = pod.bound - _AHEAD if uid in partly_started else pod.bound
            for family, container, gpus in named:
                if (uid, container) in started:
                    continue
                claims += [
                    Claim(
                        gpu, family, pod.full_name, uid, since.get((uid, family, gpu), now), order
                    )
                    for gpu in gpus
                ]
        return claims

    def _waiting(self) -> list[tuple[Pod, _Named]]:
        """Return the pods whose annotations name GPUs for containers that have not started."""
        families, inventory = self._context.families, self._context.inventory()
        paused = {family.name for family in families.paused}
        by_pod = tuple(family for family in families.by_pod if family.name not in paused)
        resources = self._ledger.resources
        cached_for = (by_pod, inventory.version, resources)
        if cached_for != self._cached_for:
            self._cached_for, self._cached = cached_for, {}
        cached, waiting = {}, []
        for pod in self._context.pods.pods if by_pod else ():
            before = self._cached.get(pod.kubelet_uid)
            entry = (
                before
                if before is not None and before[0] is pod
                else (pod, _named(pod, by_pod, inventory, resources))
            )
            cached[pod.kubelet_uid] = entry
            if entry[1]:
                waiting.append(entry)
        self._cached = cached
        return waiting


def other_families(
    container: PodContainer, family: str, resources: Iterable[Resource]
) -> list[str]:
    """List the resources of other families that the container asks for as well.
    Each would give it GPUs of its own.
    """
    foreign = (
        offer.name
        for offer in resources
        if offer.decided_by is not Decider.NOBODY and offer.family != family
    )
    return [name for name in foreign if container.limits.get(name)]


def _named(
    pod: Pod, by_pod: Iterable[PodFamily], inventory: Inventory, resources: tuple[Resource, ...]
) -> _Named:
    """Return the GPUs that the pod's annotations name for containers that have not started."""
    # A pod that is being deleted starts no container any more, and the kubelet never
    # runs a pod that claims to be the mirror of a static pod.
    if not pod.scheduled or pod.ended or pod.deleting or pod.mirror:
        return ()
    if all(container.started for container in pod.containers):
        # Most pods run already. This spares reading their annotations, which is most of the work.
        return ()
    return tuple(
        (family.name, name, gpus)
        for family in by_pod
        for name, gpus in family.named(pod, inventory).items()
        if (container := pod.container(name)) is not None and not container.started
        if not other_families(container, family.name, resources)
    )
