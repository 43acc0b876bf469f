"""``vgpu-agent pods``: the containers with shares of GPUs, their limits, and the pods that wait
for some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.cli import answers

if TYPE_CHECKING:
    from typing import Any

# 'not in force': the limit of a container is not enforced
_EXAMPLES = """\
  vgpu-agent pods
  vgpu-agent pods -o wide | grep 'not in force'
  vgpu-agent pods -o json | jq -r '.pods[] | [.pod, .grants[].shares[].gpu_index] | @tsv'"""


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    answers.add_table(
        subparsers,
        "pods",
        help="show which container holds which share of which GPU",
        description=(
            "Show which container holds which share of which GPU, what limits it to that share, "
            "and the pods of this node that ask for GPUs and have none yet."
        ),
        examples=_EXAMPLES,
        path="/debug/pods",
        # by these two the agent's answer is recognised, as JSON and as text
        key="pods",
        beginning="Pods",
    )
