"""The agent's cost and speed with `nvidia.com/gpu`:
8 simulated GPUs × 10 replicas, an independent gRPC client.

The first part of the benchmark, called by `__main__`. The way of measurement is stated beside each
figure.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import grpc

from tests.bench.allocate import timed_calls
from tests.bench.figures import Figure, percentile
from tests.bench.processors import seconds_of
from vgpu_agent.agent.records import verification
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.kubelet.kubelet import Container, SimulatedKubelet
from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages
from vgpu_agent.sim.state import SimulatedNode

GPU = "nvidia.com/gpu"
GPUS, REPLICAS = 8, 10
VIEWERS = 5
_PAGE_SECONDS = 20
CONFIG = (
    f"version: v1\nsharing: {{timeSlicing: {{resources: [{{name: {GPU}, replicas: "
    f"{REPLICAS}}}]}}}}\n"
)
_SERVICE = "/v1beta1.DevicePlugin"


class Node:
    """One simulated node for one measurement or several."""

    def __init__(self, folder: Path) -> None:
        self.simulated = SimulatedNode.create(
            folder / "gpus", model="A100-SXM4-80GB", gpus=GPUS, numa=[0] * 4 + [1] * 4
        )
        self.kubelet = SimulatedKubelet(folder / "kubelet")
        self.config = folder / "config.yaml"
        self.config.write_text(CONFIG)
        self.agent = AgentProcess(
            folder / "agent.log",
            kubelet=folder / "kubelet",
            simulate=self.simulated.directory,
            config=self.config,
        )

    def plugin_socket(self) -> Path:
        """The agent's own socket."""
        (path,) = [
            path for path in self.kubelet.plugins.iterdir() if path.name.startswith("vgpu-agent")
        ]
        return path


async def start_to_registered(node: Node) -> list[Figure]:
    """From the start of the process to the last Register."""
    times = []
    for _ in range(5):
        began = time.monotonic()
        await node.agent.spawn()
        seen = len(node.kubelet.called("Register"))
        # bound early
        await node.kubelet.until(lambda seen=seen: len(node.kubelet.called("Register")) > seen)  # type: ignore[misc]  # mypy does not infer a lambda with a default
        times.append(node.kubelet.called("Register")[-1].at - began)
        await node.agent.terminate()
    how = (
        "process start (python -m vgpu_agent run) to Register received by the kubelet stand-in, "
        "median of 5"
    )
    return [Figure("start to all resources registered", statistics.median(times), 0.35, "s", how)]


async def socket_to_register(node: Node) -> list[Figure]:
    """From the creation of kubelet.sock to Register."""
    times = []
    for _ in range(5):
        seen = len(node.kubelet.called("Register"))
        await node.kubelet.restart(away_seconds=0.3)
        created = (node.kubelet.plugins / "kubelet.sock").stat().st_ctime
        # bound early
        await node.kubelet.until(lambda seen=seen: len(node.kubelet.called("Register")) > seen)  # type: ignore[misc]  # mypy does not infer a lambda with a default
        wall_offset = time.time() - time.monotonic()
        times.append(max(0.0, node.kubelet.called("Register")[seen].at + wall_offset - created))
        await node.agent.until_ready()
    return [
        Figure(
            "kubelet.sock created to Register",
            max(times),
            0.3,
            "s",
            "inode change time of the socket to Register received, worst of 5",
        )
    ]


async def allocate(node: Node) -> list[Figure]:
    """Allocate through the unix socket from grpcio."""
    ids = sorted(node.kubelet.resource(GPU).healthy)
    calls, warm = 2000, 100
    asked = [[ids[number % len(ids)]] for number in range(warm + calls)]
    times = [call.seconds for call in await timed_calls(node.plugin_socket(), asked, warm=warm)]
    how = (
        f"{calls} calls, one in flight, blocking grpcio client in a process of its own, 80 ids in "
        "turn"
    )
    return [
        Figure("Allocate p50", percentile(times, 50) * 1000, 1.5, "ms", how),
        Figure("Allocate p99", percentile(times, 99) * 1000, 5, "ms", how),
    ]


async def preference(node: Node) -> list[Figure]:
    """GetPreferredAllocation with 100,000 ids."""
    ids = sorted(node.kubelet.resource(GPU).healthy)
    available = ids + [
        f"{ids[0].partition('::')[0]}::{number}"
        for number in range(1000, 1000 + 100_000 - len(ids))
    ]
    request = messages.PreferredAllocationRequest(
        container_requests=[
            messages.ContainerPreferredAllocationRequest(
                available_device_ids=available, allocation_size=2
            )
        ]
    )
    async with grpc.aio.insecure_channel(
        f"unix:{node.plugin_socket()}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        call = channel.unary_unary(
            f"{_SERVICE}/GetPreferredAllocation",
            request_serializer=messages.PreferredAllocationRequest.SerializeToString,
            response_deserializer=messages.PreferredAllocationResponse.FromString,
        )
        times = []
        for _ in range(3):
            began = time.monotonic()
            answer = await call(request)
            times.append(time.monotonic() - began)
    if len(answer.container_responses[0].device_ids) != 2:
        raise RuntimeError(f"the preference is wrong: {answer}")
    return [
        Figure(
            "GetPreferredAllocation, 100,000 ids",
            max(times),
            1.0,
            "s",
            "round trip of a grpcio client, worst of 3",
        )
    ]


async def xid_to_stream(node: Node) -> list[Figure]:
    """From an XID to Unhealthy at kubelet."""
    times = []
    for number in range(4):
        healthy = node.kubelet.resource(GPU).allocatable
        began = time.monotonic()
        node.simulated.xid(number, 79)
        # bound early
        await node.kubelet.until(
            lambda healthy=healthy: node.kubelet.resource(GPU).allocatable == healthy - REPLICAS  # type: ignore[misc]  # mypy does not infer a lambda with a default
        )
        times.append(node.kubelet.called("list")[-1].at - began)
    return [
        Figure(
            "XID to Unhealthy on the stream",
            max(times),
            1.0,
            "s",
            "event posted to list received by the kubelet stand-in, worst of 4",
        )
    ]


async def metrics(node: Node) -> list[Figure]:
    """One scrape."""
    times = []
    for _ in range(20):
        began = time.monotonic()
        await node.agent.get_text("/metrics")
        times.append(time.monotonic() - began)
    return [
        Figure(
            "/metrics",
            statistics.median(times) * 1000,
            20,
            "ms",
            "HTTP round trip with a new connection, median of 20",
        )
    ]


async def resident(node: Node) -> list[Figure]:
    """Memory after all of the above, once the next look at kubelet's records has given back what
    large messages had taken.
    """
    await asyncio.sleep(verification.VERIFY_SECONDS + 1)
    status = await asyncio.to_thread(Path(f"/proc/{node.agent.pid}/status").read_text)
    rss_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return [
        Figure(
            "RSS",
            rss_kib / 1024,
            72,
            "MiB",
            "VmRSS of the process after the measurements above and the next verification",
        )
    ]


async def idle_cpu(node: Node) -> list[Figure]:
    """Processor time while nothing happens."""
    seconds = 20
    await asyncio.sleep(3)  # let what was just done settle
    before = await asyncio.to_thread(seconds_of, node.agent.pid)
    await asyncio.sleep(seconds)
    used = await asyncio.to_thread(seconds_of, node.agent.pid) - before
    return [
        Figure(
            "idle CPU",
            used / seconds * 100,
            1,
            "% of a core",
            f"user and system time over {seconds} s",
        )
    ]


async def page(node: Node) -> list[Figure]:
    """The page of a full node in five browsers, while the figures of every GPU change."""
    await _fill(node)
    address = f"http://{node.agent.public_address}"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{address}/", headers={"Accept": "text/html"}) as answer:
            document = await answer.text()
        loaded = len(document.encode())
        for path in ("dashboard.css", "dashboard.js"):
            async with session.get(f"{address}/{path}") as answer:
                loaded += len(await answer.read())
        alone = await _used_while_gpus_work(node)
        version = document.partition('data-version="')[2].partition('"')[0]
        messages: list[int] = []
        viewers = [
            asyncio.create_task(_view(session, f"{address}/stream?have={version}", messages))
            for _ in range(VIEWERS)
        ]
        await asyncio.sleep(3)
        before = len(messages)
        followed = await _used_while_gpus_work(node)
        for viewer in viewers:
            viewer.cancel()
        await asyncio.gather(*viewers, return_exceptions=True)
    if len(messages) - before < VIEWERS * 3:
        raise RuntimeError(f"the stream is silent: {messages}")
    what = f"{GPUS} GPUs and {GPUS * REPLICAS} pods"
    return [
        Figure("page: first load", loaded / 1024, 100, "KiB", f"document, style, script; {what}"),
        Figure(
            "page: largest change",
            max(messages) / 1024,
            5,
            "KiB",
            "bytes of a message on the stream, in which all figures of all GPUs change",
        ),
        Figure(
            f"page: {VIEWERS} viewers",
            followed - alone,
            1,
            "% of a core",
            f"user and system time over {_PAGE_SECONDS} s, beyond that without viewers; {what}",
        ),
    ]


async def _fill(node: Node) -> None:
    """A pod for each replica, named by kubelet's records."""
    for number in range(GPUS * REPLICAS):
        await node.kubelet.admit(
            f"transformer-finetune-worker-{number}", [Container("main", {GPU: 1})]
        )
    await node.agent.until(
        "/debug/allocations",
        lambda found: sum(bool(each["pod"]) for each in found["allocations"]) == GPUS * REPLICAS,
        timeout_seconds=verification.VERIFY_SECONDS + 10,
    )


async def _used_while_gpus_work(node: Node) -> float:
    """The processor time of the agent in percent of a core, while GPUs are more and less busy."""
    before = await asyncio.to_thread(seconds_of, node.agent.pid)
    for second in range(_PAGE_SECONDS):
        for gpu in range(GPUS):
            node.simulated.utilisation(gpu, (17 * second + gpu) % 100)
            node.simulated.temperature(gpu, 40 + (7 * second + gpu) % 40)
        await asyncio.sleep(1)
    return (await asyncio.to_thread(seconds_of, node.agent.pid) - before) / _PAGE_SECONDS * 100


async def _view(session: aiohttp.ClientSession, url: str, messages: list[int]) -> None:
    """Follow the page, and note the size of each message."""
    async with session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as response:
        size = 0
        async for line in response.content:
            size += len(line)
            if line == b"\n":
                messages.append(size)
                size = 0


async def lag_while_hung(node: Node) -> list[Figure]:
    """The event loop while NVML does not return."""
    node.simulated.fault("nvmlDeviceGetTemperature", times=1, delay_ms=5000)
    await asyncio.sleep(6)
    tasks = await node.agent.get("/debug/tasks")
    how = (
        "lateness of a 0.1 s timer in the agent, 99th percentile of the samples of a fresh process "
        "in which NVML hung for 5 s"
    )
    return [
        Figure(
            "event loop lag p99, NVML hung for 5 s", tasks["loop_lag_seconds"] * 1000, 10, "ms", how
        )
    ]


async def measure(folder: Path) -> list[Figure]:
    """All figures, in an order in which none disturbs the next."""
    node = Node(folder)
    await node.kubelet.start()
    try:
        return await _measure(node)
    finally:
        await node.agent.kill()
        await node.kubelet.stop()


async def _measure(node: Node) -> list[Figure]:
    figures = await start_to_registered(node)
    steps: list[Callable[[Node], Awaitable[list[Figure]]]] = [
        socket_to_register,
        allocate,
        preference,
        metrics,
        xid_to_stream,
        resident,
    ]
    for step in steps:
        if step is socket_to_register:
            await node.agent.start()
            await node.agent.until_ready()
        figures += await step(node)
    await node.agent.terminate()
    for step in (lag_while_hung, idle_cpu, page):
        await node.agent.start()
        await node.agent.until_ready()
        figures += await step(node)
        await node.agent.terminate()
    return figures
