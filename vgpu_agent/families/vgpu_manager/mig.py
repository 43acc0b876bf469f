"""MIG instances that an administrator has made, under vgpu-manager's names:
``nvidia.com/mig-1g.10gb`` (vgpu-manager §2.3).

The ids name the instances. Schedulers only count them, like any resource. This is a family of its
own beside `vgpu-manager`, so that the ledger keeps the two apart: whole GPUs are shared there, and
instances of divided ones are granted here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.families.family import Ownership
from vgpu_agent.families.mig_instances import MIXED, SINGLE, MigInstancesFamily
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.offer import why_excluded

if TYPE_CHECKING:
    from vgpu_agent.families.device_lists import ListOptions
    from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
    from vgpu_agent.model import Gpu, Inventory, MigInstance


MIG_FAMILY = "vgpu-manager-mig"


class VgpuManagerMigFamily(MigInstancesFamily):
    """The instances under one name for each profile."""

    name = MIG_FAMILY

    def __init__(self, options: VgpuManagerOptions, lists: ListOptions) -> None:
        """Make the family.

        Args:
            options: those of vgpu-manager.
            lists: how containers get the devices that ids name (NVIDIA's ``deviceListStrategy``).
        """
        super().__init__(lists)
        self._options = options

    def owns(self, resource: str) -> Ownership:
        """Return CERTAIN, so that this family is asked before those that are less sure of a name,
        for the names in the configured domain, and for those in the default domain, which may be in
        the kubelet's records from before a change of the configuration.
        """
        # without a profile: the beginning of the names
        prefixes = (self._options.keys.mig(""), Keys().mig(""))
        return Ownership.CERTAIN if resource.startswith(prefixes) else Ownership.NONE

    def resource_name(self, instance: MigInstance) -> str:
        """Return the resource of all instances that have this one's profile."""
        return self._options.keys.mig(instance.profile)

    def divided_gpus(self, inventory: Inventory) -> list[Gpu]:
        """Return all GPUs in MIG mode."""
        return [gpu for gpu in inventory.gpus if gpu.mig_enabled]

    def why_never_granted(self, gpu: Gpu, inventory: Inventory) -> str:
        """Explain why the instances of ``gpu`` are listed as unhealthy and never granted: the
        operator has excluded it. Empty when not.
        """
        return why_excluded(gpu, inventory, self._options)

    def refusals(self, inventory: Inventory) -> dict[str, str]:
        """Refuse the strategy `SINGLE` on a node whose GPUs are not all divided alike: return
        resource → reason.
        """
        if self._options.mig_strategy != SINGLE or not inventory.gpus:
            return {}
        whole = [f"GPU {gpu.index} ({gpu.uuid})" for gpu in inventory.gpus if not gpu.mig_enabled]
        profiles = sorted({instance.profile for _, instance in self.offered(inventory)})
        if not whole and len(profiles) < 2:
            return {}
        found = (
            f"{' and '.join(whole)} {'is' if len(whole) == 1 else 'are'} not in MIG mode"
            if whole
            else f"this node has instances of {', '.join(profiles)}"
        )
        why = (
            f"the MIG strategy is {SINGLE}, and {found}; divide all GPUs alike, or choose {MIXED} "
            "(vgpuManager.migStrategy)"
        )
        # One entry withholds all resources of this family. Without any instance there is no name of
        # one, so the reason is given under that of whole GPUs.
        names = [self._options.keys.mig(profile) for profile in profiles]
        return dict.fromkeys(names or [self._options.keys.number], why)
