"""The configuration, schema v1: every key with its unit, default and reason, in one place.

The loader, ``config show``, ``config example`` and docs/configuration.md are all derived from this
file and from the sections of the families (`families`). So a new key needs no other change. Keys
are camelCase in YAML and snake_case in Python. `agent` passes each package its section. No other
package reads the environment.

`load` checks every value against the types here. A Struct that is constructed directly, as in
tests, is not checked.
"""

# No `from __future__ import annotations` here: it makes each annotation a string, which msgspec
# would evaluate twice at each start.

import os
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from vgpu_agent.config.audit import Audit
from vgpu_agent.config.binding import Binding, Cluster, Families
from vgpu_agent.config.device_answers import Cdi, Plugin
from vgpu_agent.config.hami_core import HamiCore
from vgpu_agent.config.mps import Mps
from vgpu_agent.config.node_status import NodeStatus
from vgpu_agent.config.types import NODE_NAME, AbsolutePath, Address, OptionalPath, Seconds
from vgpu_agent.config.vgpu_control import VgpuControl

# The mount point of sysfs, the same in a container and on the node. NUMA nodes, PCI paths and
# cgroups are read from it.
SYSFS_ROOT = "/sys"

Section = TypeVar("Section", bound=msgspec.Struct)


class Log(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The agent's log on stderr."""

    format: Annotated[
        Literal["json", "console"],
        Meta(
            description=("json: one object per line, for log collectors. console: text for people.")
        ),
    ] = "json"
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(
            description=(
                "The lowest level that is logged. `PUT /debug/loglevel` changes it until the next "
                "restart."
            )
        ),
    ] = "info"


class Kubelet(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Communication with the kubelet."""

    directory: Annotated[
        AbsolutePath,
        Meta(
            description=(
                "The kubelet's root directory on this node, which contains `device-plugins/` and "
                "`pod-resources/`."
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
        """The kubelet's checkpoint file, with the device ids of each container."""
        return self.device_plugin_directory / "kubelet_internal_checkpoint"

    @property
    def pod_resources_socket(self) -> Path:
        """The socket of the kubelet's pod-resources API."""
        return Path(self.directory) / "pod-resources" / "kubelet.sock"


class Recovery(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The recovery of Unhealthy GPUs."""

    mode: Annotated[
        Literal["auto", "never"],
        Meta(
            description=(
                "When an Unhealthy GPU is offered again. auto: after quietSeconds without a new "
                "fault, if the driver does not require a reset. never: only after a restart of the "
                "agent."
            )
        ),
    ] = "auto"
    quiet_seconds: Annotated[
        Seconds,
        Meta(
            description=(
                "How long a GPU must answer without a new fault before it is offered again. The "
                "time doubles for a GPU that fails again within an hour."
            )
        ),
    ] = 60.0


class Gpu(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The location of the driver, and the monitoring of its GPUs."""

    discovery: Annotated[
        Literal["auto", "nvml", "tegra"],
        Meta(
            description=(
                "How GPUs are found. nvml: the driver lists them. tegra: the only GPU is part of a "
                "Tegra processor (Jetson), and is offered as one device with the id `tegra`. auto: "
                "tegra on such a processor without NVML, or with an NVML that lists only "
                "integrated GPUs; nvml everywhere else. Simulated GPUs are always found through "
                "NVML."
            )
        ),
    ] = "auto"
    driver_root: Annotated[
        AbsolutePath,
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
                "Root of the file system that contains `/dev/nvidia*` on the host. Empty: the same "
                "as driverRoot."
            )
        ),
    ] = ""
    proc_root: Annotated[
        AbsolutePath,
        Meta(
            description=(
                "The mount point of procfs. It shows which directories of grants are mounted and, "
                "if it is the host's, which processes are alive. A mount of the host's /proc at "
                "another path makes `hostPID` unnecessary."
            )
        ),
    ] = "/proc"
    fail_on_init_error: Annotated[
        bool,
        Meta(
            description=(
                "If there is no usable driver: true ends the agent with an error, false makes it "
                "wait and try again."
            )
        ),
    ] = True
    disable_health_checks: Annotated[
        str,
        Meta(
            description=(
                'XID numbers, separated by commas, that do not make a GPU Unhealthy; "all" or '
                '"xids" for all of them.'
            )
        ),
    ] = ""
    enable_health_checks: Annotated[
        str,
        Meta(
            description=(
                "XID numbers that make a GPU Unhealthy even if they are ignored by default or by "
                'disableHealthChecks; or "all".'
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
        """The root of the host's ``/dev/nvidia*``: ``devRoot``, or ``driverRoot`` if ``devRoot`` is
        empty.
        """
        return Path(self.dev_root or self.driver_root)


class Web(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The data that the HTTP servers show."""

    pod_names: Annotated[
        Literal["all", "debug"],
        Meta(
            description=(
                "The addresses that show the names of pods. all: both `listen` and `debugListen`, "
                "as with the device plugins that the agent replaces. debug: only `debugListen`, "
                "which then also serves the page on `/` and every metric on `/metrics`. In that "
                "case `listen` omits the metrics with a label for a pod, the page, and the reasons "
                "that probes give. Use it on nodes of several tenants who can reach the port and "
                "must not know of each other."
            )
        ),
    ] = "all"


class Settings(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """All settings except the families' own sections, which `schema.root` adds."""

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
                "The address that serves metrics and probes. Port 0 takes a free port and logs its "
                "number."
            )
        ),
    ] = ":9394"
    debug_listen: Annotated[
        Address,
        Meta(
            description=(
                "The address that serves `/debug`. It is local by default, because `/debug` shows "
                "all data and can change the log level."
            )
        ),
    ] = "127.0.0.1:9395"
    kubeconfig: Annotated[
        OptionalPath,
        Meta(
            description=(
                "A kubeconfig file with the credentials for the API server. Empty: the pod's "
                "service account, if it has one."
            )
        ),
    ] = ""
    simulate: Annotated[
        OptionalPath,
        Meta(
            description=(
                "Directory of simulated GPUs (`vgpu-agent sim create`) to use instead of real "
                "ones. The agent reads its sysfs, and takes driverRoot, procRoot, mps.root and "
                "stateDirectory from it unless they are set. Empty: real GPUs."
            )
        ),
    ] = ""
    state_directory: Annotated[
        AbsolutePath,
        Meta(
            description=(
                "Directory on the node for the data that a restart needs: `remembered.json`, the "
                "data last read from the API server, so that a restart during an outage offers the "
                "same resources; `slices.json`, the GPU of each MIG instance, for pods that still "
                "hold an instance that was removed; `share-seconds.json`, the sums of "
                "`vgpu_agent_share_seconds_total`; with early binding, `grants/`, the answer for "
                "each container; and `succession.sock`, over which the next agent takes over in an "
                "upgrade, with its lock. The directory may be lost at any time while the API "
                "server answers."
            )
        ),
    ] = "/var/lib/vgpu-agent"
    nvidia_config_file: Annotated[
        OptionalPath,
        Meta(
            description=(
                "A configuration file of NVIDIA's device plugin (schema v1), used unchanged. The "
                "agent's own file has priority over it. Its text may also be the section "
                "`nvidiaConfig` of the agent's own file. Empty: none."
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
    node_status: NodeStatus = msgspec.field(default_factory=NodeStatus)
    audit: Audit = msgspec.field(default_factory=Audit)
    hami_core: HamiCore = msgspec.field(default_factory=HamiCore)
    vgpu_control: VgpuControl = msgspec.field(default_factory=VgpuControl)
    web: Web = msgspec.field(default_factory=Web)

    def section(self, kind: type[Section]) -> Section:
        """Return the section of type ``kind``, which belongs to one family; the section's defaults
        where these settings have no part of that family (`families`), as in some tests.
        """
        found = (getattr(self, field) for field in self.__struct_fields__)
        return next((section for section in found if isinstance(section, kind)), kind())

    def is_on(self, family: str) -> bool:
        """Tell whether ``families`` enables ``family``; False for one that has no switch there."""
        return bool(getattr(self.families, family.replace("-", "_"), False))

    @property
    def sysfs_root(self) -> str:
        """The root of the node's sysfs, or of the simulated one."""
        return os.path.join(self.simulate, "sys") if self.simulate else SYSFS_ROOT

    @property
    def node_name_or_hostname(self) -> str:
        """The configured name of the node, or else the lower-case host name, as in the kubelet."""
        return self.node_name or os.uname().nodename.lower()


def split_address(address: str) -> tuple[str, int]:
    """Split a valid ``HOST:PORT`` into host and port.

    The host is ``""`` for all interfaces. An IPv6 address is returned without brackets.
    """
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
