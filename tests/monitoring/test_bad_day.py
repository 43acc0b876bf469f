"""A bad day of three nodes and a scheduler, as Prometheus sees it.

Prometheus, the agents and the scheduler extender are the real ones, and the GPUs are simulated: on
one node a GPU reports an XID, another is lost and an MPS daemon dies under its client. A second
node loses the API server, and a third one has MIG instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.component.conftest import QUICK, Stage, folder
from tests.component.test_mig import FIVE, MIXED
from tests.component.test_mps import Mps
from tests.component.vgpu_extender import ExtenderStage, asks, extender_stage
from tests.monitoring.prometheus import MONITORING, Prometheus
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.agent_process import ExtenderProcess
from vgpu_agent.sim.mps_tools import end_daemon

__all__ = ["folder"]  # a fixture

DASHBOARDS = sorted((MONITORING / "dashboards").iterdir())
RATE_INTERVAL = "10s"
MPS_NODE, SHARES_NODE, MIG_NODE = "node-mps", "node-shares", "node-mig"


class Day(NamedTuple):
    """All that takes part."""

    prometheus: Prometheus
    mps: Mps
    shares: ExtenderStage
    mig: Stage


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.asynccontextmanager
async def _stage(path: Path) -> AsyncIterator[Stage]:
    await asyncio.to_thread(path.mkdir)
    stage = await asyncio.to_thread(Stage, path)
    await stage.kubelet.start()
    try:
        yield stage
    finally:
        for agent in stage.agents:
            with contextlib.suppress(SimulationError):
                await agent.terminate()
        await stage.kubelet.stop()


async def _place(extender: ExtenderProcess, stage: ExtenderStage) -> None:
    """Let the extender answer two filters: one with room, one without."""
    nodes = [stage.cluster.node_object()["metadata"]["name"]]
    async with aiohttp.ClientSession() as http:
        for name in ("fits", "too-large"):
            stage.create(name, asks(1, 0, 100 if name == "fits" else 10**6), scheduler="nobody")
            await asyncio.sleep(1)  # until its watch has seen the pod
            pod = stage.cluster.pod(name)
            body = json.dumps({"Pod": pod, "NodeNames": nodes})
            async with http.post(f"{extender.url}/filter", data=body) as answer:
                said = await answer.json(content_type=None)
            assert bool(said["NodeNames"]) == (name == "fits"), said


@pytest.fixture
async def day(folder: Path, promtool: Path) -> AsyncIterator[Day]:
    """Every process, with a pod on each node."""
    async with contextlib.AsyncExitStack() as stack:
        mps_stage = await stack.enter_async_context(_stage(folder / "m"))
        mps = await asyncio.to_thread(Mps, mps_stage)
        stack.callback(end_daemon, mps.pipe)
        on_mps = await mps_stage.ready_agent(mps.shared)
        await mps_stage.admit("train")

        mig = await stack.enter_async_context(_stage(folder / "g"))
        await asyncio.to_thread(mig.node.set_mig, 1, ["1g.5gb"] * 7)
        on_mig = await mig.ready_agent(QUICK + MIXED)
        await mig.allocatable(7, resource=FIVE)
        await mig.admit("slice", 1, FIVE)

        shares = await stack.enter_async_context(extender_stage(folder / "s"))
        on_shares = await shares.start_agent()
        kubeconfig = folder / "s" / "cluster" / "kubeconfig"
        extender = ExtenderProcess(folder / "extender.log", kubeconfig=kubeconfig)
        await extender.start()
        stack.push_async_callback(extender.terminate)

        agents = {
            MPS_NODE: on_mps.public_address,
            MIG_NODE: on_mig.public_address,
            SHARES_NODE: on_shares.public_address,
        }
        jobs = {"vgpu-agent": agents, "vgpu-scheduler": {"": extender.public_address}}
        server = Prometheus(folder / "p", jobs)
        await server.start(_free_port())
        stack.push_async_callback(server.stop)
        # Counters must be seen once before they grow, or no rate knows of it.
        await server.until(
            lambda: (
                len(server.series('up{job="vgpu-agent"} == 1')) == 3
                and server.series("vgpu_scheduler_leader")
            ),
            "the first scrapes",
        )
        shares.create("share", asks(1, 10, 1024))
        await shares.cluster.running("share")
        await _place(extender, shares)
        yield Day(server, mps, shares, mig)


async def _spoil(day: Day) -> None:
    """Break what can break."""
    agent = day.mps.stage.agents[0]
    await agent.until(
        "/debug/ledger",
        lambda found: any(each["state"] == "identified" for each in found["grants"]),
    )
    day.mps.tools.misbehave(start="refuse")
    await asyncio.to_thread(end_daemon, day.mps.pipe)
    await agent.until_logged("mps.daemon_lost")
    day.mig.node.xid(0, 79)
    day.mig.node.lose(1)
    await day.shares.cluster.api.down()


_EXPECTED = {
    ("VgpuAgentMpsDaemonDown", MPS_NODE),
    ("VgpuAgentGpuUnhealthy", MIG_NODE),
    ("VgpuAgentGpuLost", MIG_NODE),
    ("VgpuAgentMigInstanceUnhealthy", MIG_NODE),
    ("VgpuAgentNotReady", MPS_NODE),
    *(("VgpuAgentProblems", node) for node in (MPS_NODE, MIG_NODE, SHARES_NODE)),
}


def _empty_panels(prometheus: Prometheus) -> list[str]:
    """The queries of both dashboards that have had no data on any node."""
    empty = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
                nodes = [MPS_NODE, SHARES_NODE, MIG_NODE] if "$node" in query else [""]
                if not any(prometheus.series(query.replace("$node", node)) for node in nodes):
                    empty.append(f"{path.stem}: {panel['title']}: {query}")
    return empty


async def test_alerts_and_dashboards_show_a_bad_day(day: Day) -> None:
    """Nothing is raised before it. Then the alerts of what has happened are pending or fire, and
    every query of both dashboards has data.
    """
    # That GPUs are simulated is true, all day.
    before = await asyncio.to_thread(day.prometheus.alerts)
    assert {each["labels"]["alertname"] for each in before} == {"VgpuAgentSimulated"}
    await _spoil(day)
    alerts: list[dict[str, Any]] = []

    def raised() -> bool:
        alerts[:] = day.prometheus.alerts()
        found = {(each["labels"]["alertname"], each["labels"].get("node")) for each in alerts}
        return found >= _EXPECTED

    await day.prometheus.until(raised, str(_EXPECTED))
    for each in alerts:
        assert "<no value>" not in each["annotations"]["summary"], each

    day.mig.node.restore(1)  # a recovery, which a panel counts
    empty: list[str] = []

    def filled() -> bool:
        empty[:] = _empty_panels(day.prometheus)
        return not empty

    with contextlib.suppress(TimeoutError):  # the assertion names what is missing
        await day.prometheus.until(filled, "every panel to have data")
    assert empty == []


def test_every_dashboard_metric_is_one_of_ours() -> None:
    """A panel of a metric that is not documented would stay empty at the user's."""
    documented = (MONITORING.parents[2] / "docs" / "metrics.md").read_text() + (
        MONITORING.parents[2] / "docs" / "scheduling.md"
    ).read_text()
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                names = {
                    word
                    for word in target["expr"].replace("(", " ").replace("{", " ").split()
                    if word.startswith(("vgpu_agent_", "vgpu_scheduler_", "process_"))
                }
                for name in names:
                    bare = name.strip("()[]{},").split("[")[0].rstrip(")")
                    bare = re.sub(r"_seconds_(bucket|count)$", "_seconds", bare)
                    assert f"`{bare}`" in documented, (panel["title"], bare)
