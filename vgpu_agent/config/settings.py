"""The configuration, schema v1: every key with its unit, default and reason, in one place.

The loader, ``config show``, ``config example`` and docs/configuration.md all read this file and the
sections of the families (`families`), so a key that is described there is complete. Keys are
camelCase in YAML and snake_case in Python. `agent` passes each package its section. No other
package reads the environment.

A Struct does not check itself when it is built by hand (a test may use any number); `load` checks
every value against the types here.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

import os
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from vgpu_agent.config.binding import Binding, Cluster, Families
from vgpu_agent.config.device_answers import Cdi, Plugin
from vgpu_agent.config.hami_core import HamiCore
from vgpu_agent.config.mps import Mps
from vgpu_agent.config.types import NODE_NAME, Address, Directory, OptionalPath, Seconds
from vgpu_agent.config.vgpu_control import VgpuControl

# Where sysfs is mounted, in a container as on the node; NUMA nodes, PCI paths and cgroups are read
# from it.
SYSFS_ROOT = "/sys"

Section = TypeVar("Section", bound=msgspec.Struct)


class Log(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The agent's log on stderr."""

    format: Annotated[
        Literal["json", "console"],
        Meta(
            description=(
                "json: one object a line, for a log collector. console: for a person's eyes."
            )
        ),
    ] = "json"
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(
            description=(
                "The least important lines that are written. `PUT /debug/loglevel` changes it "
                "until the next restart."
            )
        ),
    ] = "info"


class Kubelet(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Communication with the kubelet."""

    directory: Annotated[
        Directory,
        Meta(
            description=(
                "The kubelet's root directory on this node; `device-plugins/` and `pod-resources/` "
                "lie below it."
            )
        ),
    ] = "/var/lib/kubelet"

    @property
    def device_plugin_directory(self) -> Path:
        """The directory of the plugin sockets, ours and the kubelet's."""
        return Path(self.directory) / "device-plugins"

    @property
    def kubelet_socket(self) -> Path:
        """The kubelet's registration socket."""
        return self.device_plugin_directory / "kubelet.sock"

    @property
    def checkpoint_path(self) -> Path:
        """The kubelet's record of each container's device ids."""
        return self.device_plugin_directory / "kubelet_internal_checkpoint"

    @property
    def pod_resources_socket(self) -> Path:
        """The kubelet's pod-resources API."""
        return Path(self.directory) / "pod-resources" / "kubelet.sock"


class Recovery(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The recovery of Unhealthy GPUs."""

    mode: Annotated[
        Literal["auto", "never"],
        Meta(
            description=(
                "auto: when the driver asks for no reset and the GPU has been quiet. never: only "
                "after a restart of the agent."
            )
        ),
    ] = "auto"
    quiet_seconds: Annotated[
        Seconds,
        Meta(
            description="How long a GPU must answer without a new fault before it is offered again."
        ),
    ] = 60.0


class Gpu(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The location of the driver, and the monitoring of its GPUs."""

    discovery: Annotated[
        Literal["auto", "nvml", "tegra"],
        Meta(
            description=(
                "How GPUs are found. nvml: the driver lists them. tegra: the only GPU is part of a "
                "Tegra processor (Jetson), and is offered as one device of id `tegra`. auto: tegra "
                "on such a processor without NVML, or whose NVML lists nothing but integrated "
                "GPUs; nvml everywhere else. Simulated GPUs are found through NVML, whatever "
                "stands here."
            )
        ),
    ] = "auto"
    driver_root: Annotated[
        Directory,
        Meta(
            description=(
                "Root of the file system in which the NVIDIA driver is installed, e.g. "
                "`/run/nvidia/driver`."
            )
        ),
    ] = "/"
    dev_root: Annotated[
        OptionalPath,
        Meta(
            description=(
                "Root of the file system in which `/dev/nvidia*` lie on the host. Empty: the same "
                "as driverRoot."
            )
        ),
    ] = ""
    proc_root: Annotated[
        Directory,
        Meta(
            description=(
                "Where procfs is mounted: which folders of grants are in use, and, where it shows "
                "the host, which processes live. A mount of the host's /proc elsewhere shows that "
                "without `hostPID`."
            )
        ),
    ] = "/proc"
    fail_on_init_error: Annotated[
        bool,
        Meta(
            description=(
                "Without a usable driver: true ends the agent with an error, false waits and tries "
                "again."
            )
        ),
    ] = True
    disable_health_checks: Annotated[
        str,
        Meta(
            description=(
                'XID numbers, separated by commas, that do not make a GPU Unhealthy; "all" or '
                '"xids" for every one.'
            )
        ),
    ] = ""
    enable_health_checks: Annotated[
        str,
        Meta(
            description=(
                "XID numbers that do make a GPU Unhealthy although they are ignored by default or "
                'disabled above; or "all".'
            )
        ),
    ] = ""
    usage_seconds: Annotated[
        Seconds,
        Meta(
            description="How often memory use, utilisation and processes are read for the metrics."
        ),
    ] = 5.0
    recovery: Recovery = msgspec.field(default_factory=Recovery)

    @property
    def device_node_root(self) -> Path:
        """Root of the host's ``/dev/nvidia*``: ``devRoot``,
        or ``driverRoot`` when that is empty.
        """
        return Path(self.dev_root or self.driver_root)


class Web(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The contents of the HTTP servers."""

    pod_names: Annotated[
        Literal["all", "debug"],
        Meta(
            description=(
                "Who is told the names of pods. all: whoever may reach `listen`, as with the "
                "device plugins that the agent replaces. debug: only the address `debugListen`, "
                "which then serves the page on `/` and every metric on `/metrics`, too; on "
                "`listen` the metrics with a label for a pod are left out, and so are the page and "
                "the reasons that probes give. For nodes shared by tenants who may reach the port "
                "and must not know of each other."
            )
        ),
    ] = "all"


class Settings(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Everything that can be set and is no family's own;
    `schema.root` has the families' sections, too.
    """

    node_name: Annotated[
        str,
        Meta(
            pattern=rf"\A({NODE_NAME})?\Z",
            extra={"expected": "a Kubernetes node name (lower case letters, digits, '-' and '.')"},
            description="This node's name in Kubernetes. Empty: the host's name.",
        ),
    ] = ""
    listen: Annotated[
        Address,
        Meta(
            description=(
                "Where metrics and probes are served. Port 0 takes a free port, which the log then "
                "names."
            )
        ),
    ] = ":9394"
    debug_listen: Annotated[
        Address,
        Meta(
            description=(
                "Where `/debug` is served. It shows everything and can change the log level, hence "
                "only locally."
            )
        ),
    ] = "127.0.0.1:9395"
    kubeconfig: Annotated[
        OptionalPath,
        Meta(
            description=(
                "Credentials for the API server. Empty: the pod's service account, where there is "
                "one."
            )
        ),
    ] = ""
    simulate: Annotated[
        OptionalPath,
        Meta(
            description=(
                "Directory of simulated GPUs (`vgpu-agent sim create`) to run on instead of a "
                "driver. Its sysfs is read, and driverRoot and procRoot lie in it, unless they are "
                "set. Empty: real GPUs."
            )
        ),
    ] = ""
    state_directory: Annotated[
        Directory,
        Meta(
            description=(
                "Directory on the node for what a restart needs: `remembered.json`, the last good "
                "copy of what was read from the API server, so that a restart during an outage "
                "offers the same resources; `slices.json`, the GPU of each MIG instance, "
                "for pods that still hold an instance that was removed; and, with early binding, "
                "`grants/`, the answer for each container. The directory may be lost at any time "
                "while the API server answers."
            )
        ),
    ] = "/var/lib/vgpu-agent"
    nvidia_config_file: Annotated[
        OptionalPath,
        Meta(
            description=(
                "A configuration file of NVIDIA's device plugin (schema v1), read as it is. What "
                "stands in this file beats it. Its text may stand in this file, too, as the "
                "section `nvidiaConfig`. Empty: none."
            )
        ),
    ] = ""
    log: Log = msgspec.field(default_factory=Log)
    kubelet: Kubelet = msgspec.field(default_factory=Kubelet)
    gpu: Gpu = msgspec.field(default_factory=Gpu)
    plugin: Plugin = msgspec.field(default_factory=Plugin)
    mps: Mps = msgspec.field(default_factory=Mps)
    cdi: Cdi = msgspec.field(default_factory=Cdi)
    families: Families = msgspec.field(default_factory=Families)
    binding: Binding = msgspec.field(default_factory=Binding)
    cluster: Cluster = msgspec.field(default_factory=Cluster)
    hami_core: HamiCore = msgspec.field(default_factory=HamiCore)
    vgpu_control: VgpuControl = msgspec.field(default_factory=VgpuControl)
    web: Web = msgspec.field(default_factory=Web)

    def section(self, kind: type[Section]) -> Section:
        """Return the section of that type, which belongs to one family;
        its defaults where that family was not added.
        """
        found = (getattr(self, field) for field in self.__struct_fields__)
        return next((section for section in found if isinstance(section, kind)), kind())

    def is_on(self, family: str) -> bool:
        """Tell whether ``families`` switches that family on; false for one that was not added."""
        return bool(getattr(self.families, family.replace("-", "_"), False))

    @property
    def sysfs_root(self) -> str:
        """The root of sysfs: the node's, or that of the simulated GPUs."""
        return os.path.join(self.simulate, "sys") if self.simulate else SYSFS_ROOT

    @property
    def node_name_or_hostname(self) -> str:
        """The node's name. Without a configured name,
        the kubelet also takes the lower-case host name.
        """
        return self.node_name or os.uname().nodename.lower()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a checked ``HOST:PORT``; the host is ``""`` for every interface and an IPv6
    address comes without brackets.
    """
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
