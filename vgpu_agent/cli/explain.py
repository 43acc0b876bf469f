"""``vgpu-agent explain``: why a pod does not start on this node, or what it has and how that is
known. Pods without a node are explained by the scheduler extender (``vgpu-agent why``).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vgpu_agent.cli import answers, debug_address

if TYPE_CHECKING:
    from typing import Any

    from vgpu_agent.web.address import Address

_EXAMPLES = f"""examples:
  vgpu-agent explain ml/train-0
  vgpu-agent explain ml/train-0 -o json | jq -r '.answer[]'
  kubectl -n vgpu-agent exec AGENT -- vgpu-agent explain ml/train-0
  kubectl vgpu explain ml/train-0           finds the node of the pod

{answers.EXIT_STATUS}"""


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        help="explain why a pod does not start on this node, or what it has",
        description=(
            "Explain why a pod does not start on this node, or which GPU it has, how that is "
            "known, and what is wrong with it."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pod", metavar="NAMESPACE/NAME", type=answers.pod, help="the pod")
    answers.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is known of the pod.

    Raises:
        ConfigError: the address or the pod's name is invalid.
        UnreachableError: the agent cannot be reached, or another program answers.
    """
    address = debug_address.address(arguments.debug_listen)
    print(fetch(address, arguments.pod, arguments.output, arguments.timeout))
    return 0


def fetch(address: Address, pod: str, form: str | None, timeout_seconds: float) -> str:
    """Return the explanation of the pod, in one of `answers.FORMS`; with None as text that fits the
    terminal.
    """
    text, _state = answers.fetch(
        address,
        "/debug/explain",
        {"pod": pod},
        form,
        timeout_seconds,
        # by these two the agent's answer is recognised, as JSON and as text
        key="pod",
        beginning="pod ",
    )
    return text
