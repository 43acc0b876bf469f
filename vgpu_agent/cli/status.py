"""``vgpu-agent status``: the node on one page, or one pod in sentences,
asked from the running agent over its debug port.

Built into the command line by `cli`. It needs nothing of the node but that port (`debug_address`).
"""

from __future__ import annotations

import argparse
import re
import urllib.parse
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vgpu_agent.cli import debug_address
from vgpu_agent.errors import AgentError
from vgpu_agent.web import page
from vgpu_agent.web.explain import Explanation
from vgpu_agent.web.views import Overview

if TYPE_CHECKING:
    from typing import Any

    from vgpu_agent.web.address import Address

T = TypeVar("T")

_PATH = "/debug/status"
_POD = re.compile(r"[^/\s]+/[^/\s]+\Z")
_EXAMPLES = f"""examples:
  vgpu-agent status                                  the agent of this node
  vgpu-agent status --pod ml/train-0                 why it does not start, or what it has and how
                                                     that is known
  vgpu-agent status --json | jq '.pods[].pod'        for scripts
  vgpu-agent status --debug-listen 127.0.0.1:19395   through a port forward

The exit status is 0 when the agent answered, 1 when it did not.
{debug_address.ENVIRONMENT} replaces the default address."""


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
    debug_address.add_arguments(parser)
    parser.add_argument(
        "--pod",
        metavar="NAMESPACE/NAME",
        type=_pod,
        help="explain one pod instead: why it does not start, or what it has",
    )
    parser.add_argument("--json", action="store_true", help="print the agent's answer as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the overview, or what is known of one pod.

    Raises:
        ConfigError: the address is invalid.
        AgentError: the agent cannot be reached, or another program answers; one line with the
            remedy.
    """
    address = debug_address.address(arguments.debug_listen)
    path = f"/debug/explain?pod={urllib.parse.quote(arguments.pod)}" if arguments.pod else _PATH
    body = debug_address.fetch(address, path, arguments.timeout)
    if arguments.pod:
        text = page.explained(_decoded(body, Explanation, address, path))
    else:
        text = page.as_text(_decoded(body, Overview, address, path))
    print(
        msgspec.json.format(body, indent=2).decode().strip()
        if arguments.json
        else text.rstrip("\n")
    )
    return 0


def _decoded(body: bytes, kind: type[T], address: Address, path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as err:  # covers ValidationError
        raise AgentError(
            f"{address} answers {path} with something that is not an agent's status ({err}); check "
            "--debug-listen"
        ) from err


def _pod(text: str) -> str:
    if not _POD.match(text):
        raise argparse.ArgumentTypeError(
            f"expected NAMESPACE/NAME, for example default/train-0, got {text[:60]!r}"
        )
    return text
