"""The claims: GPUs that the ledger keeps for pods of this node that are bound and have no shares.

There are two kinds of claims. In families whose pods decide (Volcano), the scheduler has named the
GPU in an annotation of the pod. In families whose device ids name GPUs, the scheduler has only
counted ids. There a bound pod is *demand* for a number of ids until the kubelet has admitted it. If
the GPUs that serve its family do not cover the demand, free GPUs are claimed for it. Without them
the kubelet would fail the pod for good, while a pod of Volcano would only wait. So demand has
priority over claims by annotation, except those that have stood for more than two seconds
(`demand.EQUAL_AGE_SECONDS`).

The claims are derived from the pods, the families and the grants alone, so a restart loses nothing.
A claim begins when the watch shows the bound pod. It ends when the container gets its shares, when
the pod ends or is deleted, when its start is refused for good, or when its family finds that the
annotation cannot be followed. A pod whose image cannot be pulled keeps its claim, like its memory
and CPUs on the node.

Anyone who may create pods can write annotations. So a pod claims at most the number of GPUs that
it requests from the kubelet, and only after a scheduler has bound it or the kubelet has admitted
it.
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

# The order of a claim is its pod's position in the order of binds (`Pod.bound`). This number is
# larger than any position. It is subtracted from the order of claims that come before all others:
# of pods that have some of their shares, and of demand, which never takes a GPU that an older claim
# by annotation has.
_PRIORITY = 2**40

_NamedGpus = tuple[tuple[str, str, tuple[str, ...]], ...]  # (family, container, UUIDs of GPUs)


class Claims:
    """The computation of the claims, whose result goes to the ledger.

    State: caches only. The GPUs that the annotations of each pod name are cached until the pod, the
    families or the GPUs change. `refresh` is called before every decision. It first compares the
    versions of all inputs, so it is cheap while they stay the same.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = context.ledger
        self._inputs: tuple[object, ...] = ()
        # the kubelet's UID of a pod → the pod and the GPUs that its annotations name; valid for
        # the families, inventory and resources in `_cached_for`
        self._cached: dict[str, tuple[Pod, _NamedGpus]] = {}
        self._cached_for: tuple[object, ...] = ()

    def refresh(self) -> None:
        """Compute the claims again if any of their inputs has changed."""
        inputs = self._input_versions()
        if inputs == self._inputs:
            return
        self._ledger.claim(self._claims())
        # read again, because new claims advance the ledger's revision
        self._inputs = self._input_versions()

    def _input_versions(self) -> tuple[object, ...]:
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
        # bound by a scheduler, and not admitted by the kubelet yet
        expected = [pod for pod in self._context.pods.pods if is_expected(pod)]
        if not expected:
            return named
        demand = Demand(self._ledger, named, priority=_PRIORITY, now=self._context.clock())
        return named + [claim for pod in expected for claim in demand.claims(pod)]

    def _named_claims(self) -> list[Claim]:
        waiting = self._waiting_pods()
        if not waiting:
            return []
        since = {
            (claim.pod_uid, claim.family, claim.gpu): claim.since for claim in self._ledger.claims
        }
        # (UID of the pod, container) of the containers that have shares in the ledger, perhaps by a
        # guess. `container.started`, which is used below, is about the pod's status instead.
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
            # `bound`: the pod's position in the order of binds
            order = pod.bound - _PRIORITY if uid in partly_started else pod.bound
            for family, container, gpus in named:
                if (uid, container) in started:
                    continue
                claims += [
                    Claim(
                        gpu=gpu,
                        family=family,
                        pod=pod.full_name,
                        pod_uid=uid,
                        since=since.get((uid, family, gpu), now),
                        order=order,
                    )
                    for gpu in gpus
                ]
        return claims

    def _waiting_pods(self) -> list[tuple[Pod, _NamedGpus]]:
        """Return the pods whose annotations name GPUs for containers that have not started."""
        families, inventory = self._context.families, self._context.inventory()
        # A paused family starts no container now, and for its scheduler no GPU is free, so its pods
        # claim nothing.
        paused = {family.name for family in families.paused}
        pod_families = tuple(
            family for family in families.pod_families if family.name not in paused
        )
        resources = self._ledger.resources
        cached_for = (pod_families, inventory.version, resources)
        if cached_for != self._cached_for:
            self._cached_for, self._cached = cached_for, {}
        cached, waiting = {}, []
        for pod in self._context.pods.pods if pod_families else ():
            before = self._cached.get(pod.kubelet_uid)
            entry = (
                before
                if before is not None and before[0] is pod
                else (pod, _named_gpus(pod, pod_families, inventory, resources))
            )
            cached[pod.kubelet_uid] = entry
            if entry[1]:
                waiting.append(entry)
        self._cached = cached
        return waiting


def resources_of_other_families(
    container: PodContainer, family: str, resources: Iterable[Resource]
) -> list[str]:
    """List the names of other families' resources that the container also requests.

    Each of them would give it more GPUs. A resource with `Decider.NOBODY` only counts something for
    schedulers, and gives nothing.
    """
    foreign = (
        resource.name
        for resource in resources
        if resource.decided_by is not Decider.NOBODY and resource.family != family
    )
    return [name for name in foreign if container.limits.get(name)]


def _named_gpus(
    pod: Pod,
    pod_families: Iterable[PodFamily],
    inventory: Inventory,
    resources: tuple[Resource, ...],
) -> _NamedGpus:
    """Return the GPUs that the pod's annotations name for containers that have not started."""
    # A pod that is being deleted starts no more containers. One with the annotation of a mirror
    # (`mirror`) is never run as such: a true one stands for a static pod, which no scheduler binds,
    # and anybody can write the annotation.
    # `scheduled` is False where the pod's author has chosen the node and the kubelet has not
    # reported the pod.
    if not pod.scheduled or pod.ended or pod.deleting or pod.mirror:
        return ()
    if all(container.started for container in pod.containers):
        # The annotations of running pods need not be parsed, which would be most of the work.
        return ()
    return tuple(
        (family.name, name, gpus)
        for family in pod_families
        for name, gpus in family.named_gpus(pod, inventory).items()
        if (container := pod.container(name)) is not None and not container.started
        if not resources_of_other_families(container, family.name, resources)
    )
