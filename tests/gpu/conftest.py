"""A simulated node below the real pynvml."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests import constants
from tests.gpu.watched import QUICK
from tests.simulated import simulated_node
from vgpu_agent.gpu.nvml import Nvml
from vgpu_agent.sim.preload import preload
from vgpu_agent.sim.state import SimulatedNode


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, and time limits for a busy machine."""
    constants.use(monkeypatch, QUICK)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    """Four A100 on two NUMA nodes, under the NVML of this process;
    when the test is over, they are released.
    """
    earlier = set(threading.enumerate())
    node = simulated_node(tmp_path, gpus=4, numa=[0, 0, 1, 1])
    preload(node.directory)
    # the first fault of a process reads the list of functions: here, not on an event loop
    node.fault("nvmlInit", code=999, times=1)
    node.clear_faults()
    yield node
    node.clear_faults()
    # nvmlInit is counted in the process. A test that failed, or whose thread still hangs, must not
    # leave its node to all tests after it.
    for thread in threading.enumerate():
        if thread.name == "nvml" and thread not in earlier:
            thread.join(timeout=10)
    with contextlib.suppress(pynvml.NVMLError_Uninitialized):
        while True:
            pynvml.nvmlShutdown()


@pytest.fixture
def nvml(node: SimulatedNode) -> Iterator[Nvml]:
    """The driver of that node, open; for tests without a thread."""
    assert node
    nvml = Nvml()
    nvml.load(Path("/"))
    yield nvml
    nvml.shutdown()
