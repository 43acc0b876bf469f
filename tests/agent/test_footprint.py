"""What the agent loads when it starts: memory and start-up time are won by not importing things."""

from __future__ import annotations

import subprocess
import sys

_HEAVY = ["kubernetes_asyncio", "grpc", "google.protobuf", "pydantic", "uvloop", "numpy", "vgpu_agent.sim"]


def test_the_agent_loads_nothing_heavy_and_no_simulator() -> None:
    """Neither an independent gRPC stack nor the simulator is part of a node with real GPUs."""
    program = f"import sys, vgpu_agent.agent; print([name for name in {_HEAVY!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
