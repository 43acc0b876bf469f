"""The agent's speed with Volcano's pods:
110 of them on the node, 49,152 ids of memory, an API server that is 20 ms away.

The second part of the benchmark, called by `__main__`. Allocate is timed by a client that does
nothing else (`allocate`), and also by the kubelet stand-in, which shares its process with the API
server's and with its own work. PreStartContainer is timed by the stand-in only. For comparison, one
Allocate of the reference plugin (`reference`) runs against the same API server. The agent has
processors of its own (`processors`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench import processors
from tests.bench.allocate import timed_calls
from tests.bench.figures import Figure, percentile
from tests.bench.volcano_node import MEMORY, NODE, NUMBER, PODS, RESOURCES, VolcanoNode
from vgpu_agent.agent.records import verification
from vgpu_agent.sim.kubelet.endpoint import Timing

BURST, ROUNDS, BURSTS, EARLY_ROUNDS = 40, 60, 5, 5
QUIET_SECONDS = 35.0
"""Longer than the pause between two verifications."""
_SETTLE_SECONDS = 0.1
_SAMPLES, _SAMPLE_SECONDS = 30, 0.2  # of the resident memory
CALLS = 300
"""Of a client other than kubelet."""
ALONE = "blocking client in a process of its own, one call in flight"
_ONE_BY_ONE = f"{ROUNDS} pods one after the other beside {PODS - 1} that run"
_ONCE = (
    f"{BURST} pods bound in one moment, {PODS} in the end; kubelet admits one by one and starts at "
    "once"
)
_AT_ONCE = f"{BURSTS} times {_ONCE}"


def _milliseconds(timings: list[Timing], percent: int) -> float:
    return percentile((timing.seconds for timing in timings), percent) * 1000


async def one_by_one(node: VolcanoNode) -> float:
    """Let pods come and go, one at a time; the time when it began."""
    began = time.monotonic()
    for _ in range(ROUNDS):
        names = await node.serve(1)
        await node.served(names)
        await node.remove(names)
        await asyncio.sleep(_SETTLE_SECONDS)
    return began


async def at_once(node: VolcanoNode) -> float:
    """Let a burst of pods come; the time when it began."""
    await node.remove(list(node.pods)[: len(node.pods) + BURST - node.plan.pods])
    await asyncio.sleep(1)
    began = time.monotonic()
    await node.served(await node.serve(BURST))
    return began


def requests_inside(node: VolcanoNode, allocated: Sequence[Timing]) -> Figure:
    """Measure whether Allocate sends requests to the API server: then each call has one inside.

    What the agent writes by itself, such as the mark of the pod before, may fall into a call.
    """
    inside = [
        request for each in allocated for request in node.requests_between(each.began, each.seconds)
    ]
    seen = f": {', '.join(sorted(set(inside)))}" if inside else ""
    return Figure(
        "API requests inside Allocate",
        len(inside) / len(allocated),
        0.05,
        "a call",
        f"{len(allocated)} calls, seen by the API server between call and answer{seen}",
    )


async def late(node: VolcanoNode) -> list[Figure]:
    """Late binding: Allocate answers a name, PreStartContainer decides."""
    began = await one_by_one(node)
    allocated = {
        resource: node.timings("Allocate", resource, since=began) for resource in RESOURCES
    }
    started = node.timings("PreStartContainer", NUMBER, since=began)
    burst: list[Timing] = []
    wholes, in_calls = [], []
    for _ in range(BURSTS):
        began = await at_once(node)
        starts = node.timings("PreStartContainer", NUMBER, since=began)
        burst += starts
        wholes.append(max(each.began + each.seconds for each in starts) - began)
        calls = [
            each
            for method in ("Allocate", "PreStartContainer")
            for name in RESOURCES
            for each in node.timings(method, name, since=began)
        ]
        in_calls.append(sum(each.seconds for each in calls))
    ours = (
        "the same, the slowest: the first bind to the last PreStartContainer answered, the work of "
        "the kubelet stand-in included"
    )
    return [
        Figure(
            "late Allocate p50, as kubelet waits, number",
            _milliseconds(allocated[NUMBER], 50),
            None,
            "ms",
            _ONE_BY_ONE,
        ),
        Figure(
            "late Allocate p50, as kubelet waits, memory",
            _milliseconds(allocated[MEMORY], 50),
            None,
            "ms",
            "the same pods",
        ),
        requests_inside(node, list(itertools.chain(*allocated.values()))),
        Figure("PreStartContainer p50", _milliseconds(started, 50), 15, "ms", _ONE_BY_ONE),
        Figure("PreStartContainer p50, burst", _milliseconds(burst, 50), 15, "ms", _AT_ONCE),
        Figure(
            "PreStartContainer p99, burst",
            _milliseconds(burst, 99),
            50,
            "ms",
            f"the same, {BURSTS * BURST} starts",
        ),
        Figure("bind to granted, burst", max(wholes), 5, "s", ours),
        Figure(
            "of that, time in our calls",
            max(in_calls),
            None,
            "s",
            "sum over all calls, though starts overlap",
        ),
    ]


async def idle(node: VolcanoNode) -> list[Figure]:
    """Requests while nothing happens."""
    await asyncio.sleep(3)  # let what was just done settle
    began = time.monotonic()
    await asyncio.sleep(QUIET_SECONDS)
    made = node.requests_between(began, QUIET_SECONDS)
    return [
        Figure(
            "API requests while nothing happens",
            len(made),
            0,
            "requests",
            f"in {QUIET_SECONDS:g} s, {PODS} pods; watches apart",
        )
    ]


async def resident(node: VolcanoNode) -> list[Figure]:
    """Memory after all of the above, once the next verification has given back what large messages
    had taken.

    A verification that is under way needs some MiB more. The calls above are bookings that the
    kubelet never confirms, so one begins 31 s after them: one sample could meet it.
    """
    await asyncio.sleep(verification.VERIFY_SECONDS + 1)
    samples = []
    for _ in range(_SAMPLES):
        samples.append(await node.resident_mib())
        await asyncio.sleep(_SAMPLE_SECONDS)
    return [
        Figure(
            "RSS",
            statistics.median(samples),
            72,
            "MiB",
            f"VmRSS after the measurements above and the next verification, {PODS} pods; median of "
            f"{_SAMPLES} in {_SAMPLES * _SAMPLE_SECONDS:g} s, {max(samples):.1f} at most",
        )
    ]


async def late_alone(node: VolcanoNode) -> list[Figure]:
    """Allocate without kubelet's own work around it."""
    number, memory = node.free(NUMBER), node.free(MEMORY)
    each = [[number[call % len(number)]] for call in range(CALLS)]
    sizes = [200 + call * 53 % 241 for call in range(CALLS)]
    starts = [call * 31 % (len(memory) - 441) for call in range(CALLS)]
    many = [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    figures = []
    for name, resource, asked, what in (
        ("late Allocate p50, vgpu-number", NUMBER, each, f"{len(number)} free ids in turn"),
        ("late Allocate p50, vgpu-memory", MEMORY, many, "200 to 440 free ids a call"),
    ):
        times = [call.seconds for call in await timed_calls(node.socket(resource), asked)]
        figures.append(
            Figure(name, percentile(times, 50) * 1000, 1.5, "ms", f"{CALLS} calls, {what}; {ALONE}")
        )
    return figures


async def start(node: VolcanoNode) -> list[Figure]:
    """From the start of the process, or from the end of the one before, to the last Register."""
    whole: list[float] = []
    killed: list[float] = []
    kubelet = node.cluster.kubelet
    for times, end in ((whole, node.agent.terminate), (killed, node.agent.kill)):
        for _ in range(5):
            seen, before = len(kubelet.called("Register")), time.monotonic()
            await end()
            began = time.monotonic() if times is whole else before
            await node.agent.spawn()
            # bound early
            await kubelet.until(
                lambda seen=seen: len(kubelet.called("Register")) >= seen + len(RESOURCES)  # type: ignore[misc]  # mypy does not infer a lambda with a default
            )
            times.append(kubelet.called("Register")[-1].at - began)
            await node.agent.until_ready()
    how = f"{PODS} pods on the node, to the last of three Registers, median of 5"
    return [
        Figure(
            "start to all resources registered",
            statistics.median(whole),
            1.5,
            "s",
            f"from the start of the process; {how}",
        ),
        Figure(
            "kill -9 to all resources registered",
            statistics.median(killed),
            0.5,
            "s",
            f"the process is started at once; {how}",
        ),
    ]


async def early(node: VolcanoNode) -> list[Figure]:
    """Early binding: Allocate decides."""
    await node.agent.terminate()
    node.configure("early")
    await node.start()
    alone = await early_alone(node)
    await node.served(await node.serve(PODS - 1 - len(node.pods)))
    began = await one_by_one(node)
    timings = node.timings("Allocate", NUMBER, since=began)
    began = await at_once(node)
    burst = node.timings("Allocate", NUMBER, since=began)
    return [
        *alone,
        Figure(
            "early Allocate p50, as kubelet waits",
            _milliseconds(timings, 50),
            None,
            "ms",
            _ONE_BY_ONE,
        ),
        Figure("early Allocate p50, burst", _milliseconds(burst, 50), None, "ms", _ONCE),
        Figure(
            "early Allocate p99, as kubelet waits",
            _milliseconds([*timings, *burst], 99),
            None,
            "ms",
            f"both, {ROUNDS + BURST} calls",
        ),
    ]


async def early_alone(node: VolcanoNode) -> list[Figure]:
    """Allocate in early mode without kubelet's own work around it:
    pods are bound, and kubelet admits none of them.
    """
    times: list[float] = []
    await node.remove(list(node.pods)[: len(node.pods) + BURST - node.plan.pods])
    for _ in range(EARLY_ROUNDS):
        async with node.waiting(BURST):
            asked = [[id_] for id_ in node.free(NUMBER)[:BURST]]
            times += [call.seconds for call in await timed_calls(node.socket(NUMBER), asked)]
        await asyncio.sleep(_SETTLE_SECONDS)
    how = (
        f"{EARLY_ROUNDS} times {BURST} pods, bound and not admitted, beside {PODS - BURST} that "
        f"run; {ALONE}"
    )
    return [
        Figure("early Allocate p50", percentile(times, 50) * 1000, 5, "ms", how),
        Figure(
            "early Allocate p99",
            percentile(times, 99) * 1000,
            15,
            "ms",
            f"the same, {len(times)} calls",
        ),
    ]


async def reference(node: VolcanoNode) -> list[Figure]:
    """Measure the reference plugin's way of allocating."""
    calls = 20
    await node.agent.terminate()
    await node.remove(list(node.pods)[:calls])
    node.cluster.hold_admission = True
    for _ in range(calls):
        node.bind()
    program = [
        *node.through,
        sys.executable,
        "-m",
        "tests.bench.reference",
        node.cluster.api.url,
        NODE,
        str(calls),
    ]
    answer = await asyncio.to_thread(
        subprocess.run, program, check=True, capture_output=True, text=True
    )
    how = (
        f"lists all pods, patch, get, patch, get node: {calls} pods, no gRPC around it, no limit "
        "on requests"
    )
    return [
        Figure(
            "the reference's Allocate p50",
            percentile(json.loads(answer.stdout), 50) * 1000,
            None,
            "ms",
            how,
        )
    ]


async def measure(folder: Path) -> list[Figure]:
    """All figures, in an order in which none disturbs the next."""
    with processors.apart() as through:
        return await _measure(await asyncio.to_thread(VolcanoNode, folder, through))


async def _measure(node: VolcanoNode) -> list[Figure]:
    async with node.cluster:
        try:
            await asyncio.to_thread(node.configure, "late")
            await node.start()
            await node.served(await node.serve(PODS - 1))
            figures: list[Figure] = []
            for step in (late, idle, late_alone, resident, start, early, reference):
                figures += await step(node)
            return figures
        finally:
            await node.agent.kill()
            await asyncio.to_thread(node.close)
