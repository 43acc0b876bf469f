"""A node whose MPS daemon does not outlive the test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mps.supervised import Node, no_blocked_loop
from vgpu_agent.mps import daemon, host_tools


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose daemon does not outlive the test;
    below a short path, because a daemon's socket has 107 bytes for its name.
    """
    monkeypatch.setattr(host_tools, "COMMAND_TIMEOUT_SECONDS", 5.0)
    monkeypatch.setattr(daemon, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(daemon, "BACKOFF_MIN_SECONDS", 0.05)
    monkeypatch.setattr(daemon, "BACKOFF_MAX_SECONDS", 0.2)
    with tempfile.TemporaryDirectory(
        prefix="vgm", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        made = Node(Path(folder), monkeypatch)
        yield made
        made.end()


@pytest.fixture
def nothing_blocks() -> Iterator[None]:
    """Fail a test in which the agent blocks its event loop."""
    with no_blocked_loop():
        yield
