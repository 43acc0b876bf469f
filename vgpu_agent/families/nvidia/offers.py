"""The resources that a node offers under NVIDIA's names, with their ids, and those that are
withheld (configured, and not offered) with the reasons.

The input is the devices of each name (`devices`) and the sharing entries of the configuration. A
`Resource` has whole devices, or replicas of all or some of them. Each device belongs to one
resource only (nvidia G1–G16, D15; iktos K1–K9, for a fork of NVIDIA's plugin). A fault in one
resource withholds only that one. Called by `family`; pure functions.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.device_ids import DeviceId, IdBlock, NumberedIds
from vgpu_agent.families.family import Shortfall
from vgpu_agent.families.nvidia.devices import named_devices
from vgpu_agent.families.nvidia.options import ALL, AUTOMATIC, GPU_RESOURCE
from vgpu_agent.families.nvidia.settings import FAMILY
from vgpu_agent.isolation.mps import why_not_by_mps
from vgpu_agent.model import Resource, SharingMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vgpu_agent.families.nvidia.devices import Device, NamedDevices
    from vgpu_agent.families.nvidia.options import NvidiaOptions, SharedEntry
    from vgpu_agent.model import Inventory


# A list with more ids is larger than the kubelet accepts (kubelet §10). Its ids are only counted,
# so that it can be refused with its length.
_MAX_IDS = 200_000


class Offers(msgspec.Struct, frozen=True):
    """The offered resources, and the reasons why others are not offered."""

    resources: tuple[Resource, ...]
    shortfall: Shortfall

    def resource(self, name: str) -> Resource | None:
        """Return the resource of that name; None when it is not offered."""
        return next((resource for resource in self.resources if resource.name == name), None)


class _Part(msgspec.Struct, frozen=True):
    """One device in a resource: how often it is offered, and whether a sharing entry names it."""

    device: Device
    replicas: int = 1
    shared: bool = False


def offers(options: NvidiaOptions, inventory: Inventory) -> Offers:
    """Return the offers of this node; deterministic; never raises."""
    plan = _Plan(options, named_devices(inventory, options))
    for entry in options.shared:
        plan.share(entry)
    plan.offer_the_rest_whole()
    return plan.offers(inventory)


class _Plan:
    """The devices of each resource, filled entry by entry.
    A device belongs to the first entry that names it.
    """

    def __init__(self, options: NvidiaOptions, named: NamedDevices) -> None:
        self._options = options
        self._named = named
        self._refused = dict(named.refused)  # resource → why it is withheld
        self._cautions = list(named.cautions)  # sentences about oddities of the offered ones
        self._parts: dict[str, list[_Part]] = {}  # resource → its devices
        self._taken: dict[str, str] = {}  # UUID → resource of the first entry that names it

    def share(self, entry: SharedEntry) -> None:
        """Offer the devices that the entry selects, each as often as the entry says."""
        # the resource of the replicas; `entry.name` is that of the devices without sharing
        name = entry.published
        if reason := self._named.refused.get(entry.name):
            if entry.devices == ALL:
                self._refused.pop(entry.name, None)  # it would not be offered under this name
            self._refused[name] = reason
        if (devices := self._named.devices.get(entry.name)) is None:
            # One configuration serves nodes with and without such devices, so this is no fault. But
            # the node's GPUs may have another name, which the operator should know.
            if entry.name == GPU_RESOURCE and not reason and (names := self._names_of_gpus()):
                self._cautions.append(
                    f"{name}: no GPU is shared by the entry about {entry.name}, because "
                    f"resources.gpus calls them {', '.join(names)}; name those in it"
                )
            return
        chosen, missing = _chosen(entry, devices)
        if missing:
            self._cautions.append(f"{name}: {_missing_caution(entry, devices, missing)}")
        for device in chosen:
            if other := self._taken.get(device.uuid):
                self._refused[name] = (
                    f"{device.shown} would be offered twice, by {other} and by {name}; name it in "
                    f"one entry about {entry.name} only"
                )
                break
        self._taken |= {device.uuid: self._taken.get(device.uuid, name) for device in chosen}
        self._parts.setdefault(name, []).extend(self._part(entry, device) for device in chosen)

    def offer_the_rest_whole(self) -> None:
        """Offer what no entry has taken, each device once."""
        for name, devices in self._named.devices.items():
            if whole := [_Part(device) for device in devices if device.uuid not in self._taken]:
                self._parts.setdefault(name, []).extend(whole)

    def offers(self, inventory: Inventory) -> Offers:
        """Return the resources that can be offered, and the reasons why the others cannot."""
        resources = []
        for name, parts in self._parts.items():
            if name in self._refused:
                continue
            resource = _resource(name, parts, self._options)
            if reason := _why_not_offered(resource, parts, inventory):
                self._refused[name] = reason
            elif resource.ids:
                resources.append(resource)
        return Offers(tuple(resources), Shortfall(self._refused, tuple(self._cautions)))

    def _names_of_gpus(self) -> list[str]:
        return [
            name
            for name, devices in self._named.devices.items()
            if any(device.instance is None for device in devices)
        ]

    def _part(self, entry: SharedEntry, device: Device) -> _Part:
        # `AUTOMATIC`: as many replicas as the device has units of memory
        if entry.replicas != AUTOMATIC:
            return _Part(device, entry.replicas, shared=True)
        # For a MIG instance its own memory counts, not that of its GPU (iktos K2, D7).
        replicas, unit_mib = device.memory_mib // self._options.unit_mib, self._options.unit_mib
        if device.gpu.integrated:
            self._refused[entry.published] = (
                f"{device.shown} is part of the processor and has no memory of its own that could "
                "be counted; set a number of replicas for it in iktos.resourceConfig"
            )
        elif not replicas:
            self._cautions.append(
                f"{entry.published}: {device.shown} has {device.memory_mib} MiB, and an id stands "
                f"for {unit_mib} MiB"
            )
        return _Part(device, replicas, shared=True)


def _chosen(entry: SharedEntry, devices: Sequence[Device]) -> tuple[list[Device], list[str]]:
    """Return the devices that an entry selects, in the order of ``devices``, and the indices and
    UUIDs in it that match none (or its number, where there are fewer devices).
    """
    if entry.devices == ALL:
        return list(devices), []
    if isinstance(entry.devices, int):
        return list(devices[: entry.devices]), [] if entry.devices <= len(devices) else [
            str(entry.devices)
        ]
    by_text = {
        text: device
        for device in devices
        for text in (device.index, device.uuid, *_old_mig_name(device))
    }
    selected = {by_text[text].uuid for text in entry.devices if text in by_text}
    return [device for device in devices if device.uuid in selected], [
        text for text in entry.devices if text not in by_text
    ]


def _old_mig_name(device: Device) -> tuple[str, ...]:
    """Return the name of a MIG instance under drivers before 470 (nvidia §4); none for a GPU."""
    instance = device.instance
    return (
        (f"MIG-{device.gpu.uuid}/{instance.gpu_instance_id}/{instance.compute_instance_id}",)
        if instance
        else ()
    )


def _missing_caution(entry: SharedEntry, devices: Sequence[Device], missing: Iterable[str]) -> str:
    have = ", ".join(device.index for device in devices)
    if isinstance(entry.devices, int):
        return (
            f"{entry.devices} devices of {entry.name} are to be shared, and there are "
            f"{len(devices)} ({have}); all of them are"
        )
    return (
        f"devices: {', '.join(missing)} is not among those of {entry.name} ({have}); what else it "
        "names is shared"
    )


def _resource(name: str, members: Iterable[_Part], options: NvidiaOptions) -> Resource:
    parts = sorted(
        members,
        key=lambda part: (
            part.device.gpu.index,
            part.device.instance.index if part.device.instance else -1,
        ),
    )
    counts = [part.replicas for part in parts]
    most = max(counts, default=1)
    shared = any(
        part.shared and (part.replicas > 1 or options.sharing is SharingMode.MPS) for part in parts
    )
    return Resource(
        name,
        FAMILY,
        _ids(parts, options),
        # how many ids of one device may be held at once; `holders`: of each device, if they differ
        holders_per_device=most,
        holders={} if len(set(counts)) < 2 else {part.device.uuid: part.replicas for part in parts},
        sharing=options.sharing if shared else SharingMode.NONE,
        # for the error when there are too many ids; `automatic`: the resources whose ids are units
        # of memory
        ids_setting="iktos.resourceConfig" if name in options.automatic else "",
    )


def _ids(parts: Sequence[_Part], options: NvidiaOptions) -> Sequence[DeviceId]:
    def numbered(part: _Part) -> bool:
        # `suffix_always`: the only replica of a device has a number, too
        return part.shared and (part.replicas != 1 or options.suffix_always)

    blocks = tuple(
        IdBlock(
            part.device.id + options.separator,
            count=part.replicas,
            device=part.device.uuid,
            numa_node=part.device.gpu.numa_node,
        )
        for part in parts
        if numbered(part)
    )
    if sum(block.count for block in blocks) > _MAX_IDS:
        return NumberedIds(blocks)
    replicas = {block.device: NumberedIds((block,)) for block in blocks}
    whole = {
        part.device.uuid: (DeviceId(part.device.id, part.device.uuid, part.device.gpu.numa_node),)
        for part in parts
    }
    return tuple(itertools.chain.from_iterable(replicas.get(uuid, whole[uuid]) for uuid in whole))


def _why_not_offered(resource: Resource, members: Sequence[_Part], inventory: Inventory) -> str:
    """Explain why a resource cannot be offered as planned; empty when it can."""
    if resource.sharing is not SharingMode.MPS:
        return ""
    if whole := [part.device for part in members if not part.shared]:
        return (
            f"{whole[0].shown} would be offered whole under the name of those that are shared by "
            "MPS; give the entry of sharing.mps a rename, or devices: all"
        )
    return why_not_by_mps(resource, inventory)
