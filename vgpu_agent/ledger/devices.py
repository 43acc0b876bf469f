"""The devices of an inventory as the book keeps them: which there are, of which GPU each is a part, and why nobody may get it.

Called by `book` for each inventory that `gpu` publishes, and where it learns who holds what; nothing here has a state of its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vgpu_agent.ledger.accounting import Device

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from vgpu_agent.model import Gpu, Inventory, MigInstance

# Those of 8 GPUs in a dozen divisions; a node that is divided more often forgets those that nobody holds any more.
_MOST_SLICES_KNOWN = 1000


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


def gone(uuids: Iterable[str], known: Mapping[str, Device]) -> dict[str, Device]:
    """Those of ``uuids`` that ``known`` tells something of, as devices that are not there any more."""
    return {uuid: dataclasses.replace(known[uuid], trouble="the device is gone") for uuid in uuids if uuid in known}


def with_gone(
    seen: Mapping[str, Device], *, before: Mapping[str, Device], slices: dict[str, Device], held: Collection[str]
) -> dict[str, Device]:
    """The devices of the book once ``seen`` are there: those, and those of ``held`` that are gone.

    Args:
        seen: of the newest inventory.
        before: the devices of the book until now.
        slices: every MIG instance that was ever seen; learns those of ``seen``, and forgets the oldest that are neither there nor held.
        held: devices of which somebody has a share.
    """
    for device in seen.values():
        if device.uuid != device.gpu:
            slices.pop(device.uuid, None)  # the newest stand last
            slices[device.uuid] = Device(device.uuid, device.gpu, device.memory_mib)
    surplus = max(0, len(slices) - _MOST_SLICES_KNOWN)
    for uuid in [uuid for uuid in slices if uuid not in held and uuid not in seen][:surplus]:
        del slices[uuid]
    return {**seen, **gone((uuid for uuid in held if uuid not in seen), slices | dict(before))}


def _trouble(gpu: Gpu) -> str:
    return "" if gpu.health.ok and gpu.present else gpu.health.reason or "the GPU does not answer"


def _illness(instance: MigInstance) -> str:
    return "" if instance.health.ok else instance.health.reason or "the MIG instance does not answer"
