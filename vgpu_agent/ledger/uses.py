"""The use of each GPU at one moment: the family that it serves and since when, its pods, and the
pods that wait for it.

`allocation` uses it for the texts of refusals, and `web` for every page. All functions are pure
functions of the ledger's state.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.device_ids import NumberedIds
from vgpu_agent.ledger import availability

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vgpu_agent.ledger.accounting import Device
    from vgpu_agent.ledger.claims import Claim
    from vgpu_agent.model import Grant, Resource


class GpuUse(msgspec.Struct, frozen=True):
    """The use of one GPU, MIG instances included.

    Attributes:
        gpu: the GPU's UUID.
        family: the family that the GPU serves; empty while no container has a share of it.
        since: the time of the oldest grant on the GPU, in unix seconds; 0 while there is none.
        or_earlier: a grant was found in the kubelet's records after a restart of the agent, so the
            GPU may have served the family before ``since``.
        pods: the names of the pods that have shares, oldest first.
        unnamed: the number of grants whose pod is not known yet.
        claims: the claims of pods that wait for the GPU, oldest first.
    """

    gpu: str
    family: str = ""
    since: float = 0.0
    or_earlier: bool = False
    pods: tuple[str, ...] = ()
    unnamed: int = 0
    claims: tuple[Claim, ...] = ()

    @property
    def holders(self) -> int:
        """The number of pods that have shares; each grant without a known pod counts as one."""
        return len(self.pods) + self.unnamed


class HeldBack(msgspec.Struct, frozen=True):
    """Ids of one resource that are not granted, for one reason.

    Attributes:
        reason: why none of these ids is granted.
        family: the family that their GPUs serve, if that is the reason; otherwise empty.
        gpus: the UUIDs of their GPUs, in the order of the ids.
        ids: the number of these ids.
    """

    reason: str
    family: str
    gpus: tuple[str, ...]
    ids: int


def uses(
    devices: Mapping[str, Device], grants: Iterable[Grant], claims: Iterable[Claim]
) -> tuple[GpuUse, ...]:
    """Return the use of each GPU: those of ``devices`` in their order, then GPUs that only a grant
    or a claim names.

    Args:
        devices: GPUs and MIG instances by UUID.
        grants: all grants, oldest first.
        claims: all claims, oldest first.
    """
    by_gpu: dict[str, list[Grant]] = {device.gpu: [] for device in devices.values()}
    for grant in grants:
        for gpu in dict.fromkeys(
            devices[share.device].gpu if share.device in devices else share.device
            for share in grant.shares
        ):
            by_gpu.setdefault(gpu, []).append(grant)
    waiting: dict[str, list[Claim]] = {}
    for claim in claims:
        waiting.setdefault(claim.gpu, []).append(claim)
    return tuple(
        _use(gpu, by_gpu.get(gpu, ()), tuple(waiting.get(gpu, ())))
        for gpu in dict.fromkeys([*by_gpu, *waiting])
    )


def held_back(
    resource: Resource,
    troubles: Mapping[str, str],
    devices: Mapping[str, Device],
    by_gpu: Mapping[str, GpuUse],
) -> tuple[HeldBack, ...]:
    """Group the ids of ``resource`` that are not granted by reason.

    Args:
        resource: a resource that is offered.
        troubles: UUID of a device → why nothing of it may be granted through the resource; empty
            if something may.
        devices: GPUs and MIG instances by UUID.
        by_gpu: the use of each GPU, by UUID.
    """
    counts = _ids_by_device(resource)
    by_reason: dict[str, list[str]] = {}
    for device, trouble in troubles.items():
        if trouble:
            by_reason.setdefault(trouble, []).append(device)
    groups = []
    for reason, held in by_reason.items():
        gpus = tuple(
            dict.fromkeys(devices[device].gpu if device in devices else device for device in held)
        )
        family = by_gpu[gpus[0]].family if gpus[0] in by_gpu else ""
        # `serves`: the ledger's reason where a GPU serves another family
        in_use = bool(family) and reason == availability.serves(family)
        groups.append(
            HeldBack(reason, family if in_use else "", gpus, sum(counts[device] for device in held))
        )
    return tuple(groups)


def _use(gpu: str, grants: Sequence[Grant], claims: tuple[Claim, ...]) -> GpuUse:
    if not grants:
        return GpuUse(gpu, claims=claims)
    oldest = min(grants, key=lambda grant: grant.reserved_at)
    pods = tuple(dict.fromkeys(grant.owner.pod_name for grant in grants if grant.owner))
    unnamed = sum(grant.owner is None for grant in grants)
    return GpuUse(
        gpu,
        family=oldest.family,
        since=oldest.reserved_at,
        or_earlier=any(grant.found for grant in grants),
        pods=pods,
        unnamed=unnamed,
        claims=claims,
    )


def _ids_by_device(resource: Resource) -> collections.Counter[str]:
    if isinstance(resource.ids, NumberedIds):
        counts = collections.Counter[str]()
        for block in resource.ids.blocks:  # the numbered ids of one device
            counts[block.device] += block.count
        return counts
    return collections.Counter(entry.device for entry in resource.ids)
