"""The tests of this room change the node around the agent from its own event loop, which the agent itself may not do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster

from tests.mps.supervised import Node

_MAY_BLOCK = {
    "vgpu_agent/sim/mps_tools.py": {"calls", "misbehave", "client", "daemon_pid", "end_daemon"},
    "vgpu_agent/sim/state.py": {"open"},
}


@pytest.fixture(autouse=True)
def _the_node_may_block(_no_blocked_loop: BlockBuster | None) -> None:
    """The simulator is not the agent."""
    for function in _no_blocked_loop.functions.values() if _no_blocked_loop else ():
        for file, names in _MAY_BLOCK.items():
            function.can_block_in(file, names)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node whose daemon does not outlive the test."""
    made = Node(tmp_path)
    yield made
    made.end()
