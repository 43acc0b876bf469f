"""The reasons against granting a device through a resource now:
its health, a cordon, a holder through another resource, or a claim.

The module `book` asks before it reports devices to the kubelet or to schedulers, and before each
booking. Pure functions of the ledger's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.errors import listed
from vgpu_agent.ledger.claims import why_kept
from vgpu_agent.model import Decider

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from vgpu_agent.ledger.accounting import Device
    from vgpu_agent.ledger.claims import Claim
    from vgpu_agent.ledger.cordons import Cordons
    from vgpu_agent.model import Grant, Resource, Share


class Context(NamedTuple):
    """The ledger's knowledge of the devices.

    Attributes:
        devices: by UUID.
        cordons: of devices and of whole GPUs.
        grants: those that are `in_the_way` of the resource in question.
        all_ids_offered: tells whether all ids of a grant are still offered; not so after a change
            of settings.
        claims: GPU → the oldest claim on it; empty where the caller disregards claims.
        why_waits: GPU, family → why another family is offered the GPU first; empty where none is,
            or where the caller disregards turns.
        still_at_kubelet: GPU, family → whether the kubelet may still give the GPU to pods of the
            family, although schedulers are told that it is not available to them (a withdrawal
            takes a moment); always False in answers that are not for the kubelet.
    """

    devices: Mapping[str, Device]
    cordons: Cordons
    grants: Sequence[Grant]
    all_ids_offered: Callable[[Grant], bool]
    claims: Mapping[str, Claim]
    why_waits: Callable[[str, str], str]
    still_at_kubelet: Callable[[str, str], bool]


def in_the_way(resource: Resource, grants: Iterable[Grant]) -> list[Grant]:
    """The grants that can keep ``resource`` from a device: those of other families; where ids name
    devices, also those of its own, which may be from other settings.
    """
    by_ids = resource.decided_by is Decider.IDS
    return [grant for grant in grants if by_ids or grant.family != resource.family]


def why_unavailable(device: str, resource: Resource, known: Context) -> str:
    """Explain why nothing of ``device`` may be granted through ``resource`` now;
    empty when it may.
    """
    return (
        own_trouble(device, resource, known.devices, known.cordons)
        or _conflicting_holder(device, resource, known)
        or _kept(known.devices[device].gpu, resource, known)
    )


def own_trouble(
    device: str, resource: Resource, devices: Mapping[str, Device], cordons: Cordons
) -> str:
    """Explain why ``resource`` grants nothing of ``device`` even if nothing of it is held;
    empty when it does.
    """
    if ill := illness(devices, device):
        return ill
    if reason := cordons.reason(device) or cordons.reason(devices[device].gpu):
        return f"cordoned: {reason}"
    if resource.requires_mig_off and devices[device].divided:
        return "the GPU is in MIG mode, and this resource gives out GPUs that are not divided"
    return resource.never_granted.get(device, "")


def _conflicting_holder(device: str, resource: Resource, known: Context) -> str:
    gpu = known.devices[device].gpu
    by_ids = resource.decided_by is Decider.IDS
    for grant in known.grants:
        for share in grant.shares:
            holds = known.devices.get(share.device)
            if holds is None or holds.gpu != gpu:
                continue
            if grant.family != resource.family:
                # Where the pod decides, its ids name no GPU: a pod that was on its way is admitted,
                # and its start waits.
                return (
                    ""
                    if not by_ids and known.still_at_kubelet(gpu, resource.family)
                    else serves(grant.family)
                )
            if by_ids and share.device != device and gpu in (share.device, device):
                # From before MIG mode was switched: a GPU and its MIG instances are never both
                # granted.
                whole = (
                    "the whole GPU" if share.device == gpu else f"the MIG instance {share.device}"
                )
                return f"a container still holds {whole} ({listed(grant.ids)})"
            # Ids from before a change of replicas: whole and shared holders never mix on one
            # device. `holders_of`: how many may hold it at once.
            mixed = (
                by_ids
                and share.device == device
                and (share.exclusive or resource.holders_of(device) == 1)
            )
            if mixed and not known.all_ids_offered(grant):
                return (
                    "a container admitted under earlier settings still holds it "
                    f"({listed(grant.ids)})"
                )
    return ""


def _kept(gpu: str, resource: Resource, known: Context) -> str:
    """Explain why a claim or a turn of another family keeps the GPU from ``resource``;
    empty when none does.
    """
    reason = why_kept(gpu, resource.family, known.claims) or known.why_waits(gpu, resource.family)
    return "" if reason and known.still_at_kubelet(gpu, resource.family) else reason


def strangers(
    shares: Iterable[Share], offered: Collection[str], devices: Mapping[str, Device]
) -> list[str]:
    """Devices of ``shares`` that a resource does not offer: neither among ``offered``, the UUIDs
    that it offers, nor a MIG instance of one that is.
    """
    gpus = {
        share.device: devices[share.device].gpu if share.device in devices else share.device
        for share in shares
    }
    return [device for device, gpu in gpus.items() if device not in offered and gpu not in offered]


def illness(devices: Mapping[str, Device], device: str) -> str:
    """Return the fault of the device itself; empty when it has none."""
    known = devices.get(device)
    return known.trouble if known else "the device is gone"


def serves(family: str) -> str:
    """The reason why a GPU is not available to others than ``family``."""
    return f"the GPU serves {family} until its last share is returned"
