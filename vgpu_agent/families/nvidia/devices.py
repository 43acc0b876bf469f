"""The devices behind each of NVIDIA's resource names, before sharing: the MIG strategies and the
patterns of the section ``resources``, which give GPUs and MIG profiles other resource names.

Names and the table of what is valid are those of nvidia §3 and G1 to G7, without its defects. What
cannot be offered under one name does not stop the other names. A MIG instance whose compute
instance is smaller than its GPU instance has a name like any other (nvidia D8). Called by `offers`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.families.nvidia.ids import EVERY_GPU
from vgpu_agent.families.nvidia.options import DOMAIN, GPU_RESOURCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vgpu_agent.families.nvidia.options import NvidiaOptions, Pattern
    from vgpu_agent.model import Gpu, Inventory, MigInstance

# the name of a Kubernetes resource without its domain
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)


class Device(msgspec.Struct, frozen=True):
    """A whole GPU, or its MIG instance ``instance``. With ``every`` its ids stand for all GPUs."""

    gpu: Gpu
    instance: MigInstance | None = None
    every: bool = False

    @property
    def id(self) -> str:
        """The text with which the device's ids begin."""
        return EVERY_GPU if self.every else self.uuid

    @property
    def uuid(self) -> str:
        """The UUID: ``GPU-…`` or ``MIG-…``."""
        return self.instance.uuid if self.instance else self.gpu.uuid

    @property
    def index(self) -> str:
        """The index: ``0``, or ``0:1`` of a MIG instance."""
        return f"{self.gpu.index}:{self.instance.index}" if self.instance else str(self.gpu.index)

    @property
    def memory_mib(self) -> int:
        """The device's memory; of a MIG instance its own, not that of its GPU (iktos D7)."""
        return self.instance.memory_mib if self.instance else self.gpu.memory_mib

    @property
    def kind(self) -> tuple[str, int]:
        """Profile and memory, which make two MIG instances alike; all whole GPUs are alike."""
        return (self.instance.profile, self.instance.memory_mib) if self.instance else ("", 0)

    @property
    def shown(self) -> str:
        """The device as text for an operator."""
        return (
            f"MIG device {self.index} ({self.uuid})"
            if self.instance
            else f"GPU {self.index} ({self.uuid})"
        )


class NamedDevices(msgspec.Struct):
    """The devices of each resource, in the order of the node's GPUs; resources without devices,
    each with a sentence that says why; and what is odd with the rest, a sentence each.
    """

    devices: dict[str, list[Device]] = msgspec.field(default_factory=dict)
    refused: dict[str, str] = msgspec.field(default_factory=dict)
    cautions: list[str] = msgspec.field(default_factory=list)


class MigStrategy(msgspec.Struct, frozen=True):
    """The way in which GPUs in MIG mode are offered.

    Attributes:
        divided: the GPU's MIG instances are offered, instead of the whole GPU.
        instance_name: the resource of MIG instances that match no pattern; ``{}`` stands for the
            profile.
        alike: all devices under one name must be of one kind, and no GPU in MIG mode may be without
            MIG instances.
    """

    divided: bool
    instance_name: str = ""
    alike: bool = False


MIG_STRATEGIES: Mapping[str, MigStrategy] = {
    "none": MigStrategy(divided=False),
    "single": MigStrategy(divided=True, instance_name=GPU_RESOURCE, alike=True),
    "mixed": MigStrategy(divided=True, instance_name=DOMAIN + "mig-{}"),
}


def named_devices(inventory: Inventory, options: NvidiaOptions) -> NamedDevices:
    """Return the devices of the node by resource name; no device is under two names."""
    strategy = MIG_STRATEGIES[options.mig_strategy]
    named = NamedDevices()
    if options.wsl:
        # The Windows Subsystem for Linux does not distinguish GPUs, so all are as healthy as the
        # worst of them.
        gpus = sorted(inventory.gpus, key=lambda gpu: (gpu.health.ok and gpu.present, gpu.index))
        return NamedDevices({GPU_RESOURCE: [Device(gpus[0], every=True)]}) if gpus else named
    for number, known in inventory.numbered.items():
        # the index by which users name it in `devices` of a shared resource, also when a card
        # before it is lost
        gpu = msgspec.structs.replace(known, index=number)
        if gpu.mig_enabled and strategy.divided:
            _name_instances(gpu, strategy, options, named)
            continue
        if gpu.mig_enabled:
            named.cautions.append(
                f"{Device(gpu).shown} is in MIG mode and offered whole, because plugin.migStrategy "
                "is none; work on it fails or sees one MIG instance: set plugin.migStrategy to "
                "single or mixed, or switch its MIG mode off"
            )
        if gpu.integrated and strategy.divided:
            named.cautions.append(
                f"plugin.migStrategy: {options.mig_strategy} has no effect here: "
                f"{Device(gpu).shown} is part of the processor and cannot be cut into MIG instances"
            )
        named.devices.setdefault(
            _first_match(options.gpu_patterns, gpu.name) or GPU_RESOURCE, []
        ).append(Device(gpu))
    for name, devices in named.devices.items():
        if reason := _why_not(name, devices, strategy):
            named.refused.setdefault(name, reason)
    for name in named.refused:
        named.devices.pop(name, None)
    return named


def _name_instances(
    gpu: Gpu, strategy: MigStrategy, options: NvidiaOptions, named: NamedDevices
) -> None:
    for instance in gpu.mig_instances:
        default = strategy.instance_name.format(instance.profile.replace("+", "."))
        name = _first_match(options.mig_patterns, instance.profile) or default
        named.devices.setdefault(name, []).append(Device(gpu, instance))
    device = Device(gpu)
    if gpu.mig_trouble:
        unread = (
            f"MIG instances of {device.shown} cannot be read, so they are not offered: "
            f"{gpu.mig_trouble}"
        )
        if strategy.alike and gpu.present and not gpu.mig_instances:
            named.refused[strategy.instance_name] = unread
        else:
            named.cautions.append(unread)
        return
    if gpu.mig_instances:
        return
    if strategy.alike and gpu.present:
        named.refused[strategy.instance_name] = (
            f"device {device.index} has no MIG devices configured: {device.shown} is in MIG mode "
            "without a MIG instance, and with plugin.migStrategy: single all devices must be "
            "alike; create its MIG instances, switch its MIG mode off, or set plugin.migStrategy: "
            "mixed"
        )
    else:
        named.cautions.append(
            f"{device.shown} is in MIG mode and has no MIG instances, so it is not offered; create "
            "MIG instances, or switch its MIG mode off"
        )


def _first_match(patterns: Iterable[Pattern], text: str) -> str:
    return next((pattern.name for pattern in patterns if pattern.matches(text)), "")


def _why_not(name: str, devices: Sequence[Device], strategy: MigStrategy) -> str:
    """Explain why nothing can be offered under the name; empty when it can."""
    if _NAME.fullmatch(name.removeprefix(DOMAIN)) is None:
        return (
            f"no resource can have this name, which {devices[0].shown} would get; name it by a "
            "pattern in resources.mig"
        )
    if all(device.instance and device.instance.trouble for device in devices):
        first = devices[0].instance
        return f"the device nodes of no MIG instance are known: {first.trouble}" if first else ""
    return _unlike(devices) if strategy.alike else ""


def _unlike(devices: Sequence[Device]) -> str:
    """Explain why these devices cannot share one name; empty when they can. A lost GPU, which is
    never granted, is not compared.
    """
    devices = [device for device in devices if device.gpu.present] or devices
    first: dict[tuple[str, int], Device] = {}
    for device in devices:
        first.setdefault(device.kind, device)
    instances = [device for device in first.values() if device.instance]
    whole = next((device for device in first.values() if device.instance is None), None)
    if whole and instances:
        gpu = Device(instances[0].gpu)
        return (
            "all devices on the node must be configured with the same migEnabled value: "
            f"{gpu.shown} is in MIG mode and {whole.shown} is not; switch MIG mode alike on all "
            "GPUs, or set plugin.migStrategy: mixed"
        )
    if len(instances) > 1:
        return (
            "more than one MIG device type present on node: "
            f"{' and '.join(map(_described, instances[:2]))}; make all MIG instances alike, or set "
            "plugin.migStrategy: mixed"
        )
    return ""


def _described(device: Device) -> str:
    profile, memory_mib = device.kind
    return f"{device.shown} is {profile} of {memory_mib} MiB"
