"""Simulated nodes that this process's pynvml looks at;
each test has a fresh one, so none sees another's faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.simulated import nvml_on, simulated_node
from vgpu_agent.sim.state import SimulatedNode

NodeFactory = Callable[..., SimulatedNode]


@pytest.fixture
def nvml_node(tmp_path: Path) -> Iterator[NodeFactory]:
    """Call it with the arguments of `simulated_node`:
    a node, and NVML initialised on it until the test ends.
    """
    with ExitStack() as cleanup:

        def make(model: str = "A100-SXM4-80GB", gpus: int = 2, **more: object) -> SimulatedNode:
            # checked where it arrives
            node = simulated_node(tmp_path, model, gpus, **more)  # type: ignore[arg-type]  # the test's own keywords
            cleanup.enter_context(nvml_on(node))
            return node

        yield make


@pytest.fixture
def node(nvml_node: NodeFactory) -> SimulatedNode:
    """Four A100, two on each of two NUMA nodes, under an initialised NVML."""
    return nvml_node(gpus=4, numa=[0, 0, 1, 1])
