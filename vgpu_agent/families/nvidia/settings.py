"""The settings of the family `nvidia`: the sections ``resources``, ``sharing``, ``iktos`` (replicas
as k8s-gpu-sharing-plugin of iktos configures them) and ``namedConfig``, their flags and rules.

Defaults and meaning: nvidia §2 and §3, iktos §I.2. What NVIDIA's plugin parses and then drops
(renames, patterns, `devices`) is honoured here.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.checks import Conflict
from vgpu_agent.config.documents import NamedDocuments, PluginDocument
from vgpu_agent.config.families import FamilySettings, OfferedName, Spreading
from vgpu_agent.config.options import Option
from vgpu_agent.config.problems import shown
from vgpu_agent.config.schema import Contradicted
from vgpu_agent.config.settings import Settings
from vgpu_agent.families.nvidia import iktos
from vgpu_agent.families.nvidia.named import NamedConfig, choose
from vgpu_agent.families.nvidia.plugin_config import (
    PLUGIN_ONLY_KEYS,
    SECTION,
    translate_file,
    translate_section,
)
from vgpu_agent.families.nvidia.resource_names import (
    MIG_PREFIX,
    NVIDIA_GPU,
    completed_resource_name,
)

FAMILY = "nvidia"
_SHARED_SUFFIX = ".shared"

ResourceName = Annotated[
    str,
    Meta(
        extra={
            "expected": "a resource name such as nvidia.com/gpu",
            "complete_name": completed_resource_name,  # a name may come without its domain
        }
    ),
]
# An index "0", a MIG instance "1:0", or a UUID. `numbers_are_text`: 0 without quotes is read as the
# text "0".
DeviceWord = Annotated[
    str,
    Meta(
        pattern=(
            r"\A([0-9]{1,4}(:[0-9]{1,4})?|GPU-[0-9A-Fa-f-]{36}|MIG-[0-9A-Fa-f-]{36}|"
            r"MIG-GPU-[0-9A-Fa-f-]{36}/[0-9]{1,4}/[0-9]{1,4})\Z"
        ),
        extra={
            "expected": (
                "an index (0), a MIG index (1:0), GPU-<uuid>, MIG-<uuid> or "
                "MIG-GPU-<uuid>/<gi>/<ci>"
            ),
            "numbers_are_text": True,
        },
    ),
]
Devices = (
    Literal["all"]
    | Annotated[int, Meta(ge=1, le=1024)]
    | Annotated[tuple[DeviceWord, ...], Meta(min_length=1)]
)


def shared_twice(
    entry: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]
) -> Contradicted | None:
    """Find the one of the ``earlier`` entries that shares a device of ``entry``, too. Two entries
    may have the same resource only if both list their devices. ``{line}`` in the text stands for
    the line of the earlier entry.
    """
    for index, other in enumerate(earlier):
        if "name" not in entry or other.get("name") != entry["name"]:
            continue
        devices, others = entry.get("devices", "all"), other.get("devices", "all")
        if not isinstance(devices, tuple) or not isinstance(others, tuple):
            return Contradicted(
                position=index,
                key="name",
                text=(
                    f"{shown(entry['name'])} stands twice, first on line {{line}}; keep one of them"
                ),
            )
        if both := [word for word in devices if word in others]:
            return Contradicted(
                position=index,
                key="devices",
                text=(
                    f"{shown(both[0])} is shared twice, first on line {{line}}; keep it in one of "
                    "them"
                ),
            )
    return None


class ResourcePattern(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The devices that a resource name selects."""

    pattern: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=253,
            description=(
                "Name of a GPU or of a MIG profile, as NVML gives it; `*` stands for any text. The "
                "whole name must match."
            ),
            examples=["*"],
        ),
    ]
    name: Annotated[
        ResourceName,
        Meta(description="The resource that such devices are offered as.", examples=[NVIDIA_GPU]),
    ]


class Resources(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Other resource names than NVIDIA's, by the name of the GPU or of the MIG profile. The first
    pattern that matches counts.
    """

    gpus: Annotated[
        tuple[ResourcePattern, ...],
        Meta(
            description=(
                "Patterns for whole GPUs. Empty: every GPU is `nvidia.com/gpu`. With patterns, a "
                "GPU that none matches stays so."
            )
        ),
    ] = ()
    mig: Annotated[
        tuple[ResourcePattern, ...],
        Meta(
            description=(
                "Patterns for MIG profiles such as `1g.5gb`, with migStrategy single or mixed. A "
                "profile that none matches keeps its name: `nvidia.com/gpu` with single, "
                "`nvidia.com/mig-<profile>` with mixed."
            )
        ),
    ] = ()


class SharedResource(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One resource whose devices are offered several times."""

    name: Annotated[
        ResourceName,
        Meta(
            description=(
                "The resource to share, before it is renamed; `gpu` means `nvidia.com/gpu`."
            ),
            examples=[NVIDIA_GPU],
        ),
    ]
    replicas: Annotated[
        int,
        Meta(
            ge=1,
            description="How many containers may use each device at the same time.",
            examples=[4],
        ),
    ]
    rename: Annotated[
        str,
        Meta(
            extra={
                "expected": 'a resource name such as nvidia.com/gpu, or ""',
                "complete_name": completed_resource_name,
            },
            description=(
                "The name under which the shared devices are offered. Empty: the name, "
                "followed by `.shared` where renameByDefault says so."
            ),
        ),
    ] = ""
    devices: Annotated[
        Devices,
        Meta(
            extra={"expected": '"all", a number of devices, or a list of indices and UUIDs'},
            description=(
                'Which devices of the resource are shared: "all", the first so many, or a list '
                'such as `[0, "1:0", GPU-<uuid>]`. '
                "The others are offered whole."
            ),
        ),
    ] = "all"


class TimeSlicing(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Several containers on one GPU, in turns; nothing limits the memory or the time that one of
    them takes.
    """

    rename_by_default: Annotated[
        bool,
        Meta(
            description=(
                "Offer shared devices as `<name>.shared`, so that nobody takes a share for a whole "
                "GPU."
            )
        ),
    ] = False
    fail_requests_greater_than_one: Annotated[
        bool,
        Meta(
            description=(
                "Refuse a container that asks for more than one replica; two replicas are not "
                "twice the time."
            )
        ),
    ] = False
    resources: Annotated[
        tuple[SharedResource, ...],
        Meta(
            # not empty, unless the whole section is left out; no entry may repeat an earlier one
            extra={"can_be_omitted_with": "timeSlicing", "find_contradicted": shared_twice},
            description=(
                "What is shared. Required, and not empty, when `timeSlicing` is there at all."
            ),
        ),
    ] = ()


class MpsSharing(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Several containers on one GPU at the same time, each with a limit of memory and compute,
    through NVIDIA's MPS (section `mps`).
    """

    rename_by_default: Annotated[
        bool,
        Meta(
            description=(
                "Offer shared devices as `<name>.shared`, so that nobody takes a share for a whole "
                "GPU."
            )
        ),
    ] = False
    fail_requests_greater_than_one: Annotated[
        bool,
        Meta(
            description=(
                "Refuse a container that asks for more than one replica; without "
                "mps.perContainerLimits two replicas have the limits of one."
            )
        ),
    ] = True
    resources: Annotated[
        tuple[SharedResource, ...],
        Meta(
            extra={"can_be_omitted_with": "mps", "find_contradicted": shared_twice},
            description="What is shared. Required, and not empty, when `mps` is there at all.",
        ),
    ] = ()


class Sharing(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Sharing of one GPU by several containers. Without it, and without `iktos`, each container
    gets whole GPUs. With `timeSlicing` and `mps`, `mps` counts, and `iktos` counts before either.
    """

    time_slicing: TimeSlicing = msgspec.field(default_factory=TimeSlicing)
    mps: MpsSharing = msgspec.field(default_factory=MpsSharing)


class Iktos(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Replicas as k8s-gpu-sharing-plugin (iktos) configures them; ids are then
    `<uuid>-replica-<n>`.
    """

    resource_config: Annotated[
        str,
        Meta(
            extra={"expected": "entries <resource>:<new name>:<replicas>, separated by commas"},
            description=(
                "Entries `<resource>:<new name>:<replicas>`, separated by commas, such as "
                "`gpu:sharedgpu:4` or `gpu:gpu-mem-gb:-1`; -1 makes one replica for each unit of "
                "the device's memory. Names without `nvidia.com/`. Empty: off."
            ),
        ),
    ] = ""
    automatic_unit: Annotated[
        Literal["gib", "mib1000"],
        Meta(
            description=(
                "Memory for which -1 makes one replica: gib is 1024 MiB, mib1000 is 1000 MiB as "
                "the replaced plugin counts."
            )
        ),
    ] = "gib"


def offered_names(settings: Settings) -> Iterator[OfferedName]:
    """Yield all names under which the family can offer GPUs of some node, each once: where two
    entries give the same name, their devices are one resource.
    """
    gpus, strategy = settings.section(Resources).gpus, settings.plugin.mig_strategy
    names = {pattern.name for pattern in gpus}
    if strategy == "single" or not any(set(pattern.pattern) == {"*"} for pattern in gpus):
        names.add(NVIDIA_GPU)
    if strategy != "none":
        names.update(pattern.name for pattern in settings.section(Resources).mig)
    mixed = strategy == "mixed"
    # names under which nothing is left, since all of their devices are offered under a new one; and
    # the names of shared devices
    renamed, published = set[str](), set[str]()
    for name, new, everything in _shared(settings):
        if name in names or (mixed and name.startswith(MIG_PREFIX)):
            published.add(new)
            if everything:
                renamed.add(name)
    for text in sorted((names - renamed) | published):
        if not (mixed and text.startswith(MIG_PREFIX)):
            # the path: the setting that a message about a clash of names is to name
            yield OfferedName(text, FAMILY, path="families.nvidia")
    if mixed:
        yield OfferedName(MIG_PREFIX, FAMILY, path="families.nvidia", prefix=True)


def _shared(settings: Settings) -> Sequence[tuple[str, str, bool]]:
    """Return each entry about sharing that has an effect: the resource, the name under which it is
    offered, and whether all of its devices are meant.
    """
    if entries := iktos.entries(settings.section(Iktos).resource_config):
        return [(entry.original, entry.new, True) for entry in entries]
    mps, slicing = settings.section(Sharing).mps, settings.section(Sharing).time_slicing
    block = mps if mps.resources else slicing
    suffix = _SHARED_SUFFIX if block.rename_by_default else ""
    return [
        (entry.name, entry.rename or entry.name + suffix, entry.devices == "all")
        for entry in block.resources
    ]


def _conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield the settings that conflict with MPS sharing (nvidia §1), and the mistakes in iktos's
    entries.
    """
    if settings.section(Sharing).mps.resources:
        if settings.plugin.mig_strategy == "mixed":
            text = "MPS cannot share MIG instances"
            # the settings that could be changed, each with its sentence
            yield Conflict(
                (
                    (
                        "plugin.migStrategy",
                        f'{text}; expected none or single with sharing.mps, got "mixed"',
                    ),
                    (
                        "sharing.mps.resources",
                        f"{text}; leave sharing.mps out with plugin.migStrategy: mixed",
                    ),
                )
            )
        if not settings.mps.root:
            text = "sharing.mps needs a directory on the node"
            yield Conflict(
                (
                    (
                        "mps.root",
                        f'{text}; expected an absolute path such as /run/nvidia/mps, got ""',
                    ),
                )
            )
    for problem in iktos.problems(settings.section(Iktos).resource_config):
        yield Conflict((("iktos.resourceConfig", problem),))


def _without_effect(settings: Settings) -> Iterator[str]:
    sharing, resources = settings.section(Sharing), settings.section(Resources)
    if sharing.mps.resources and sharing.time_slicing.resources:
        yield (
            "sharing.timeSlicing: has no effect beside sharing.mps, which wins as in NVIDIA's "
            "plugin; leave one of them out"
        )
    if settings.section(Iktos).resource_config and (
        sharing.mps.resources or sharing.time_slicing.resources
    ):
        yield "sharing: has no effect beside iktos.resourceConfig; leave one of them out"
    known = {NVIDIA_GPU} | {pattern.name for pattern in (*resources.gpus, *resources.mig)}
    for kind, block in (("timeSlicing", sharing.time_slicing), ("mps", sharing.mps)):
        for index, entry in enumerate(block.resources):
            if entry.name not in known and not entry.name.startswith(MIG_PREFIX):
                yield (
                    f"sharing.{kind}.resources[{index}].name: {shown(entry.name)} is no resource "
                    f"of any node; expected {NVIDIA_GPU}, {MIG_PREFIX}<profile>, or a name from "
                    "resources:"
                )


def _daemons(settings: Settings) -> bool:
    """Tell whether the agent runs MPS control daemons for the family."""
    return (
        bool(settings.section(Sharing).mps.resources)
        and not settings.section(Iktos).resource_config
    )


def _named_documents(settings: Settings) -> NamedDocuments:
    """Return the configuration files of which a label of the Node chooses one."""
    named = settings.section(NamedConfig)
    return NamedDocuments(named.directory, named.label, functools.partial(choose, named))


SETTINGS = FamilySettings(
    FAMILY,
    "`nvidia.com/gpu` and `nvidia.com/mig-*`, as NVIDIA's device plugin offers them.",
    on_by_default=True,
    sections={
        "resources": Resources,
        "sharing": Sharing,
        "iktos": Iktos,
        "named_config": NamedConfig,
    },
    # the beginnings of the settings whose changes a running agent follows
    live_paths=("resources.", "sharing.", "iktos."),
    options=(
        # Variables without a flag, as NVIDIA's config-manager names them.
        Option("namedConfig.directory", "", "CONFIG_FILE_SRCDIR"),
        Option("namedConfig.label", "", "NODE_LABEL"),
        Option("namedConfig.default", "", "DEFAULT_CONFIG"),
        Option("namedConfig.fallbackStrategies", "", "FALLBACK_STRATEGIES"),
        # As k8s-gpu-sharing-plugin (iktos) names it.
        Option(
            "iktos.resourceConfig",
            "--resource-config",
            "NVIDIA_DRIVER_RESOURCE_CONFIG",
            "ENTRIES",
            "replicas: RESOURCE:NEW-NAME:COUNT, separated by commas",
        ),
    ),
    conflicts=_conflicts,
    without_effect=_without_effect,
    names=offered_names,
    # the setting with which the family takes more GPUs than it needs, and the value that avoids it
    spreading=(Spreading("plugin.sharedDevicesAllocationPolicy", "distributed", "auto"),),
    mps_key="sharing.mps",
    runs_mps_daemons=_daemons,
    # How a configuration in NVIDIA's own form is read: a file, or the value of the key `SECTION` in
    # the agent's file. `PLUGIN_ONLY_KEYS`: keys of such a configuration that the agent's file never
    # has; the error about one there says where it belongs.
    plugin_document=PluginDocument(
        SECTION,
        PLUGIN_ONLY_KEYS,
        translate_file,
        translate_section,
        directory_key="namedConfig.directory",
        named_documents=_named_documents,
    ),
    offers_mig=True,  # instances that exist already
)
