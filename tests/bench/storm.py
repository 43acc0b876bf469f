"""A storm against the agent within the memory of its DaemonSet:
all that tenants and neighbours can throw at it, at once.

A part of the benchmark, called by `__main__`; tests/adversary/storm.py says what is thrown.
"""

from __future__ import annotations

from pathlib import Path

from tests.adversary.memory_cgroup import memory_cgroup
from tests.adversary.storm import CONNECTIONS, LIMIT_MIB, PODS, endure, storm_stage
from tests.bench.figures import Figure, percentile
from vgpu_agent import log

FILES, STARTS = 1_000_000, 100


async def measure(folder: Path) -> list[Figure]:
    """Throw everything, and start pods one after the other meanwhile."""
    log.configure(level="error")  # the stand-in scheduler logs each pod
    with memory_cgroup(LIMIT_MIB) as cgroup:
        async with storm_stage(folder, cgroup) as stage:
            endured = await endure(stage, files=FILES, starts=STARTS)
    thrown = (
        f"{PODS} pods of 1.4 MB, {CONNECTIONS:,} slow connections, {FILES:,} files in a tenant's "
        f"folder, {LIMIT_MIB} MiB"
    )
    return [
        Figure("RSS, peak", endured.peak_mib, 200, "MiB", f"VmHWM; {thrown}"),
        Figure(
            "killed for want of memory, restarted",
            endured.kills + endured.restarted,
            0,
            "times",
            "the cgroup's count, and the process id",
        ),
        Figure(
            "PreStartContainer p50, in the storm",
            percentile(endured.starts, 50) * 1000,
            None,
            "ms",
            f"{STARTS} well-behaved pods",
        ),
        Figure(
            "PreStartContainer p99, in the storm",
            percentile(endured.starts, 99) * 1000,
            500,
            "ms",
            "the same",
        ),
        Figure(
            "/livez at the end of the storm",
            endured.alive * 1000,
            1000,
            "ms",
            "one request on a connection of its own",
        ),
    ]
