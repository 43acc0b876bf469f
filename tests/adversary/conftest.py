"""Attacks, each a test named after what the attacker wants; docs/security.md lists what must hold.

An attack goes against the most real counterpart there is: real files, real sockets, the agent's own
process on a simulated node. It must have succeeded once, on the code before its fix. Tests that
start the agent's process are marked `component` besides.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.component.conftest import folder, preloaded, stage, starts_are_forks
from tests.kubelet.conftest import grpcio_stays_initialised

__all__ = ["folder", "grpcio_stays_initialised", "preloaded", "stage", "starts_are_forks"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is an attack."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.adversary)
