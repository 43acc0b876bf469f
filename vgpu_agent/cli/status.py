"""``vgpu-agent status``: the node on one page, or one pod in sentences,
asked from the running agent over its debug port.

Needs nothing but that port, so it also works inside the agent's pod and through a port forward.
Uses plain http.client: it ignores proxies in the environment, and aiohttp takes long to import.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import urllib.parse
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vgpu_agent.errors import AgentError, ConfigError, ListenError
from vgpu_agent.web import page
from vgpu_agent.web.address import Address, parse
from vgpu_agent.web.explain import Explanation
from vgpu_agent.web.views import Overview

if TYPE_CHECKING:
    from typing import Any

T = TypeVar("T")

ENVIRONMENT = "VGPU_AGENT_DEBUG_LISTEN"
_DEFAULT = "127.0.0.1:9395"
_PATH = "/debug/status"
_POD = re.compile(r"[^/\s]+/[^/\s]+\Z")
_EXAMPLES = f"""examples:
  vgpu-agent status                                  the agent of this node
  vgpu-agent status --pod ml/train-0                 why it does not start, or what it has and how
                                                     that is known
  vgpu-agent status --json | jq '.pods[].pod'        for scripts
  vgpu-agent status --debug-listen 127.0.0.1:19395   through a port forward

The exit status is 0 when the agent answered, 1 when it did not.
{ENVIRONMENT} replaces the default address."""


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
    parser.add_argument(
        "--debug-listen", metavar="ADDR", help=f"where the agent serves /debug (default {_DEFAULT})"
    )
    parser.add_argument(
        "--pod",
        metavar="NAMESPACE/NAME",
        type=_pod,
        help="explain one pod instead: why it does not start, or what it has",
    )
    parser.add_argument("--json", action="store_true", help="print the agent's answer as JSON")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=5.0,
        help="how long to wait for the agent (default 5)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the overview, or what is known of one pod.

    Raises:
        ConfigError: the address is invalid.
        AgentError: the agent cannot be reached, or another program answers; one line with the
            remedy.
    """
    address = _address(arguments.debug_listen)
    path = f"/debug/explain?pod={urllib.parse.quote(arguments.pod)}" if arguments.pod else _PATH
    body = _fetch(address, path, arguments.timeout)
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


def _address(flag: str | None) -> Address:
    given = (
        ("--debug-listen", flag)
        if flag
        else (f"environment variable {ENVIRONMENT}", os.environ.get(ENVIRONMENT))
    )
    try:
        return parse(given[1] or _DEFAULT).reachable
    except ListenError as err:
        raise ConfigError([f"{given[0]}: {err}"]) from err


def _fetch(address: Address, path: str, timeout_seconds: float) -> bytes:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_seconds)
    try:
        connection.request("GET", path, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
    except ConnectionRefusedError as err:
        raise AgentError(
            f"cannot reach the agent at {address}: connection refused; is it running? If it "
            "listens elsewhere, name its address with --debug-listen"
        ) from err
    except TimeoutError as err:
        raise AgentError(
            f"the agent at {address} did not answer within {timeout_seconds:g} s; look into its "
            "log, or wait longer with --timeout"
        ) from err
    except http.client.HTTPException as err:
        raise AgentError(
            f"the server at {address} does not speak HTTP ({type(err).__name__}); check "
            "--debug-listen"
        ) from err
    except OSError as err:
        raise AgentError(
            f"cannot reach the agent at {address}: {err.strerror or err}; check --debug-listen"
        ) from err
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise AgentError(
            f"{address} answers {path} with {answer.status} {answer.reason}; is that the agent's "
            "debug address?"
        )
    return body


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


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds above 0 and up to 3600, got {text!r}")
    return seconds
