"""Fixtures for all tests: the event loop must not be blocked, and the golden node of the contracts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from tests.golden import golden_inventory
from vgpu_agent.model import Inventory


@pytest.fixture(autouse=True)
def _no_blocked_loop(request: pytest.FixtureRequest) -> Iterator[BlockBuster | None]:
    """A blocking call on the event loop, made by our own code, fails the test."""
    if request.node.get_closest_marker("component") or request.node.get_closest_marker("cluster"):
        yield None  # those run the agent in a process of its own and may themselves block
        return
    with blockbuster_ctx("vgpu_agent") as detector:
        yield detector


@pytest.fixture
def inventory() -> Inventory:
    """The two A100 of the contracts' golden vectors."""
    return golden_inventory()
