"""A simulated node below the real pynvml."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated import simulated_node
from vgpu_agent.gpu.nvml import Nvml
from vgpu_agent.sim.preload import preload
from vgpu_agent.sim.state import SimulatedNode


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    """Four A100 on two NUMA nodes, under the NVML of this process."""
    node = simulated_node(tmp_path, gpus=4, numa=[0, 0, 1, 1])
    preload(node.directory)
    node.fault("nvmlInit", code=999, times=1)  # the first fault of a process reads the list of functions: here, not on an event loop
    node.clear_faults()
    return node


@pytest.fixture
def nvml(node: SimulatedNode) -> Iterator[Nvml]:
    """The driver of that node, open; for tests without a thread."""
    assert node
    nvml = Nvml()
    nvml.load(Path("/"))
    yield nvml
    nvml.shutdown()
