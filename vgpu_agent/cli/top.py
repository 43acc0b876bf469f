"""``vgpu-agent top``: the memory and compute of each GPU that are given to pods and that are in
use, as a live view of a terminal or as one table.

It asks the running agent over its debug port, as ``status`` does (`debug_address`), and needs
nothing else. The answer is decoded to types of its own with the fields that are shown, so that it
starts quickly and reads an agent of another version. The view is drawn with the escape sequences
that every terminal has: an image need not contain curses and its database.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vgpu_agent.cli import debug_address
from vgpu_agent.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.web.address import Address

_PATH = "/debug/status"
_INTERVAL_SECONDS = 2.0
_NARROWEST = 60  # columns of the table, also on a narrower terminal
_NO_TERMINAL = (100, 24)  # columns and lines where the output is none
_WHOLE_DEVICE = "whole device"  # the state of the limit of a grant whose device is not shared
_ENTER, _LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"  # another screen, no cursor
_HOME, _REST = "\033[H", "\033[J"  # cursor to the first line; clear all after the cursor
_PLAIN, _BOLD, _RED, _DIM = "", "1", "31", "2"  # SGR: styles of text on a terminal
_UP, _DOWN, _QUIT = ("k", "\033[A", "\033OA"), ("j", "\033[B", "\033OB"), ("q", "\033", "\x03")
# control characters, which texts of the node may contain → a blank
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), " ")
_EXAMPLES = """examples:
  vgpu-agent top                      live; q ends it, arrows scroll
  vgpu-agent top --once               one table, as in a pipe
  kubectl -n vgpu-agent exec -it AGENT -- vgpu-agent top
  kubectl vgpu top --watch 5          all nodes

USED is what the driver measures. GIVEN is the sum of the limits of the pods' shares: of memory in
MiB, and of compute in percent of the GPU. A share without a limit is not part of the sum, and is
shown as "no limit"."""


class _Usage(msgspec.Struct):
    memory_used_mib: int | None = None
    utilisation_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None


class _Illness(msgspec.Struct):
    """The trouble of an Unhealthy GPU: when it is offered again if nothing else happens; None where
    more than time is missing.
    """

    offered_again_in_seconds: float | None = None


class _Mig(msgspec.Struct):
    uuid: str
    profile: str = ""
    memory_mib: int = 0


class _Gpu(msgspec.Struct):
    uuid: str
    index: int = 0
    name: str = ""
    memory_mib: int = 0
    present: bool = True
    health: str = ""
    health_reason: str = ""
    max_holders: int | None = None  # how many shares of it there may be at once
    usage: _Usage | None = None
    mig_instances: tuple[_Mig, ...] = ()
    illness: _Illness | None = None


class _Share(msgspec.Struct):
    device: str  # UUID of the GPU or of the MIG instance
    gpu: str = ""  # UUID of its GPU
    memory_mib: int = 0
    cores_percent: int = 0
    exclusive: bool = False


class _Grant(msgspec.Struct):
    container: str = ""
    resource: str = ""
    limit: str = ""  # the state of its limits, a value of `web.limits.LimitState`
    shares: tuple[_Share, ...] = ()


class _Pod(msgspec.Struct):
    pod: str  # ``namespace/name``
    grants: tuple[_Grant, ...] = ()


class _Problem(msgspec.Struct):
    part: str = ""  # what has the problem; the view shows only how many there are


class Node(msgspec.Struct):
    """The fields of ``/debug/status`` that are shown."""

    node: str
    ready: bool = False  # the agent's ``/readyz`` succeeds
    simulated: bool = False
    driver_version: str = ""
    gpus: tuple[_Gpu, ...] = ()
    pods: tuple[_Pod, ...] = ()
    problems: tuple[_Problem, ...] = ()


class Line(NamedTuple):
    """A line of the view, and how it is shown on a terminal (SGR)."""

    text: str
    style: str = _PLAIN


class _Held(NamedTuple):
    """A share of a GPU. Memory and compute are None without a limit."""

    pod: str
    container: str
    resource: str
    device: str  # the profile of a MIG instance; empty for a GPU
    memory_mib: int | None
    cores_percent: int | None


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "top",
        help="show live how much of each GPU is granted and used",
        description="Show what of each GPU is given to pods, and what of it is in use.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--once", action="store_true", help="print one table and end, as without a terminal"
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=debug_address.seconds,
        default=_INTERVAL_SECONDS,
        help=f"how often the live view is drawn (default {_INTERVAL_SECONDS:g})",
    )
    debug_address.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one table, or draw the view until `q` is pressed.

    Raises:
        ConfigError: the address makes no sense.
        UnreachableError: the agent cannot be reached at the start, or another program answers.
    """
    address = debug_address.address(arguments.debug_listen)
    node = _fetch(address, arguments.timeout)
    if arguments.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        columns, _ = shutil.get_terminal_size(_NO_TERMINAL)
        width = max(columns, _NARROWEST) if sys.stdout.isatty() else None
        for line in table(node, width, bars=False):
            print(line.text)
        return 0
    _live(node, address, arguments.timeout, arguments.interval)
    return 0


def _fetch(address: Address, timeout_seconds: float) -> Node:
    body = debug_address.fetch(address, _PATH, timeout_seconds)
    try:
        return msgspec.json.decode(body, type=Node)
    except msgspec.DecodeError as err:  # covers ValidationError
        raise UnreachableError(
            f"{address} answers {_PATH} with something that is not an agent's status ({err}); "
            "check --debug-listen"
        ) from err


# ---- the table


def table(node: Node, width: int | None, *, bars: bool) -> list[Line]:
    """Return the view of a node.

    Args:
        node: the agent's answer.
        width: lines are cut after as many characters; None for whole lines.
        bars: also draw a line of bars for each GPU.
    """
    lines = [Line(_headline(node), _BOLD if node.ready else _RED)]
    if node.simulated:
        lines.append(Line("*** SIMULATED GPUs: nothing here is real hardware ***", _BOLD))
    lines.append(Line(""))
    rows = [_HEAD, *(_row(gpu, _held(node, gpu)) for gpu in node.gpus)]
    aligned = _aligned(rows)
    lines.append(Line(aligned[0], _DIM))
    for gpu, text in zip(node.gpus, aligned[1:], strict=True):
        held = _held(node, gpu)
        sound = gpu.present and gpu.health == "Healthy"
        lines.append(Line(text, _PLAIN if sound else _RED))
        if bars:
            lines.append(Line(_bars(gpu, held, width or _NO_TERMINAL[0])))
        if not sound:
            lines.append(Line(f"    {_trouble(gpu)}", _RED))
        lines += [Line(f"    {_pod(each)}") for each in held]
    if not node.gpus:
        lines.append(Line("  no GPU"))
    return [Line(_cut(line.text.translate(_CONTROL).rstrip(), width), line.style) for line in lines]


_HEAD = ("GPU", "NAME", "HEALTH", "TEMP", "POWER", "MEMORY USED", "GIVEN", "USE", "GIVEN", "SHARES")


def _headline(node: Node) -> str:
    parts = [
        f"node {node.node}",
        "ready" if node.ready else "NOT READY",
        f"{len(node.gpus)} GPUs",
        f"{sum(len(grant.shares) for pod in node.pods for grant in pod.grants)} shares",
    ]
    if node.driver_version:
        parts.append(f"driver {node.driver_version}")
    if node.problems:
        parts.append(f"{len(node.problems)} problems (vgpu-agent status)")
    return " · ".join(parts)


def _row(gpu: _Gpu, held: list[_Held]) -> tuple[str, ...]:
    usage = gpu.usage or _Usage()
    return (
        str(gpu.index),
        gpu.name,
        gpu.health if gpu.present else "Gone",
        _figure(usage.temperature_celsius, " C"),
        _figure(None if usage.power_watts is None else round(usage.power_watts), " W"),
        f"{_figure(usage.memory_used_mib)}/{gpu.memory_mib or '-'} MiB",
        _given([each.memory_mib for each in held], " MiB"),
        _figure(usage.utilisation_percent, " %"),
        _given([each.cores_percent for each in held], " %"),
        str(len(held)) + (f"/{gpu.max_holders}" if gpu.max_holders is not None else ""),
    )


def _figure(value: int | None, unit: str = "") -> str:
    return "-" if value is None else f"{value}{unit}"


def _given(limits: list[int | None], unit: str) -> str:
    """Sum the limits of shares; "no limit" where none of several has one, and a plus where some do
    not.
    """
    known = [limit for limit in limits if limit is not None]
    if not limits:
        return f"0{unit}"
    if not known:
        return "no limit"
    return f"{sum(known)}{unit}{'+' if len(known) < len(limits) else ''}"


def _held(node: Node, gpu: _Gpu) -> list[_Held]:
    """List the shares of a GPU and of its MIG instances, by pod."""
    instances = {each.uuid: each for each in gpu.mig_instances}
    found = []
    for pod in node.pods:
        for grant in pod.grants:
            for share in grant.shares:
                if gpu.uuid not in (share.gpu, share.device):
                    continue
                instance = instances.get(share.device)
                whole = instance is not None or share.exclusive or grant.limit == _WHOLE_DEVICE
                memory = instance.memory_mib if instance else gpu.memory_mib
                found.append(
                    _Held(
                        pod=pod.pod,
                        container=grant.container,
                        resource=grant.resource,
                        device=instance.profile if instance else "",
                        memory_mib=share.memory_mib or (memory if whole else None),
                        cores_percent=share.cores_percent
                        or (100 if whole and instance is None else None),
                    )
                )
    return found


def _pod(held: _Held) -> str:
    limits = (_figure(held.memory_mib, " MiB"), _figure(held.cores_percent, " %"))
    amounts = ", ".join("no limit" if limit == "-" else limit for limit in limits)
    if held.memory_mib is None and held.cores_percent is None:
        amounts = "no limit"
    container = f" {held.container}" if held.container else ""
    kind = " ".join(filter(None, (held.resource, held.device)))
    return f"{held.pod}{container}: {amounts} ({kind})"


def _trouble(gpu: _Gpu) -> str:
    left = gpu.illness.offered_again_in_seconds if gpu.illness else None
    again = "" if left is None else f"offered again in {left:.0f} s; "
    return f"{again}{gpu.health_reason or 'it no longer answers'}"


def _bars(gpu: _Gpu, held: list[_Held], width: int) -> str:
    """Draw memory and compute: used as ``|``, given and not used as ``:``."""
    usage = gpu.usage or _Usage()
    length = max(8, min(40, (width - 40) // 2))
    memory = _bar(
        usage.memory_used_mib or 0,
        sum(each.memory_mib or 0 for each in held),
        gpu.memory_mib,
        length,
    )
    compute = _bar(
        usage.utilisation_percent or 0, sum(each.cores_percent or 0 for each in held), 100, length
    )
    return f"    memory {memory}   compute {compute}"


def _bar(used: int, given: int, total: int, length: int) -> str:
    def part(amount: int) -> int:
        return min(length, round(length * amount / total)) if total else 0

    return "[" + ("|" * part(used)).ljust(part(given), ":").ljust(length, ".") + "]"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"


# ---- the live view


def _live(node: Node, address: Address, timeout_seconds: float, interval_seconds: float) -> None:
    first, trouble = 0, ""  # the first line in view, and why the last question had no answer
    with _screen():
        while True:
            columns, height = shutil.get_terminal_size(_NO_TERMINAL)
            lines = table(node, columns, bars=True)
            first = max(0, min(first, len(lines) - (height - 1)))
            _draw(lines[first:], columns, height, trouble)
            pressed = _key(interval_seconds)
            if pressed in _QUIT:
                return
            first += (pressed in _DOWN) - (pressed in _UP)
            if pressed:
                continue
            try:
                node, trouble = _fetch(address, timeout_seconds), ""
            except UnreachableError as err:
                trouble = str(err)  # the last answer stays, and the agent may come back


def _draw(lines: list[Line], columns: int, height: int, trouble: str) -> None:
    shown = lines[: height - 1]
    more = len(lines) - len(shown)
    moment = time.strftime("%H:%M:%S")
    foot = trouble or f"{moment}  q ends{f', {more} more lines below' if more else ''}"
    shown = [*shown, Line(_cut(foot, columns), _RED if trouble else _DIM)]
    text = "\033[K\r\n".join(
        f"\033[{line.style}m{line.text}\033[0m" if line.style else line.text for line in shown
    )
    sys.stdout.write(f"{_HOME}{text}\033[K{_REST}")
    sys.stdout.flush()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Use the terminal's other screen, and get keys as they are pressed."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _key(seconds: float) -> str:
    """Wait for a key and return it with its escape sequence; empty when none was pressed, and ``q``
    at the end of the input.
    """
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return ""
    # past Python's buffer, which select does not see
    return os.read(sys.stdin.fileno(), 16).decode(errors="replace") or "q"
