"""Settings about which names this node's GPUs have and how often each is offered: sections ``resources``, ``sharing`` and ``iktos``.

Part of the schema in `settings`; read by the NVIDIA family. Defaults and meaning: nvidia §2 and §3, iktos §I.2. What
NVIDIA's plugin parses and then drops (renames, patterns, `devices`) is honoured here.
"""

# Without `from __future__ import annotations`: msgspec would evaluate each annotation, a text then, twice at each start.

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

NVIDIA_GPU = "nvidia.com/gpu"

# The domain NVIDIA's plugin puts before a name without one, and the only one whose devices can be shared.
NVIDIA_DOMAIN = "nvidia.com"

# `load` completes and checks such a name; see `resource_names`.
ResourceName = Annotated[str, Meta(extra={"expected": "a resource name such as nvidia.com/gpu", "resource": True})]
# An index "0", a slice "1:0", or a UUID. `load` reads 0 without quotes as the text "0".
DeviceWord = Annotated[
    str,
    Meta(
        pattern=r"\A([0-9]{1,4}(:[0-9]{1,4})?|GPU-[0-9A-Fa-f-]{36}|MIG-[0-9A-Fa-f-]{36}|MIG-GPU-[0-9A-Fa-f-]{36}/[0-9]{1,4}/[0-9]{1,4})\Z",
        extra={"expected": "an index (0), a MIG index (1:0), GPU-<uuid>, MIG-<uuid> or MIG-GPU-<uuid>/<gi>/<ci>", "words": True},
    ),
]
Devices = Literal["all"] | Annotated[int, Meta(ge=1, le=1024)] | Annotated[tuple[DeviceWord, ...], Meta(min_length=1)]


class ResourcePattern(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The devices that a resource name selects."""

    pattern: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=253,
            description="Name of a GPU or of a MIG profile, as NVML gives it; `*` stands for any text. The whole name must match.",
            examples=["*"],
        ),
    ]
    name: Annotated[ResourceName, Meta(description="The resource that such devices are offered as.", examples=[NVIDIA_GPU])]


class Resources(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Other resource names than NVIDIA's, by the name of the GPU or of the MIG profile. The first pattern that matches counts."""

    gpus: Annotated[
        tuple[ResourcePattern, ...],
        Meta(description="Patterns for whole GPUs. Empty: every GPU is `nvidia.com/gpu`. With patterns, a GPU that none matches stays so."),
    ] = ()
    mig: Annotated[
        tuple[ResourcePattern, ...],
        Meta(
            description="Patterns for MIG profiles such as `1g.5gb`, with migStrategy mixed. A profile that none matches is called "
            "`nvidia.com/mig-<profile>`."
        ),
    ] = ()


class SharedResource(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One resource whose devices are offered several times."""

    name: Annotated[
        ResourceName,
        Meta(description="The resource to share, before it is renamed; `gpu` means `nvidia.com/gpu`.", examples=[NVIDIA_GPU]),
    ]
    replicas: Annotated[int, Meta(ge=1, description="How many containers may use each device at the same time.", examples=[4])]
    rename: Annotated[
        str,
        Meta(
            extra={"expected": 'a resource name such as nvidia.com/gpu, or ""', "resource": True},
            description="The name under which the shared devices are offered. Empty: the name, with `.shared` behind it where "
            "renameByDefault says so.",
        ),
    ] = ""
    devices: Annotated[
        Devices,
        Meta(
            extra={"expected": '"all", a number of devices, or a list of indices and UUIDs'},
            description='Which devices of the resource are shared: "all", the first so many, or a list such as `[0, "1:0", GPU-<uuid>]`. '
            "The others are offered whole.",
        ),
    ] = "all"


class TimeSlicing(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Several containers on one GPU, in turns; nothing limits the memory or the time that one of them takes."""

    rename_by_default: Annotated[
        bool, Meta(description="Offer shared devices as `<name>.shared`, so that nobody takes a share for a whole GPU.")
    ] = False
    fail_requests_greater_than_one: Annotated[
        bool, Meta(description="Refuse a container that asks for more than one replica; two replicas are not twice the time.")
    ] = False
    resources: Annotated[
        tuple[SharedResource, ...],
        Meta(
            extra={"required": "timeSlicing"},
            description="What is shared. Required, and not empty, when `timeSlicing` is there at all.",
        ),
    ] = ()


class MpsSharing(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Several containers on one GPU at the same time, each with a limit of memory and compute, through NVIDIA's MPS (section `mps`)."""

    rename_by_default: Annotated[
        bool, Meta(description="Offer shared devices as `<name>.shared`, so that nobody takes a share for a whole GPU.")
    ] = False
    fail_requests_greater_than_one: Annotated[
        bool,
        Meta(
            description="Refuse a container that asks for more than one replica; without mps.perContainerLimits two replicas have the "
            "limits of one."
        ),
    ] = True
    resources: Annotated[
        tuple[SharedResource, ...],
        Meta(extra={"required": "mps"}, description="What is shared. Required, and not empty, when `mps` is there at all."),
    ] = ()


class Sharing(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Sharing of one GPU by several containers. Without it each container gets whole GPUs. With both, `mps` counts."""

    time_slicing: TimeSlicing = msgspec.field(default_factory=TimeSlicing)
    mps: MpsSharing = msgspec.field(default_factory=MpsSharing)


class Iktos(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Replicas as k8s-gpu-sharing-plugin (iktos) configures them; ids are then `<uuid>-replica-<n>`."""

    resource_config: Annotated[
        str,
        Meta(
            extra={"expected": "entries <resource>:<new name>:<replicas>, separated by commas"},
            description="Entries `<resource>:<new name>:<replicas>`, separated by commas, such as `gpu:sharedgpu:4` or "
            "`gpu:gpu-mem-gb:-1`; -1 makes one replica for each unit of the device's memory. Names without `nvidia.com/`. Empty: off.",
        ),
    ] = ""
    automatic_unit: Annotated[
        Literal["gib", "mib1000"],
        Meta(description="Memory for which -1 makes one replica: gib is 1024 MiB, mib1000 is 1000 MiB as the replaced plugin counts."),
    ] = "gib"
