"""The options of the family `vgpu-manager`, as they result from the settings and from the node
configuration: vgpu-manager's file with entries for single nodes, which beats the settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.settings import static_mig_strategy

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.vgpu_manager.settings import VgpuManager


class VgpuManagerOptions(msgspec.Struct, frozen=True):
    """The settings by which this node offers its GPUs. A name in brackets is the feature gate of
    vgpu-manager's device plugin that sets the option.

    Attributes:
        keys: the names of resources, annotations and labels, in the configured domain.
        split: how many containers may share one GPU.
        cores_scaling: how many times a GPU's compute is offered.
        memory_scaling: how many times a GPU's memory is offered; above 1 containers may spill into
            the host's memory.
        memory_factor: MiB in one unit of the memory resource.
        excluded_uuids: GPUs that are advertised as unhealthy.
        excluded_indices: the same, by index, which a card keeps when another one is lost
            (`Inventory.numbered`).
        offer_cores: the resource of cores is offered, for quotas (GPUCoreResourcePlugin).
        offer_memory: the same of memory (GPUMemoryResourcePlugin).
        topology: the links between GPUs are written on the Node (TopologyAwareGPUAllocation).
        prefer_claimed: GetPreferredAllocation names ids of the GPUs in a scheduler's claim
            (HonorPreAllocatedDeviceIDs).
        reschedule: pods whose allocation or start failed here are evicted or recreated
            (AllocationFailureReschedule).
        sm_watcher: the agent samples the use of compute for all containers
            (SharedSMUtilizationWatcher).
        tracks_virtual_memory: containers count the memory that spills into the host's
            (VirtualMemoryTracking).
        mig_strategy: for MIG instances that exist already: ``none``, ``single`` or ``mixed``.
        types_match_substrings: where the agent places a container, ``A10`` in its pod's annotations
            also means ``A100``, as for vgpu-manager.
        open_kernel_modules: the node runs NVIDIA's open kernel modules, with which
            libvgpu-control.so must recognise a container's processes in another way.
        lists: how containers get their devices: NVIDIA's ``deviceListStrategy`` and what belongs to
            it.
    """

    keys: Keys = msgspec.field(default_factory=Keys)
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
    tracks_virtual_memory: bool = False
    mig_strategy: str = "mixed"
    types_match_substrings: bool = False
    open_kernel_modules: bool = False
    lists: ListOptions = msgspec.field(default_factory=ListOptions)

    @classmethod
    def from_settings(
        cls, settings: Settings, vgpu: VgpuManager, *, lists: ListOptions
    ) -> VgpuManagerOptions:
        """Return the configured options.

        Args:
            settings: those of the agent.
            vgpu: the family's own, with the node configuration already applied to them
                (`node_config.NodeConfig.applied_to`).
            lists: how containers get their devices, with the node configuration
                (`node_config.NodeConfig.lists`).
        """
        gates, excluded = vgpu.gates, vgpu.excluded
        # the second value: why the strategy is not the configured one
        mig_strategy, _ = static_mig_strategy(settings, vgpu)
        return cls(
            keys=Keys(vgpu.domain),
            split=vgpu.device_split_count,
            cores_scaling=vgpu.device_cores_scaling,
            memory_scaling=vgpu.device_memory_scaling,
            memory_factor=vgpu.device_memory_factor,
            excluded_uuids=excluded.uuids,
            excluded_indices=excluded.indices,
            offer_cores=gates.offer_cores,
            offer_memory=gates.offer_memory,
            topology=gates.topology,
            prefer_claimed=gates.prefer_claimed,
            reschedule=gates.reschedule,
            sm_watcher=gates.sm_watcher,
            tracks_virtual_memory=gates.tracks_virtual_memory,
            mig_strategy=mig_strategy,
            types_match_substrings=vgpu.type_match == "substring",
            open_kernel_modules=vgpu.open_kernel_modules,
            lists=lists,
        )
