"""Settings for how containers get devices: the sections ``plugin`` and ``cdi``.

Part of the schema in `settings`. Every family reads `Plugin`, the package `cdi` reads `Cdi`.
Defaults: nvidia §1.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from vgpu_agent.config.types import AbsolutePath, enabled_modes

ListStrategy = Literal["envvar", "volume-mounts", "cdi-annotations", "cdi-cri"]
CdiFeatureFlag = Literal[
    "enable-explicit-driver-libraries",
    "disable-nvsandboxutils",
    "enable-coherent-annotations",
    "disable-multiple-csv-devices",
    "no-additional-gids-for-device-nodes",
    "disable-ipc-discoverer",
]
# A Kubernetes label prefix with its slash; annotations are named
# <prefix>nvidia-device-plugin_<uuid>.
_ANNOTATION_PREFIX = r"\A[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/\Z"
_HOOK_NAME = r"\A[a-z0-9][a-z0-9-]{0,62}\Z"


class Plugin(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The content of the plugins' answers for containers,
    and the devices that the kubelet is advised to take.
    """

    pass_device_specs: Annotated[
        bool,
        Meta(
            description=(
                "Name the device nodes in each answer; needed where the kubelet's CPU manager "
                "rewrites device cgroups."
            )
        ),
    ] = False
    device_list_strategy: Annotated[
        tuple[ListStrategy, ...],
        Meta(
            min_length=1,
            extra={"expected": "a list of envvar, volume-mounts, cdi-annotations and cdi-cri"},
            description=(
                "How the container runtime gets the list of devices; several at once are possible. "
                "The two cdi strategies need a CDI spec (section `cdi`), but no NVIDIA runtime."
            ),
        ),
    ] = ("envvar",)
    device_id_strategy: Annotated[
        Literal["uuid", "index"],
        Meta(
            description="How NVIDIA_VISIBLE_DEVICES names a GPU. An index can change with a reboot."
        ),
    ] = "uuid"
    shared_devices_allocation_policy: Annotated[
        Literal["auto", "distributed", "packed"],
        Meta(
            description=(
                "Replicas of several GPUs: distributed takes the least used GPU first, packed the "
                "most used. auto: distributed, but on a node with several families first among the "
                "GPUs that serve this family already, so that the others keep theirs."
            )
        ),
    ] = "auto"
    mig_strategy: Annotated[
        Literal["none", "single", "mixed"],
        Meta(
            description=(
                "none: ignore MIG. single: MIG instances are offered as `nvidia.com/gpu`, all "
                "must be alike. mixed: each profile is a resource, `nvidia.com/mig-<profile>`."
            )
        ),
    ] = "none"
    cdi_annotation_prefix: Annotated[
        str,
        Meta(
            pattern=_ANNOTATION_PREFIX,
            extra={"expected": "a DNS name followed by a slash"},
            description=(
                "Prefix of the name of the annotation that the strategy cdi-annotations adds; "
                "runtimes look for the default prefix."
            ),
        ),
    ] = "cdi.k8s.io/"
    gdrcopy_enabled: Annotated[
        bool, Meta(description="Give containers GDRCopy devices (`NVIDIA_GDRCOPY`).")
    ] = False
    gds_enabled: Annotated[
        bool, Meta(description="Give containers GPUDirect Storage devices (`NVIDIA_GDS`).")
    ] = False
    mofed_enabled: Annotated[
        bool, Meta(description="Give containers Mellanox devices (`NVIDIA_MOFED`).")
    ] = False
    imex_channel_ids: Annotated[
        tuple[Literal[0], ...],
        Meta(
            max_length=1,
            extra={"expected": "[] or [0]"},
            description=(
                "IMEX channels that containers with a GPU are given; the driver's default channel "
                "0 is the only one possible."
            ),
        ),
    ] = ()
    imex_required: Annotated[
        bool,
        Meta(
            description=(
                "A node without the channel's device node: true offers nothing and says why, false "
                "goes on without it."
            )
        ),
    ] = False

    @property
    def device_modes(self) -> tuple[str, ...]:
        """The enabled modes of `types.DEVICE_MODES`: kinds of devices that are not GPUs."""
        return enabled_modes(
            gdrcopy=self.gdrcopy_enabled, gds=self.gds_enabled, mofed=self.mofed_enabled
        )


class Cdi(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The CDI spec of this node's GPUs. Its file is in binding.cdiDirectory."""

    source: Annotated[
        Literal["generated", "toolkit"],
        Meta(
            description=(
                "generated: the agent has the spec made and keeps it up to date. toolkit: "
                "containers refer to the spec that the NVIDIA container toolkit keeps "
                "(`nvidia.com/gpu=<uuid>`)."
            )
        ),
    ] = "generated"
    nvidia_ctk: Annotated[
        AbsolutePath,
        Meta(
            description=(
                "The program of the NVIDIA container toolkit that makes the spec, as the agent "
                "sees it: at this path, or at this path below `containerDriverRoot`."
            )
        ),
    ] = "/usr/bin/nvidia-ctk"
    hook_path: Annotated[
        AbsolutePath,
        Meta(
            description=(
                "Path on the node of the program that the container runtime runs as hook; written "
                "into the spec."
            )
        ),
    ] = "/usr/bin/nvidia-cdi-hook"
    container_driver_root: Annotated[
        AbsolutePath,
        Meta(description="Where gpu.driverRoot of the node is mounted in the agent's container."),
    ] = "/driver-root"
    feature_flags: Annotated[
        tuple[CdiFeatureFlag, ...],
        Meta(
            extra={"expected": "a list of " + ", ".join(get_args(CdiFeatureFlag))},
            description="Feature flags for the program that makes the spec.",
        ),
    ] = ()
    disable_hooks: Annotated[
        tuple[Annotated[str, Meta(pattern=_HOOK_NAME)], ...],
        Meta(
            extra={"expected": "a list of hook names such as enable-cuda-compat"},
            description=(
                "Hooks that are left out of the spec: `create-symlinks`, `enable-cuda-compat`, "
                "`update-ldcache`, `disable-device-node-modification`, "
                "`update-application-profile`, `chmod`; `all` leaves out every one. Without "
                "`enable-cuda-compat`, images whose CUDA is newer than the driver cannot use the "
                "compatibility libraries that they bring."
            ),
        ),
    ] = ()
    inline: Annotated[
        bool,
        Meta(
            description=(
                "Write the device nodes, libraries and hooks of a GPU into the spec of each "
                "late-bound grant, so that the node needs no NVIDIA runtime."
            )
        ),
    ] = False
