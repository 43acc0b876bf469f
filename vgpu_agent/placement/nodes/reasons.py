"""The reasons why a Node, or a card of it, cannot take a pod (vgpu-manager §5.2).

Operators know the codes from metrics and the phrases from events, so both are vgpu-manager's.
"""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """A reason: its name is the code, its value the short phrase."""

    # Members are equal only to themselves. enum's own hash is a call in Python, for each Node.
    __hash__ = object.__hash__

    NodeNotVGPUEnabled = "node not vGPU-enabled"
    NodeNoVGPURegister = "node has no vGPU registered"
    NodeNoVGPUConfig = "node has no vGPU configuration"
    NodeBadVGPURegister = "node vGPU registry invalid"
    NodeBadVGPUConfig = "node vGPU configuration invalid"
    NodeBadMemoryFactor = "node memory factor invalid"
    NodeMemoryTypeMismatch = "node memory type mismatch"
    NodeCacheMiss = "node missing from cache"
    DeviceUnhealthy = "GPU unhealthy"
    DeviceMIGEnabled = "GPU has MIG enabled"
    InsufficientVGPUSlot = "Insufficient vGPU slots"
    InsufficientVGPUMemory = "Insufficient vGPU memory"
    InsufficientVGPUCore = "Insufficient vGPU cores"
    DeviceTypeMismatch = "GPU type mismatch"
    DeviceUUIDMismatch = "GPU UUID mismatch"
    InsufficientGPUCards = "Insufficient GPU cards"
    InsufficientGPUResources = "Insufficient GPU resources"
    LinkTopologyUnsatisfied = "Link topology unsatisfied"
    NUMATopologyUnsatisfied = "NUMA topology unsatisfied"
