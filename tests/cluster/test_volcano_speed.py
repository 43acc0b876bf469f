"""How much later pods run because they ask for vGPU: measured on a real node, both kinds in one run.

The unit of memory is coarse here. With units of 1 MiB kubelet itself needs many times longer for such pods, whatever the plugin does: it
writes each id into its checkpoint and, as allocatedResourcesStatus, into the pod's status.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.cluster.agents import NodeAgent
from tests.cluster.rig import Rig
from tests.cluster.rig.manifests import container
from tests.cluster.volcano import VolcanoScheduler, vgpu, volcano_pod
from tests.cluster.volcano_node import COARSE_CONFIG, UNIT_MIB, seen_limit, start_vgpu, volcano_agent, wait_running

PODS = 20
ROUNDS = 2
# 1.2 is what an idle machine should show. Here two cores carry the whole control plane, runc and whatever else the machine does, so that
# rounds of one kind differ by more than that among themselves; the best of each kind are compared, and only something gross fails.
MOST_LATER = 1.8


@pytest.fixture
def agent(volcano_rig: Rig) -> Iterator[NodeAgent]:
    """An agent of its own."""
    running = volcano_agent(volcano_rig, COARSE_CONFIG)
    try:
        yield start_vgpu(running, UNIT_MIB)
    finally:
        running.close()


def _last_running(rig: Rig, limits: Mapping[str, Mapping[str, int]]) -> float:
    """Seconds from the first creation until all pods run."""
    began = time.monotonic()
    for name, each in limits.items():
        printing = container("main", command='echo "LIMIT=$CUDA_DEVICE_MEMORY_LIMIT_0"; sleep 100000', limits=each)
        rig.create_pod(volcano_pod(name, containers=[printing]))
    wait_running(rig, limits, 90)
    return time.monotonic() - began


def _kubelets_allocations(rig: Rig) -> str:
    """How long kubelet says that Allocate took: mean over all calls so far, for each resource."""
    text = rig.api.text(f"/api/v1/nodes/{rig.node_name()}/proxy/metrics")
    found = {}
    for resource in ("number", "memory", "cores"):
        sums = [
            float(match[1])
            for kind in ("sum", "count")
            if (match := re.search(rf'alloc_duration_seconds_{kind}{{resource_name="volcano.sh/vgpu-{resource}"}} (\S+)', text))
        ]
        if len(sums) == 2:
            found[resource] = f"{sums[0] / sums[1] * 1000:.2f} ms × {sums[1]:.0f}"
    return ", ".join(f"{name} {value}" for name, value in found.items())


def test_twenty_unequal_pods_run_about_as_soon_as_pods_without_a_gpu(
    volcano_rig: Rig, agent: NodeAgent, record_property: Callable[[str, object], None]
) -> None:
    """20 pods at once under the same scheduler, with and without vGPU in turn; every container has its own limit."""
    rig, times = volcano_rig, {"without": list[float](), "with": list[float]()}
    with VolcanoScheduler(rig, policy="spread"):
        for number in range(ROUNDS):
            for kind, seconds in times.items():
                memory = {f"{kind}-{number}-{each:02}": 15 + each for each in range(PODS)}
                seconds.append(_last_running(rig, {name: vgpu(1, units, 3) if kind == "with" else {} for name, units in memory.items()}))
                for name, units in memory.items():
                    assert seen_limit(rig, name) == (f"{units * UNIT_MIB}m" if kind == "with" else "")
                rig.clean()
    bound = [line["milliseconds"] for line in agent.process.log_lines() if line["msg"] == "start.bound"]
    best = {kind: min(seconds) for kind, seconds in times.items()}
    report = {
        "last of 20 Running, without vGPU, s": [round(seconds, 2) for seconds in times["without"]],
        "last of 20 Running, with vGPU, s": [round(seconds, 2) for seconds in times["with"]],
        "later, ratio of the best": round(best["with"] / best["without"], 2),
        "kubelet_device_plugin_alloc_duration_seconds": _kubelets_allocations(rig),
        "PreStartContainer, ms, median and worst": [statistics.median(bound), max(bound)],
    }
    for name, value in report.items():
        record_property(name, value)
        print(f"{name}: {value}")  # noqa: T201 - what the test is for; `pytest -rP` shows it
    assert "start.refused" not in agent.events()
    assert best["with"] <= MOST_LATER * best["without"], report
