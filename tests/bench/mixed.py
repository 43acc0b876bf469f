"""The cost of several families on one node: `nvidia`, `aws` and `volcano-vgpu` on 8 GPUs, 110 pods,
an API server that is 20 ms away.

The part ``mixed`` of the benchmark, called by `__main__`. There are as many pods and as many ids of
memory as in the part `volcano`, and Volcano's pods come and go in the same way, so the figures of
the two can be compared. Volcano has six of the GPUs, `nvidia` one. The eighth goes from family to
family, which changes the lists of all of them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tests.bench import processors, volcano
from tests.bench.allocate import timed_calls
from tests.bench.figures import Figure, percentile
from tests.bench.volcano_node import NODE, PODS, RESOURCES, Plan, VolcanoNode

NVIDIA, AWS = "nvidia.com/gpu", "k8s.amazonaws.com/vgpu"
STREAMS = {"nvidia": (NVIDIA,), "aws": (AWS,), "volcano-vgpu": RESOURCES}
REPLICAS, OF_NVIDIA, OF_AWS = 10, 6, 6
FAMILIES = f"""\
{{nvidia: true, aws: true, volcanoVgpu: true}}
sharing: {{timeSlicing: {{resources: [{{name: {NVIDIA}, replicas: {REPLICAS}}}]}}}}"""
SIX_OF_EIGHT = Plan(
    gpus=8, gpu_mib=6 * 1024, families=FAMILIES, cards=6, pods=PODS - OF_NVIDIA - OF_AWS
)

CALLS, HANDOVERS, IDLE_SECONDS = 1000, 5, 60
_EVENT_SECONDS = 2.0
"""Longer than from a container's end to the last family's list."""


class MixedNode(VolcanoNode):
    """The node of the part `volcano` with more GPUs,
    and pods of the two families whose ids name the GPU.
    """

    def __init__(self, folder: Path, through: Sequence[str]) -> None:
        super().__init__(folder, through, SIX_OF_EIGHT)
        self._names = itertools.count()

    async def run_pods(self, resource: str, count: int) -> list[str]:
        """Bind that many pods that want one of ``resource``, once kubelet has as many for them, and
        wait until they run; their names.
        """
        await self.cluster.until(
            lambda: self._healthy_and_free(resource) >= count,
            f"{count} of {resource} to be offered",
        )
        names = [f"n{next(self._names):04}" for _ in range(count)]
        for name in names:
            created = self.cluster.create_pod(name, {resource: 1}, scheduler="by-hand")
            self.cluster.objects.bind(
                name, created["metadata"]["namespace"], {"target": {"name": NODE}}
            )
        await self.cluster.running(*names)
        return names

    def _healthy_and_free(self, resource: str) -> int:
        return len(
            self.cluster.kubelet.resource(resource).healthy.keys() & set(self.free(resource))
        )

    async def end_pods(self, names: Sequence[str]) -> None:
        """Delete pods of `run_pods`, and wait until they are gone."""
        for name in names:
            self.cluster.delete_pod(name)
        await self.cluster.until(
            lambda: not any(self.cluster.exists(name) for name in names), "pods to go"
        )


class Lists:
    """The lists that kubelet was sent about pod events.

    State: one count of each event, by resource.
    """

    def __init__(self, node: MixedNode) -> None:
        self._node = node
        self.events: list[collections.Counter[str]] = []

    @contextlib.asynccontextmanager
    async def event(self) -> AsyncIterator[None]:
        """Count what is sent from the beginning of the block
        until the event has been dealt with.
        """
        began = time.monotonic()
        yield
        await asyncio.sleep(_EVENT_SECONDS)
        self.events.append(
            collections.Counter(
                call.resource
                for call in self._node.cluster.kubelet.called("list")
                if call.at >= began
            )
        )

    def most(self, resources: Sequence[str]) -> int:
        """The largest number on one stream for one event."""
        return max(counts[resource] for counts in self.events for resource in resources)

    def total(self, resources: Sequence[str]) -> int:
        """All of them."""
        return sum(counts[resource] for counts in self.events for resource in resources)


async def lists(node: MixedNode) -> list[Figure]:
    """Lists about pods that start and end: beside others of their family,
    and on a GPU that goes from family to family.
    """
    beside, between = Lists(node), Lists(node)
    await node.remove(list(node.pods)[:2])
    of_aws = await node.run_pods(AWS, OF_AWS)
    await asyncio.sleep(_EVENT_SECONDS)
    for _ in range(HANDOVERS):
        async with beside.event():
            names = await node.serve(1)
        async with beside.event():
            await node.remove(names)
        async with between.event():  # the GPU is in use by `aws`, whose pods get no more of it
            names = [node.bind(node.plan.uuids[-1])]
        async with between.event():
            await node.end_pods(of_aws)
            await node.cluster.running(*names)
        async with between.event():
            await node.remove(names)
        async with between.event():
            of_aws = await node.run_pods(AWS, OF_AWS)
    await node.end_pods(of_aws)
    await node.serve(2)
    every = [name for streams in STREAMS.values() for name in streams]
    how = (
        f"of each {len(beside.events)} starts and ends beside others of the family, all streams "
        "together"
    )
    figures = [Figure("lists, no GPU changes hands", beside.total(every), 0, "messages", how)]
    how = (
        f"{len(between.events)} events: a claim on a GPU in use, the end of its {OF_AWS} pods and "
        f"a start, the last end, {OF_AWS} new pods"
    )
    for family, streams in STREAMS.items():
        figures += [
            Figure(
                f"lists a pod event, {family}, most on a stream",
                between.most(streams),
                3,
                "messages",
                how,
            ),
            Figure(
                f"lists a pod event, {family}",
                between.total(streams) / len(between.events),
                None,
                "messages",
                f"mean, {len(streams)} streams",
            ),
        ]
        how = "the same"
    return figures


async def by_ids(node: MixedNode) -> list[Figure]:
    """Allocate of ids that name their GPU. Each call is a new booking:
    its ids are others than those of the call before.
    """
    few = node.free(NVIDIA)[: REPLICAS - OF_NVIDIA]
    asked = [[few[0]] if call % 2 else few[:2] for call in range(CALLS)]
    times = [
        call.seconds for call in await timed_calls(node.socket(NVIDIA), asked, warm=CALLS // 10)
    ]
    how = f"{len(times)} calls beside {PODS - OF_AWS} pods, each books anew; {volcano.ALONE}"
    return [
        Figure("Allocate p50, nvidia.com/gpu", percentile(times, 50) * 1000, 1.5, "ms", how),
        Figure("Allocate p99, nvidia.com/gpu", percentile(times, 99) * 1000, 5, "ms", "the same"),
    ]


async def idle(node: MixedNode) -> list[Figure]:
    """Processor time while nothing happens."""
    await asyncio.sleep(_EVENT_SECONDS)
    before = await asyncio.to_thread(processors.seconds_of, node.agent.pid)
    await asyncio.sleep(IDLE_SECONDS)
    used = await asyncio.to_thread(processors.seconds_of, node.agent.pid) - before
    how = (
        f"user and system time in {IDLE_SECONDS} s, two comparisons with kubelet's records among "
        "them"
    )
    return [Figure("idle CPU", used / IDLE_SECONDS * 100, 2, "% of a core", how)]


async def measure(folder: Path) -> list[Figure]:
    """All figures, in an order in which none disturbs the next."""
    with processors.apart() as through:
        return await _measure(await asyncio.to_thread(MixedNode, folder, through))


async def _measure(node: MixedNode) -> list[Figure]:
    async with node.cluster:
        try:
            await asyncio.to_thread(node.configure, "late")
            await node.start()
            await node.served(await node.serve(node.plan.pods - 1))
            await node.run_pods(NVIDIA, OF_NVIDIA)
            of_aws = await node.run_pods(AWS, OF_AWS)
            figures = await volcano.late(node)
            await node.end_pods(of_aws)
            for step in (lists, by_ids, volcano.idle, idle, volcano.resident):
                figures += await step(node)
            return figures
        finally:
            await node.agent.kill()
            await asyncio.to_thread(node.close)
