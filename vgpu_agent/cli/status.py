"""``vgpu-agent status``: the node on one page, once, again and again, or as soon as it is ready.

It is fetched from the running agent over its debug port, so the command needs nothing of the node
but that port (`debug_address`). The exit status tells the state of the node.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from vgpu_agent.cli import answers, debug_address, explain
from vgpu_agent.errors import UnreachableError
from vgpu_agent.web.address import DEGRADED, HEALTHY, NOT_READY

if TYPE_CHECKING:
    from typing import Any

    from vgpu_agent.web.address import Address

_PATH = "/debug/status"
_EXIT_DEGRADED = 1
_ASK_SECONDS, _WAIT_SECONDS = 5.0, 60.0
_WATCH_SECONDS, _POLL_SECONDS = 2.0, 0.5
# argument of --wait → the states of the node that satisfy it
_WAITED_FOR = {"ready": (HEALTHY, DEGRADED), "healthy": (HEALTHY,)}
_CLEAR = "\033[H\033[2J\033[3J"  # clears a terminal, with the lines above
_EXAMPLES = f"""examples:
  vgpu-agent status                                  the agent of this node
  vgpu-agent status -o wide                          one line per row, untruncated
  vgpu-agent status -o json | jq '.pods[].pod'       for scripts
  vgpu-agent status --watch 5                        again every five seconds
  vgpu-agent status --wait ready --timeout 120       return once it is ready
  vgpu-agent status --debug-listen 127.0.0.1:19395   through a port forward

exit status:
  0  ready, and no problem is known
  1  degraded: not ready, or a problem is known
  2  the agent cannot be reached, or the arguments are invalid
With --wait: 0 once the state is reached, 1 when it is not in time.
With --pod: 0 when the agent answered.

{debug_address.ENVIRONMENT} replaces the default address. Colours are for a terminal only; NO_COLOR
switches them off."""


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status",
        help="show the GPUs, resources, pods and problems of the running agent",
        description=(
            "Show the GPUs, the resources, their holders and the problems of the running agent."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    answers.add_arguments(parser, timeout=False)
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=debug_address.seconds,
        help=f"how long to wait for the agent (default {_ASK_SECONDS:g}), or with --wait for the "
        f"state (default {_WAIT_SECONDS:g})",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--watch",
        metavar="SECONDS",
        type=debug_address.seconds,
        nargs="?",
        const=_WATCH_SECONDS,
        help=f"show it again and again, until Ctrl-C (default every {_WATCH_SECONDS:g} s)",
    )
    instead.add_argument(
        "--wait",
        choices=_WAITED_FOR,
        help="wait until the agent is ready, or ready without a problem (healthy)",
    )
    instead.add_argument(
        "--pod",
        metavar="NAMESPACE/NAME",
        type=answers.pod,
        help="explain one pod instead, as vgpu-agent explain does",
    )
    parser.add_argument(
        "--json", dest="output", action="store_const", const=answers.JSON, help="as -o json"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the overview, or what is known of one pod.

    Raises:
        ConfigError: the address is invalid.
        UnreachableError: the agent cannot be reached, or another program answers; one line with the
            remedy.
    """
    address = debug_address.address(arguments.debug_listen)
    timeout_seconds = arguments.timeout or (_WAIT_SECONDS if arguments.wait else _ASK_SECONDS)
    if arguments.pod:
        print(explain.fetch(address, arguments.pod, arguments.output, timeout_seconds))
        return 0
    if arguments.watch:
        return _watch(address, arguments.output, timeout_seconds, arguments.watch)
    if arguments.wait:
        return _wait(address, arguments.output, timeout_seconds, arguments.wait)
    text, state = _fetch(address, arguments.output, timeout_seconds)
    print(text)
    return _EXIT_DEGRADED if state in {DEGRADED, NOT_READY} else 0


def _fetch(address: Address, form: str | None, timeout_seconds: float) -> tuple[str, str]:
    """Return the overview in the ``form`` that -o names (None: as text), and the node's state."""
    # `{}`: no further query parameters; by the last two the agent's answer is recognised, as JSON
    # and as text
    return answers.fetch(address, _PATH, {}, form, timeout_seconds, key="node", beginning="node ")


def _watch(
    address: Address, form: str | None, timeout_seconds: float, interval_seconds: float
) -> int:
    """Print the overview until Ctrl-C. On a terminal each one replaces the one before."""
    while True:
        try:
            text, _state = _fetch(address, form, timeout_seconds)
        except UnreachableError as err:  # it may come back
            text = f"vgpu-agent: {err}"
        if sys.stdout.isatty():
            print(_CLEAR, end="")
        print(text, flush=True)
        time.sleep(interval_seconds)
        if not sys.stdout.isatty() and form is None:
            print()


def _wait(address: Address, form: str | None, timeout_seconds: float, wanted: str) -> int:
    """Print the overview once the node has the wanted state, or the last one when time is up."""
    end = time.monotonic() + timeout_seconds
    while True:
        left = end - time.monotonic()
        over = left <= _POLL_SECONDS
        try:
            text, state = _fetch(address, form, min(_ASK_SECONDS, max(left, _POLL_SECONDS)))
        except UnreachableError:
            if over:
                raise
        else:
            if state in _WAITED_FOR[wanted]:
                print(text)
                return 0
            if over:
                print(text, flush=True)
                print(f"vgpu-agent: not {wanted} within {timeout_seconds:g} s", file=sys.stderr)
                return _EXIT_DEGRADED
        time.sleep(_POLL_SECONDS)
