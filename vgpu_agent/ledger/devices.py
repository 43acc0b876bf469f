"""The devices of an inventory as the book keeps them: which there are, of which GPU each is a part, and why nobody may get it.

Called by `book` for each inventory that `gpu` publishes; a pure function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.ledger.accounting import Device

if TYPE_CHECKING:
    from vgpu_agent.model import Gpu, Inventory, MigInstance


def devices_of(inventory: Inventory) -> dict[str, Device]:
    """Every GPU and every MIG instance, by UUID.

    What is wrong with a GPU is wrong with all its instances. An instance can be ill by itself; who is given the whole GPU would get that
    part of it too, so the GPU as a device is as well as its worst instance. A missing device node troubles its instance only.
    """
    devices: dict[str, Device] = {}
    for gpu in inventory.gpus:
        trouble = _trouble(gpu)
        ill = next((instance for instance in gpu.mig_instances if not instance.health.ok), None)
        worst = f"{ill.uuid}: {_illness(ill)}" if ill else ""
        devices[gpu.uuid] = Device(gpu.uuid, gpu.uuid, gpu.memory_mib, trouble or worst, divided=gpu.mig_enabled)
        for instance in gpu.mig_instances:
            own = _illness(instance) or instance.trouble
            devices[instance.uuid] = Device(instance.uuid, gpu.uuid, instance.memory_mib, trouble or own)
    return devices


def _trouble(gpu: Gpu) -> str:
    return "" if gpu.health.ok and gpu.present else gpu.health.reason or "the GPU does not answer"


def _illness(instance: MigInstance) -> str:
    return "" if instance.health.ok else instance.health.reason or "the MIG instance does not answer"
