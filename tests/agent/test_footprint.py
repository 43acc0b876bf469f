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


def test_big_blocks_go_back_to_the_system() -> None:
    """After 40 MB of messages that are gone, no more is held than before, but for a little; in a process of its own."""
    program = """
import threading
from vgpu_agent.agent.footprint import keep_small
def kib(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
def work():
    for size in (8_000_000, 4_000_000, 100_000) * 5:
        held = [bytes(size) for _ in range(5)]
        pinned.append(bytes(600))
pinned = []
keep_small()
before = kib()
for _ in range(3):
    thread = threading.Thread(target=work); thread.start(); thread.join()
print(kib() - before)
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert int(ran.stdout) < 2048


def test_what_lies_between_blocks_in_use_goes_back_too() -> None:
    """Of 20 MB in blocks of 4,000 bytes all but every fiftieth are freed: hardly anything goes back until `give_back`, then nearly all."""
    program = """
from vgpu_agent.agent.footprint import give_back, keep_small
def kib(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
keep_small()
before = kib()
blocks = [bytes(4000) for _ in range(5000)]
pinned = blocks[::50]
del blocks
kept = kib() - before
give_back()
print(kept, kib() - before)
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    kept, left = map(int, ran.stdout.split())
    assert kept > 15_000
    assert left < 3_000
