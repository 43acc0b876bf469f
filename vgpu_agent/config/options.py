"""The settings that have a flag and an environment variable: one table for argparse, `load`,
``--help`` and the docs.

Called by `cli` for every command that uses the configuration. A flag that is not given leaves no
trace in the parsed arguments, so that `load` can tell "not given" from "given as the default". The
flags and variables of the replaced plugins have their own names (nvidia §1; those of one family are
in its settings), read as Go reads them: ``--flag=value``, one dash or two, a switch alone, a list
repeated or separated by commas.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.config import families, foreign_settings, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PREFIX = "VGPU_AGENT_"
CONFIG_FLAG, CONFIG_VARIABLE = "--config", "VGPU_AGENT_CONFIG"
NVIDIA_CONFIG_FLAG, NVIDIA_CONFIG_VARIABLE = "--config-file", "CONFIG_FILE"

# The kubelet puts variables about each Service into every container; a Service named vgpu-agent…
# would look like a misspelt option.
_SERVICE_LINK = re.compile(
    r"VGPU_AGENT_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|"
    r"ADDR))?)?)\Z"
)
# Data between the simulated GPUs and their own processes; no configuration of the agent.
_SIMULATION = "VGPU_AGENT_SIM_"
# Set in the image to name the build; no configuration either.
_COMMIT = "VGPU_AGENT_COMMIT"
# the attribute of the parsed arguments that has the flags that were given, with their values
_DESTINATION = "settings_given"
_PLUGIN_DIRECTORY = "/device-plugins"
_KUBELET_SOCKET = f"{_PLUGIN_DIRECTORY}/kubelet.sock"


class Option(msgspec.Struct, frozen=True):
    """One setting that can be given outside the file.

    Attributes:
        path: the dotted path of the key in the configuration file, e.g. ``log.format``.
        flag: the flag, or "" when there is only a variable.
        variable: the environment variable.
        metavar: the value's name in ``--help``.
        text: the text in ``--help``.
        other_flags: more names of the flag.
        other_variables: more names of the variable; the first one that is set counts.
        convert: the function that converts the option's text into the key's text. It returns None
            for a text that it cannot convert. ``convert`` is None if the two texts are the same.
        expected: the form of the text that ``convert`` accepts, for error messages.
    """

    path: str
    flag: str
    variable: str
    metavar: str = ""
    text: str = ""
    other_flags: tuple[str, ...] = ()
    other_variables: tuple[str, ...] = ()
    convert: Callable[[str], str | None] | None = None
    expected: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """Every name of the flag."""
        return (self.flag, *self.other_flags) if self.flag else ()

    @property
    def variables(self) -> tuple[str, ...]:
        """Every name of the variable, the strongest first."""
        return (self.variable, *self.other_variables)

    def given_in(self, environment: Mapping[str, str]) -> str:
        """Return the name of the variable that counts; "" when none is set."""
        return next((name for name in self.variables if environment.get(name, "")), "")


def _kubelet_directory(socket: str) -> str | None:
    """Return the kubelet's root directory; None unless ``socket`` is its usual registration
    socket.
    """
    return (
        socket.removesuffix(_KUBELET_SOCKET)
        if socket.startswith("/") and socket.endswith(_KUBELET_SOCKET)
        else None
    )


def _above_plugin_directory(directory: str) -> str | None:
    """Return the kubelet's root directory; None unless ``directory`` is its usual one for
    plugins.
    """
    return _kubelet_directory(f"{directory.rstrip('/')}/kubelet.sock")


_OPTIONS: tuple[Option, ...] = (
    Option(
        "nodeName",
        "--node-name",
        "NODE_NAME",
        "NAME",
        "this node's name in Kubernetes (default: the host's name)",
    ),
    Option(
        "kubelet.directory",
        "--kubelet-socket",
        "KUBELET_SOCKET",
        "SOCKET",
        "the kubelet's registration socket: NVIDIA's form of --kubelet-dir",
        convert=_kubelet_directory,
        expected="the kubelet's directory, followed by /device-plugins/kubelet.sock",
    ),
    Option(
        "kubelet.directory",
        "--device-plugin-path",
        "VGPU_AGENT_DEVICE_PLUGIN_PATH",
        "DIR",
        "the kubelet's directory for plugin sockets: some plugins' form of --kubelet-dir",
        convert=_above_plugin_directory,
        expected=f"the kubelet's directory, followed by {_PLUGIN_DIRECTORY}",
    ),
    Option(
        "kubelet.directory",
        "--kubelet-dir",
        "VGPU_AGENT_KUBELET_DIR",
        "DIR",
        "the kubelet's root directory",
    ),
    Option(
        "listen", "--listen", "VGPU_AGENT_LISTEN", "ADDR", "where metrics and probes are served"
    ),
    Option(
        "debugListen", "--debug-listen", "VGPU_AGENT_DEBUG_LISTEN", "ADDR", "where /debug is served"
    ),
    Option(
        "kubeconfig",
        "--kubeconfig",
        "VGPU_AGENT_KUBECONFIG",
        "FILE",
        "credentials for the API server (default: the service account)",
    ),
    Option(
        "gpu.driverRoot",
        "--driver-root",
        "VGPU_AGENT_DRIVER_ROOT",
        "DIR",
        "where the NVIDIA driver is installed",
        other_flags=("--nvidia-driver-root", "--host-driver-root"),
        other_variables=("NVIDIA_DRIVER_ROOT",),
    ),
    Option(
        "gpu.devRoot",
        "--dev-root",
        "NVIDIA_DEV_ROOT",
        "DIR",
        "root of the host's /dev/nvidia* (default: the driver root)",
        other_flags=("--nvidia-dev-root",),
    ),
    Option(
        "gpu.procRoot",
        "--proc-root",
        "VGPU_AGENT_PROC_ROOT",
        "DIR",
        "where the host's procfs is mounted",
    ),
    Option(
        "simulate",
        "--simulate",
        "VGPU_AGENT_SIMULATE",
        "DIR",
        "run on the simulated GPUs in DIR instead of a driver",
    ),
    Option("log.format", "--log-format", "VGPU_AGENT_LOG_FORMAT", "FORMAT", "json or console"),
    Option(
        "log.level", "--log-level", "VGPU_AGENT_LOG_LEVEL", "LEVEL", "debug, info, warning or error"
    ),
    # From here on named as NVIDIA's plugin names them, so that a DaemonSet can be moved over with
    # its arguments and its environment.
    Option(
        "nvidiaConfigFile",
        NVIDIA_CONFIG_FLAG,
        NVIDIA_CONFIG_VARIABLE,
        "FILE",
        "a configuration file of NVIDIA's plugin, read as it is",
    ),
    Option(
        "plugin.migStrategy", "--mig-strategy", "MIG_STRATEGY", "STRATEGY", "none, single or mixed"
    ),
    Option(
        "gpu.failOnInitError",
        "--fail-on-init-error",
        "FAIL_ON_INIT_ERROR",
        "BOOL",
        "end when there is no usable driver",
    ),
    Option(
        "gpu.discovery",
        "--device-discovery-strategy",
        "DEVICE_DISCOVERY_STRATEGY",
        "STRATEGY",
        "auto, nvml or tegra",
    ),
    Option("gpu.disableHealthChecks", "", "DP_DISABLE_HEALTHCHECKS"),
    Option("gpu.enableHealthChecks", "", "DP_ENABLE_HEALTHCHECKS"),
    Option(
        "plugin.passDeviceSpecs",
        "--pass-device-specs",
        "PASS_DEVICE_SPECS",
        "BOOL",
        "name device nodes in each answer",
    ),
    Option(
        "plugin.deviceListStrategy",
        "--device-list-strategy",
        "DEVICE_LIST_STRATEGY",
        "STRATEGY",
        "envvar, volume-mounts, cdi-annotations, cdi-cri; may be repeated",
    ),
    Option(
        "plugin.deviceIdStrategy",
        "--device-id-strategy",
        "DEVICE_ID_STRATEGY",
        "STRATEGY",
        "uuid or index",
    ),
    Option(
        "plugin.sharedDevicesAllocationPolicy",
        "--shared-devices-allocation-policy",
        "SHARED_DEVICES_ALLOCATION_POLICY",
        "POLICY",
        "distributed or packed",
    ),
    *(
        Option(
            f"plugin.{name}Enabled",
            f"--{name}-enabled",
            f"{name.upper()}_ENABLED",
            "BOOL",
            f"give containers {devices} devices",
        )
        for name, devices in (
            ("gdrcopy", "GDRCopy"),
            ("gds", "GPUDirect Storage"),
            ("mofed", "Mellanox"),
        )
    ),
    Option(
        "plugin.imexChannelIds",
        "--imex-channel-ids",
        "IMEX_CHANNEL_IDS",
        "IDS",
        "IMEX channels of containers: 0, or none",
    ),
    Option(
        "plugin.imexRequired",
        "--imex-required",
        "IMEX_REQUIRED",
        "BOOL",
        "offer nothing while the IMEX channel does not exist",
    ),
    Option(
        "plugin.cdiAnnotationPrefix",
        "--cdi-annotation-prefix",
        "CDI_ANNOTATION_PREFIX",
        "PREFIX",
        "beginning of the name of CDI annotations",
    ),
    Option(
        "cdi.hookPath",
        "--nvidia-cdi-hook-path",
        "NVIDIA_CDI_HOOK_PATH",
        "PATH",
        "the hook program on the node, for CDI specs",
        other_flags=("--nvidia-ctk-path",),
        other_variables=("NVIDIA_CTK_PATH",),
    ),
    Option(
        "cdi.containerDriverRoot",
        "--driver-root-ctr-path",
        "DRIVER_ROOT_CTR_PATH",
        "DIR",
        "where the driver root is mounted in the agent's container",
        other_flags=("--container-driver-root",),
        other_variables=("CONTAINER_DRIVER_ROOT",),
    ),
    Option(
        "cdi.featureFlags",
        "--cdi-feature-flags",
        "CDI_FEATURE_FLAGS",
        "FLAG",
        "feature flags for CDI specs; may be repeated",
    ),
    Option(
        "cdi.disableHooks",
        "--cdi-disable-hooks",
        "CDI_DISABLE_HOOKS",
        "HOOK",
        "hooks left out of CDI specs; may be repeated",
    ),
    Option("mps.root", "--mps-root", "MPS_ROOT", "DIR", "directory on the node for MPS"),
)


def options() -> tuple[Option, ...]:
    """List all options, those of the families last."""
    return (*_OPTIONS, *(option for family in families.DECLARED for option in family.options))


def keys_also_set(path: str, *, in_file: bool = False) -> tuple[str, ...]:
    """List the keys of families that the options of the key ``path`` also set; with ``in_file``,
    those that its field in NVIDIA's file also sets. E.g. ``--mig-strategy``, of
    ``plugin.migStrategy``, also sets ``vgpuManager.migStrategy``.
    """
    return tuple(
        key
        for family in families.DECLARED
        for key, setter in (
            *family.also_set_by.items(),
            *(() if in_file else family.also_set_by_options.items()),
        )
        if setter == path
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` every flag of `options` and ``--config``; `given` reads them back."""
    group = parser.add_argument_group(
        "settings",
        "A flag beats the environment, the environment beats the file, the file beats the default.",
    )
    _add(
        group,
        (CONFIG_FLAG,),
        metavar="FILE",
        help=f"the configuration file; it is watched for changes ({CONFIG_VARIABLE})",
    )
    for option in options():
        if option.flag:
            key = schema.value_paths()[option.path]
            shown = (
                f"; default {_shown_default(key)}"
                if key.default not in ("", ()) and option.convert is None
                else ""
            )
            alone = {"nargs": "?", "const": "true"} if key.is_switch else {}
            text = f"{option.text} ({option.variable}{shown})"
            _add(
                group, option.flags, metavar=option.metavar, help=text, repeats=key.is_list, **alone
            )
    # those of replaced plugins that are accepted and not followed
    for name in foreign_settings.flags():
        _add(group, (name,), nargs="?", const="true", help=argparse.SUPPRESS)


class _Given(argparse.Action):
    """The action that keeps a value under the flag as it was typed, so that a message about the
    value can begin with that flag.
    """

    def __init__(self, *, names: tuple[str, ...], repeats: bool = False, **arguments: Any) -> None:
        """Make the action for ``names``, which mean the same. The last flag that is given counts;
        with ``repeats`` all of them do.
        """
        super().__init__(**arguments)
        self._names = names
        self._repeats = repeats

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flags = dict(getattr(namespace, self.dest) or {})
        before = [flags.pop(name) for name in self._names if name in flags]
        typed = f"--{(option_string or self._names[0]).lstrip('-')}"
        flags[typed] = ",".join([*before, values]) if self._repeats else values
        setattr(namespace, self.dest, flags)


# `help` is argparse's own word
def _add(
    group: argparse._ArgumentGroup,
    names: tuple[str, ...],
    *,
    help: str,  # noqa: A002
    **arguments: Any,
) -> None:
    """Add one option under its names and, hidden in ``--help``, under the same names with one dash,
    as Go's flags may have.
    """
    group.add_argument(
        *names, action=_Given, dest=_DESTINATION, default=None, names=names, help=help, **arguments
    )
    one_dash = [name.removeprefix("-") for name in names]
    group.add_argument(
        *one_dash,
        action=_Given,
        dest=_DESTINATION,
        default=None,
        names=names,
        help=argparse.SUPPRESS,
        **arguments,
    )


def _shown_default(key: schema.Key) -> str:
    if key.is_switch:
        return str(key.default).lower()
    return ",".join(key.default) if key.is_list else str(key.default)


def given(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the flags that were given, as they were typed (``{"--listen": ":9394"}``), from
    arguments that `add_arguments` declared.
    """
    return dict(getattr(arguments, _DESTINATION) or {})


def text_of(path: str, environment: Mapping[str, str]) -> str:
    """Return the environment's text for the key ``path``, unchecked; "" when there is none. For
    keys that are needed before the configuration is read, such as the format of the log.
    """
    return next(
        (
            environment[name]
            for option in options()
            if option.path == path
            if (name := option.given_in(environment))
        ),
        "",
    )


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `options`, those that look like ours, and those of replaced plugins
    that `load` warns of.
    """
    ours = _known_variables() | foreign_settings.names()
    return {
        name: value
        for name, value in environment.items()
        if name in ours or name.startswith(PREFIX)
    }


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """List the variables that look like ours and are not, sorted; without Kubernetes' variables
    about Services.
    """
    known = _known_variables() | {CONFIG_VARIABLE, _COMMIT}
    return sorted(
        name
        for name in environment
        if name.startswith(PREFIX)
        and name not in known
        and not name.startswith(_SIMULATION)
        and not _SERVICE_LINK.match(name)
    )


def names_without_prefix() -> list[str]:
    """List the part after our prefix of each variable that has it: the names to suggest for a
    misspelt one.
    """
    variables = [CONFIG_VARIABLE, *_known_variables()]
    return [variable.removeprefix(PREFIX) for variable in variables if variable.startswith(PREFIX)]


def _known_variables() -> set[str]:
    return {variable for option in options() for variable in option.variables}
