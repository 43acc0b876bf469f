"""A kubelet that takes a list of any length, as `parts.mig_family` makes every MiB an id."""

from __future__ import annotations

import pytest

from tests import constants


@pytest.fixture(autouse=True)
def _long_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: 10**9})
