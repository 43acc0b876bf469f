"""The options of the family `vgpu-manager`, as they result from settings and node configuration."""

from __future__ import annotations

import dataclasses

from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.vgpu_manager.keys import Keys


@dataclasses.dataclass(frozen=True, slots=True)
class VgpuManagerOptions:
    """How this node offers its GPUs.

    Attributes:
        keys: the names in the configured domain.
        split: how many containers may share one GPU.
        cores_scaling: how many times a GPU's compute is offered.
        memory_scaling: how many times a GPU's memory is offered; above 1 containers may spill into
            the host's memory.
        memory_factor: MiB in one unit of the memory resource.
        excluded_uuids: GPUs that are advertised as unhealthy.
        excluded_indices: the same, by NVML index.
        offer_cores: the resource of cores is offered, for quotas (GPUCoreResourcePlugin).
        offer_memory: the same of memory (GPUMemoryResourcePlugin).
        topology: the links between GPUs are written on the Node (TopologyAwareGPUAllocation).
        prefer_claimed: the kubelet is advised which ids suit a scheduler's claim
            (HonorPreAllocatedDeviceIDs).
        reschedule: pods that this node has failed are evicted or made anew
            (AllocationFailureReschedule).
        sm_watcher: the agent samples the use of compute for all containers
            (SharedSMUtilizationWatcher).
        memory_ledger: containers keep a ledger of spilled memory (VirtualMemoryTracking).
        mig_strategy: ``none``, ``single`` or ``mixed``.
        lists: how containers get their devices.
        message_budget_bytes: largest device list that is sent to the kubelet.
    """

    keys: Keys = dataclasses.field(default_factory=Keys)
    split: int = 10
    cores_scaling: float = 1.0
    memory_scaling: float = 1.0
    memory_factor: int = 1
    excluded_uuids: frozenset[str] = frozenset()
    excluded_indices: frozenset[int] = frozenset()
    offer_cores: bool = False
    offer_memory: bool = False
    topology: bool = False
    prefer_claimed: bool = False
    reschedule: bool = False
    sm_watcher: bool = False
    memory_ledger: bool = False
    mig_strategy: str = "mixed"
    lists: ListOptions = dataclasses.field(default_factory=ListOptions)
    message_budget_bytes: int = 3_670_016
