"""Short pauses for the parts that make devices ready."""

from __future__ import annotations

import pytest

from tests import constants


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec that could not be made is tried again at once, and a start waits a moment for it."""
    quick = {
        constants.SPEC_LOOK: 0.05,
        constants.SPEC_RETRY_MIN: 0.02,
        constants.SPEC_RETRY_MAX: 0.1,
        constants.POD_WAIT: 0.2,
    }
    constants.use(monkeypatch, quick)
