"""The feature gates of vgpu-manager: ``Gate=true,Other=false``, by their names and by those that
they had before v1.0.0 (vgpu-manager §1.7).

The replaced programs have two sets of gates: one for the DRA driver, one for all other programs.
Each program refuses the gates of the other set. Here all are accepted. Those of the device plugin
have their effect, and a message says that the others have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.config.problems import shown
from vgpu_agent.config.suggestions import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

_OF_THE_SCHEDULER = "is a gate of the scheduler extender, it has no effect on a node"
_OF_DRA = "is a gate of the DRA driver, which this agent does not have; it has no effect"

# Gate → attribute of `Gates`.
_EFFECTS = {
    "GPUCoreResourcePlugin": "offer_cores",
    "GPUMemoryResourcePlugin": "offer_memory",
    "AllocationFailureReschedule": "reschedule",
    "TopologyAwareGPUAllocation": "topology",
    "SharedSMUtilizationWatcher": "sm_watcher",
    "VirtualMemoryTracking": "tracks_virtual_memory",
    "DevicePluginClientMode": "client_mode",
    "HonorPreAllocatedDeviceIDs": "prefer_claimed",
}
_WITHOUT_EFFECT = {
    "SerializedNodeBind": _OF_THE_SCHEDULER,
    "SerializedNodeFilter": _OF_THE_SCHEDULER,
    **dict.fromkeys(
        (
            "ConsumableShares",
            "DRAListTypeAttributes",
            "DeviceMetadata",
            "DynamicMIG",
            "FabricManagerPartitioning",
            "IMEXDaemonsWithDNSNames",
            "MPSSupport",
            "NRISupport",
            "NVMLDeviceHealthCheck",
            "PassthroughSupport",
            "TimeSlicingSettings",
            "TopologyDeviceAttributes",
            "VGPUSupport",
        ),
        _OF_DRA,
    ),
}
# Name before v1.0.0 → name of the same gate since.
_FORMER = {
    "CorePlugin": "GPUCoreResourcePlugin",
    "MemoryPlugin": "GPUMemoryResourcePlugin",
    "Reschedule": "AllocationFailureReschedule",
    "GPUTopology": "TopologyAwareGPUAllocation",
    "SMWatcher": "SharedSMUtilizationWatcher",
    "VMemoryNode": "VirtualMemoryTracking",
    "ClientMode": "DevicePluginClientMode",
    "SerialBindNode": "SerializedNodeBind",
    "SerialFilterNode": "SerializedNodeFilter",
}
_KNOWN = (*_EFFECTS, *_WITHOUT_EFFECT, *_FORMER)
# Go's strconv.ParseBool.
_VALUES = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


class Gates(msgspec.Struct, frozen=True):
    """The gates that have an effect here; all are off by default.

    Attributes:
        offer_cores: GPUCoreResourcePlugin; the cards' compute is a resource, for quotas.
        offer_memory: GPUMemoryResourcePlugin; the same for their memory.
        reschedule: AllocationFailureReschedule; pods whose allocation or start failed are evicted
            or recreated.
        topology: TopologyAwareGPUAllocation; an annotation of the Node shows the links between its
            GPUs.
        sm_watcher: SharedSMUtilizationWatcher; the agent measures the compute in use, once for all
            containers.
        tracks_virtual_memory: VirtualMemoryTracking; containers count spilled memory: what was
            allocated for a card and lies in the host's memory.
        client_mode: DevicePluginClientMode; containers register their processes with the agent.
        prefer_claimed: HonorPreAllocatedDeviceIDs; GetPreferredAllocation names the ids of the GPUs
            that a scheduler has chosen.
        problems: one sentence for each entry that is not ``Gate=value``.
        without_effect: one sentence for each gate of another program, and for each entry that a
            later entry with the gate's other name overrides.
    """

    offer_cores: bool = False
    offer_memory: bool = False
    reschedule: bool = False
    topology: bool = False
    sm_watcher: bool = False
    tracks_virtual_memory: bool = False
    client_mode: bool = False
    prefer_claimed: bool = False
    problems: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()


def read_gates(words: Sequence[str]) -> Gates:
    """Read ``words``, entries such as ``GPUCoreResourcePlugin=true``; the last entry of a gate
    counts. Never raises.
    """
    values: dict[str, bool] = {}  # attribute of `Gates` → its value
    last: dict[str, str] = {}  # gate → its last entry
    problems: list[str] = []
    idle: dict[str, str] = {}  # gate → the sentence that it, or an entry of it, has no effect
    for word in words:
        written, equals, value = (part.strip() for part in word.partition("="))
        name = _FORMER.get(written, written)
        if name not in _EFFECTS and name not in _WITHOUT_EFFECT:
            problems.append(_unknown(written))
        elif value not in _VALUES:
            got = f"got {shown(value)}" if equals else "got no value"
            problems.append(f"{written}: expected {written}=true or {written}=false, {got}")
        elif name in _WITHOUT_EFFECT:
            idle[name] = f"{written} {_WITHOUT_EFFECT[name]}; leave it out"
        else:
            now = f"{written}={value}"
            before = last.get(name, now)
            if before.partition("=")[0] != written and values.get(_EFFECTS[name]) != _VALUES[value]:
                idle[name] = (
                    f"{before} has no effect before {now}, which is the same gate; keep one of them"
                )
            last[name] = now
            values[_EFFECTS[name]] = _VALUES[value]
    return Gates(**values, problems=tuple(problems), without_effect=tuple(idle.values()))


def _unknown(written: str) -> str:
    guess = nearest(written, _KNOWN)
    return f"unknown feature gate {shown(written)}, " + (
        f"did you mean {guess}?" if guess else f"expected one of {', '.join(_EFFECTS)}"
    )
