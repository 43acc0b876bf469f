"""``vgpu-agent pods``: the containers with shares of GPUs, their limits, and the pods without."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vgpu_agent.cli import answers, debug_address

if TYPE_CHECKING:
    from typing import Any

_EXAMPLES = f"""examples:
  vgpu-agent pods
  vgpu-agent pods -o wide | grep 'not in force'
  vgpu-agent pods -o json | jq -r '.pods[] | [.pod, .grants[].shares[].gpu_index] | @tsv'

{answers.EXIT_STATUS}"""


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "pods",
        help="show which container holds which share of which GPU",
        description=(
            "Show which container holds which share of which GPU, what limits it to that share, "
            "and the pods of this node that ask for GPUs and have none yet."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    answers.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the pods.

    Raises:
        ConfigError: the address is invalid.
        UnreachableError: the agent cannot be reached, or another program answers.
    """
    text, _ = answers.shown(
        debug_address.address(arguments.debug_listen),
        "/debug/pods",
        {},
        arguments.output,
        arguments.timeout,
        key="pods",
        beginning="Pods",
    )
    print(text)
    return 0
