"""``vgpu-agent version``: the version of the agent, for bug reports and rollouts."""

from __future__ import annotations

import argparse
import platform

from vgpu_agent import __version__


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``version``."""
    subparsers.add_parser("version", help="print the version").set_defaults(run=_print_version)


def _print_version(_: argparse.Namespace) -> int:
    print(f"vgpu-agent {__version__} (Python {platform.python_version()})")
    return 0
