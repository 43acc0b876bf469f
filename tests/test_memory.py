"""Modules that the agent loads when it starts: fewer imports save memory and start-up time."""

from __future__ import annotations

import subprocess
import sys

_HEAVY = [
    "kubernetes_asyncio",
    "grpc",
    "google.protobuf",
    "pydantic",
    "uvloop",
    "numpy",
    "vgpu_agent.sim",
]


def test_the_agent_loads_nothing_heavy_and_no_simulator() -> None:
    """Neither an independent gRPC stack nor the simulator is part of a node with real GPUs."""
    program = (
        f"import sys, vgpu_agent.agent; print([name for name in {_HEAVY!r} if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "[]"


_BIG_BLOCKS = """
import threading
from vgpu_agent.memory import limit_heaps
def kib():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
def work():
    for size in (8_000_000, 4_000_000, 100_000) * 5:
        held = [bytes(size) for _ in range(5)]
        pinned.append(bytes(600))
pinned = []
{first}
before = kib()
for _ in range(3):
    thread = threading.Thread(target=work); thread.start(); thread.join()
print(kib() - before)
"""


def _kept_kib(first: str) -> int:
    """Return how much more a fresh process holds after 40 MB of messages that are gone."""
    ran = subprocess.run(
        [sys.executable, "-c", _BIG_BLOCKS.format(first=first)],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(ran.stdout)


def test_big_blocks_go_back_to_the_system() -> None:
    """After 40 MB of messages that are gone, no more is held than before, but for a little."""
    assert _kept_kib("limit_heaps()") < 2048


def test_the_c_library_still_keeps_big_blocks_by_itself() -> None:
    """The day on which this fails, `limit_heaps` has become needless and can go.

    A block of 8 MB that was freed makes glibc take smaller ones from its heap, and keep twice as
    much at the heap's end.
    """
    program = """
def kib():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
before = kib()
first = bytes(8_000_000)
del first
blocks = [b"x" * (3_000_000 + place) for place in range(4)]
del blocks
print(kib() - before)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert int(ran.stdout) > 4 * 2048


def test_what_lies_between_blocks_in_use_goes_back_too() -> None:
    """Freed blocks between blocks in use go back only when `release_free_pages` is called.

    Of 20 MB in blocks of 4,000 bytes all but every fiftieth are freed. Hardly anything goes back
    before the call, nearly all after it.
    """
    program = """
from vgpu_agent.memory import release_free_pages, limit_heaps
def kib():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
limit_heaps()
before = kib()
blocks = [bytes(4000) for _ in range(5000)]
pinned = blocks[::50]
del blocks
kept = kib() - before
release_free_pages()
print(kept, kib() - before)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    kept, left = map(int, ran.stdout.split())
    assert kept > 15_000
    assert left < 3_000


def test_what_the_start_has_made_is_not_searched_again() -> None:
    """Everything that is there when the start is over stays, and a search for cycles passes it
    over. Later ones are found as ever. No search comes before: it would block the event loop.
    """
    program = """
import gc, weakref
from vgpu_agent.memory import freeze_objects
class Thing: pass
there = [Thing() for _ in range(5000)]
searches = []
gc.callbacks.append(lambda phase, info: searches.append(phase))
freeze_objects()
print(searches == [])
thing = Thing(); thing.itself = thing; gone = weakref.ref(thing); del thing
gc.collect()
print(gc.get_freeze_count() > 5000, len(gc.get_objects()) < 5000, gone() is None)
print(gc.get_threshold()[0] < 5000)  # those of a start are higher
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ran.stdout.split() == ["True"] * 5
