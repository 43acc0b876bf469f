"""A post-renderer of Helm: the chart's DaemonSet on the simulated GPUs of a folder.

usage: python -m tests.real_node.simulated_renderer FOLDER <rendered >changed
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from tests.real_node.deployment import on_simulated_gpus


def main() -> None:
    """Change what Helm has rendered."""
    objects = [each for each in yaml.safe_load_all(sys.stdin) if each is not None]
    on_simulated_gpus(objects, Path(sys.argv[1]))
    yaml.safe_dump_all(objects, sys.stdout)


if __name__ == "__main__":
    main()
