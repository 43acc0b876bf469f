"""The settings of the family `volcano-vgpu`: its section and its rules.

Defaults are those of the plugin that is replaced (volcano-vgpu §5). Its own configuration files are
read by `files` and override this section.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.checks import Conflict
from vgpu_agent.config.families import FamilySettings, OfferedName, Spreading, mig_family
from vgpu_agent.config.foreign_settings import ForeignVariable
from vgpu_agent.config.hami_core import HamiCore
from vgpu_agent.config.options import Option
from vgpu_agent.config.problems import shown
from vgpu_agent.config.settings import Settings
from vgpu_agent.config.types import (
    DEVICE_MODES,
    Factor,
    OptionalPath,
    Program,
    Seconds,
    enabled_modes,
)

FAMILY = "volcano-vgpu"
# the name, in grants and resources, of the part that offers MIG instances made by somebody else
STATIC_MIG_FAMILY = "volcano-vgpu-mig"
# the operating modes, as written in the register annotation (volcano-vgpu §2.1)
HAMI_CORE, MIG = "hami-core", "mig"

_VOLCANO_NAME = r"\Avolcano\.sh/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z"
VolcanoName = Annotated[
    str,
    Meta(pattern=_VOLCANO_NAME, extra={"expected": "a resource name that begins with volcano.sh/"}),
]


class VolcanoVgpu(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The family `volcano-vgpu`. The ConfigMap and the node configuration of
    volcano-vgpu-device-plugin, where they exist, beat this.
    """

    number_resource: Annotated[
        VolcanoName,
        Meta(
            description=(
                "The resource that counts GPUs; schedulers from 1.14.3 know the default only."
            )
        ),
    ] = "volcano.sh/vgpu-number"
    memory_resource: Annotated[
        VolcanoName,
        Meta(description="The resource that counts memory in units of `gpuMemoryFactor` MiB."),
    ] = "volcano.sh/vgpu-memory"
    cores_resource: Annotated[
        VolcanoName, Meta(description="The resource that counts percent of a GPU's compute.")
    ] = "volcano.sh/vgpu-cores"
    memory_percentage_resource: Annotated[
        VolcanoName,
        Meta(description="The resource with which a pod asks for a percentage of a GPU's memory."),
    ] = "volcano.sh/vgpu-memory-percentage"
    offer_memory_percentage: Annotated[
        bool,
        Meta(
            description=(
                "Offer the percentage resource to the kubelet, without which schedulers from 1.13 "
                "leave such pods pending."
            )
        ),
    ] = False
    device_split_count: Annotated[
        int, Meta(ge=1, le=1000, description="How many containers may share one GPU.")
    ] = 10
    gpu_memory_factor: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description=(
                "MiB in one unit of the memory resource. 0: the smallest power of two with which "
                "the device list fits into one message of the kubelet; 1 unless the node has much "
                "memory."
            ),
        ),
    ] = 0
    device_memory_scaling: Annotated[
        Factor,
        Meta(
            description="How many times a GPU's memory is offered; above 1, containers may run out "
            "of memory below their limit."
        ),
    ] = 1.0
    device_core_scaling: Annotated[
        Factor, Meta(description="How many times a GPU's compute is offered.")
    ] = 1.0
    disable_core_limit: Annotated[bool, Meta(description="Book compute but do not limit it.")] = (
        False
    )
    gdrcopy_enabled: Annotated[
        bool, Meta(description="Ask the NVIDIA runtime for GDRCopy devices (`NVIDIA_GDRCOPY`).")
    ] = True
    gds_enabled: Annotated[
        bool,
        Meta(description="Ask the NVIDIA runtime for GPUDirect Storage devices (`NVIDIA_GDS`)."),
    ] = True
    mofed_enabled: Annotated[
        bool, Meta(description="Ask the NVIDIA runtime for Mellanox devices (`NVIDIA_MOFED`).")
    ] = True
    isolation: Annotated[
        Literal["hami-core", "none"],
        Meta(
            description=(
                "hami-core: libvgpu.so limits memory and compute in the container. none: sharing "
                "without any limit."
            )
        ),
    ] = "hami-core"
    read_config_map: Annotated[
        bool,
        Meta(
            description=(
                "Read the ConfigMap volcano-vgpu-device-config, in kube-system or volcano-system, "
                "as the replaced plugin does."
            )
        ),
    ] = True
    config_map_namespace: Annotated[
        str,
        Meta(
            pattern=r"\A([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?\Z",
            extra={"expected": "the name of a namespace (lower case letters, digits and '-')"},
            description=(
                "Where that ConfigMap is looked for first, before kube-system and volcano-system. "
                "The agent's role must allow reading it there. Empty: only in those two."
            ),
        ),
    ] = ""
    node_config_file: Annotated[
        OptionalPath,
        Meta(
            description=(
                "The mounted config.json of volcano-vgpu-node-config; empty or missing: none."
            )
        ),
    ] = "/config/config.json"
    operating_mode: Annotated[
        Literal["hami-core", "mig"],
        Meta(
            description=(
                "hami-core: GPUs are shared by memory and compute. mig: each share is a MIG "
                "instance, and GPUs are divided as pods need it, into the groups of "
                "`knownMigGeometries` in the ConfigMap; needs late binding. `operatingmode` in the "
                "node configuration says the same."
            )
        ),
    ] = "hami-core"
    mig_strategy: Annotated[
        Literal["", "none", "single", "mixed"],
        Meta(
            description=(
                "MIG instances that somebody else has made. single: `<prefix>/gpu`, one profile on "
                "the node. mixed: `<prefix>/mig-<profile>`. none: not offered. Empty: as "
                "`plugin.migStrategy`, and none beside the family nvidia, which offers them itself."
            )
        ),
    ] = ""
    mig_resource_prefix: Annotated[
        Literal["volcano.sh", "nvidia.com"],
        Meta(
            description=(
                "What the names of those resources begin with; nvidia.com is what "
                "volcano-vgpu-device-plugin up to 1.11 had."
            )
        ),
    ] = "volcano.sh"
    mig_parted: Annotated[
        Program,
        Meta(
            description=(
                "The program that divides a GPU in the operating mode mig: nvidia-mig-parted, or a "
                "script that calls it."
            )
        ),
    ] = "nvidia-mig-parted"
    mig_parted_timeout_seconds: Annotated[
        Seconds,
        Meta(
            description=(
                "How long one call of that program may take before it is ended. A pod waits no "
                "longer than 20 s, and finds the GPU divided when the kubelet "
                "asks again."
            )
        ),
    ] = 120.0

    @property
    def device_modes(self) -> tuple[str, ...]:
        """The kinds of other devices that are switched on, of `types.DEVICE_MODES`."""
        return enabled_modes(
            gdrcopy=self.gdrcopy_enabled, gds=self.gds_enabled, mofed=self.mofed_enabled
        )


def static_mig_strategy(settings: Settings, vgpu: VolcanoVgpu) -> tuple[str, str]:
    """Return the strategy for existing MIG instances under Volcano's names, and why it is not the
    requested one; empty where it is.

    Args:
        settings: all settings; they tell what the other families offer.
        vgpu: with the files of the replaced plugin already applied to it.
    """
    other = mig_family(settings)  # the family that offers them as `plugin.migStrategy` says
    strategy = vgpu.mig_strategy or ("none" if other else settings.plugin.mig_strategy)
    instead = ""
    if strategy != "none" and vgpu.operating_mode == MIG:
        instead = (
            "in the operating mode mig instances are given through volcano.sh/vgpu-number; they "
            "are not offered by their own names"
        )
    elif strategy != "none" and other and settings.plugin.mig_strategy != "none":
        instead = (
            f"the family {other} offers the same instances (plugin.migStrategy); turn one of the "
            "two off"
        )
    return ("none", f"{strategy}: {instead}") if instead else (strategy, "")


def _names(settings: Settings) -> Iterator[OfferedName]:
    vgpu = settings.section(VolcanoVgpu)
    strategy, _ = static_mig_strategy(settings, vgpu)
    # `change_order`: of two equal names, the operator is asked to change the one with the lower
    # number; `prefix`: the text stands for all names that begin with it
    if strategy != "none":
        text = f"{vgpu.mig_resource_prefix}/{'gpu' if strategy == 'single' else 'mig-'}"
        yield OfferedName(
            text,
            STATIC_MIG_FAMILY,
            "volcanoVgpu.migResourcePrefix",
            prefix=strategy == "mixed",
            change_order=2,
        )
    yield OfferedName(vgpu.number_resource, FAMILY, "volcanoVgpu.numberResource", change_order=1)
    yield OfferedName(vgpu.memory_resource, FAMILY, "volcanoVgpu.memoryResource", change_order=1)
    yield OfferedName(vgpu.cores_resource, FAMILY, "volcanoVgpu.coresResource", change_order=1)
    if vgpu.offer_memory_percentage:
        yield OfferedName(
            vgpu.memory_percentage_resource,
            FAMILY,
            "volcanoVgpu.memoryPercentageResource",
            change_order=1,
        )


def _collisions(settings: Settings) -> Iterator[Conflict]:
    """Yield the settings by which one MIG instance is offered twice,
    or a divided GPU as if it were whole.
    """
    vgpu = settings.section(VolcanoVgpu)
    _, problem = static_mig_strategy(settings, vgpu)
    if problem:
        # the settings that could be changed, each with its sentence
        yield Conflict((("volcanoVgpu.migStrategy", problem), ("plugin.migStrategy", problem)))
    strategy, other = settings.plugin.mig_strategy, mig_family(settings)
    if other and vgpu.operating_mode == MIG and strategy != "mixed":
        why = (
            f"the family {other} would offer a GPU that is divided for a Volcano pod as a whole "
            "one, on which work fails"
        )
        if strategy == "single":
            why = f"the family {other} would offer nothing while the GPUs are divided differently"
        yield Conflict(
            (
                (
                    "plugin.migStrategy",
                    (
                        "expected mixed with volcanoVgpu.operatingMode: mig, got "
                        f"{shown(strategy)}; {why}"
                    ),
                ),
                (
                    "volcanoVgpu.operatingMode",
                    (
                        f"mig goes with plugin.migStrategy: mixed, and that is {shown(strategy)}; "
                        f"{why}"
                    ),
                ),
            )
        )


def _limited(settings: Settings) -> bool:
    return settings.section(VolcanoVgpu).isolation == HAMI_CORE


def _hook_path(settings: Settings) -> str:
    return settings.section(HamiCore).host_directory


SETTINGS = FamilySettings(
    FAMILY,
    "`volcano.sh/vgpu-number`, `-memory` and `-cores`, as volcano-vgpu-device-plugin offers them.",
    sections={"volcano_vgpu": VolcanoVgpu},
    # keys of earlier versions → what the agent does now
    former_keys={
        "volcanoVgpu.migRetrySeconds": (
            "a division of a GPU that has failed is tried again after 60 s at the earliest"
        ),
        "volcanoVgpu.migSettleSeconds": (
            "the driver has 10 s to show the instances that nvidia-mig-parted has made"
        ),
    },
    # without a flag; the variable is called as in volcano-vgpu-device-plugin
    options=(
        Option("volcanoVgpu.configMapNamespace", flag="", variable="DEVICE_CONFIG_NAMESPACE"),
    ),
    # This plugin and NVIDIA's read the same variables, with different defaults: a flag, a
    # variable or NVIDIA's file that sets the second key sets the first one, too.
    also_set_by={f"volcanoVgpu.{mode}Enabled": f"plugin.{mode}Enabled" for mode in DEVICE_MODES},
    # not followed; it is reported where it differs from the value in force, which `_hook_path`
    # returns, and only with HAMi-core (`concerns`), whose directory on the host it would set
    ignored_variables=(
        ForeignVariable(
            "HOOK_PATH",
            _hook_path,
            "set hamiCore.hostDirectory to that, and mount the path",
            concerns=_limited,
        ),
    ),
    names=_names,
    collisions=_collisions,
    # the setting with which the family takes more GPUs than it needs, and the value that avoids it
    spreading=(Spreading("binding.policy", "spread", "binpack"),),
)
