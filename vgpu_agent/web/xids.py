"""The XIDs on the GPUs of a pod while the pod had them, as JSON and in sentences: which, when, and
whether the pod's own program has most likely caused them.

An error of a program leaves the GPU healthy, so nothing else tells the owner why the pod failed.
The driver does not name the process. Used by `views` and `explain`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import listed
from vgpu_agent.model import GrantState, Remedy
from vgpu_agent.web.health import clock, span
from vgpu_agent.web.shapes import When, when

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from vgpu_agent.journal import Entry
    from vgpu_agent.model import Gpu, MigInstance
    from vgpu_agent.pods import Pod
    from vgpu_agent.status import AgentStatus, XidSeen
    from vgpu_agent.web.allocations import AllocationView

_SHOWN = 4  # XIDs of one device, the latest
_NAMED_PODS = 3  # in one sentence
# A program that has caused an XID usually ends within this time of it. The pod's status leaves out
# fractions of a second.
_ENDS_WITHIN_SECONDS = 60.0
_FRACTION_SECONDS = 1.0


class XidView(msgspec.Struct, frozen=True):
    """One XID on a GPU, once or ``count`` times in a row.

    Attributes:
        text: number and meaning.
        remedy: the short name of what helps, a value of `Remedy`.
        ignored: it does not make the GPU Unhealthy.
        gpu_instance: the MIG GPU instance that the driver named; null for the whole GPU.
        compute_instance: the same for the MIG compute instance.
    """

    xid: int
    text: str = ""
    remedy: str = ""
    ignored: bool = False
    first: When = When()
    last: When = When()
    count: int = 1
    gpu_instance: int | None = None
    compute_instance: int | None = None


class Held(msgspec.Struct, frozen=True):
    """A device that a container has or had, from and until when (unix seconds)."""

    device: str
    container: str
    since: float
    until: float


def xid_view(seen: XidSeen, now: float) -> XidView:
    """Return the view of one XID; ``now`` is unix seconds."""
    return XidView(
        xid=seen.xid,
        text=seen.text,
        remedy=seen.remedy.value,
        ignored=seen.ignored,
        first=when(seen.first_at, now),
        last=when(seen.last_at, now),
        count=seen.count,
        gpu_instance=seen.gpu_instance,
        compute_instance=seen.compute_instance,
    )


def held_now(grants: Sequence[AllocationView], now: float) -> list[Held]:
    """List the devices of ``grants``, those that one pod has."""
    return [
        Held(
            device=share.device,
            container=grant.container,
            since=now - (grant.reserved.seconds_ago or 0.0),
            until=now,
        )
        for grant in grants
        for share in grant.shares
    ]


def held_before(status: AgentStatus, entries: Sequence[Entry], now: float) -> list[Held]:
    """List the devices that a pod without grants had, by the journal's ``entries`` about it."""
    # number of a grant → unix seconds of its Allocate
    reserved = {
        entry.facts.get("grant"): entry.at
        for entry in status.events
        if entry.event == "allocate.reserved"
    }
    found: dict[tuple[str, str], Held] = {}
    for entry in entries:
        devices, container = entry.facts.get("devices"), entry.facts.get("container")
        if not isinstance(devices, list | tuple) or not isinstance(container, str):
            continue
        since = reserved.get(entry.facts.get("grant"), entry.at)
        until = entry.at if entry.event == "ledger.released" else now
        # each text begins with the UUID of the device
        for device in {str(text).partition(" ")[0] for text in devices}:
            before = found.get((device, container))
            found[device, container] = Held(
                device=device,
                container=container,
                since=min(since, before.since if before else since),
                until=until,
            )
    return list(found.values())


def sentences(
    status: AgentStatus, now: float, name: str, held: Held, pod: Pod | None = None
) -> Iterator[str]:
    """Tell the latest XIDs on a device while a container had it.

    Args:
        status: the snapshot.
        now: unix seconds.
        name: ``namespace/name`` of the container's pod.
        held: the device, and when the container had it.
        pod: the pod, if the watch shows it.
    """
    place = status.inventory.device(held.device)
    if place is None:
        return
    gpu, instance = place
    seen = [
        each
        for each in status.nvml.xids.get(gpu.uuid, ())
        if held.since <= each.last_at
        and each.first_at <= held.until
        and each.concerns(instance)
        and (each.ignored or gpu.health.ok)  # otherwise the reason why it is Unhealthy tells it
    ]
    for each in seen[-_SHOWN:]:
        yield _occurred(gpu, instance, each, now)
        yield _blame(status, name, held, each, pod)


def _occurred(gpu: Gpu, instance: MigInstance | None, seen: XidSeen, now: float) -> str:
    device = f"{instance.uuid} of GPU {gpu.index}" if instance else f"GPU {gpu.index} ({gpu.uuid})"
    times = (
        f"at {clock(seen.last_at)}"
        if seen.count == 1
        else f"{seen.count} times, from {clock(seen.first_at)} to {clock(seen.last_at)}"
    )
    return (
        f"{seen.text}. That was reported on {device} while the pod had it, {times} "
        f"({span(now - seen.last_at)} ago)."
    )


def _blame(status: AgentStatus, name: str, held: Held, seen: XidSeen, pod: Pod | None) -> str:
    # `APPLICATION`: the remedy of an error that a program causes
    if seen.remedy is not Remedy.APPLICATION:
        return (
            "It is an error of the GPU, not of the program; the program may have failed because "
            "of it."
        )
    container = pod.container(held.container) if pod else None
    ended_at = container.ended_at if container else 0.0
    after = ended_at - seen.last_at
    if ended_at and -_FRACTION_SECONDS <= after <= _ENDS_WITHIN_SECONDS:
        return (
            f"Container {held.container} ended at {clock(ended_at)}, right after it: its own "
            "program has most likely caused it, and the GPU is not the cause; look at its log."
        )
    # the UID of grants is the kubelet's, which differs from the API server's for static pods
    if others := _others(status, {name, pod.kubelet_uid if pod else name}, held):
        more = f" and {len(others) - _NAMED_PODS} more" if len(others) > _NAMED_PODS else ""
        return (
            "A program causes such an error, not the GPU: that of this pod, or that of another pod "
            f"on the GPU ({listed(others[:_NAMED_PODS])}{more}). The one that failed at that time "
            "is the most likely."
        )
    return (
        f"No other pod has the GPU, so the program of container {held.container} has most likely "
        "caused it, and the GPU is not the cause; look at its log of that time."
    )


def _others(status: AgentStatus, own: Collection[str], held: Held) -> list[str]:
    """List the other pods that have a share of the device; ``own`` has name and UID of this one."""
    return sorted(
        {
            grant.owner.pod_name if grant.owner else "one that is not named yet"
            for grant in status.ledger.grants
            if grant.state is not GrantState.RELEASED
            and any(share.device == held.device for share in grant.shares)
            and not (grant.owner and {grant.owner.pod_uid, grant.owner.pod_name} & {*own})
        }
    )
