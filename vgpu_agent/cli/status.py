"""``vgpu-agent status``: the node on one page, asked from the running agent over its debug port.

Built into the command line by `cli`; needs nothing of the node but that port, so it also works inside the agent's pod and through a port
forward. Plain http.client: no proxy from the environment may stand between us and the loopback interface, and aiohttp takes long to import.
"""

from __future__ import annotations

import argparse
import http.client
import os
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import AgentError, ConfigError, ListenError
from vgpu_agent.web import page, views
from vgpu_agent.web.address import Address, parse

if TYPE_CHECKING:
    from typing import Any

ENVIRONMENT = "VGPU_AGENT_DEBUG_LISTEN"
_DEFAULT = "127.0.0.1:9395"
_PATH = "/debug/status"
_EXAMPLES = f"""examples:
  vgpu-agent status                                  the agent of this node
  vgpu-agent status --json | jq '.pods[].pod'        for scripts
  vgpu-agent status --debug-listen 127.0.0.1:19395   through a port forward

The exit status is 0 when the agent answered, 1 when it did not. {ENVIRONMENT} replaces the default address."""


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action, which has no public type)."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status",
        help="what the running agent knows: GPUs, resources, pods, problems",
        description="Ask the running agent what it knows: GPUs, resources, who holds what, and what is wrong.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug-listen", metavar="ADDR", help=f"where the agent serves /debug (default {_DEFAULT})")
    parser.add_argument("--json", action="store_true", help="print the agent's answer as JSON")
    parser.add_argument("--timeout", metavar="SECONDS", type=_seconds, default=5.0, help="how long to wait for the agent (default 5)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the overview.

    Raises:
        ConfigError: the address makes no sense.
        AgentError: the agent cannot be reached, or what answers is not the agent; one line with the remedy.
    """
    address = _address(arguments.debug_listen)
    body = _fetch(address, arguments.timeout)
    overview = _decoded(body, address)
    print(msgspec.json.format(body, indent=2).decode().strip() if arguments.json else page.as_text(overview).rstrip("\n"))
    return 0


def _address(flag: str | None) -> Address:
    given = ("--debug-listen", flag) if flag else (f"environment variable {ENVIRONMENT}", os.environ.get(ENVIRONMENT))
    try:
        return parse(given[1] or _DEFAULT).reachable
    except ListenError as err:
        raise ConfigError([f"{given[0]}: {err}"]) from err


def _fetch(address: Address, timeout_seconds: float) -> bytes:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_seconds)
    try:
        connection.request("GET", _PATH, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
    except ConnectionRefusedError as err:
        raise AgentError(
            f"cannot reach the agent at {address}: connection refused; is it running? If it listens elsewhere, say so with --debug-listen"
        ) from err
    except TimeoutError as err:
        raise AgentError(
            f"the agent at {address} did not answer within {timeout_seconds:g} s; its log may say what holds it up (--timeout waits longer)"
        ) from err
    except http.client.HTTPException as err:
        raise AgentError(f"what listens at {address} does not speak HTTP ({type(err).__name__}); check --debug-listen") from err
    except OSError as err:
        raise AgentError(f"cannot reach the agent at {address}: {err.strerror or err}; check --debug-listen") from err
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise AgentError(f"{address} answers {_PATH} with {answer.status} {answer.reason}; is that the agent's debug address?")
    return body


def _decoded(body: bytes, address: Address) -> views.Overview:
    try:
        return msgspec.json.decode(body, type=views.Overview)
    except msgspec.DecodeError as err:  # covers ValidationError
        raise AgentError(f"{address} answers {_PATH} with something that is not an agent's status ({err}); check --debug-listen") from err


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds above 0 and up to 3600, got {text!r}")
    return seconds
