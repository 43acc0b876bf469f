"""``vgpu-agent status``: the node on one page, or one pod in sentences,
asked from the running agent over its debug port.

Built into the command line by `cli`. It needs nothing of the node but that port (`debug_address`).
The agent makes the text: the types and functions for that would take ten times as long to import as
all else that this command does. For the same reason JSON is read with the standard library.
"""

from __future__ import annotations

import argparse
import json
import re
import urllib.parse
from typing import TYPE_CHECKING

from vgpu_agent.cli import debug_address
from vgpu_agent.errors import AgentError

if TYPE_CHECKING:
    from typing import Any

    from vgpu_agent.web.address import Address

_STATUS, _EXPLAIN = "/debug/status", "/debug/explain"
_BEGINNINGS = (b"node ", b"pod ")  # of the agent's texts
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
    query = {"pod": arguments.pod} if arguments.pod else {}
    if not arguments.json:
        query["text"] = ""
    path = _EXPLAIN if arguments.pod else _STATUS
    asked = f"{path}?{urllib.parse.urlencode(query, safe='/')}" if query else path
    body = debug_address.fetch(address, asked, arguments.timeout)
    key = "pod" if arguments.pod else "node"  # by which an agent's answer is recognised
    print(_formatted(body, key, address, path) if arguments.json else _text(body, address, path))
    return 0


def _text(body: bytes, address: Address, path: str) -> str:
    if not body.startswith(_BEGINNINGS):
        raise _not_an_agent(address, path)
    return body.decode(errors="replace").rstrip("\n")


def _formatted(body: bytes, key: str, address: Address, path: str) -> str:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as err:
        raise _not_an_agent(address, path) from err
    if not isinstance(found, dict) or not isinstance(found.get(key), str):
        raise _not_an_agent(address, path)
    return json.dumps(found, indent=2, ensure_ascii=False)


def _not_an_agent(address: Address, path: str) -> AgentError:
    return AgentError(
        f"{address} answers {path} with something that is not an agent's status; check "
        "--debug-listen"
    )


def _pod(text: str) -> str:
    if not _POD.match(text):
        raise argparse.ArgumentTypeError(
            f"expected NAMESPACE/NAME, for example default/train-0, got {text[:60]!r}"
        )
    return text
