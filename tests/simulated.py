"""Simulated GPUs for any test: a node in a temporary directory, put below this process's pynvml.

Tests of `gpu`, `agent` and others call `simulated_node`; this is enough for the directory (to hand
it to an agent process), and calls of pynvml in this process need `nvml_on`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pynvml

from vgpu_agent.sim.preload import preload
from vgpu_agent.sim.state import SimulatedNode


def simulated_node(
    tmp_path: Path,
    model: str = "A100-SXM4-80GB",
    gpus: int = 2,
    numa: Sequence[int] | None = None,
    uuids: Sequence[str] | None = None,
) -> SimulatedNode:
    """A fresh node below ``tmp_path``."""
    return SimulatedNode.create(tmp_path / "gpus", model=model, gpus=gpus, numa=numa, uuids=uuids)


@contextlib.contextmanager
def nvml_on(node: SimulatedNode) -> Iterator[None]:
    """NVML of this process, initialised on ``node``; shut down entirely afterwards, so that the
    next test can have another node.
    """
    preload(node.directory)
    pynvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(pynvml.NVMLError_Uninitialized):
            while True:  # nvmlInit is counted; a test that failed half-way may have left some
                pynvml.nvmlShutdown()
