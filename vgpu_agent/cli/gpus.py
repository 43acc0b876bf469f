"""``vgpu-agent gpus``: each GPU of the node with its figures, its health and its holders."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vgpu_agent.cli import answers, debug_address

if TYPE_CHECKING:
    from typing import Any

_EXAMPLES = f"""examples:
  vgpu-agent gpus
  vgpu-agent gpus -o json | jq -r '.gpus[] | select(.health != "Healthy") | .uuid'
  vgpu-agent top                             given and used, live

{answers.EXIT_STATUS}"""


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "gpus",
        help="show each GPU with its figures, its health and its holders",
        description=(
            "Show each GPU and MIG instance with its figures, its health and its holders; and the "
            "cause and the remedy of each that is not healthy."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    answers.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the GPUs.

    Raises:
        ConfigError: the address is invalid.
        UnreachableError: the agent cannot be reached, or another program answers.
    """
    text, _ = answers.shown(
        debug_address.address(arguments.debug_listen),
        "/debug/devices",
        {},
        arguments.output,
        arguments.timeout,
        key="gpus",
        beginning="GPUs",
    )
    print(text)
    return 0
