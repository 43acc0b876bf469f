"""The labels of GPU Feature Discovery (GFD), from the agent's own knowledge of the GPUs.

Names and values are GFD's (nvidia §12, §17.5), so what selects nodes by them need not change. The
labels are those that follow from the inventory and from what the family offers. Left out are the
machine's product name, the graphics mode, the fabric clique, vGPU guests, and the counts of
multiprocessors and engines of MIG instances. ``gfd.timestamp`` is never written: it shows that GFD
itself runs.

Pure functions; `cluster.feature_labels` decides whether their result is written.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING

from vgpu_agent.device_ids import NumberedIds
from vgpu_agent.families.nvidia.options import DOMAIN, GPU_RESOURCE
from vgpu_agent.model import SharingMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vgpu_agent.families.nvidia.options import NvidiaOptions
    from vgpu_agent.model import Gpu, Inventory, MigInstance, Resource

TIMESTAMP = f"{DOMAIN}gfd.timestamp"
MIG_NONE, MIG_SINGLE, MIG_MIXED = "none", "single", "mixed"

# All labels that `feature_labels` may return, without those that begin with a MIG profile.
NAMES = tuple(
    f"{DOMAIN}{name}"
    for name in (
        "cuda.driver-version.full",
        "cuda.driver-version.major",
        "cuda.driver-version.minor",
        "cuda.driver-version.revision",
        "cuda.driver.major",
        "cuda.driver.minor",
        "cuda.driver.rev",
        "cuda.runtime-version.full",
        "cuda.runtime-version.major",
        "cuda.runtime-version.minor",
        "cuda.runtime.major",
        "cuda.runtime.minor",
        "gpu.compute.major",
        "gpu.compute.minor",
        "gpu.count",
        "gpu.family",
        "gpu.memory",
        "gpu.product",
        "gpu.replicas",
        "gpu.sharing-strategy",
        "gpu.slices.ci",
        "gpu.slices.gi",
        "mig.capable",
        "mig.strategy",
        "mps.capable",
    )
)

_DISALLOWED = re.compile(r"[^a-zA-Z0-9_. -]")
_LONGEST_VALUE = 63
# lowest compute capability → GFD's word for the architecture, which it calls family: nvidia §12
_FAMILIES = {
    (1, 0): "tesla",
    (2, 0): "fermi",
    (3, 0): "kepler",
    (5, 0): "maxwell",
    (6, 0): "pascal",
    (7, 0): "volta",
    (7, 5): "turing",
    (8, 0): "ampere",
    (8, 9): "ada-lovelace",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (11, 0): "undefined",
    (12, 0): "blackwell",
    (13, 0): "rubin",
}
_NEWEST_MAJOR = 13


def feature_labels(
    options: NvidiaOptions, resources: Sequence[Resource], inventory: Inventory
) -> Mapping[str, str] | None:
    """Return the labels of a node with these GPUs; None while no GPU answers, so that the present
    labels stay.

    Args:
        options: how the family offers GPUs.
        resources: what it offers now; empty while it is switched off.
        inventory: the GPUs.
    """
    # `integrated`: part of a processor
    gpus = [gpu for gpu in inventory.gpus if gpu.present and not gpu.integrated]
    if not gpus:
        return None
    labels: dict[str, str] = {}
    labels |= _driver(inventory.driver_version)
    labels |= _runtime(inventory.cuda_version)
    labels["mig.capable"] = _word(any(gpu.mig_capable for gpu in gpus))
    labels["mps.capable"] = _word(
        any(resource.sharing is SharingMode.MPS for resource in resources)
    )
    offer = _Offer(resources)
    labels |= _of_gpus(gpus, offer)
    if options.mig_strategy != MIG_NONE:
        labels["mig.strategy"] = options.mig_strategy
    if options.mig_strategy == MIG_SINGLE and any(gpu.mig_enabled for gpu in gpus):
        labels |= _single(gpus, offer)
    elif options.mig_strategy == MIG_MIXED:
        labels |= _mixed(gpus, offer)
    return {f"{DOMAIN}{name}": value for name, value in sorted(labels.items())}


class _Offer:
    """The resources by device."""

    def __init__(self, resources: Iterable[Resource]) -> None:
        self._of_device = {
            device: resource for resource in resources for device in _devices(resource)
        }

    def labels(self, devices: Iterable[str], name: str) -> dict[str, str]:
        """Return replicas and strategy of the devices, and the suffix of their product's name;
        the first one that is offered counts. ``name`` is the resource's name without renaming: the
        suffix tells shared devices from others only where the resource's name does not.
        """
        for device in devices:
            if (resource := self._of_device.get(device)) is not None:
                replicas = resource.holders_of(device)  # how many may hold it at once
                shared = resource.sharing is not SharingMode.NONE
                return {
                    "replicas": str(replicas),
                    "sharing-strategy": _STRATEGIES[resource.sharing],
                    "suffix": "SHARED" if shared and resource.name == name else "",
                }
        return {"replicas": "1", "sharing-strategy": "none", "suffix": ""}


def _devices(resource: Resource) -> Iterable[str]:
    ids = resource.ids
    if isinstance(ids, NumberedIds):  # perhaps tens of thousands
        return ids.devices
    return dict.fromkeys(one.device for one in ids)


_STRATEGIES = {
    SharingMode.NONE: "none",
    SharingMode.TIME_SLICING: "time-slicing",
    SharingMode.MPS: "mps",
    SharingMode.MPS_OF_HOST: "mps",  # through an MPS daemon that others run
}


def _of_gpus(gpus: Sequence[Gpu], offer: _Offer) -> Iterator[tuple[str, str]]:
    """Yield the labels of whole GPUs. Where a node has several products, the labels are those of
    the most frequent one. GFD takes one at random.
    """
    counts = collections.Counter(gpu.name for gpu in gpus)
    product = max(counts, key=lambda name: counts[name])
    same = [gpu for gpu in gpus if gpu.name == product]
    offered = offer.labels((gpu.uuid for gpu in same if not gpu.mig_enabled), GPU_RESOURCE)
    if all(gpu.mig_enabled for gpu in same):
        offered = {"replicas": "0", "sharing-strategy": "none", "suffix": ""}
    major, minor = same[0].compute_capability
    yield "gpu.product", _value(product, offered["suffix"])
    yield "gpu.count", str(len(same))
    yield "gpu.replicas", offered["replicas"]
    yield "gpu.sharing-strategy", offered["sharing-strategy"]
    yield "gpu.memory", str(same[0].memory_mib)
    yield "gpu.family", family_of(major, minor)
    yield "gpu.compute.major", str(major)
    yield "gpu.compute.minor", str(minor)


def _single(gpus: Sequence[Gpu], offer: _Offer) -> Iterator[tuple[str, str]]:
    """Yield the labels of a node whose GPUs are all divided into instances of one profile; for
    any other node, labels that call it invalid.
    """
    instances = [instance for gpu in gpus for instance in gpu.mig_instances]
    profiles = {instance.profile for instance in instances}
    divided = all(gpu.mig_enabled and gpu.mig_instances for gpu in gpus)
    product = gpus[0].name
    if not divided or len(profiles) != 1:
        yield "gpu.product", _value(product, "MIG", "INVALID")
        yield from (("gpu.count", "0"), ("gpu.replicas", "0"), ("gpu.memory", "0"))
        yield "gpu.sharing-strategy", ""
        return
    first = instances[0]
    offered = offer.labels((instance.uuid for instance in instances), GPU_RESOURCE)
    yield "gpu.product", _value(product, "MIG", first.profile, offered["suffix"])
    yield "gpu.count", str(len(instances))
    yield from ((f"gpu.{name}", value) for name, value in _of_instance(first, offered))


def _mixed(gpus: Sequence[Gpu], offer: _Offer) -> Iterator[tuple[str, str]]:
    by_profile: dict[str, list[tuple[Gpu, MigInstance]]] = {}
    for gpu in gpus:
        for instance in gpu.mig_instances:
            by_profile.setdefault(instance.profile.replace("+", "."), []).append((gpu, instance))
    for profile, found in by_profile.items():
        name, (gpu, first) = f"mig-{profile}", found[0]
        offered = offer.labels((instance.uuid for _, instance in found), f"{DOMAIN}{name}")
        yield f"{name}.product", _value(gpu.name, "MIG", first.profile, offered["suffix"])
        yield f"{name}.count", str(len(found))
        yield from ((f"{name}.{key}", value) for key, value in _of_instance(first, offered))


def _of_instance(instance: MigInstance, offered: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "replicas", offered["replicas"]
    yield "sharing-strategy", offered["sharing-strategy"]
    yield "memory", str(instance.memory_mib)
    yield "slices.gi", str(instance.gpu_slices)
    yield "slices.ci", str(instance.compute_slices)


def _driver(version: str) -> Iterator[tuple[str, str]]:
    if not version:
        return
    major, minor, revision = (*version.split("."), "", "")[:3]
    yield "cuda.driver-version.full", _value(version)
    # ``former``: the end of the label's deprecated name
    for name, former, part in (
        ("major", "major", major),
        ("minor", "minor", minor),
        ("revision", "rev", revision),
    ):
        yield f"cuda.driver-version.{name}", _value(part)
        yield f"cuda.driver.{former}", _value(part)


def _runtime(version: str) -> Iterator[tuple[str, str]]:
    if not version:
        return
    major, minor = (*version.split("."), "")[:2]
    yield "cuda.runtime-version.full", _value(version)
    for name, part in (("major", major), ("minor", minor)):
        yield f"cuda.runtime-version.{name}", _value(part)
        yield f"cuda.runtime.{name}", _value(part)


def family_of(major: int, minor: int) -> str:
    """Return GFD's name of the architecture with this compute capability."""
    known = [name for lowest, name in _FAMILIES.items() if lowest <= (major, minor)]
    return known[-1] if known and major <= _NEWEST_MAJOR else "undefined"


def _value(*parts: str) -> str:
    """Join the parts to the value of a label, as GFD does: without characters that Kubernetes does
    not allow, and with dashes for spaces.
    """
    allowed = (_DISALLOWED.sub("", part.replace("+", ".")) for part in parts)
    return "-".join(word for part in allowed for word in part.split())[:_LONGEST_VALUE].strip("-_.")


def _word(value: object) -> str:
    return "true" if value else "false"
