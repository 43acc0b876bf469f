"""The command ``vgpu-agent webhook``: reads its flags and runs `webhook`.

The first flags are those of the webhook that it replaces, with their names and defaults; the others
are its own. It has no configuration file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.errors import ConfigError
from vgpu_agent.families.admission import AdmissionOptions
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.memory import freeze_objects

if TYPE_CHECKING:
    from vgpu_agent.families.admission import AdmissionFamily
    from vgpu_agent.webhook.options import Options

_EXAMPLES = """\
examples:
  vgpu-agent webhook --certificate-secret vgpu-agent-webhook --scheduler-name vgpu-scheduler
  vgpu-agent webhook --cert-dir /certificates --default-device-policy binpack

Exit status: 0 after SIGTERM or SIGINT, 1 when it cannot start (port in use, no certificate), 2 when
a flag is wrong.
"""

_NAME = "vgpu-agent-webhook"  # of the Service and of the webhook configurations, by default
_SWITCH = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}  # Go's strconv.ParseBool
# Flags of the replaced webhook without effect here; the last ones are those of klog.
_WITHOUT_EFFECT = (
    "--kube-api-qps",
    "--kube-api-burst",
    "--pprof-bind-port",
    "--vgpu-device-class-name",
    "--logtostderr",
    "--alsologtostderr",
    "--stderrthreshold",
    "--vmodule",
    "--v",
)
# Flags of the replaced webhook for DRA, which are refused when they are true.
_OF_RESOURCE_CLAIMS = (
    "--dra-admission-enabled",
    "--default-convert2-dra",
    "--combined-resource-claim",
)
_LONGEST_SECONDS = 3600.0
_MOST_GPUS = 1024
_LEAST_BODY_BYTES, _MOST_BODY_BYTES = 1024 * 1024, 64 * 1024 * 1024


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``webhook``."""
    parser = subparsers.add_parser(
        "webhook",
        help="complete and check new pods that ask for shares of GPUs, as an admission webhook",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_replaced(parser.add_argument_group("flags of the webhook that this one replaces"))
    _add_own(parser.add_argument_group("further flags"))
    parser.set_defaults(run=_run)


def _add_replaced(group: argparse._ArgumentGroup) -> None:
    """Add the flags that the replaced webhook had."""

    def add(flag: str, metavar: str, text: str, default: str = "") -> None:
        shown = f" (default {default})" if default else ""
        group.add_argument(flag, metavar=metavar, default=default, help=text + shown)

    add(
        "--scheduler-name",
        "NAME",
        "schedulerName of pods that have not chosen one; empty: not changed",
    )
    group.add_argument(
        "--server-bind-port",
        metavar="PORT",
        type=_whole(0, 65535),
        default=9443,
        help="the port of the HTTPS server (default 9443)",
    )
    add("--domain", "NAME", "the domain of resources, annotations and labels")
    add(
        "--cert-dir",
        "DIRECTORY",
        "folder of a certificate that another program renews",
        "/tmp/k8s-webhook-server/serving-certs",  # noqa: S108 - the replaced webhook's default
    )
    add("--tls-cert-name", "FILE", "the certificate in it, with its chain", "tls.crt")
    add("--tls-key-name", "FILE", "its key", "tls.key")
    add("--default-node-policy", "POLICY", "binpack, spread or none, for pods without one")
    add("--default-device-policy", "POLICY", "binpack, spread or none, for pods without one")
    add("--default-topology-mode", "MODE", "numa, link, … for pods with several GPUs and no mode")
    add("--default-runtime-class", "NAME", "runtimeClassName of pods that have none")
    for flag in _OF_RESOURCE_CLAIMS:
        _add_switch(group, flag, default=False, text=argparse.SUPPRESS)
    for flag in _WITHOUT_EFFECT:
        group.add_argument(
            flag, *(["-v"] if flag == "--v" else []), nargs="?", const="", help=argparse.SUPPRESS
        )


def _add_own(group: argparse._ArgumentGroup) -> None:
    """Add the flags that the replaced webhook did not have."""
    group.add_argument("--bind-address", metavar="HOST", default="", help="default: all addresses")
    group.add_argument("--kubeconfig", metavar="FILE", default="", help="default: the pod's token")
    _add_switch(
        group,
        "--complete-limits",
        default=True,
        text="write out one GPU for a share without a number, and 100 %% of compute for a GPU "
        "without amounts",
    )
    group.add_argument(
        "--pinned-pods",
        choices=("affinity", "hostname", "keep"),
        default="affinity",
        help="how a pod with spec.nodeName is sent to that node by a scheduler: by affinity to the "
        "node's name, by the label kubernetes.io/hostname, or not at all (default affinity)",
    )
    _add_switch(
        group,
        "--watch-nodes",
        default=True,
        text="warn of pods that ask for more than the largest node or GPU that was seen",
    )
    group.add_argument(
        "--largest-node",
        metavar="GPUS",
        type=_whole(0, _MOST_GPUS),
        default=0,
        help="GPUs of the largest node that there is or may come: pods that ask for more are "
        "refused (default 0: they are admitted with a warning)",
    )
    group.add_argument(
        "--certificate-secret",
        metavar="NAME",
        default="",
        help="make a certificate and keep it in this Secret; empty: use the files above",
    )
    group.add_argument(
        "--namespace",
        metavar="NAME",
        default=os.environ.get("POD_NAMESPACE") or "vgpu-agent",
        help="of Secret and Service (default: $POD_NAMESPACE, or vgpu-agent)",
    )
    group.add_argument(
        "--service-name",
        metavar="NAME",
        default=_NAME,
        help=f"the Service by which the API server calls (default {_NAME})",
    )
    group.add_argument(
        "--webhook-configurations",
        metavar="NAMES",
        default=_NAME,
        help="the webhook configurations that get the caBundle, separated by commas (default "
        f"{_NAME})",
    )
    _add_times(group)
    group.add_argument("--log-level", choices=log.LEVELS, default="info", help="default info")
    group.add_argument(
        "--log-format", choices=("json", "console"), default="json", help="default json"
    )


def _add_times(group: argparse._ArgumentGroup) -> None:
    for flag, default, text in (
        ("--body-seconds", 4.0, "how long a request may take to arrive"),
        ("--drain-seconds", 5.0, "how long to answer further requests after a signal to stop"),
        ("--stop-seconds", 10.0, "how long unfinished requests may take after that"),
    ):
        group.add_argument(
            flag,
            metavar="SECONDS",
            type=_seconds,
            default=default,
            help=f"{text} (default {default:g})",
        )
    group.add_argument(
        "--max-body-bytes",
        metavar="BYTES",
        type=_whole(_LEAST_BODY_BYTES, _MOST_BODY_BYTES),
        default=8 * 1024 * 1024,
        help="a larger request is denied (default 8 MiB)",
    )


def _add_switch(group: argparse._ArgumentGroup, flag: str, *, default: bool, text: str) -> None:
    shown = text if text == argparse.SUPPRESS else f"{text} (default {str(default).lower()})"
    group.add_argument(
        flag, metavar="BOOL", nargs="?", const=True, default=default, type=_switch, help=shown
    )


def _switch(text: str) -> bool:
    if text not in _SWITCH:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return _SWITCH[text]


class _whole:  # noqa: N801 - argparse shows its name
    """The type of a whole number within bounds."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def __call__(self, text: str) -> int:
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1
        if not self._least <= number <= self._most:
            raise argparse.ArgumentTypeError(
                f"expected a number from {self._least} to {self._most}, got {text!r}"
            )
        return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected seconds from 0 to {_LONGEST_SECONDS:g}, got {text!r}"
        )
    return seconds


def _run(arguments: argparse.Namespace) -> int:
    # As in `run`: until the webhook installs its own handler, SIGTERM ends the process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    family, options = _family(arguments), _options(arguments)
    log.configure(log_format=arguments.log_format, level=arguments.log_level, cache_loggers=True)
    # The imports take 200 ms, and a wrong flag is reported before them.
    from vgpu_agent.cluster.credentials import credentials  # noqa: PLC0415
    from vgpu_agent.config.settings import Settings  # noqa: PLC0415
    from vgpu_agent.webhook import service  # noqa: PLC0415

    found = credentials(Settings(kubeconfig=arguments.kubeconfig))
    freeze_objects()  # excludes what was imported from garbage collection
    asyncio.run(service.run(options, family, found))
    return 0


def _family(arguments: argparse.Namespace) -> AdmissionFamily:
    """Return the rules for new pods of the one family that has such rules."""
    build = next(family.admission for family in FAMILIES if family.admission is not None)
    return build(
        AdmissionOptions(
            domain=arguments.domain,
            scheduler_name=arguments.scheduler_name,
            node_policy=arguments.default_node_policy,
            device_policy=arguments.default_device_policy,
            topology_mode=arguments.default_topology_mode,
            runtime_class=arguments.default_runtime_class,
            completes_limits=arguments.complete_limits,
        )
    )


def _options(arguments: argparse.Namespace) -> Options:
    """Return the options of the service.

    Raises:
        ConfigError: flags that cannot be used, one sentence each.
    """
    from vgpu_agent.pods import is_object_name  # noqa: PLC0415 - only for its own command
    from vgpu_agent.webhook.new_pod import Pinned  # noqa: PLC0415
    from vgpu_agent.webhook.options import (  # noqa: PLC0415
        CertificateFiles,
        Options,
        OwnCertificateOptions,
    )

    configurations = tuple(
        name for each in arguments.webhook_configurations.split(",") if (name := each.strip())
    )
    problems = [
        f"{flag}: resource claims are not supported; leave the flag out, and keep the replaced "
        "webhook for pods that use them"
        for flag in _OF_RESOURCE_CLAIMS
        if getattr(arguments, flag[2:].replace("-", "_"))
    ]
    certificate: CertificateFiles | OwnCertificateOptions
    if arguments.certificate_secret:
        certificate = OwnCertificateOptions(
            namespace=arguments.namespace,
            secret=arguments.certificate_secret,
            service=arguments.service_name,
            configurations=configurations,
        )
        names = (
            ("--certificate-secret", arguments.certificate_secret),
            ("--namespace", arguments.namespace),
            ("--service-name", arguments.service_name),
            *(("--webhook-configurations", name) for name in configurations or ("",)),
        )
        problems += [
            f"{flag}: expected a name that Kubernetes allows, got {name!r}"
            for flag, name in names
            if not is_object_name(name)  # parts of a request's path
        ]
    else:
        folder = Path(arguments.cert_dir)
        certificate = CertificateFiles(
            str(folder / arguments.tls_cert_name), str(folder / arguments.tls_key_name)
        )
    if problems:
        raise ConfigError(problems)
    return Options(
        certificate,
        host=arguments.bind_address,
        port=arguments.server_bind_port,
        pinned=Pinned(arguments.pinned_pods),
        watches_nodes=arguments.watch_nodes,
        assumed_largest_node=arguments.largest_node,  # a larger one that is seen counts instead
        max_body_bytes=arguments.max_body_bytes,
        body_seconds=arguments.body_seconds,
        drain_seconds=arguments.drain_seconds,
        stop_seconds=arguments.stop_seconds,
    )
