"""Answers of the running agent on a terminal, or as JSON and YAML for scripts.

Used by ``status``, ``gpus``, ``pods``, ``events`` and ``explain``. The agent makes the text, in the
width and with the colours that it is asked for: the types and functions for that would take ten
times as long to import as all else that these commands do. For the same reason JSON is read with
the standard library, and YAML is imported only to be written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.parse
from typing import TYPE_CHECKING

from vgpu_agent.cli import debug_address
from vgpu_agent.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from vgpu_agent.web.address import Address

WIDE, JSON, YAML = "wide", "json", "yaml"
FORMS = (WIDE, JSON, YAML)  # of the output; without one, tables that fit the terminal
_NARROWEST, _USUAL, _WIDEST = 40, 80, 1000  # columns
_BOLD = b"\033[1m"
_POD = re.compile(r"[^/\s]+/[^/\s]+\Z")
EXIT_STATUS = (
    "The exit status is 0 when the agent answered, 2 when it did not or an argument is invalid.\n"
    f"{debug_address.ENVIRONMENT} replaces the default address. Colours are for a terminal only; "
    "NO_COLOR\nswitches them off."
)


def add_arguments(parser: argparse.ArgumentParser, *, timeout: bool = True) -> None:
    """Declare ``--output`` and ``--debug-listen``; also ``--timeout``, unless the command has its
    own.
    """
    parser.add_argument(
        "-o",
        "--output",
        choices=FORMS,
        metavar="FORM",
        help="wide (tables with one line per row), json or yaml (default: tables that fit the "
        "terminal, or 80 columns)",
    )
    debug_address.add_arguments(parser, timeout=timeout)


def add_table(
    subparsers: Any,
    name: str,
    *,
    help: str,  # noqa: A002 - the name that argparse has for it
    description: str,
    examples: str,
    path: str,
    key: str,
    beginning: str,
) -> None:
    """Declare a command that prints one answer of the agent.

    Args:
        subparsers: argparse's special action, which has no public type.
        name: of the command.
        help: one line for the list of commands.
        description: for its own help.
        examples: lines for the end of its help.
        path: of the answer, below ``/debug``.
        key: a key of the agent's JSON, by which it is recognised.
        beginning: of the agent's text, for the same.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"examples:\n{examples}\n\n{EXIT_STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)

    def run(arguments: argparse.Namespace) -> int:
        text, _state = fetch(
            debug_address.address(arguments.debug_listen),
            path,
            {},
            arguments.output,
            arguments.timeout,
            key=key,
            beginning=beginning,
        )
        print(text)
        return 0

    parser.set_defaults(run=run)


def pod(text: str) -> str:
    """Parse ``namespace/name`` for argparse.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    if not _POD.match(text):
        raise argparse.ArgumentTypeError(
            f"expected NAMESPACE/NAME, for example default/train-0, got {text[:60]!r}"
        )
    return text


def fetch(
    address: Address,
    path: str,
    query: Mapping[str, str],
    form: str | None,
    timeout_seconds: float,
    *,
    key: str,
    beginning: str,
) -> tuple[str, str]:
    """Return the text to print, and the state of the node, which only ``/debug/status`` tells;
    otherwise it is empty.

    Args:
        address: the agent's.
        path: below ``/debug``.
        query: its parameters.
        form: one of `FORMS`; None for tables that fit.
        timeout_seconds: for connecting, and for each wait for more of the answer.
        key: a key of the agent's JSON, by which it is recognised.
        beginning: the same for the text.

    Raises:
        UnreachableError: the agent cannot be reached, or another program answers.
        ConfigError: the agent does not understand the query.
    """
    in_words = form not in {JSON, YAML}
    asked = {**query, **_layout(form)} if in_words else query
    target = f"{path}?{urllib.parse.urlencode(asked, safe='/')}" if asked else path
    answer = debug_address.ask(address, target, timeout_seconds)
    if not in_words:
        return _document(answer.body, key, form, address, path), answer.state
    if not answer.body.removeprefix(_BOLD).startswith(beginning.encode()):
        raise _not_an_agent(address, path)
    return answer.body.decode(errors="replace").rstrip("\n"), answer.state


def _layout(form: str | None) -> dict[str, str]:
    """Return the query that asks for text; without ``columns`` each row of a table is one line."""
    query = {"text": ""}
    if form != WIDE:
        query["columns"] = str(_columns())
    if _has_colours():
        query["colours"] = ""
    return query


def _columns() -> int:
    """Return the width of the terminal, or that of COLUMNS. shutil has this, and takes long to
    import.
    """
    try:
        columns = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        columns = 0
    if columns <= 0:
        try:
            columns = os.get_terminal_size(sys.stdout.fileno()).columns
        except (OSError, ValueError):  # no terminal
            columns = 0
    return min(max(columns or _USUAL, _NARROWEST), _WIDEST)


def _has_colours() -> bool:
    """Tell whether stdout is a terminal that shows colours (https://no-color.org)."""
    return (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") not in {None, "", "dumb"}
    )


def _document(body: bytes, key: str, form: str | None, address: Address, path: str) -> str:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as err:
        raise _not_an_agent(address, path) from err
    if not isinstance(found, dict) or not isinstance(found.get(key), str | list):
        raise _not_an_agent(address, path)
    return _yaml(found) if form == YAML else json.dumps(found, indent=2, ensure_ascii=False)


def _yaml(found: dict[str, Any]) -> str:
    import yaml  # noqa: PLC0415 - it takes longer to import than all else

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(found, Dumper=dumper, sort_keys=False, allow_unicode=True)
    return text.rstrip("\n")


def _not_an_agent(address: Address, path: str) -> UnreachableError:
    return UnreachableError(
        f"{address} answers {path} with something that is not an agent's status; check "
        "--debug-listen"
    )
