"""The running agent as the commands of the same machine reach it: its debug address, and the
answers that it gives there.

Used by `answers`, ``status``, ``top``, ``doctor`` and ``support-bundle``. It needs nothing of the
node but that port, so it also works inside the agent's pod and through a port forward. Plain
http.client: no proxy from the environment may come between the agent and the loopback interface,
and aiohttp takes long to import.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
from typing import NamedTuple

from vgpu_agent.errors import ConfigError, ListenError, UnreachableError
from vgpu_agent.web.address import STATE_HEADER, Address, parse

ENVIRONMENT = "VGPU_AGENT_DEBUG_LISTEN"
DEFAULT = "127.0.0.1:9395"
# The answer of /debug/status of the largest node has a few MiB. Another program at this address may
# send no end.
_LARGEST_BYTES = 64 * 1024 * 1024
_TIMEOUT_SECONDS = 5.0
_LONGEST_TIMEOUT_SECONDS = 3600


class NoAgentError(UnreachableError):
    """Nothing listens at the debug address."""


class Answer(NamedTuple):
    """An answer of the agent: its body, and for /debug/status the state of the node (``healthy``,
    ``degraded`` or ``not-ready``), else empty.
    """

    body: bytes
    state: str


def add_arguments(parser: argparse.ArgumentParser, *, timeout: bool = True) -> None:
    """Declare ``--debug-listen`` and, unless the command has its own, ``--timeout``."""
    parser.add_argument(
        "--debug-listen", metavar="ADDR", help=f"where the agent serves /debug (default {DEFAULT})"
    )
    if timeout:
        add_timeout(parser, "how long to wait for the agent", _TIMEOUT_SECONDS)


def add_timeout(parser: argparse.ArgumentParser, purpose: str, default_seconds: float) -> None:
    """Declare ``--timeout``; ``purpose`` says in its help what the time limits."""
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        default=default_seconds,
        help=f"{purpose} (default {default_seconds:g})",
    )


def address(flag: str | None) -> Address:
    """Return the address at which the agent is reached: that of the flag, of the environment, or
    the default.

    Raises:
        ConfigError: the address makes no sense.
    """
    given = (
        ("--debug-listen", flag)
        if flag
        else (f"environment variable {ENVIRONMENT}", os.environ.get(ENVIRONMENT))
    )
    try:
        # `reachable`: the loopback address where the agent listens on all
        return parse(given[1] or DEFAULT).reachable
    except ListenError as err:
        raise ConfigError([f"{given[0]}: {err}"]) from err


def fetch(where: Address, path: str, timeout_seconds: float, *, failing: bool = False) -> bytes:
    """Return the body of the agent's answer; parameters and errors are those of `ask`."""
    return ask(where, path, timeout_seconds, failing=failing).body


def ask(where: Address, path: str, timeout_seconds: float, *, failing: bool = False) -> Answer:
    """Return the agent's answer to a GET of ``path``.

    Args:
        where: the agent's address.
        path: with its query.
        timeout_seconds: for connecting, and for each wait for more of the answer.
        failing: also return the answer of a probe that fails, with status 503.

    Raises:
        NoAgentError: nothing listens there.
        UnreachableError: the agent cannot be reached or refuses, or another program answers. The
            message is one line with the remedy.
        ConfigError: the agent does not understand the query.
    """
    connection = http.client.HTTPConnection(where.host, where.port, timeout=timeout_seconds)
    try:
        connection.request("GET", path, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        body = answer.read(_LARGEST_BYTES + 1)
    except ConnectionRefusedError as err:
        raise NoAgentError(
            f"cannot reach the agent at {where}: connection refused; is it running? If it "
            "listens elsewhere, name its address with --debug-listen"
        ) from err
    except TimeoutError as err:
        raise UnreachableError(
            f"the agent at {where} did not answer within {timeout_seconds:g} s; look into its "
            "log, or wait longer with --timeout"
        ) from err
    except http.client.HTTPException as err:
        raise UnreachableError(
            f"the server at {where} does not speak HTTP ({type(err).__name__}); check "
            "--debug-listen"
        ) from err
    except OSError as err:
        raise UnreachableError(
            f"cannot reach the agent at {where}: {err.strerror or err}; check --debug-listen"
        ) from err
    finally:
        connection.close()
    shown = path.partition("?")[0]
    if answer.status == http.HTTPStatus.BAD_REQUEST and (refusal := _refusal(body)):
        raise ConfigError([f"the agent at {where} refuses {shown}: {refusal}"])
    if answer.status != http.HTTPStatus.OK and not (
        failing and answer.status == http.HTTPStatus.SERVICE_UNAVAILABLE
    ):
        raise UnreachableError(
            f"{where} answers {shown} with {answer.status} {answer.reason}; is that the agent's "
            "debug address?"
        )
    if len(body) > _LARGEST_BYTES:
        raise UnreachableError(
            f"{where} answers {shown} with more than {_LARGEST_BYTES >> 20} MiB; check "
            "--debug-listen"
        )
    return Answer(body, answer.headers.get(STATE_HEADER, ""))


def _refusal(body: bytes) -> str:
    """Return the text of an agent's refusal; empty for another program's."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    text = found.get("error") if isinstance(found, dict) else None
    return " ".join(text.split()) if isinstance(text, str) else ""


def seconds(text: str) -> float:
    """Parse a number of seconds for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none, or out of range.
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= _LONGEST_TIMEOUT_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected seconds above 0 and up to {_LONGEST_TIMEOUT_SECONDS}, got {text!r}"
        )
    return found
