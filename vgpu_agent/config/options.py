"""Which settings have a flag and an environment variable: one table for argparse, `load`, ``--help`` and the documentation.

Called by `cli` for every command that runs on the configuration. A flag that is not given leaves no trace in the parsed arguments, so that
`load` can tell "not given" from "given as the default".
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from vgpu_agent.config import foreign_variables, schema

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

PREFIX = "VGPU_AGENT_"
CONFIG_FLAG, CONFIG_VARIABLE = "--config", "VGPU_AGENT_CONFIG"

# kubelet puts variables about each Service into every container; a Service named vgpu-agent… would look like a misspelt option.
_SERVICE_LINK = re.compile(r"VGPU_AGENT_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)\Z")
# What the simulated GPUs exchange with their own processes; no configuration of the agent.
_SIMULATION = "VGPU_AGENT_SIM_"
# Set in the image to say which build it is; no configuration either.
_COMMIT = "VGPU_AGENT_COMMIT"


@dataclasses.dataclass(frozen=True)
class Option:
    """One setting that can be given outside the file.

    Attributes:
        path: the dotted path of the key.
        flag: the flag, or "" when there is only a variable.
        variable: the environment variable.
        metavar: what ``--help`` calls the value.
        text: what ``--help`` says.
    """

    path: str
    flag: str
    variable: str
    metavar: str = ""
    text: str = ""

    @property
    def destination(self) -> str:
        """The attribute of the parsed arguments."""
        return "setting_" + self.flag.removeprefix("--").replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option("nodeName", "--node-name", "NODE_NAME", "NAME", "this node's name in Kubernetes (default: the host's name)"),
    Option("kubelet.directory", "--kubelet-dir", "VGPU_AGENT_KUBELET_DIR", "DIR", "the kubelet's root directory"),
    Option("listen", "--listen", "VGPU_AGENT_LISTEN", "ADDR", "where metrics and probes are served"),
    Option("debugListen", "--debug-listen", "VGPU_AGENT_DEBUG_LISTEN", "ADDR", "where /debug is served"),
    Option("kubeconfig", "--kubeconfig", "VGPU_AGENT_KUBECONFIG", "FILE", "credentials for the API server (default: the service account)"),
    Option("gpu.driverRoot", "--driver-root", "VGPU_AGENT_DRIVER_ROOT", "DIR", "where the NVIDIA driver is installed"),
    Option("gpu.sysfsRoot", "--sysfs-root", "VGPU_AGENT_SYSFS_ROOT", "DIR", "where sysfs is mounted"),
    Option("gpu.procRoot", "--proc-root", "VGPU_AGENT_PROC_ROOT", "DIR", "where the host's procfs is mounted"),
    Option("simulate", "--simulate", "VGPU_AGENT_SIMULATE", "DIR", "run on the simulated GPUs in DIR instead of a driver"),
    Option("log.format", "--log-format", "VGPU_AGENT_LOG_FORMAT", "FORMAT", "json or console"),
    Option("log.level", "--log-level", "VGPU_AGENT_LOG_LEVEL", "LEVEL", "debug, info, warning or error"),
    # Named as NVIDIA's plugin names them, so that a DaemonSet can be moved over with its environment.
    Option("gpu.failOnInitError", "", "FAIL_ON_INIT_ERROR"),
    Option("gpu.disableHealthChecks", "", "DP_DISABLE_HEALTHCHECKS"),
    Option("gpu.enableHealthChecks", "", "DP_ENABLE_HEALTHCHECKS"),
    Option("plugin.passDeviceSpecs", "", "PASS_DEVICE_SPECS"),
    Option("plugin.deviceIdStrategy", "", "DEVICE_ID_STRATEGY"),
    Option("plugin.sharedDevicesAllocationPolicy", "", "SHARED_DEVICES_ALLOCATION_POLICY"),
    # As volcano-vgpu-device-plugin names it.
    Option("volcanoVgpu.configMapNamespace", "", "DEVICE_CONFIG_NAMESPACE"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` every flag of `OPTIONS` and ``--config``; `given` reads them back."""
    group = parser.add_argument_group(
        "settings", "A flag beats the environment, the environment beats the file, the file beats the default."
    )
    group.add_argument(
        CONFIG_FLAG,
        metavar="FILE",
        dest="setting_config",
        default=None,
        help=f"the configuration file; it is watched for changes ({CONFIG_VARIABLE})",
    )
    for option in OPTIONS:
        if option.flag:
            default = schema.value_paths()[option.path].default
            shown = f"; default {default}" if default else ""
            group.add_argument(
                option.flag,
                metavar=option.metavar,
                dest=option.destination,
                default=None,
                help=f"{option.text} ({option.variable}{shown})",
            )


def given(arguments: argparse.Namespace) -> dict[str, str]:
    """The flags that were given, by flag (``{"--listen": ":9394"}``), from arguments that `add_arguments` declared."""
    flags = {option.flag: getattr(arguments, option.destination, None) for option in OPTIONS if option.flag}
    flags[CONFIG_FLAG] = getattr(arguments, "setting_config", None)
    return {flag: value for flag, value in flags.items() if value is not None}


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `OPTIONS`, those that look like ours, and those of the replaced plugins that `load` warns of."""
    ours = {option.variable for option in OPTIONS} | foreign_variables.NAMES
    return {name: value for name, value in environment.items() if name in ours or name.startswith(PREFIX)}


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """The variables that look like ours and are not, sorted; Kubernetes' service variables are none of them."""
    known = {option.variable for option in OPTIONS} | {CONFIG_VARIABLE, _COMMIT}
    return sorted(
        name
        for name in environment
        if name.startswith(PREFIX) and name not in known and not name.startswith(_SIMULATION) and not _SERVICE_LINK.match(name)
    )


def our_names() -> list[str]:
    """What follows our prefix in each variable that has it."""
    variables = [CONFIG_VARIABLE, *(option.variable for option in OPTIONS)]
    return [variable.removeprefix(PREFIX) for variable in variables if variable.startswith(PREFIX)]
