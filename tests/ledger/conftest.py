"""Fixtures for tests of the ledger."""

from __future__ import annotations

import pytest

from tests.ledger.book_parts import Clock


@pytest.fixture
def clock() -> Clock:
    """A clock at 1000 s."""
    return Clock()
