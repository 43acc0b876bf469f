"""Prometheus as the counterpart of alerts and dashboards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.monitoring import prometheus
from tests.real_node.rig.errors import RequirementError

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs programs that a machine may not have, as cluster tests do."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("cluster")
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def promtool() -> Path:
    """The path of promtool. Skips where it cannot be had, unless REQUIRE_CLUSTER=1 insists."""
    try:
        return prometheus.programs() / "promtool"
    except RequirementError as err:
        if os.environ.get("REQUIRE_CLUSTER") == "1":
            pytest.fail(f"REQUIRE_CLUSTER=1, but {err}", pytrace=False)
        pytest.skip(str(err))
