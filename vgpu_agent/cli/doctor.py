"""``vgpu-agent doctor``: all that the agent needs of a node, each with its remedy.

It is for a node before the agent is installed, and for one on which something is wrong. With a
running agent it uses that agent's settings, unless there are flags, and asks it for the GPUs.
Without one it looks itself. The checks are in `node_checks`. Without a running agent they load
NVML, in this process only.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.cli import debug_address, node_checks
from vgpu_agent.cli.node_checks import CHECKS, Finding, Level, Node, RunningAgent
from vgpu_agent.config import load, options, schema
from vgpu_agent.errors import AgentError, ConfigError
from vgpu_agent.web.views import GpuView, NvmlView, Overview

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.web.address import Address

# Where the DaemonSet mounts its ConfigMap, so that `kubectl exec … vgpu-agent doctor` finds it.
_MOUNTED_CONFIG = "/etc/vgpu-agent/config.yaml"
# Each check; longer than a request to an API server that is away.
_CHECK_SECONDS = 20.0
_ASK_SECONDS = 5.0  # for one answer of the running agent
_EXIT_STATUS = {Level.OK: 0, Level.WARNING: 1, Level.ERROR: 2}
# a terminal's codes (SGR) for green, yellow and red
_COLOURS = {Level.OK: "32", Level.WARNING: "33", Level.ERROR: "31"}
_LEVEL_WIDTH, _CHECK_WIDTH = 9, 19
# one part of a setting's path: a key, or an item of a list (`key[0]`)
_LIST_ITEM = re.compile(r"(?P<name>[^.\[\]]+)(?:\[(?P<index>\d{1,4})\])?")
_EXAMPLES = (
    """examples:
  vgpu-agent doctor                              this node, with the settings of the running agent
  vgpu-agent doctor --config config.yaml         before the agent is installed
  vgpu-agent doctor --json | jq '.findings[] | select(.level != "ok")'
  kubectl -n vgpu-agent exec AGENT -- vgpu-agent doctor

The exit status is 0 when all is well, 1 when there are warnings and 2 when there are errors.
All flags of `vgpu-agent run` are accepted. Without any, the settings of the running agent are
used, or where none answers, those of """
    + _MOUNTED_CONFIG
)


# What the command reads of the agent's answers to /debug/config and /debug/devices.


class _ConfigValue(msgspec.Struct):
    value: Any = None


class _ConfigAnswer(msgspec.Struct):
    values: dict[str, _ConfigValue] = {}


class _DevicesAnswer(msgspec.Struct):
    nvml: NvmlView = NvmlView()
    gpus: tuple[GpuView, ...] = ()


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="check what the agent needs of this node, with a remedy for each fault",
        description=(
            "Check what the agent needs of this node: driver, container runtime, CDI, cgroups, the "
            "kubelet's sockets, other plugins, MPS, libraries, limits, clock and rights."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings, and return 0, 1 or 2 for the worst of them.

    Raises:
        ConfigError: the debug address makes no sense.
    """
    flags = options.given(arguments)
    address = debug_address.address(flags.pop("--debug-listen", None))
    found = list[Finding]()
    for finding in examine(flags, address):
        found.append(finding)
        if not arguments.json:
            print(_shown(finding, colour=sys.stdout.isatty()), flush=True)
    worst = max((finding.level for finding in found), key=_EXIT_STATUS.__getitem__)
    if arguments.json:
        report = {"worst": worst, "findings": found}
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print(_summary(found))
    sys.stdout.flush()
    return _EXIT_STATUS[worst]


def examine(flags: Mapping[str, str], address: Address) -> Iterator[Finding]:
    """Look at this node, and yield what is found, check by check.

    Args:
        flags: the settings of the command line, as from `options.given`.
        address: the debug address of an agent that may run here.
    """
    agent, trouble = running_agent(address)
    if trouble:
        yield Finding("agent", Level.ERROR, trouble, "see its log, or docs/troubleshooting.md")
    settings, findings = settings_in_force(flags, address, agent=agent is not None)
    yield from findings
    # not a Node of Kubernetes: what the checks need to know of this machine
    node = Node(settings, agent, in_container=node_checks.is_in_container())
    for name, check in CHECKS:
        if name == "agent" and trouble:
            continue
        yield from _within_time(name, functools.partial(check, node))


def _within_time(name: str, check: Callable[[], Iterable[Finding]]) -> tuple[Finding, ...]:
    """Run a check in a thread, and give up on one that blocks: the thread ends with the process."""
    done: list[tuple[Finding, ...]] = []

    def in_thread() -> None:
        try:
            done.append(tuple(check()))
        except Exception as err:  # noqa: BLE001 - one broken check must not hide the others
            text = f"could not be checked: {type(err).__name__}: {err}"
            done.append((Finding(name, Level.ERROR, text, "report this as a bug"),))

    thread = threading.Thread(target=in_thread, name=f"doctor: {name}", daemon=True)
    thread.start()
    thread.join(_CHECK_SECONDS)
    if done:
        return done[0]
    text = f"did not answer within {_CHECK_SECONDS:g} s"
    return (Finding(name, Level.ERROR, text, "see dmesg: a driver or a file system hangs"),)


def running_agent(address: Address) -> tuple[RunningAgent | None, str]:
    """Return the agent that runs here, None if there is none or it cannot be read; and why one that
    listens cannot be read, otherwise an empty text.
    """
    try:
        overview = debug_address.fetch(address, "/debug/status", _ASK_SECONDS)
        devices = debug_address.fetch(address, "/debug/devices", _ASK_SECONDS)
        answer = msgspec.json.decode(devices, type=_DevicesAnswer)
        found = msgspec.json.decode(overview, type=Overview)
    except debug_address.NoAgentError:
        return None, ""
    except AgentError as err:
        return None, str(err)
    except msgspec.DecodeError as err:
        return None, f"{address} does not answer as an agent does ({err})"
    return RunningAgent(found, answer.nvml, answer.gpus), ""


def settings_in_force(
    flags: Mapping[str, str], address: Address, *, agent: bool
) -> tuple[Settings, list[Finding]]:
    """Return the settings to check with, and the findings about them; ``agent``: one runs and
    answers at ``address``.
    """
    name = "configuration"
    if agent and not flags:
        try:
            body = debug_address.fetch(address, "/debug/config", _ASK_SECONDS)
            answer = msgspec.json.decode(body, type=_ConfigAnswer)
            values = {path: found.value for path, found in answer.values.items()}
            return settings_of(values), [Finding(name, Level.OK, "that of the running agent")]
        except (AgentError, msgspec.DecodeError) as err:
            note = Finding(
                name,
                Level.WARNING,
                f"that of the running agent cannot be used here: {err}",
                "use the vgpu-agent of the agent's own version",
            )
            return _loaded({}, name, [note])
    return _loaded(flags, name, [])


def _loaded(
    flags: Mapping[str, str], name: str, findings: list[Finding]
) -> tuple[Settings, list[Finding]]:
    if (file := config_file(flags)) is not None:
        flags = {**flags, options.CONFIG_FLAG: file}
    remedy = "vgpu-agent config check says more; docs/configuration.md has every key"
    try:
        loaded = load.load(flags, os.environ)
    except ConfigError as err:
        findings += [Finding(name, Level.ERROR, problem, remedy) for problem in err.problems]
        return schema.root()(), findings  # all settings with their defaults
    # settings of several families that are in conflict: the agent starts without what they concern
    findings += [Finding(name, Level.ERROR, text, remedy) for text in loaded.collisions]
    findings += [Finding(name, Level.WARNING, text, remedy) for text in loaded.warnings]
    if not findings:
        text = loaded.files or "the defaults, the environment and the flags (no file)"
        findings.append(Finding(name, Level.OK, text))
    return loaded.settings, findings


def config_file(flags: Mapping[str, str]) -> str | None:
    """Return the configuration file: that of the flags, of the environment, or the one that the
    DaemonSet mounts, if it is there.
    """
    named = flags.get(options.CONFIG_FLAG) or os.environ.get(options.CONFIG_VARIABLE)
    return named or (_MOUNTED_CONFIG if os.path.exists(_MOUNTED_CONFIG) else None)


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Return the settings with these values, by dotted path as in ``/debug/config``.

    Raises:
        ConfigError: a value is not one of this version's.
    """
    document: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        section = document
        for parent in parents:
            section = _below(section, parent)
        section[last] = value
    try:
        return msgspec.convert(document, schema.root())
    except msgspec.ValidationError as err:
        raise ConfigError([str(err)]) from err


def _below(section: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the section ``name``, or the item ``name[0]`` of a list, made where it is missing."""
    found = _LIST_ITEM.fullmatch(name)
    if found is None or found["index"] is None:
        below: dict[str, Any] = section.setdefault(name, {})
        return below
    items: list[dict[str, Any]] = section.setdefault(found["name"], [])
    while len(items) <= int(found["index"]):
        items.append({})
    return items[int(found["index"])]


def _shown(finding: Finding, *, colour: bool) -> str:
    width = max(60, min(shutil.get_terminal_size((80, 24)).columns, 120))
    indent = " " * (_LEVEL_WIDTH + _CHECK_WIDTH)
    level = finding.level.ljust(_LEVEL_WIDTH)
    head = finding.check.ljust(_CHECK_WIDTH - 1) + " "
    text = " ".join(finding.text.split())
    lines = textwrap.wrap(
        f"{level}{head}{text}",
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if finding.remedy:
        lines += textwrap.wrap(
            f"remedy: {' '.join(finding.remedy.split())}",
            width,
            initial_indent=indent,
            subsequent_indent=indent + " " * len("remedy: "),
            break_long_words=False,
            break_on_hyphens=False,
        )
    if colour:
        lines[0] = lines[0].replace(
            finding.level, f"\033[{_COLOURS[finding.level]}m{finding.level}\033[0m", 1
        )
    return "\n".join(lines)


def _summary(found: list[Finding]) -> str:
    count = {level: sum(finding.level is level for finding in found) for level in Level}
    return f"{count[Level.OK]} ok, {count[Level.WARNING]} warnings, {count[Level.ERROR]} errors"
