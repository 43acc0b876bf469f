"""The settings of the family `vgpu-manager`: its section, its flags and its rules.

Defaults are those of the plugin that is replaced (vgpu-manager §1.2, §1.7). Its node configuration
is read by `node_config` and overrides this section.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.checks import Conflict, same_port
from vgpu_agent.config.families import FamilySettings, OfferedName, mig_family
from vgpu_agent.config.foreign_settings import ForeignFlag, ForeignVariable
from vgpu_agent.config.options import Option
from vgpu_agent.config.settings import Settings
from vgpu_agent.config.types import HOST, PORT, Factor, OptionalPath
from vgpu_agent.families.vgpu_manager import exclusion
from vgpu_agent.families.vgpu_manager.exclusion import Excluded, read_excluded
from vgpu_agent.families.vgpu_manager.gates import Gates, read_gates
from vgpu_agent.families.vgpu_manager.keys import DEFAULT_DOMAIN, Keys

FAMILY = "vgpu-manager"
SECTION = "vgpuManager"
# The longest that Kubernetes takes before the slash of an annotation or a label.
_LONGEST_DOMAIN = 253
_DOMAIN = r"\A[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*\Z"


class Exporter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The metrics of vgpu-manager's device-monitor, under their own names."""

    address: Annotated[
        str,
        Meta(
            pattern=rf"\A({HOST}:{PORT})?\Z",
            extra={"expected": 'an address HOST:PORT or :PORT, or ""'},
            description=(
                "Where they are served, at `/metrics`, with `/healthz` and `/readyz`; device-"
                "monitor listens on :3456. Empty: not at all."
            ),
        ),
    ] = ""
    min_scrape_interval_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description=(
                "A scrape within this time after another one gets the same answer, with the "
                "header `X-Rate-Limited: true`."
            ),
        ),
    ] = 1.0
    authorised: Annotated[
        bool,
        Meta(
            description=(
                "A scraper must show a token of a user or a service account that may get the path "
                "`/metrics`. The API server is asked (TokenReview, SubjectAccessReview), which "
                "needs the rights of the manifests' `components/scrape-reviews`."
            )
        ),
    ] = False
    certificate_file: Annotated[
        OptionalPath,
        Meta(
            description=(
                "A certificate with its chain, in PEM. A renewed one is served within five "
                "seconds. Empty: plain HTTP."
            )
        ),
    ] = ""
    key_file: Annotated[OptionalPath, Meta(description="Its private key, in PEM.")] = ""


class VgpuManager(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The family `vgpu-manager`. The node configuration of vgpu-manager, where there is one,
    overrides this.
    """

    domain: Annotated[
        str,
        Meta(
            pattern=_DOMAIN,
            max_length=_LONGEST_DOMAIN,
            extra={"expected": "a DNS name in lower case such as nvidia.com"},
            description=(
                "The domain of its resources, annotations and labels. Schedulers, quotas and pods "
                "must have the same."
            ),
        ),
    ] = DEFAULT_DOMAIN
    device_split_count: Annotated[
        int, Meta(ge=1, le=65536, description="How many containers may share one GPU.")
    ] = 10
    device_cores_scaling: Annotated[
        Factor, Meta(description="How many times a GPU's compute is offered.")
    ] = 1.0
    device_memory_scaling: Annotated[
        Factor,
        Meta(
            description=(
                "How many times a GPU's memory is offered. Above 1, containers spill into the "
                "host's memory."
            ),
        ),
    ] = 1.0
    device_memory_factor: Annotated[
        int, Meta(ge=1, le=65536, description="MiB in one unit of the memory resource.")
    ] = 1
    exclude_devices: Annotated[
        tuple[Annotated[str, Meta(pattern=exclusion.PATTERN)], ...],
        Meta(
            # `numbers_are_text`: 0 without quotes is read as the text "0"
            extra={"expected": f"a list of {exclusion.EXPECTED}", "numbers_are_text": True},
            description=(
                "GPUs that no container gets through this family: indices, ranges (`0-2`, `0..2`) "
                "and UUIDs. They are advertised as unhealthy."
            ),
        ),
    ] = ()
    feature_gates: Annotated[
        tuple[str, ...],
        Meta(
            extra={"expected": "a list such as [GPUCoreResourcePlugin=true]"},
            description=(
                "The feature gates of vgpu-manager's device plugin, by their new or old names; all "
                "are off by default. `GPUCoreResourcePlugin` and `GPUMemoryResourcePlugin` also "
                "offer `vgpu-cores` and `vgpu-memory`, for quotas. `TopologyAwareGPUAllocation` "
                "writes the links between GPUs on the Node. `HonorPreAllocatedDeviceIDs` asks the "
                "kubelet for ids of the GPUs that a scheduler has chosen. "
                "`AllocationFailureReschedule` evicts pods that failed here, or recreates them. "
                "`SharedSMUtilizationWatcher` measures compute once for all containers. "
                "`VirtualMemoryTracking` counts spilled memory. `DevicePluginClientMode` "
                "has containers register their processes."
            ),
        ),
    ] = ()
    node_config_file: Annotated[
        OptionalPath,
        Meta(
            description=(
                "The mounted node configuration of vgpu-manager, YAML or JSON. It is watched for "
                "changes. Empty: none."
            )
        ),
    ] = ""
    open_kernel_modules: Annotated[
        bool,
        Meta(
            description=(
                "The node runs NVIDIA's open kernel modules, with which the library must recognise "
                "a container's processes in another way."
            )
        ),
    ] = False
    isolation: Annotated[
        Literal["vgpu-control", "none"],
        Meta(
            description=(
                "vgpu-control: libvgpu-control.so limits memory and compute in the container. "
                "none: sharing without any limit."
            )
        ),
    ] = "vgpu-control"
    mig_strategy: Annotated[
        Literal["", "none", "single", "mixed"],
        Meta(
            description=(
                "Existing MIG instances, as `<domain>/mig-<profile>`. mixed: beside shares of "
                "other GPUs. single: every GPU must be divided alike, and there are no shares. "
                "none: not offered. Empty: mixed, and none beside the family nvidia, which offers "
                "them itself."
            )
        ),
    ] = ""

    type_match: Annotated[
        Literal["words", "substring"],
        Meta(
            description=(
                "How the words of `include-gpu-type` and `exclude-gpu-type` match product names, "
                "where the agent places a container. words: `A10` is no part of `A100`. substring: "
                "it is, as for vgpu-manager. The extender has `--type-match` for the same."
            )
        ),
    ] = "words"

    exporter: Exporter = msgspec.field(default_factory=Exporter)

    @property
    def gates(self) -> Gates:
        """The feature gates that have an effect."""
        return read_gates(self.feature_gates)

    @property
    def excluded(self) -> Excluded:
        """The GPUs that no container gets."""
        return read_excluded(self.exclude_devices)


def is_domain(text: str) -> bool:
    """Tell whether the family's keys can have that domain."""
    return len(text) <= _LONGEST_DOMAIN and re.match(_DOMAIN, text) is not None


def static_mig_strategy(settings: Settings, vgpu: VgpuManager) -> tuple[str, str]:
    """Return the strategy for existing MIG instances, and why it is not the requested one; empty
    where it is.

    Where another family offers the same instances by the same names and ids, they are left to it,
    and that is no problem to report.

    Args:
        settings: all settings, for those of the other families.
        vgpu: with the node configuration already applied to it.
    """
    # the family that offers existing instances, empty for none, and the strategy by which it does
    other, theirs = mig_family(settings), settings.plugin.mig_strategy
    strategy = vgpu.mig_strategy or ("none" if other else "mixed")
    if strategy == "none" or not other or theirs == "none":
        return strategy, ""
    if vgpu.domain == DEFAULT_DOMAIN and strategy == theirs == "mixed":
        return "none", ""
    return "none", (
        f"{strategy}: the family {other} offers the same instances (plugin.migStrategy); turn one "
        "of the two off"
    )


def _conflicts(settings: Settings) -> Iterator[Conflict]:
    # Broken rules about this section alone; `_collisions` has those about other families.
    vgpu = settings.section(VgpuManager)
    # a conflict has the settings that could be changed, each with its sentence
    for problem in vgpu.gates.problems:
        yield Conflict(((f"{SECTION}.featureGates", problem),))
    exporter = vgpu.exporter
    if bool(exporter.certificate_file) != bool(exporter.key_file):
        problem = "a certificate and its key are given together, or neither"
        yield Conflict(
            (
                (f"{SECTION}.exporter.certificateFile", problem),
                (f"{SECTION}.exporter.keyFile", problem),
            )
        )
    if exporter.address and settings.is_on(FAMILY):
        ours = (f"{SECTION}.exporter.address", exporter.address)
        yield from same_port(ours, ("listen", settings.listen))
        yield from same_port(ours, ("debugListen", settings.debug_listen))
    for problem in vgpu.excluded.problems:
        yield Conflict(((f"{SECTION}.excludeDevices", problem),))


def _without_effect(settings: Settings) -> Iterator[str]:
    vgpu = settings.section(VgpuManager)
    gates, exporter = vgpu.gates, vgpu.exporter
    for name, is_set in (
        ("certificateFile", bool(exporter.certificate_file)),
        ("authorised", exporter.authorised),
    ):
        if is_set and not exporter.address and settings.is_on(FAMILY):
            yield (
                f"{SECTION}.exporter.{name} has no effect without {SECTION}.exporter.address; set "
                "that to :3456, where device-monitor listens"
            )
    for sentence in gates.without_effect:
        yield f"{SECTION}.featureGates: {sentence}"
    processes = settings.vgpu_control.processes
    if gates.client_mode and processes != "client":
        yield (
            f"{SECTION}.featureGates: DevicePluginClientMode has no effect beside "
            f"vgpuControl.processes: {processes}; set that to client"
        )


def _names(settings: Settings) -> Iterator[OfferedName]:
    vgpu = settings.section(VgpuManager)
    keys, gates = Keys(vgpu.domain), vgpu.gates
    strategy, _ = static_mig_strategy(settings, vgpu)
    offered = [(keys.number, strategy != "single")]
    offered += [(keys.cores, gates.offer_cores), (keys.memory, gates.offer_memory)]
    # The setting that an operator has to change in a conflict.
    path = "families.vgpuManager" if vgpu.domain == DEFAULT_DOMAIN else f"{SECTION}.domain"
    for name in (name for name, is_offered in offered if is_offered):
        yield OfferedName(name, FAMILY, path=path)
    if strategy != "none":
        # all names that begin with this one
        yield OfferedName(keys.mig(""), FAMILY, path=f"{SECTION}.migStrategy", prefix=True)


def _collisions(settings: Settings) -> Iterator[Conflict]:
    """Yield the settings by which one MIG instance is offered twice."""
    _, problem = static_mig_strategy(settings, settings.section(VgpuManager))
    if problem:
        yield Conflict(
            ((f"{SECTION}.migStrategy", problem), ("plugin.migStrategy", problem)),
        )


_GO_DURATION = re.compile(r"(?P<number>[0-9]{1,9}(\.[0-9]{1,9})?)(?P<unit>ms|s|m|h)?\Z", re.ASCII)
_UNIT_SECONDS = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _address_of(port: str) -> str | None:
    """The address that listens on this port of all the node's addresses; None if it is no port."""
    return f":{port}" if port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536 else None


def _seconds_of(duration: str) -> str | None:
    """The seconds in a duration as Go writes it, or in a plain number of them; None for others."""
    found = _GO_DURATION.match(duration)
    return f"{float(found['number']) * _UNIT_SECONDS[found['unit']]:.9f}" if found else None


def _own(key: str, flag: str, metavar: str, text: str) -> Option:
    """An option of the section. The replaced plugin has flags only, so the variables are the
    agent's own.
    """
    name = flag.removeprefix("--").replace("-", "_").upper()
    return Option(f"{SECTION}.{key}", flag, f"VGPU_AGENT_{name}", metavar, text)


_FEW_REQUESTS = "the agent writes what has changed, and only that"
_FINDS_CGROUP = "the agent finds a container's cgroup by itself, with either driver"


# For a variable that is not followed: it is reported where its value differs from this, so every
# value that is not empty is reported.
def _nothing_in_force(_: Settings) -> str:
    return ""


def _tls(settings: Settings) -> str:
    return "true" if settings.section(VgpuManager).exporter.certificate_file else "false"


SETTINGS = FamilySettings(
    FAMILY,
    "`nvidia.com/vgpu-number`, `-cores` and `-memory`, as vgpu-manager offers them.",
    sections={"vgpu_manager": VgpuManager},
    # As vgpu-manager's device plugin and its monitor name them (vgpu-manager §1.2, §1.4); those
    # that NVIDIA's plugin has as well are options of the whole agent.
    options=(
        _own("domain", "--domain", "NAME", "the domain of vgpu-manager's keys"),
        _own("deviceSplitCount", "--device-split-count", "N", "vGPUs of each GPU"),
        _own("deviceCoresScaling", "--device-cores-scaling", "X", "times a GPU's compute"),
        _own("deviceMemoryScaling", "--device-memory-scaling", "X", "times a GPU's memory"),
        _own("deviceMemoryFactor", "--device-memory-factor", "MIB", "MiB in a unit of memory"),
        _own("excludeDevices", "--exclude-devices", "GPUS", "GPUs not given out: 0-2, 0..2, UUIDs"),
        _own("featureGates", "--feature-gates", "GATES", "vgpu-manager's gates: A=true,B=false"),
        _own("nodeConfigFile", "--node-config-path", "FILE", "vgpu-manager's node configuration"),
        _own("openKernelModules", "--open-kernel-modules", "BOOL", "the driver's open modules"),
        Option("vgpuControl.hostDirectory", flag="", variable="HOST_MANAGER_DIR"),
        # those of vgpu-manager's monitor
        Option(
            f"{SECTION}.exporter.address",
            "--server-bind-port",
            "VGPU_AGENT_SERVER_BIND_PORT",
            "PORT",
            "the port of vgpu-manager's metrics, under their own names",
            convert=_address_of,
            expected="a port from 1 to 65535",
        ),
        Option(
            f"{SECTION}.exporter.minScrapeIntervalSeconds",
            "--min-scrape-interval",
            "VGPU_AGENT_MIN_SCRAPE_INTERVAL",
            "TIME",
            "the time within which a scrape is answered from the last one: 1s, 500ms, or seconds",
            convert=_seconds_of,
            expected="a time such as 1s or 500ms",
        ),
        _own("exporter.authorised", "--enable-rbac", "BOOL", "ask the API server who may scrape"),
        _own("exporter.certificateFile", "--tls-cert-file", "FILE", "certificate of the metrics"),
        _own("exporter.keyFile", "--tls-key-file", "FILE", "its private key"),
    ),
    # the flag and the variable of `plugin.migStrategy` also set this family's
    also_set_by_options={f"{SECTION}.migStrategy": "plugin.migStrategy"},
    # Variables and flags that are accepted and not followed. A flag's third text is the value with
    # which it asks for nothing.
    ignored_variables=(ForeignVariable("CGROUP_DRIVER", _nothing_in_force, _FINDS_CGROUP),),
    ignored_flags=(
        ForeignFlag("--master", "name the API server in the kubeconfig"),
        # The chart gives these two with their defaults.
        ForeignFlag("--kube-api-qps", _FEW_REQUESTS, "20"),
        ForeignFlag("--kube-api-burst", _FEW_REQUESTS, "30"),
        ForeignFlag("--kube-timeout", "a request may take 15 s", "0"),
        ForeignFlag("--cgroup-driver", _FINDS_CGROUP),
        ForeignFlag("--pprof-bind-port", "debugListen serves /debug", "0"),
        ForeignFlag("--enable-dra-monitor", "the agent gives nothing out through DRA", "false"),
        # those of vgpu-manager's monitor
        ForeignFlag(
            "--enable-tls",
            "a certificate is served where one is given, and plain HTTP where none is "
            "(--tls-cert-file, --tls-key-file)",
            in_force=_tls,
        ),
        ForeignFlag(
            "--cert-refresh-interval", "a renewed certificate is served within five seconds", "5"
        ),
        ForeignFlag(
            "--stuck-grace-period", "how long a claim waits for its pod is the scheduler's", "30s"
        ),
        # klog's, with the dashes of newer and the underscores of older versions
        *(
            ForeignFlag(flag, "set log.level and log.format")
            for name in (
                "--v",
                "--vmodule",
                "--logtostderr",
                "--alsologtostderr",
                "--stderrthreshold",
                "--log-backtrace-at",
                "--log-dir",
                "--log-file",
                "--log-file-max-size",
                "--one-output",
                "--add-dir-header",
                "--skip-headers",
                "--skip-log-headers",
            )
            for flag in dict.fromkeys((name, f"--{name[2:].replace('-', '_')}"))
        ),
    ),
    conflicts=_conflicts,
    without_effect=_without_effect,
    names=_names,
    collisions=_collisions,
)
