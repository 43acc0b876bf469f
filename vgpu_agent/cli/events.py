"""``vgpu-agent events``: what happened on the node recently, and what the agent decided."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vgpu_agent.cli import answers, debug_address

if TYPE_CHECKING:
    from typing import Any

_EXAMPLES = f"""examples:
  vgpu-agent events --since 10m
  vgpu-agent events --event gpu                 names that begin with gpu.
  vgpu-agent events --limit 20 -o yaml

The agent keeps the latest thousand since its start; its log has all of them. The names are
explained in docs/events.md.

{answers.EXIT_STATUS}"""
_PARAMETERS = ("since", "event", "limit")


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "events",
        help="show what happened on the node recently, and what the agent decided",
        description="Show what happened on the node recently, and what the agent decided.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--since", metavar="TIME", help="an age (30s, 10m, 2h, 1d) or a time (2027-01-15T08:00:00Z)"
    )
    parser.add_argument("--event", metavar="NAME", help="a name, or its beginning before a dot")
    parser.add_argument("--limit", metavar="NUMBER", help="how many of the newest")
    answers.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the events, the latest last.

    Raises:
        ConfigError: the address, or the value of one of the flags, is invalid.
        UnreachableError: the agent cannot be reached, or another program answers.
    """
    given = {name: getattr(arguments, name) for name in _PARAMETERS}
    text, _state = answers.fetch(
        debug_address.address(arguments.debug_listen),
        "/debug/events",
        {name: value for name, value in given.items() if value is not None},
        arguments.output,
        arguments.timeout,
        # by these two the agent's answer is recognised, as JSON and as text
        key="events",
        beginning="Events",
    )
    print(text)
    return 0
