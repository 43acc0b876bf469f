"""Settings of the two Volcano families and of the isolation backend `hami-core`.

Part of the schema in `settings`. Defaults are those of the plugins that are replaced (volcano-vgpu §5,
volcano-gpushare §5); their own configuration files are read by `families/volcano_vgpu/files.py` and override this.
"""

# Without `from __future__ import annotations`: msgspec would evaluate each annotation, a text then, twice at each start.

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.types import Directory, Factor, OptionalPath, Program, Seconds, enabled_modes

_VOLCANO_NAME = r"\Avolcano\.sh/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z"
VolcanoName = Annotated[str, Meta(pattern=_VOLCANO_NAME, extra={"expected": "a resource name that begins with volcano.sh/"})]


class VolcanoVgpu(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The family `volcano-vgpu`. The ConfigMap and the node configuration of volcano-vgpu-device-plugin, where they exist, beat this."""

    number_resource: Annotated[
        VolcanoName, Meta(description="The resource that counts GPUs; schedulers from 1.14.3 know the default only.")
    ] = "volcano.sh/vgpu-number"
    memory_resource: Annotated[VolcanoName, Meta(description="The resource that counts memory in units of `gpuMemoryFactor` MiB.")] = (
        "volcano.sh/vgpu-memory"
    )
    cores_resource: Annotated[VolcanoName, Meta(description="The resource that counts percents of a GPU's compute.")] = (
        "volcano.sh/vgpu-cores"
    )
    memory_percentage_resource: Annotated[
        VolcanoName, Meta(description="The resource with which a pod asks for a percentage of a GPU's memory.")
    ] = "volcano.sh/vgpu-memory-percentage"
    offer_memory_percentage: Annotated[
        bool,
        Meta(description="Offer the percentage resource to the kubelet, without which schedulers from 1.13 leave such pods pending."),
    ] = False
    device_split_count: Annotated[int, Meta(ge=1, le=1000, description="How many containers may share one GPU.")] = 10
    gpu_memory_factor: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="MiB in one unit of the memory resource. 0: the smallest power of two with which the device list fits into "
            "one message of "
            "the kubelet; 1 unless the node has much memory.",
        ),
    ] = 0
    device_memory_scaling: Annotated[
        Factor, Meta(description="How many times a GPU's memory is offered; above 1, containers may run out.")
    ] = 1.0
    device_core_scaling: Annotated[Factor, Meta(description="How many times a GPU's compute is offered.")] = 1.0
    disable_core_limit: Annotated[bool, Meta(description="Book compute but do not limit it.")] = False
    gdrcopy_enabled: Annotated[bool, Meta(description="Ask the NVIDIA runtime for GDRCopy devices (`NVIDIA_GDRCOPY`).")] = True
    gds_enabled: Annotated[bool, Meta(description="Ask the NVIDIA runtime for GPUDirect Storage devices (`NVIDIA_GDS`).")] = True
    mofed_enabled: Annotated[bool, Meta(description="Ask the NVIDIA runtime for Mellanox devices (`NVIDIA_MOFED`).")] = True
    isolation: Annotated[
        Literal["hami-core", "none"],
        Meta(
            description="hami-core: libvgpu.so limits memory and compute in the container. none: sharing without any limit, and it says so."
        ),
    ] = "hami-core"
    read_config_map: Annotated[
        bool,
        Meta(description="Read the ConfigMap volcano-vgpu-device-config, in kube-system or volcano-system, as the replaced plugin does."),
    ] = True
    config_map_namespace: Annotated[
        str,
        Meta(
            pattern=r"\A([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?\Z",
            extra={"expected": "the name of a namespace (lower case letters, digits and '-')"},
            description="Where that ConfigMap is looked for first, before kube-system and volcano-system. The agent's role must allow to "
            "read it there. Empty: only in those two.",
        ),
    ] = ""
    node_config_file: Annotated[
        OptionalPath, Meta(description="The mounted config.json of volcano-vgpu-node-config; empty or missing: none.")
    ] = "/config/config.json"
    operating_mode: Annotated[
        Literal["hami-core", "mig"],
        Meta(
            description="hami-core: GPUs are shared by memory and compute. mig: each share is a MIG instance, and GPUs are divided as pods "
            "need it, into the groups of `knownMigGeometries` in the ConfigMap; needs late binding. `operatingmode` in the node "
            "configuration says the same."
        ),
    ] = "hami-core"
    mig_strategy: Annotated[
        Literal["", "none", "single", "mixed"],
        Meta(
            description="MIG instances that somebody else has made. single: `<prefix>/gpu`, one profile on the node. mixed: "
            "`<prefix>/mig-<profile>`. none: not offered. Empty: as `plugin.migStrategy`, and none beside the family nvidia, which offers "
            "them itself."
        ),
    ] = ""
    mig_resource_prefix: Annotated[
        Literal["volcano.sh", "nvidia.com"],
        Meta(description="What the names of those resources begin with; nvidia.com is what volcano-vgpu-device-plugin up to 1.11 had."),
    ] = "volcano.sh"
    mig_parted: Annotated[
        Program, Meta(description="The program that divides a GPU in the operating mode mig: nvidia-mig-parted, or a script that calls it.")
    ] = "nvidia-mig-parted"
    mig_parted_timeout_seconds: Annotated[
        Seconds,
        Meta(
            description="How long one call of that program may take before it is ended. A pod waits no longer than `binding.startSeconds`, "
            "and finds the GPU divided when the kubelet asks again."
        ),
    ] = 120.0
    mig_settle_seconds: Annotated[
        Seconds, Meta(description="How long after that program's success the driver may take to show the new instances.")
    ] = 10.0
    mig_retry_seconds: Annotated[
        Seconds, Meta(description="For how long a change of a GPU's division that has failed is not tried again.")
    ] = 60.0

    @property
    def device_modes(self) -> tuple[str, ...]:
        """The kinds of other devices that are switched on, of `types.DEVICE_MODES`."""
        return enabled_modes(gdrcopy=self.gdrcopy_enabled, gds=self.gds_enabled, mofed=self.mofed_enabled)


class VolcanoGpushare(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The family `volcano-gpushare`: advisory sharing, nothing limits a container."""

    strategy: Annotated[
        Literal["share", "number"],
        Meta(description="share: offer memory (`volcano.sh/gpu-memory`). number: offer whole GPUs (`volcano.sh/gpu-number`)."),
    ] = "share"
    gpu_memory_factor: Annotated[
        int, Meta(ge=0, le=65536, description="MiB in one unit of the memory resource. 0: the smallest power of two that fits, usually 1.")
    ] = 1
    unequal_gpus: Annotated[
        Literal["refuse", "minimum"],
        Meta(
            description="GPUs of different size, which the scheduler cannot tell apart: offer nothing and say why, or offer the "
            "smallest size of each."
        ),
    ] = "refuse"
    visible_devices: Annotated[
        Literal["index", "uuid"],
        Meta(description="How NVIDIA_VISIBLE_DEVICES names a GPU. index is what the replaced plugin does; uuid survives renumbering."),
    ] = "index"


class HamiCore(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The isolation backend `hami-core`: HAMi's libvgpu.so, which the operator puts onto the node."""

    host_directory: Annotated[
        Directory, Meta(description="Directory on the node for the library, ld.so.preload and the containers' regions (HOOK_PATH).")
    ] = "/usr/local/vgpu"
    library: Annotated[
        OptionalPath,
        Meta(
            description="Where the operator's libvgpu.so is delivered; it is installed from there under a name made of its content. "
            "Empty: `libvgpu.so` in `hostDirectory`."
        ),
    ] = ""
    disable_variable: Annotated[
        Literal["whole-gpus", "ignore", "honor"],
        Meta(
            description="Which pods may switch their limit off by setting the variable CUDA_DISABLE_CONTROL. whole-gpus: those that have "
            "all memory of their GPUs, so that nobody else has a share of them. ignore: none. honor: all, as with the replaced plugin, so "
            "that any pod can take the memory of its neighbours."
        ),
    ] = "whole-gpus"
