"""The devices of this node that no new container may get, and the pods that hold one.

Pure functions on plain values, for `gpu_events` and `gpu_status`, which report such devices to
Kubernetes. A MIG instance that the node no longer has is not among them:
`agent.records.missing_devices` reports its pods.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from vgpu_agent.concurrency import Latest
    from vgpu_agent.model import Gpu, Grant, Inventory, MigInstance, Remedy
    from vgpu_agent.pods import Pod, PodCache
    from vgpu_agent.status import NvmlStatus, Problem

_NO_LONGER_ANSWERS = "it no longer answers"


# A dataclass: it has a snapshot and functions, and is not a plain value.
@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """The facts that this package needs about the GPUs and their holders.

    Attributes:
        inventory: the GPUs.
        driver: returns the state of the driver; it may begin to hang without a new inventory.
        grants: returns the present grants.
        libraries: returns isolation backend → why its library is missing on this node.
        labels: returns the labels that describe the GPUs; None while no GPU answers.
        problems: returns all problems of the node, as ``vgpu-agent status`` lists them.
    """

    inventory: Latest[Inventory]
    driver: Callable[[], NvmlStatus]
    grants: Callable[[], Iterable[Grant]]
    libraries: Callable[[], Mapping[str, str]] = dict
    labels: Callable[[], Mapping[str, str] | None] = dict
    problems: Callable[[], Iterable[Problem]] = tuple


class DeadDevice(msgspec.Struct, frozen=True):
    """A GPU or MIG instance that is lost or unhealthy.

    Attributes:
        uuid: its UUID.
        name: its name in messages, e.g. ``GPU 0 (GPU-…)``.
        why: why it is lost or unhealthy, as one clause for people.
        lost: its GPU no longer answers or is gone; otherwise it is present and unhealthy.
        gpu: the UUID of its GPU.
        index: the NVML index of its GPU.
        remedy: the kind of remedy that helps; None when that is not known.
        since: unix seconds of the last change of its health; 0 when it is not known.
    """

    uuid: str
    name: str
    why: str
    lost: bool
    gpu: str = ""
    index: int = 0
    remedy: Remedy | None = None
    since: float = 0.0


def dead_devices(inventory: Inventory) -> dict[str, DeadDevice]:
    """Return the lost and unhealthy devices by UUID. The instances of such a GPU are among them."""
    found: dict[str, DeadDevice] = {}
    for gpu in inventory.gpus:
        of_gpu = _dead_gpu(gpu)
        if of_gpu is not None:
            found[gpu.uuid] = of_gpu
        for instance in gpu.mig_instances:
            dead = (
                msgspec.structs.replace(of_gpu, uuid=instance.uuid, name=_name(gpu, instance))
                if of_gpu is not None
                else _dead_instance(gpu, instance)
            )
            if dead is not None:
                found[instance.uuid] = dead
    return found


def separate_devices(inventory: Inventory) -> tuple[DeadDevice, ...]:
    """Return the dead devices in the order of the inventory, without the instances of a GPU that is
    dead as a whole.
    """
    dead, found = dead_devices(inventory), list[DeadDevice]()
    for gpu in inventory.gpus:
        if gpu.uuid in dead:
            found.append(dead[gpu.uuid])
        else:
            found += [dead[one.uuid] for one in gpu.mig_instances if one.uuid in dead]
    return tuple(found)


def pods_on(
    dead: Mapping[str, DeadDevice], grants: Iterable[Grant], pods: PodCache
) -> dict[str, tuple[Pod, dict[str, DeadDevice]]]:
    """Return the pods that hold a dead device, by the API server's UID (the kubelet has another
    one for a static pod): the pod, and its dead devices by UUID. Pods that the watch does not show
    are left out, and devices that only a completed init container had.
    """
    found: dict[str, tuple[Pod, dict[str, DeadDevice]]] = {}
    if not dead:
        return found
    present = tuple(grants)
    holders = {
        (grant.owner.pod_uid, grant.owner.container, grant.resource)
        for grant in present
        if grant.owner is not None and grant.shares
    }
    for grant in present:
        held = {share.device: dead[share.device] for share in grant.shares if share.device in dead}
        if not held or (pod := pod_of(grant, pods)) is None or pod.ended:
            continue
        if _is_over(grant, pod, holders):
            continue
        found.setdefault(pod.uid, (pod, {}))[1].update(held)
    return found


def pod_of(grant: Grant, pods: PodCache) -> Pod | None:
    """Return the pod that holds the grant, as the watch shows it; None when it is not known."""
    owner = grant.owner
    if owner is None:
        return None
    if owner.pod_uid:
        return pods.get(owner.pod_uid)
    # Only pod-resources has named the container, and it knows no UIDs.
    return pods.named(owner.namespace, owner.pod) if owner.pod else None


def _is_over(grant: Grant, pod: Pod, holders: Collection[tuple[str, str, str]]) -> bool:
    """Tell whether nothing of the pod uses the devices of a grant any more: an init container had
    them and is done. It keeps the ids that no later container took over. ``holders`` are pod,
    container and resource of all grants: where a later container that asks for the resource has
    none, its own may be booked for the init container, since the kubelet's checkpoint names both.
    """
    if (owner := grant.owner) is None or (container := pod.container(owner.container)) is None:
        return False
    return (
        container.kind is ContainerKind.INIT
        and container.completed
        and all(
            (owner.pod_uid, other.name, grant.resource) in holders
            for other in pod.containers
            if other.kind is not ContainerKind.INIT and other.limits.get(grant.resource, 0) > 0
        )
    )


def gpu_name(gpu: Gpu) -> str:
    """Return the name of a GPU in messages."""
    return f"GPU {gpu.index} ({gpu.uuid})"


def _dead_gpu(gpu: Gpu) -> DeadDevice | None:
    if gpu.present and gpu.health.ok:
        return None
    health = gpu.health
    return DeadDevice(
        gpu.uuid,
        gpu_name(gpu),
        health.reason or _NO_LONGER_ANSWERS,
        lost=not gpu.present,
        gpu=gpu.uuid,
        index=gpu.index,
        remedy=health.remedy,
        since=health.since,
    )


def _dead_instance(gpu: Gpu, instance: MigInstance) -> DeadDevice | None:
    health = instance.health
    if health.ok:
        return None
    name = _name(gpu, instance)
    return DeadDevice(
        instance.uuid,
        name,
        health.reason,
        lost=False,
        gpu=gpu.uuid,
        index=gpu.index,
        remedy=health.remedy,
        since=health.since,
    )


def _name(gpu: Gpu, instance: MigInstance) -> str:
    return f"MIG instance {instance.uuid} ({instance.profile}) of GPU {gpu.index}"
