"""The settings of the `nvidia` family, in the words of NVIDIA's plugin and of iktos's fork of it
(k8s-gpu-sharing-plugin).

NVIDIA's sharing strategies and iktos's ``resourceConfig`` become one list of entries here. What
else is different for iktos's fork is the form of the ids, their order and their spreading
(`NvidiaOptions.iktos`). Sources: nvidia §2 and §3, iktos §I.2.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.nvidia import iktos
from vgpu_agent.families.nvidia.ids import IKTOS_SEPARATOR, NVIDIA_SEPARATOR
from vgpu_agent.families.nvidia.settings import Iktos, Resources, Sharing
from vgpu_agent.isolation.mps import IN_CONTAINER, MpsOptions, MpsView
from vgpu_agent.model import SharingMode
from vgpu_agent.placement.sharing import DISTRIBUTED

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings

DOMAIN = "nvidia.com/"
GPU_RESOURCE = "nvidia.com/gpu"
SHARED_SUFFIX = ".shared"
ALL = "all"
# More than any list for the kubelet can have; with some GPUs still less than 2**63, where `len`
# fails.
_MAX_REPLICAS = 2**31 - 1
AUTOMATIC = -1  # as many replicas as the device has units of memory


class Pattern(msgspec.Struct, frozen=True):
    """A pattern for names of GPUs or MIG profiles: ``*`` stands for any text, and all of the name
    must match (nvidia §3).

    Attributes:
        pattern: for the name of the GPU or profile.
        name: the resource that offers such devices.
    """

    pattern: str
    name: str

    def matches(self, text: str) -> bool:
        """Tell whether ``text`` is such a name."""
        return re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), text) is not None


class SharedEntry(msgspec.Struct, frozen=True):
    """Devices of one resource that are offered several times.

    Attributes:
        name: the resource before sharing.
        replicas: how often each device is offered; 1 leaves it whole, and with `AUTOMATIC` it is
            offered once for each unit of its memory.
        published: the name under which the replicas are offered.
        devices: `ALL`, the number of devices (the first ones), or indices (``0``, ``1:0``) and
            UUIDs.
    """

    name: str
    replicas: int
    published: str
    devices: str | int | tuple[str, ...] = ALL


class NvidiaOptions(msgspec.Struct, frozen=True):
    """The settings by which this node offers its GPUs.

    Attributes:
        mig_strategy: ``none``, ``single`` or ``mixed`` (`devices.MIG_STRATEGIES`).
        gpu_patterns: other names for whole GPUs; the first that matches counts.
        mig_patterns: the same for instances, by profile.
        sharing: how the holders of a device that is offered several times share it.
        shared: what is offered several times; the first entry that names a device has it.
        separator: the text between a device's UUID and the number of a replica, one of those in
            `ids`.
        suffix_always: the only replica of a device has a number, too.
        fail_requests_greater_than_one: a container may take one replica only, since more replicas
            are not more of the GPU.
        policy: ``distributed`` takes the device with the fewest held replicas, ``packed`` the one
            with the most.
        policy_is_set: the operator has chosen it, so that it counts before what other families on
            the node need.
        unit_mib: MiB of memory that one replica stands for where their number is `AUTOMATIC`.
        wsl: the node is a Windows Subsystem for Linux, whose containers get all GPUs or none.
        lists: how containers get their devices.
        mps: the directories that containers share with their MPS daemon, and where its limits are
            set.
    """

    mig_strategy: str = "none"
    gpu_patterns: tuple[Pattern, ...] = ()
    mig_patterns: tuple[Pattern, ...] = ()
    sharing: SharingMode = SharingMode.TIME_SLICING
    shared: tuple[SharedEntry, ...] = ()
    separator: str = NVIDIA_SEPARATOR
    suffix_always: bool = False
    fail_requests_greater_than_one: bool = False
    policy: str = DISTRIBUTED
    policy_is_set: bool = False
    unit_mib: int = 1024
    wsl: bool = False
    lists: ListOptions = msgspec.field(default_factory=ListOptions)
    mps: MpsOptions = msgspec.field(default_factory=MpsOptions)

    @property
    def iktos(self) -> bool:
        """Tell whether replicas are counted and spread as iktos's fork does."""
        return self.separator == IKTOS_SEPARATOR

    @property
    def automatic(self) -> frozenset[str]:
        """Return the resources whose ids are units of memory."""
        return frozenset(entry.published for entry in self.shared if entry.replicas == AUTOMATIC)

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        *,
        lists: ListOptions,
        wsl: bool = False,
        mps_view: MpsView = IN_CONTAINER,
    ) -> NvidiaOptions:
        """Return the configured options; if several define the sharing, iktos's entries win, then
        MPS (nvidia G12).

        Args:
            settings: those of the agent.
            lists: how containers get their devices.
            wsl: the node is a Windows Subsystem for Linux.
            mps_view: where the agent itself sees the files that MPS daemons share with containers;
                by default at the path where its own container has them mounted.
        """
        plugin, sharing, resources = (
            settings.plugin,
            settings.section(Sharing),
            settings.section(Resources),
        )
        mps = bool(sharing.mps.resources)
        block = sharing.mps if mps else sharing.time_slicing
        options = cls(
            mig_strategy=plugin.mig_strategy,
            gpu_patterns=tuple(Pattern(entry.pattern, entry.name) for entry in resources.gpus),
            mig_patterns=tuple(Pattern(entry.pattern, entry.name) for entry in resources.mig),
            sharing=SharingMode.MPS if mps else SharingMode.TIME_SLICING,
            shared=tuple(
                SharedEntry(
                    entry.name,
                    min(entry.replicas, _MAX_REPLICAS),
                    published=entry.rename or entry.name + SHARED_SUFFIX * block.rename_by_default,
                    devices=entry.devices,
                )
                for entry in block.resources
            ),
            fail_requests_greater_than_one=block.fail_requests_greater_than_one,
            policy=(
                DISTRIBUTED
                if plugin.shared_devices_allocation_policy == "auto"
                else plugin.shared_devices_allocation_policy
            ),
            policy_is_set=plugin.shared_devices_allocation_policy != "auto",
            wsl=wsl,
            lists=lists,
            mps=MpsOptions(
                root=settings.mps.root,
                per_container_limits=settings.mps.per_container_limits,
                # no container has more than one replica, so the daemon limits each client to one
                single=sharing.mps.fail_requests_greater_than_one,
                view=mps_view,
            ),
        )
        iktos_settings = settings.section(Iktos)
        # with the resource before sharing (`original`) and the name that is offered (`new`)
        entries = iktos.entries(iktos_settings.resource_config)
        if not entries:
            return options
        return msgspec.structs.replace(
            options,
            sharing=SharingMode.TIME_SLICING,
            shared=tuple(
                SharedEntry(entry.original, entry.replicas, entry.new) for entry in entries
            ),
            separator=IKTOS_SEPARATOR,
            suffix_always=True,
            fail_requests_greater_than_one=False,
            unit_mib=_UNITS_MIB[iktos_settings.automatic_unit],
        )


# iktos's setting for the size of an automatic replica → MiB
_UNITS_MIB = {"gib": 1024, "mib1000": 1000}
