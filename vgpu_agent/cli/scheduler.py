"""The command ``vgpu-agent scheduler``: the extender of kube-scheduler, with the flags of
vgpu-manager's extender (vgpu-manager §1.3).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from vgpu_agent.families.scheduling import SchedulingFamily

_EXAMPLES = """\
examples:
  vgpu-agent scheduler                                beside kube-scheduler, in one pod
  vgpu-agent scheduler --server-bind-address 0.0.0.0 --leader-elect \\
      --enable-tls --tls-cert-file tls.crt --tls-key-file tls.key
                                                      two replicas behind a Service

Any client that reaches the port can bind any pod: do not listen on an address of the network
without a NetworkPolicy that lets only kube-scheduler through. Exit status: 0 after SIGTERM or
SIGINT, 1 when it cannot start, 2 when a flag is wrong.
"""
# A duration as Go writes it, such as 1m30s, and one number of it with its unit.
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|s|m|h))+\Z", re.ASCII)
_PART = re.compile(r"([0-9.]+)(ms|s|m|h)", re.ASCII)
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
# Go's strconv.ParseBool.
_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})
_NO_EFFECT = "accepted, without effect: "


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "scheduler",
        help="place pods on Nodes, as an extender of kube-scheduler",
        description=(
            "Place pods that ask for shares of GPUs on Nodes and their cards, as an extender of "
            "kube-scheduler."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(flag: str, metavar: str, text: str, default: object = "", **more: Any) -> None:
        shown = f" (default {default})" if default and not isinstance(default, float) else ""
        parser.add_argument(flag, metavar=metavar, default=default, help=text + shown, **more)

    def add_switch(flag: str, text: str) -> None:
        add(flag, "BOOL", text, default=False, nargs="?", const=True, type=_boolean)

    add("--kubeconfig", "FILE", "access to the API server (default: the pod's service account)")
    add(
        "--family",
        "NAME",
        "the family whose pods it places (default: the family whose replaced extender has these "
        "flags); each family needs an extender of its own",
    )
    add("--domain", "NAME", "the domain of the keys on Nodes and pods", _DOMAIN, type=_domain)
    add("--scheduler-name", "NAME", "the source of its events", "vgpu-scheduler")
    add(
        "--server-bind-address",
        "ADDRESS",
        "the address to listen on; 0.0.0.0 for all",
        "127.0.0.1",
        type=_address,
    )
    add("--server-bind-port", "PORT", "the port to listen on", 3456, type=_port)
    add(
        "--probe-bind-port",
        "PORT",
        "a second port, on all addresses, for /healthz, /readyz, /version and /metrics alone "
        "(default 0: none)",
        0,
        type=_port,
    )
    add_switch("--enable-tls", "serve HTTPS; needs both files")
    add("--tls-cert-file", "FILE", "the certificate with its chain, in PEM")
    add("--tls-key-file", "FILE", "its private key, in PEM")
    add(
        "--cert-refresh-interval",
        "DURATION",
        "how often both files are checked for a renewed certificate",
        "5s",
        type=_seconds,
    )
    add(
        "--stuck-grace-period",
        "DURATION",
        "how long cards are kept for a pod that is not bound, unless its annotation "
        "stuck-grace-period says so; 1s or more",
        "30s",
        type=_seconds,
    )
    add_switch(
        "--watch-lease",
        "label the extender's own pod leader or follower, according to the Lease of the "
        "kube-scheduler in the same pod",
    )
    add_switch(
        "--leader-elect",
        "of several extenders, let one answer: the holder of a Lease of their own",
    )
    add(
        "--leader-identity-prefix",
        "NAME",
        "the beginning of the holder's name (default: variable POD_NAME, or the host's name)",
    )
    add("--leader-elect-resource-name", "NAME", "the Lease's name", "vgpu-scheduler", type=_name)
    add(
        "--leader-elect-resource-namespace",
        "NAMESPACE",
        "the Lease's namespace (default: variable POD_NAMESPACE, or kube-system)",
        type=_name,
    )
    add(
        "--type-match",
        "RULE",
        "how the texts in a pod's annotations match product names: words, or substring, with which "
        "A10 also matches A100, as in the replaced extender",
        _WORDS,
        choices=(_WORDS, _SUBSTRING),
    )
    add(
        "--cores-only",
        "RULE",
        "a container that asks for compute, and not for memory, gets all of the card's memory "
        "(as-replaced) or the same part of it (proportional), or is refused",
        _AS_REPLACED,
        choices=(_AS_REPLACED, "proportional", _REFUSED),
    )
    add(
        "--memory-only",
        "RULE",
        "a container that asks for memory, and not for compute, has no limit of compute "
        "(as-replaced), or is refused",
        _AS_REPLACED,
        choices=(_AS_REPLACED, _REFUSED),
    )
    add("--log-level", "LEVEL", "debug, info, warning or error", "info", choices=_LEVELS)
    add("--log-format", "FORMAT", "json or console", "json", choices=("json", "console"))
    for flag, why in {
        "--master": "the address is in the kubeconfig",
        "--kube-api-qps": "each pod costs one or two requests, and they are not rate-limited",
        "--kube-api-burst": "the same",
        "--pprof-bind-port": "there is no pprof",
        "--feature-gates": "links between cards always count where the Node's annotation has them, "
        "and verbs are not serialized",
        "--vmodule": "use --log-level",
    }.items():
        add(flag, "VALUE", _NO_EFFECT + why)
    # As Go parses flags: one dash is enough, and a switch needs no value.
    parser.add_argument("-v", "--v", metavar="VALUE", help=_NO_EFFECT + "use --log-level")
    add_switch("--logtostderr", _NO_EFFECT + "the log is on stderr")
    parser.set_defaults(run=_run)


_DOMAIN = "nvidia.com"
_WORDS, _SUBSTRING = "words", "substring"
_AS_REPLACED, _REFUSED = "as-replaced", "refused"
_LEVELS = ("debug", "info", "warning", "error")


def _run(arguments: argparse.Namespace) -> int:
    # The kernel ignores SIGTERM for process 1 of a container unless there is a handler. Until the
    # event loop has its own, SIGTERM ends the process as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    problems = _problems(arguments)
    if problems:
        raise ConfigError(problems)
    log.configure(log_format=arguments.log_format, level=arguments.log_level, cache_loggers=True)
    # These imports are slow, and a wrong flag is reported before them.
    import uvloop  # noqa: PLC0415

    from vgpu_agent.cluster.credentials import from_place  # noqa: PLC0415
    from vgpu_agent.scheduler.service import Service  # noqa: PLC0415

    family = _family(arguments)
    credentials = from_place(kubeconfig=arguments.kubeconfig)
    if credentials is None:
        raise ConfigError(
            ["no access to the API server: run it with a service account, or name --kubeconfig"]
        )
    uvloop.run(Service(_options(arguments, os.environ), family, credentials).run())
    return 0


def _family(arguments: argparse.Namespace) -> SchedulingFamily:
    from vgpu_agent.families.registry import FAMILIES  # noqa: PLC0415
    from vgpu_agent.families.scheduling import Incomplete, SchedulingOptions  # noqa: PLC0415

    # what a family adds to the extender: how its requests and cards are read
    parts = {each.name: each.scheduling for each in FAMILIES if each.scheduling is not None}
    name = arguments.family
    if name and name not in parts:
        raise ConfigError([f"--family: expected {' or '.join(parts)}, got {name!r}"])
    # the family with `by_default` is that whose replaced extender has these flags
    part = parts[name] if name else next(each for each in parts.values() if each.by_default)
    if not part.by_default and (
        problems := [
            f"{flag}: has no effect with --family {name}; remove it"
            for flag, (value, default) in {
                "--domain": (arguments.domain, _DOMAIN),
                "--cores-only": (arguments.cores_only, _AS_REPLACED),
                "--memory-only": (arguments.memory_only, _AS_REPLACED),
            }.items()
            if value != default
        ]
    ):
        raise ConfigError(problems)
    return part.build(
        SchedulingOptions(
            domain=arguments.domain,
            types_match_substrings=arguments.type_match == _SUBSTRING,
            # `Incomplete`: what becomes of a container that asks for compute without memory, or
            # for memory without compute
            cores_only=Incomplete(arguments.cores_only),
            memory_only=Incomplete(arguments.memory_only),
        )
    )


def _problems(arguments: argparse.Namespace) -> list[str]:
    problems = []
    files = (arguments.tls_cert_file, arguments.tls_key_file)
    if arguments.enable_tls and not all(files):
        problems.append("--enable-tls needs --tls-cert-file and --tls-key-file")
    if arguments.watch_lease and arguments.leader_elect:
        problems.append(
            "--watch-lease and --leader-elect exclude each other: the first follows the Lease of "
            "kube-scheduler, the second makes one for the extenders"
        )
    if arguments.stuck_grace_period < 1:
        problems.append(
            f"--stuck-grace-period: expected 1s or more, got {arguments.stuck_grace_period:g}s"
        )
    return problems


def _options(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Any:
    from vgpu_agent.scheduler.service import Lease, Options  # noqa: PLC0415

    pod_name = environment.get("POD_NAME", "")
    pod_namespace = environment.get("POD_NAMESPACE", "")
    prefix = arguments.leader_identity_prefix or pod_name or socket.gethostname()
    lease = None
    if arguments.watch_lease or arguments.leader_elect:
        lease = Lease(
            namespace=arguments.leader_elect_resource_namespace or pod_namespace or "kube-system",
            name=arguments.leader_elect_resource_name,
            # The beginning of the name that kube-scheduler has as holder; or a name of our own,
            # random, so that a restarted process does not take its old Lease for its own
            identity=prefix if arguments.watch_lease else f"{prefix}_{os.urandom(8).hex()}",
            is_schedulers=arguments.watch_lease,  # it is kube-scheduler's, and is only read
        )
    return Options(
        host=arguments.server_bind_address,
        port=arguments.server_bind_port,
        grace_seconds=arguments.stuck_grace_period,
        certificate_file=arguments.tls_cert_file if arguments.enable_tls else "",
        key_file=arguments.tls_key_file if arguments.enable_tls else "",
        certificate_seconds=arguments.cert_refresh_interval,
        lease=lease,
        event_source=arguments.scheduler_name,
        pod_namespace=pod_namespace,
        pod_name=pod_name if lease else "",  # the pod that gets the label; empty: none
        probe_port=arguments.probe_bind_port or None,
    )


def _boolean(text: str) -> bool:
    if text not in _TRUE | _FALSE:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text in _TRUE


def _seconds(text: str) -> float:
    # seconds without a unit, as in vgpu-manager's charts before v1.0.0
    if re.fullmatch("[0-9]{1,9}", text, re.ASCII):
        return float(text)
    if not _DURATION.match(text):
        raise argparse.ArgumentTypeError(f"expected a duration such as 30s or 1m, got {text!r}")
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _PART.findall(text))


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def _address(text: str) -> str:
    if not text.strip():  # an empty one would mean every address
        raise argparse.ArgumentTypeError(f"expected an address such as 0.0.0.0, got {text!r}")
    return text


def _name(text: str) -> str:
    from vgpu_agent.pods import is_object_name  # noqa: PLC0415

    if text and not is_object_name(text):
        raise argparse.ArgumentTypeError(f"expected a name that Kubernetes allows, got {text!r}")
    return text


def _domain(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,198}[a-z0-9])?", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"expected a DNS name in lower case such as nvidia.com, got {text!r}"
        )
    return text
