"""The GPUs that are kept in `ledger` for pods of this node which have not been given anything yet.

There are two kinds of claims. Where the pod decides (Volcano), its scheduler has named the GPU in
the pod's annotations. Where ids name GPUs, a scheduler has only counted: a pod that it has bound
and that the kubelet has not admitted yet is *demand* for so many ids. If the GPUs that serve its
family do not cover the demand, free ones are kept for it until the kubelet has admitted it. A pod
whose GPU is gone by then fails for good, while one of Volcano's only waits. So demand goes before
claims by annotation that are as young.

Made from the pods, the families and the grants alone, so a restart loses nothing. A claim begins
when the watch shows the bound pod. It ends when the container is given its shares, when the pod
ends or is deleted, when its start is refused for good, and when its family finds that the
annotation cannot be followed. A pod whose image cannot be pulled keeps its claim, as it keeps all
else that it was bound for.

Every user who may create pods can write annotations. A pod claims no more GPUs than the kubelet
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

# more pods than a process ever sees: the claims of pods that have a part of what they need come
# before all others
_AHEAD = 2**40

_Named = tuple[tuple[str, str, tuple[str, ...]], ...]  # (family, container, UUIDs of GPUs)


class Claims:
    """The claims of the ledger, brought in line with the pods.

    State: what the annotations of each pod mean, for as long as pod, families and GPUs stay the
    same, and what the claims were made from last. `refresh` costs next to nothing when none of that
    has changed, so it is called before every decision.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = context.ledger
        self._made_from: tuple[object, ...] = ()
        self._known_with: tuple[object, ...] = ()
        self._known: dict[str, tuple[Pod, _Named]] = {}  # by the kubelet's UID

    def refresh(self) -> None:
        """Make the claims anew if anything has changed that they are made from."""
        made_from = self._versions()
        if made_from == self._made_from:
            return
        self._ledger.claim(self._claims())
        self._made_from = self._versions()  # with the ledger's own step, if that was one

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
            return named  # whatever is free is theirs
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
        served = {
            grant.decided_for for grant in self._ledger.grants if grant.decided_for and grant.shares
        }
        partly = {uid for uid, _ in served}
        lost = {
            refusal.pod.kubelet_uid for refusal in self._context.refusals.current if refusal.final
        }
        now, claims = self._context.clock(), []
        for pod, named in waiting:
            uid = pod.kubelet_uid
            if uid in lost:
                continue
            order = pod.bound - _AHEAD if uid in partly else pod.bound
            for family, container, gpus in named:
                if (uid, container) in served:
                    continue
                claims += [
                    Claim(
                        gpu, family, pod.full_name, uid, since.get((uid, family, gpu), now), order
                    )
                    for gpu in gpus
                ]
        return claims

    def _waiting(self) -> list[tuple[Pod, _Named]]:
        """The pods that may claim something, with what their containers
        that have not started are given.
        """
        families, inventory = self._context.families, self._context.inventory()
        unserved = {family.name for family in families.unserved}
        by_pod = tuple(family for family in families.by_pod if family.name not in unserved)
        resources = self._ledger.resources
        known_with = (by_pod, inventory.version, resources)
        if known_with != self._known_with:
            self._known_with, self._known = known_with, {}
        known, waiting = {}, []
        for pod in self._context.pods.pods if by_pod else ():
            before = self._known.get(pod.kubelet_uid)
            entry = (
                before
                if before is not None and before[0] is pod
                else (pod, _named(pod, by_pod, inventory, resources))
            )
            known[pod.kubelet_uid] = entry
            if entry[1]:
                waiting.append(entry)
        self._known = known
        return waiting


def other_families(
    container: PodContainer, family: str, resources: Iterable[Resource]
) -> list[str]:
    """List the resources of other families that the container asks for as well,
    which would give it different GPUs.
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
    # A pod that is being deleted starts nothing any more, and the kubelet runs no pod that calls
    # itself a mirror.
    if not pod.scheduled or pod.ended or pod.deleting or pod.mirror:
        return ()
    if all(container.started for container in pod.containers):
        # most events are about pods that run, and reading annotations is most of the work
        return ()
    return tuple(
        (family.name, name, gpus)
        for family in by_pod
        for name, gpus in family.named(pod, inventory).items()
        if (container := pod.container(name)) is not None and not container.started
        if not other_families(container, family.name, resources)
    )
