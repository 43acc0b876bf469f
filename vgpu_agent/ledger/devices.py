"""The devices of an inventory as the ledger keeps them,
each with its GPU and its *trouble*: the reason why it must not be granted now, empty for none.

Called by `ledger.book` for each inventory that `gpu` publishes, and when the kubelet's records have
shown new holders. There is no state here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.ledger.accounting import Device

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from vgpu_agent.model import Gpu, Inventory, MigInstance

# Enough for 8 GPUs that are divided a dozen times, into up to 7 instances each time. Beyond that,
# the oldest instances without a holder are forgotten.
_MAX_INSTANCES_KNOWN = 1000


def devices_of(inventory: Inventory) -> dict[str, Device]:
    """Return every GPU and every MIG instance, by UUID.

    A fault of a GPU is a fault of all its instances. An instance can be unhealthy by itself. A
    grant of the whole GPU includes that instance, so the GPU as a device is as healthy as its worst
    instance. A missing device node affects its instance only.
    """
    devices: dict[str, Device] = {}
    for gpu in inventory.gpus:
        trouble = _trouble(gpu)
        ill = next((instance for instance in gpu.mig_instances if not instance.health.ok), None)
        worst = f"{ill.uuid}: {_illness(ill)}" if ill else ""
        devices[gpu.uuid] = Device(
            gpu.uuid,
            gpu=gpu.uuid,
            memory_mib=gpu.memory_mib,
            trouble=trouble or worst,
            divided=gpu.mig_enabled,
        )
        for instance in gpu.mig_instances:
            # `instance.trouble`: why its device nodes are not known
            own = _illness(instance) or instance.trouble
            devices[instance.uuid] = Device(
                instance.uuid,
                gpu=gpu.uuid,
                memory_mib=instance.memory_mib,
                trouble=trouble or own,
            )
    return devices


def gone(uuids: Iterable[str], known: Mapping[str, Device]) -> dict[str, Device]:
    """Return those of ``uuids`` that ``known`` contains, as devices that are gone; by UUID, as in
    ``known``.
    """
    return {
        uuid: msgspec.structs.replace(known[uuid], trouble="the device is gone")
        for uuid in uuids
        if uuid in known
    }


def with_gone(
    seen: Mapping[str, Device],
    *,
    before: Mapping[str, Device],
    mig_instances: dict[str, Device],
    held: Collection[str],
) -> dict[str, Device]:
    """Return the new devices of the ledger: ``seen``, and those of ``held`` that are gone.

    Args:
        seen: the devices of the newest inventory, by UUID.
        before: the devices of the ledger until now, by UUID.
        mig_instances: the MIG instances of earlier inventories, which tell the GPU of one that is
            gone. The function adds those of ``seen``, and drops the oldest that are neither in
            ``seen`` nor held, if there are too many.
        held: the UUIDs of devices that have a holder.
    """
    for device in seen.values():
        if device.uuid != device.gpu:
            mig_instances.pop(device.uuid, None)  # the newest are last
            mig_instances[device.uuid] = Device(device.uuid, device.gpu, device.memory_mib)
    surplus = max(0, len(mig_instances) - _MAX_INSTANCES_KNOWN)
    for uuid in [uuid for uuid in mig_instances if uuid not in held and uuid not in seen][:surplus]:
        del mig_instances[uuid]
    return {
        **seen,
        **gone((uuid for uuid in held if uuid not in seen), mig_instances | dict(before)),
    }


def _trouble(gpu: Gpu) -> str:
    return "" if gpu.health.ok and gpu.present else gpu.health.reason or "the GPU does not answer"


def _illness(instance: MigInstance) -> str:
    return (
        "" if instance.health.ok else instance.health.reason or "the MIG instance does not answer"
    )
