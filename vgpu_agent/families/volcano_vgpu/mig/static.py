"""MIG instances that an administrator has made, under Volcano's names:
``volcano.sh/gpu`` or ``volcano.sh/mig-1g.10gb``.

The replaced plugin offers them and then answers nothing, because their names are not that of the
resource whose ids it answers, ``volcano.sh/vgpu-number`` (volcano-vgpu §4.3, volcano-vgpu D16); up
to its version 1.11 it had ``nvidia.com/mig-…`` and passed the instances to containers. Here the ids
name the instances, and the answer is complete in Allocate. No scheduler chooses among them: it only
counts them, like any resource. A family of its own beside `volcano_vgpu`, so that the ledger keeps
both apart: whole GPUs are shared there, GPUs in MIG mode are granted here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.family import Ownership
from vgpu_agent.families.mig_instances import MIXED, SINGLE, MigInstancesFamily
from vgpu_agent.families.volcano_vgpu.offer import visible_gpus
from vgpu_agent.families.volcano_vgpu.settings import STATIC_MIG_FAMILY

if TYPE_CHECKING:
    from vgpu_agent.model import Gpu, Inventory, MigInstance


class StaticMigOptions(msgspec.Struct, frozen=True):
    """The settings by which MIG instances are offered.

    Attributes:
        strategy: `SINGLE` or `MIXED`.
        prefix: of the names: ``volcano.sh``, or ``nvidia.com`` as up to the plugin's version 1.11.
        hidden_uuids: GPUs that are not offered.
        hidden_indices: the same, by index; a GPU keeps its own when one before it is lost.
        lists: how containers get their devices.
    """

    strategy: str
    prefix: str = "volcano.sh"
    hidden_uuids: frozenset[str] = frozenset()
    hidden_indices: frozenset[int] = frozenset()
    lists: ListOptions = msgspec.field(default_factory=ListOptions)


class VolcanoStaticMigFamily(MigInstancesFamily):
    """The instances under one name, or under one for each profile (volcano-vgpu §4.2)."""

    name = STATIC_MIG_FAMILY

    def __init__(self, options: StaticMigOptions) -> None:
        super().__init__(options.lists)
        self._options = options

    def owns(self, resource: str) -> Ownership:
        """Own the names of both strategies for certain: the kubelet's records may have one from
        before a change.
        """
        ours = resource == self._single_name or resource.startswith(f"{self._options.prefix}/mig-")
        return Ownership.CERTAIN if ours else Ownership.NONE

    def resource_name(self, instance: MigInstance) -> str:
        """Return the resource that offers the instance."""
        if self._options.strategy == SINGLE:
            return self._single_name
        return f"{self._options.prefix}/mig-{instance.profile.replace('+', '.')}"

    def divided_gpus(self, inventory: Inventory) -> list[Gpu]:
        """Return the GPUs in MIG mode that the node configuration, a file of the replaced plugin,
        does not hide.
        """
        options = self._options
        return [
            gpu
            for gpu in visible_gpus(inventory, options.hidden_uuids, options.hidden_indices)
            if gpu.mig_enabled
        ]

    def refusals(self, inventory: Inventory) -> dict[str, str]:
        """Refuse instances of several profiles under the one name of `SINGLE`."""
        profiles = sorted({instance.profile for _, instance in self.offered(inventory)})
        if self._options.strategy != SINGLE or len(profiles) < 2:
            return {}
        why = (
            f"the MIG strategy is {SINGLE}, and this node has instances of {', '.join(profiles)}, "
            f"which one name cannot tell apart; make them alike, or choose {MIXED} "
            "(volcanoVgpu.migStrategy)"
        )
        return {self._single_name: why}

    @property
    def _single_name(self) -> str:
        return f"{self._options.prefix}/gpu"
