"""The cost of switching from NVIDIA's plugin:
each list strategy, the choice of GPUs, MIG slices that come and go.

The part ``drop-in`` of the benchmark, called by `__main__`. Each figure is taken from an agent
process of its own, asked by an independent gRPC client. The way of measurement is stated beside it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from tests.bench.allocate import timed_calls
from tests.bench.figures import Figure, percentile
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.kubelet.kubelet import SimulatedKubelet
from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages
from vgpu_agent.sim.state import SimulatedNode

GPU = "nvidia.com/gpu"
SLICE = "nvidia.com/mig-1g.10gb"
STRATEGIES = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")
MODEL = "A100-SXM4-80GB"
_SERVICE = "/v1beta1.DevicePlugin"


class Node:
    """A simulated node with an agent of its own."""

    def __init__(self, folder: Path, *, gpus: int, settings: dict[str, object]) -> None:
        folder.mkdir()
        half = gpus // 2
        self.simulated = SimulatedNode.create(
            folder / "gpus", model=MODEL, gpus=gpus, numa=[0] * half + [1] * (gpus - half)
        )
        self.kubelet = SimulatedKubelet(folder / "kubelet")
        config = folder / "config.yaml"
        config.write_text(
            json.dumps(
                {"version": "v1", "binding": {"cdiDirectory": str(folder / "cdi")}} | settings
            )
        )
        self.agent = AgentProcess(
            folder / "agent.log",
            kubelet=folder / "kubelet",
            simulate=self.simulated.directory,
            config=config,
        )

    def socket(self, resource: str) -> Path:
        """Return the socket on which the agent serves the resource."""
        return self.kubelet.plugins / str(
            self.kubelet.called("Register", resource)[-1].facts["endpoint"]
        )


@asynccontextmanager
async def serving(node: Node) -> AsyncIterator[Node]:
    """The node with a running agent that is ready."""
    await node.kubelet.start()
    try:
        await node.agent.start()
        await node.agent.until_ready()
        # the list comes a moment after the stream
        await node.kubelet.until(lambda: bool(node.kubelet.resource(GPU).healthy))
        # let the start settle: the first comparison with kubelet's records comes after a second
        await asyncio.sleep(2)
        yield node
    finally:
        await node.agent.kill()
        await node.kubelet.stop()


async def strategies(folder: Path) -> list[Figure]:
    """Allocate with each way to tell a container of its devices."""
    figures = []
    for strategy in STRATEGIES:
        settings: dict[str, object] = {"plugin": {"deviceListStrategy": [strategy]}}
        async with serving(Node(folder / strategy, gpus=8, settings=settings)) as node:
            ids = sorted(node.kubelet.resource(GPU).healthy)
            calls, warm = 1000, 100
            asked = [[ids[number % len(ids)]] for number in range(warm + calls)]
            times = [call.seconds for call in await timed_calls(node.socket(GPU), asked, warm=warm)]
        how = (
            f"{calls} calls, one in flight, blocking grpcio client in a process of its own, 8 "
            "whole GPUs in turn"
        )
        figures.append(
            Figure(f"Allocate p50, {strategy}", percentile(times, 50) * 1000, 1.5, "ms", how)
        )
    return figures


async def preferences(folder: Path) -> list[Figure]:
    """GetPreferredAllocation of whole GPUs, by how near they are to each other, and of replicas."""
    figures = []
    for gpus, limit in ((8, 3), (16, 20)):
        async with serving(Node(folder / f"whole-{gpus}", gpus=gpus, settings={})) as node:
            for size in (2, gpus // 2, gpus - 1):
                slow = percentile(await _preferences(node, size, calls=200), 99)
                how = "all free; round trip of a grpcio client, p99 of 200"
                figures.append(
                    Figure(
                        f"GetPreferredAllocation, {size} of {gpus} GPUs",
                        slow * 1000,
                        limit,
                        "ms",
                        how,
                    )
                )
    sharing = {"timeSlicing": {"resources": [{"name": GPU, "replicas": 64}]}}
    async with serving(Node(folder / "replicas", gpus=16, settings={"sharing": sharing})) as node:
        slow = percentile(await _preferences(node, 16, calls=200), 99)
        how = "all free, 16 wanted; round trip of a grpcio client, p99 of 200"
        figures.append(
            Figure("GetPreferredAllocation, 64 replicas × 16 GPUs", slow * 1000, 50, "ms", how)
        )
    return figures


async def slices(folder: Path) -> list[Figure]:
    """8 GPUs × 7 MIG slices: the start, and a change of geometry under a running agent."""
    node = Node(folder / "mig", gpus=8, settings={"plugin": {"migStrategy": "mixed"}})
    for gpu in range(8):
        node.simulated.set_mig(gpu, ["1g.10gb"] * 7)
    await node.kubelet.start()
    try:
        starts = []
        for _ in range(5):
            began = time.monotonic()
            await node.agent.spawn()
            seen = len(node.kubelet.called("Register"))
            # bound early
            await node.kubelet.until(lambda seen=seen: len(node.kubelet.called("Register")) > seen)  # type: ignore[misc]  # mypy does not infer a lambda with a default
            starts.append(node.kubelet.called("Register")[-1].at - began)
            await node.agent.terminate()
        await node.agent.start()
        await node.agent.until_ready()
        changes = [
            await _change(node, profiles)
            for profiles in (["3g.40gb", "3g.40gb"], ["1g.10gb"] * 7) * 3
        ]
        rss_kib = await asyncio.to_thread(_resident_kib, node.agent.pid)
    finally:
        await node.agent.kill()
        await node.kubelet.stop()
    start_how = "process start to the last Register received by the kubelet stand-in, worst of 5"
    change_how = (
        "geometry switched in the simulated driver to the right lists of both resources at the "
        "kubelet stand-in, worst of 6"
    )
    return [
        Figure("start with 8 × 7 MIG slices", max(starts), 1, "s", start_how),
        Figure("MIG change to new lists", max(changes), 2, "s", change_how),
        Figure(
            "RSS, 8 × 7 MIG slices",
            rss_kib / 1024,
            72,
            "MiB",
            "VmRSS of the process after the changes above",
        ),
    ]


async def _change(node: Node, profiles: Sequence[str]) -> float:
    """Seconds until kubelet sees the last GPU cut into ``profiles``."""
    ones, threes = 49 + profiles.count("1g.10gb"), profiles.count("3g.40gb")
    began = time.monotonic()
    node.simulated.set_mig(7, profiles)

    def seen() -> bool:
        shown = {
            name: node.kubelet.resource(name).allocatable
            for name in (SLICE, "nvidia.com/mig-3g.40gb")
            if name in node.kubelet.resources
        }
        return shown.get(SLICE) == ones and shown.get("nvidia.com/mig-3g.40gb", 0) == threes

    await node.kubelet.until(seen)
    return time.monotonic() - began


async def _preferences(node: Node, size: int, *, calls: int) -> list[float]:
    available = sorted(node.kubelet.resource(GPU).healthy)
    request = messages.PreferredAllocationRequest(
        container_requests=[
            messages.ContainerPreferredAllocationRequest(
                available_device_ids=available, allocation_size=size
            )
        ]
    )
    async with grpc.aio.insecure_channel(f"unix:{node.socket(GPU)}") as channel:
        call = channel.unary_unary(
            f"{_SERVICE}/GetPreferredAllocation",
            request_serializer=messages.PreferredAllocationRequest.SerializeToString,
            response_deserializer=messages.PreferredAllocationResponse.FromString,
        )
        times = []
        for number in range(calls + 5):  # the first ones open the connection
            began = time.monotonic()
            answer = await call(request)
            if number >= 5:
                times.append(time.monotonic() - began)
            if len(set(answer.container_responses[0].device_ids)) != size:
                raise RuntimeError(f"the preference is wrong: {answer}")
    return times


def _resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


async def measure(folder: Path) -> list[Figure]:
    """All figures."""
    return [*await strategies(folder), *await preferences(folder), *await slices(folder)]
