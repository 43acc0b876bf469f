"""A node whose MPS daemon does not outlive the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mps.supervised import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node whose daemon does not outlive the test."""
    made = Node(tmp_path)
    yield made
    made.end()
