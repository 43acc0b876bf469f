"""MIG instances: their JSON shape and whether they may be granted. Also the grants on devices that
are gone, MIG instances or whole GPUs.

Used by `views`, `problems`, `dashboard` and the metrics (`catalogue`, `readings`). As in `views`,
fields of the JSON may be added and are never renamed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.model import UNHEALTHY, GrantState
from vgpu_agent.web.health import IllnessView, illness
from vgpu_agent.web.shapes import view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.model import Gpu, Grant, MigInstance
    from vgpu_agent.status import AgentStatus


class MigView(msgspec.Struct, frozen=True):
    """A MIG instance. ``index`` is its position below its GPU. ``health`` includes the faults of
    its GPU and of its device nodes; ``illness`` has the causes of a fault and the remedy, None for
    a healthy device.
    """

    uuid: str
    index: int
    gpu_instance_id: int
    compute_instance_id: int
    profile: str
    memory_mib: int
    health: str = ""
    health_reason: str = ""
    illness: IllnessView | None = None
    device_nodes: tuple[str, ...] = ()


def instance_view(gpu: Gpu, instance: MigInstance, now: float) -> MigView:
    """The instance as ``/debug`` shows it at ``now`` (unix seconds)."""
    reason = why_withheld(gpu, instance)
    health = UNHEALTHY if reason else instance.health.word
    # `view` takes the fields that are not given from the instance, by their names
    return view(
        MigView,
        instance,
        now,
        health=health,
        health_reason=reason,
        illness=illness(gpu.health if not gpu.health.ok else instance.health, gpu.uuid, now),
        device_nodes=instance.capability_nodes,
    )


def why_withheld(gpu: Gpu, instance: MigInstance) -> str:
    """Explain why the instance may not be given to a new container; empty when it may."""
    if not gpu.present or not gpu.health.ok:
        return gpu.health.reason or "its GPU no longer answers"
    # `trouble`: why its device nodes are not known
    return instance.trouble if instance.health.ok else instance.health.reason


def on_missing_devices(status: AgentStatus) -> Iterator[tuple[Grant, str]]:
    """Yield the live grants on devices that the node no longer has, each with the device; nothing
    while no GPU has been read.
    """
    inventory = status.inventory
    if not inventory.gpus:
        return
    present = inventory.devices
    for grant in status.ledger.grants:
        if grant.state is not GrantState.RELEASED:
            yield from (
                (grant, share.device) for share in grant.shares if share.device not in present
            )
