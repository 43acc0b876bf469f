"""GPUs that are kept for pods: a scheduler has named the GPU, or the pod needs ids of it.

A scheduler that names a GPU in a pod's annotations has decided at bind; the shares are booked when
the container starts, after its image was pulled and its init containers have run. A claim covers
the time in between. It is no booking: it takes nothing from the holders of the GPU, and other pods
of its own family may still get shares of it.

The oldest claim on a GPU decides. No other family gets a new share of that GPU, so it stays free
for the claim, or becomes free as its holders end. There is one order of claims on a node, so pods
with claims on several GPUs never wait for each other in a circle.

Pure functions, called by `arbitration`; `allocation` makes the claims.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Claim(msgspec.Struct, frozen=True):
    """One GPU that is kept for a pod which has not been given its shares yet.

    Attributes:
        gpu: UUID.
        family: the family whose pod it is.
        pod: ``namespace/name``.
        pod_uid: the UID under which the kubelet keeps the pod; for a static pod not its mirror's.
        since: unix seconds of the moment at which the claim was first seen.
        order: its position among the claims of the node; smaller is older, and all claims of one
            pod have the same.
        named: a scheduler has named the GPU; otherwise the agent has chosen it, because the GPUs in
            use have too few free ids for the pod.
    """

    gpu: str
    family: str
    pod: str
    pod_uid: str
    since: float
    order: int
    named: bool = True


_in_line = operator.attrgetter("order", "pod_uid", "gpu", "family")


def in_order(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Every claim once, the oldest first."""
    return tuple(sorted(set(claims), key=_in_line))


def oldest_by_gpu(claims: Iterable[Claim]) -> dict[str, Claim]:
    """UUID of a GPU → the oldest claim on it; ``claims`` are sorted by `in_order`."""
    oldest: dict[str, Claim] = {}
    for claim in claims:
        oldest.setdefault(claim.gpu, claim)
    return oldest


def why_kept(gpu: str, family: str, oldest: Mapping[str, Claim]) -> str:
    """Explain why ``family`` gets no new share of ``gpu`` although nothing else bars it;
    empty when it may get one. ``oldest`` is the result of `oldest_by_gpu`.
    """
    claim = oldest.get(gpu)
    if claim is None or claim.family == family:
        return ""
    # Without the pod's name: owners of refused pods read this, and they may be other tenants.
    if not claim.named:
        return (
            f"the GPU is kept for a pod of {claim.family} that has been bound to this node, "
            "until the kubelet has admitted it"
        )
    return (
        f"the GPU is kept for a pod to which a scheduler of {claim.family} has given it, until "
        "that pod has started or ended"
    )
