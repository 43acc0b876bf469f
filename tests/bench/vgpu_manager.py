"""The agent's speed with pods of vgpu-manager: 110 of them on two GPUs, an API server that is 20 ms
away.

The part ``vgpu-manager`` of the benchmark, called by `__main__`. Pods are bound as its extender
leaves them. For comparison, one Allocate of the replaced plugin (`reference_manager`) runs against
the same API server. In the end the agent's memory with all families that share GPUs.
"""

from __future__ import annotations

import asyncio
import collections
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.bench import processors, volcano
from tests.bench.allocate import timed_calls
from tests.bench.figures import Figure, percentile
from tests.bench.volcano_node import CONFIG, NODE, PODS, SEATS, Plan, VolcanoNode
from vgpu_agent.sim.stand_in_library import deliver_stand_in_control_library

NUMBER = "nvidia.com/vgpu-number"
CORES, MEMORY = "nvidia.com/vgpu-cores", "nvidia.com/vgpu-memory"
PHASE = "nvidia.com/assigned-phase"
ALONE = Plan(families="{nvidia: false, vgpuManager: true}")
FIVE = "{nvidia: true, aws: true, volcanoVgpu: true, volcanoGpushare: true, vgpuManager: true}"
_CONTROL = """\
vgpuControl: {{hostDirectory: {folder}/control}}
vgpuManager: {{deviceSplitCount: {seats}}}
"""
_STARTS = 5
_REFERENCE_CALLS = 20


class ManagerNode(VolcanoNode):
    """The node of the part `volcano`, offered as by vgpu-manager."""

    def __init__(self, folder: Path, through: Sequence[str] = ()) -> None:
        super().__init__(folder, through, ALONE)
        self.families = ALONE.families
        deliver_stand_in_control_library(folder / "control")

    def configure(self, mode: str) -> None:
        """Write the agent's configuration; it takes effect at the next start."""
        text = (CONFIG + _CONTROL).format(
            node=NODE,
            folder=self._folder,
            cdi=self.cluster.cdi_directory,
            mode=mode,
            seats=SEATS,
            families=self.families,
        )
        (self._folder / "config.yaml").write_text(text)

    async def start(self) -> None:
        """Start the agent, and wait until kubelet offers what it lists."""
        await self.agent.start()
        await self.agent.until_ready()
        kubelet = self.cluster.kubelet
        await self.cluster.until(
            lambda: kubelet.resource(NUMBER).allocatable > 0, "kubelet to offer vGPUs"
        )

    def bind(self, card: str = "") -> str:
        """A pod as the scheduler leaves it, on the GPU ``card`` or the one with the fewest; its
        name.

        Memory is 200 to 440 MiB, never the same twice in a row.
        """
        number = next(self._numbers)
        name, memory = f"p{number:04}", 200 + number * 53 % 241
        if not card:
            used = collections.Counter(given for given, _ in self.pods.values())
            card = min(self.plan.uuids, key=lambda uuid: used[uuid])
        self.pods[name] = (card, memory)
        annotations = {
            "nvidia.com/pre-allocated": f"main[{self.plan.uuids.index(card)}_{card}_1_{memory}]",
            "nvidia.com/predicate-node": NODE,
            "nvidia.com/predicate-time": str(time.time_ns()),
            "nvidia.com/real-allocated": "",
        }
        created = self.cluster.create_pod(
            name,
            {NUMBER: 1, MEMORY: memory, CORES: 1},
            scheduler="vgpu-scheduler",
            annotations=annotations,
        )
        namespace = created["metadata"]["namespace"]
        labels = {PHASE: "allocating", "nvidia.com/metrics-node": NODE}
        self.cluster.objects.patch("pods", name, {"metadata": {"labels": labels}}, namespace)
        self.cluster.objects.bind(name, namespace, {"target": {"name": NODE}})
        return name

    async def served(self, names: Iterable[str]) -> None:
        """Wait until the agent has marked all of them as served."""
        left = set(names)

        def written() -> bool:
            left.difference_update(
                [
                    name
                    for name in left
                    if self.cluster.pod(name)["metadata"]["labels"].get(PHASE) == "succeed"
                ]
            )
            return not left

        await self.cluster.until(written, "the pods' labels", timeout_seconds=120)


async def late(node: ManagerNode) -> list[Figure]:
    """Late binding: Allocate answers a name, PreStartContainer decides."""
    began = await volcano.one_by_one(node)
    allocated = node.timings("Allocate", NUMBER, since=began)
    started = node.timings("PreStartContainer", NUMBER, since=began)
    burst: list[float] = []
    for _ in range(volcano.BURSTS):
        began = await volcano.at_once(node)
        burst += [each.seconds for each in node.timings("PreStartContainer", NUMBER, since=began)]
    one_by_one = f"{volcano.ROUNDS} pods one after the other beside {PODS - 1} that run"
    at_once = f"{volcano.BURSTS} times {volcano.BURST} pods at once, {PODS} in the end"
    return [
        volcano.requests_inside(node, allocated),
        Figure(
            "PreStartContainer p50",
            percentile((each.seconds for each in started), 50) * 1000,
            15,
            "ms",
            one_by_one,
        ),
        Figure("PreStartContainer p50, burst", percentile(burst, 50) * 1000, 15, "ms", at_once),
        Figure(
            "PreStartContainer p99, burst",
            percentile(burst, 99) * 1000,
            50,
            "ms",
            f"the same, {len(burst)} starts",
        ),
    ]


async def late_alone(node: ManagerNode) -> list[Figure]:
    """Allocate without the kubelet's own work around it."""
    free = node.free(NUMBER)
    asked = [[free[call % len(free)]] for call in range(volcano.CALLS)]
    times = [call.seconds for call in await timed_calls(node.socket(NUMBER), asked)]
    how = f"{volcano.CALLS} calls, {len(free)} free ids in turn; {volcano.ALONE}"
    return [Figure("late Allocate p50", percentile(times, 50) * 1000, 1.5, "ms", how)]


async def start(node: ManagerNode) -> list[Figure]:
    """From the start of the process to the Register."""
    times, kubelet = [], node.cluster.kubelet
    for _ in range(_STARTS):
        await node.agent.terminate()
        seen, began = len(kubelet.called("Register")), time.monotonic()
        await node.agent.spawn()
        await kubelet.until(
            lambda seen=seen: len(kubelet.called("Register")) > seen  # type: ignore[misc]  # mypy does not infer a lambda with a default
        )
        times.append(kubelet.called("Register")[-1].at - began)
        await node.agent.until_ready()
    how = f"{PODS} pods on the node, median of {_STARTS}"
    return [Figure("start to registered", statistics.median(times), 1.5, "s", how)]


async def five_families(node: ManagerNode) -> list[Figure]:
    """Memory with all families on."""
    await node.agent.terminate()
    node.families = FIVE
    await asyncio.to_thread(node.configure, "late")
    await node.start()
    (figure,) = await volcano.resident(node)
    how = f"VmRSS with all five families, after a verification, {PODS} pods"
    return [Figure("RSS, five families", figure.value, figure.limit, figure.unit, how)]


async def reference(node: ManagerNode) -> list[Figure]:
    """Measure the replaced plugin's way of allocating."""
    await node.agent.terminate()
    await node.remove(list(node.pods)[:_REFERENCE_CALLS])
    node.cluster.hold_admission = True
    for _ in range(_REFERENCE_CALLS):
        node.bind()
    program = [
        *node.through,
        sys.executable,
        "-m",
        "tests.bench.reference_manager",
        node.cluster.api.url,
        NODE,
        str(_REFERENCE_CALLS),
    ]
    answer = await asyncio.to_thread(
        subprocess.run, program, check=True, capture_output=True, text=True
    )
    how = (
        f"lists the node's pods, patch: {_REFERENCE_CALLS} pods, no gRPC around it, no files, no "
        "limit on requests"
    )
    value = percentile(json.loads(answer.stdout), 50) * 1000
    return [Figure("the replaced plugin's Allocate p50", value, None, "ms", how)]


async def measure(folder: Path) -> list[Figure]:
    """All figures, in an order in which none disturbs the next."""
    with processors.apart() as through:
        return await _measure(await asyncio.to_thread(ManagerNode, folder, through))


async def _measure(node: ManagerNode) -> list[Figure]:
    async with node.cluster:
        try:
            await asyncio.to_thread(node.configure, "late")
            await node.start()
            await node.served(await node.serve(PODS - 1))
            figures = await late(node)
            figures += await volcano.idle(node)
            for step in (late_alone, start, five_families, reference):
                figures += await step(node)
            return figures
        finally:
            await node.agent.kill()
            await asyncio.to_thread(node.close)
