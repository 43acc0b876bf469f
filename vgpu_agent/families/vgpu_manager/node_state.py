"""The desired state of our Node for vgpu-manager's schedulers: annotations that describe its GPUs,
labels with the driver's versions, and no resource that is not offered any more (vgpu-manager §3,
§2.2).

The texts are byte for byte those of the replaced plugin, so a node that is switched over looks the
same. They are desired state: `cluster` writes only the difference. Called by `family`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from vgpu_agent.families.vgpu_manager.keys import (
    CUDA_MAJOR_LABEL,
    CUDA_MINOR_LABEL,
    CUDA_VERSION_LABEL,
    DRIVER_VERSION_LABEL,
)
from vgpu_agent.families.vgpu_manager.offer import (
    cores_percent,
    memory_mib,
    never_granted,
    offered_names,
)
from vgpu_agent.nodes import DesiredNode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.families.family import NodeView
    from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
    from vgpu_agent.model import Gpu, Inventory, Link

LONGEST_TEXT_BYTES = 96 * 1024
"""The longest annotation about the GPUs; a longer one is not written. A Node's annotations may have
256 KiB together, and two of them grow with the GPUs.
"""

# NVML's levels of the common ancestor of two GPUs → link types of vgpu-manager §3.
_PCI_LINKS = {0: 6, 10: 5, 20: 4, 30: 3, 40: 2, 50: 1}
_NVLINKS_BASE = 6  # one NVLink is type 7
_MAX_NVLINKS = 18  # more are published as 18

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_CUDA_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")
# The characters that Go escapes in JSON.
_GO_ESCAPES = str.maketrans(
    {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
)


def desired_node(view: NodeView, options: VgpuManagerOptions) -> DesiredNode:
    """Return the annotations and labels of a node with these GPUs, and what must not be there: that
    has the value None. ``view`` has the present facts: the GPUs, the Node, and the resources that
    are offered.

    A GPU that cannot be given to a new container of this family now is announced as unhealthy: one
    that is unhealthy, excluded, not among the 16 that libvgpu-control.so can limit, or that serves
    another family. Schedulers skip unhealthy GPUs and still count the pods on them; nothing else in
    the text keeps pods away.
    """
    inventory, keys = view.inventory, options.keys
    if not inventory.version:
        # until the GPUs are read, the annotations from before the restart stay
        return DesiredNode()
    stale = DesiredNode(capacity=_stale(view, options))
    if not inventory.numbered:  # no GPUs
        return cleanup(options).joined(stale)
    # `keys.number` names the resource ``vgpu-number``, of which each card has several ids;
    # `trouble`: why new containers get nothing of the card
    free = {room.device: not room.trouble for room in view.rooms.get(keys.number, ())}
    never = never_granted(inventory, options)  # excluded, or not among those 16

    def is_healthy(gpu: Gpu) -> bool:
        if gpu.uuid in never:
            return False
        # A divided GPU has no ids of ``vgpu-number``; schedulers recognise it by the field `mig`.
        return gpu.present and gpu.health.ok if gpu.mig_enabled else free.get(gpu.uuid, False)

    healthy = {gpu.uuid: is_healthy(gpu) for gpu in inventory.gpus}
    register = register_text(inventory, options, healthy=healthy)
    topology = topology_text(inventory) if options.topology else None
    return DesiredNode(
        annotations={
            keys.node_config: config_text(options),
            keys.node_register: _unless_too_long(register),
            keys.node_topology: _unless_too_long(topology),
            keys.node_heartbeat: None,  # deprecated, so only removed
        },
        labels=_labels(inventory),
    ).joined(stale)


def _stale(view: NodeView, options: VgpuManagerOptions) -> dict[str, None]:
    """Return the resources that the Node must not have, because the kubelet would keep them
    forever (vgpu-manager §2.2): ``vgpu-cores`` and ``vgpu-memory`` where their feature gate is off,
    and MIG profiles without an instance.

    Other plugins may offer instances by the same names, so those names are removed only where they
    are at 0. ``vgpu-number`` stays, at 0: where a Node lacks a resource, the kubelet starts pods
    without it.
    """
    keys, node = options.keys, view.node
    # the resources that any family of this node offers, and those that this one could
    offered = view.offered | offered_names(view.inventory, options)
    gone = {
        name
        for name in (*node.capacity, *node.allocatable)
        if name.startswith(keys.mig(""))  # without a profile: the beginning of the names
        and node.capacity.get(name, "0") == node.allocatable.get(name, "0") == "0"
    }
    return dict.fromkeys(sorted({keys.cores, keys.memory, *gone} - offered))


def cleanup(options: VgpuManagerOptions) -> DesiredNode:
    """Return the desired state of a Node that the agent leaves for good: without the annotations
    and labels that the agent writes. Those that operators supply are not mentioned, so they stay.
    """
    keys = options.keys
    # without a value: must not be there
    written = (keys.node_config, keys.node_register, keys.node_topology, keys.node_heartbeat)
    labels = (DRIVER_VERSION_LABEL, CUDA_VERSION_LABEL, CUDA_MAJOR_LABEL, CUDA_MINOR_LABEL)
    return DesiredNode(annotations=dict.fromkeys(written), labels=dict.fromkeys(labels))


def config_text(options: VgpuManagerOptions) -> str:
    """Return the annotation about the division of the node's GPUs (vgpu-manager §13.1)."""
    return _json(
        {
            "deviceSplit": options.split,
            "coresScaling": _as_go_prints(options.cores_scaling),
            "memoryFactor": options.memory_factor,
            "memoryScaling": _as_go_prints(options.memory_scaling),
        }
    )


def register_text(
    inventory: Inventory, options: VgpuManagerOptions, *, healthy: Mapping[str, bool]
) -> str:
    """Return the annotation with the node's GPUs, one entry for each number from 0 on.

    A gap in the numbers crashes vgpu-manager's extender (vgpu-manager §3). So a GPU that is lost
    keeps its entry. A GPU that has never answered has an entry with no memory that is unhealthy.
    """
    numbered = inventory.numbered  # number → GPU; NVML's indices, but a lost GPU keeps its own
    return _json(
        [
            _entry(number, numbered[number], options, healthy=healthy[numbered[number].uuid])
            if number in numbered
            else _silent_entry(number, options)
            for number in range(max(*numbered, *_silent(inventory), 0) + 1)
        ]
    )


def _silent(inventory: Inventory) -> list[int]:
    """Return NVML's indices of the cards that did not answer when they were enumerated."""
    # a failure is ``<index>: <text>``
    indices = (failure.partition(":")[0] for failure in inventory.failures)
    return [int(index) for index in indices if index.isdecimal()]


def _entry(number: int, gpu: Gpu, options: VgpuManagerOptions, *, healthy: bool) -> dict[str, Any]:
    major, minor = gpu.compute_capability
    return {
        "id": number,
        "type": gpu.name,
        "uuid": gpu.uuid,
        "core": cores_percent(options),
        "memory": memory_mib(gpu, options),
        "number": options.split,  # of containers that may share the card
        "numa": -1 if gpu.numa_node is None else gpu.numa_node,
        "mig": gpu.mig_enabled,
        "busId": gpu.pci_bus_id,
        "capability": _as_go_prints(float(f"{major}.{minor}")),
        "healthy": healthy,
    }


def _silent_entry(number: int, options: VgpuManagerOptions) -> dict[str, Any]:
    """The entry of a card that NVML counts and that has not answered since the agent's start."""
    return {
        "id": number,
        "type": "unknown",
        # A UUID that no card has: schedulers identify the cards by it.
        "uuid": f"GPU-00000000-0000-0000-0000-{number:012x}",
        "core": cores_percent(options),
        "memory": 0,
        "number": options.split,
        "numa": -1,
        "mig": False,
        "busId": "",
        "capability": 0,
        "healthy": False,
    }


def topology_text(inventory: Inventory) -> str:
    """Return the annotation with the known types of the links from each GPU to each other one."""
    numbered = inventory.numbered
    return _json(
        [
            {
                "index": number,
                "links": {
                    # Go sorts the keys of a map as texts.
                    str(other): types
                    for other in sorted(numbered, key=str)
                    if other != number
                    and (link := inventory.links.get((gpu.uuid, numbered[other].uuid)))
                    and (types := link_types(link))
                },
            }
            for number, gpu in numbered.items()
        ]
    )


def link_types(link: Link) -> list[int]:
    """Return the types of a link, that of the PCIe bus first (vgpu-manager §3)."""
    nvlinks = link.nvlinks or link.switch_links  # to the other GPU, or to NVSwitches
    types = [_PCI_LINKS[link.pci]] if link.pci in _PCI_LINKS else []
    return [*types, _NVLINKS_BASE + min(nvlinks, _MAX_NVLINKS)] if nvlinks else types


def too_long_texts(inventory: Inventory, options: VgpuManagerOptions) -> tuple[str, ...]:
    """Return a sentence for each text that would not fit beside the Node's other annotations."""
    if not inventory.numbered:
        return ()
    keys = options.keys
    texts = {
        keys.node_register: register_text(
            inventory, options, healthy=dict.fromkeys(inventory.devices, True)
        ),
        keys.node_topology: topology_text(inventory) if options.topology else None,
    }
    return tuple(
        f"{key} is not written: it would have more than {LONGEST_TEXT_BYTES} bytes for "
        f"{len(inventory.gpus)} GPUs, and a Node's annotations may have 256 KiB together"
        for key, text in texts.items()
        if text != _unless_too_long(text)
    )


def _labels(inventory: Inventory) -> dict[str, str | None]:
    cuda = _CUDA_VERSION.fullmatch(inventory.cuda_version)
    driver = inventory.driver_version
    return {
        DRIVER_VERSION_LABEL: driver if _LABEL_VALUE.fullmatch(driver) else None,
        CUDA_VERSION_LABEL: cuda[0] if cuda else None,
        CUDA_MAJOR_LABEL: cuda[1] if cuda else None,
        CUDA_MINOR_LABEL: cuda[2] if cuda else None,
    }


def _unless_too_long(text: str | None) -> str | None:
    return text if text is None or len(text.encode()) <= LONGEST_TEXT_BYTES else None


def _as_go_prints(number: float) -> float | int:
    """Return ``number`` as Go prints it in JSON: without a fraction if it is whole."""
    return int(number) if number.is_integer() else number


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_GO_ESCAPES)
