"""``vgpu-agent gpus``: each GPU of the node with its figures, its health and its holders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.cli import answers

if TYPE_CHECKING:
    from typing import Any

_EXAMPLES = """\
  vgpu-agent gpus
  vgpu-agent gpus -o json | jq -r '.gpus[] | select(.health != "Healthy") | .uuid'
  vgpu-agent top                             granted and used, live"""


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    answers.add_table(
        subparsers,
        "gpus",
        help="show each GPU with its figures, its health and its holders",
        description=(
            "Show each GPU and MIG instance with its figures, its health and its holders; and the "
            "cause and the remedy of each that is not healthy."
        ),
        examples=_EXAMPLES,
        path="/debug/devices",
        # by these two the agent's answer is recognised, as JSON and as text
        key="gpus",
        beginning="GPUs",
    )
