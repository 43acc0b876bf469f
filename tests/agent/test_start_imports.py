"""Imports of a start before the first registration: a node has no GPUs meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.patience import PATIENCE_SECONDS

# As `vgpu-agent run` does it, up to an agent with all its parts.
_START = """
import json, sys
from vgpu_agent.cli import main, run
from vgpu_agent.config import load
loaded = load.load({}, {})
from vgpu_agent.agent import composition
from vgpu_agent.agent.composition import Agent
Agent(loaded)
print(json.dumps(sorted(sys.modules)))
"""
# Together more than a third of all that the agent imports; and what no node with real GPUs needs.
_LATER = (
    "aiohttp",
    "kubernetes_asyncio",
    "prometheus_client",
    "tomllib",
    "vgpu_agent.sim",
    "vgpu_agent.web.server",
)


def _printed(program: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return found.stdout


def test_a_registration_waits_for_nothing_that_speaks_http() -> None:
    """Counted in modules and not in seconds, so that it holds on any machine.
    The benchmark has the seconds.
    """
    modules = set(json.loads(_printed(_START)))
    assert [name for name in _LATER if name in modules] == []
    assert "vgpu_agent.kubelet.server" in modules


def test_the_garbage_collector_leaves_the_imports_alone() -> None:
    """It took a tenth of a start. Counted in collections, so that it holds on any machine."""
    program = """
import contextlib, gc
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
from vgpu_agent.cli.main import main
before = len(collections)
with contextlib.suppress(SystemExit):
    main(["run", "--help"])
from vgpu_agent.agent import composition
print(len(collections) - before)
"""
    assert int(_printed(program).splitlines()[-1]) < 10  # two for each; hundreds with the defaults
