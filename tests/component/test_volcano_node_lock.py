"""Bursts under the node lock of Volcano's scheduler, which binds one pod to the node,
and the next one when the lock is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import constants
from tests.component.volcano import VGPU, VolcanoStage, asks, volcano_stage
from vgpu_agent.sim.volcano.scheduler import VolcanoSettings

LOCK = "hamivgpu"
PODS = 20

# The real scheduler makes a round each second, and binds one pod in each at best; twice as often is
# enough to see the awaited pod.
ROUND_SECONDS = 0.5


class _Hurried(VolcanoStage):
    """A stage whose agent has the default pauses between writes:
    quick ones would hide that it waits.
    """

    def configure(self, more: str = VGPU, *, factor: int = 512) -> None:
        super().configure(more, factor=factor)
        del self.constants[constants.API_BACKOFF_MIN], self.constants[constants.API_BACKOFF_MAX]


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node whose scheduler works at the real one's rhythm."""
    async with volcano_stage(folder, of=_Hurried) as stage:
        yield stage


async def _storm(stage: VolcanoStage, name: str, *, node_lock: bool) -> float:
    """Create the pods at once; seconds until the last one runs, after which all are gone."""
    await stage.cluster.start_volcano(
        VolcanoSettings(node_lock=node_lock, period_seconds=ROUND_SECONDS)
    )
    names = [f"{name}-{number}" for number in range(PODS)]
    began = time.monotonic()
    for each in names:
        stage.cluster.create_pod(each, asks(1, 1))
    await stage.cluster.running(*names, timeout_seconds=120)
    seconds = time.monotonic() - began
    stage.check()
    await stage.cluster.stop_volcano()
    for each in names:
        stage.cluster.delete_pod(each)
    await stage.cluster.until(
        lambda: not any(stage.cluster.exists(each) for each in names), "the pods to be gone"
    )
    return seconds


@contextlib.asynccontextmanager
async def _locks_removed_at_once(stage: VolcanoStage) -> AsyncIterator[None]:
    """A plugin that does nothing but remove each lock in the moment in which it is taken: the
    quickest way possible for the scheduler.
    """

    async def remove() -> None:
        async for _ in stage.cluster.objects.revision.changes():
            if LOCK in stage.cluster.node_object()["metadata"].get("annotations", {}):
                stage.cluster.objects.patch(
                    "nodes", stage.cluster.node, {"metadata": {"annotations": {LOCK: None}}}
                )

    task = asyncio.create_task(remove())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_burst_under_the_node_lock_keeps_the_schedulers_pace(stage: VolcanoStage) -> None:
    """Twenty pods at once: the last one runs no later than if each lock were gone in the moment in
    which it was taken, and a fifth.

    Two locks within one second have the same text. An agent that takes the second for the first one
    come back lets the scheduler wait. A busy machine gets two more rounds.
    """
    await stage.start_agent(factor=512)
    without = await _storm(stage, "free", node_lock=False)
    pace = ours = math.inf
    for number in range(3):
        async with _locks_removed_at_once(stage):
            pace = min(pace, await _storm(stage, f"pace-{number}", node_lock=True))
        ours = min(ours, await _storm(stage, f"ours-{number}", node_lock=True))
        if ours <= 1.2 * pace:
            break
    assert without < pace
    assert ours <= 1.2 * pace, (
        f"{without:.1f} s without lock, {pace:.1f} s at the scheduler's pace, {ours:.1f} s with us"
    )
    events = [line["msg"] for line in await asyncio.to_thread(stage.agent.log_lines)]
    assert "node.contested" not in events


async def test_an_agent_that_is_killed_in_a_locked_burst_frees_the_lock_when_it_is_back(
    stage: VolcanoStage,
) -> None:
    """The lock of the moment stays behind, for a pod that the kubelet has failed meanwhile.
    The others run all the same.
    """
    await stage.start_agent(factor=512)
    await stage.cluster.start_volcano(VolcanoSettings(node_lock=True, period_seconds=0.1))
    names = [f"burst-{number}" for number in range(10)]
    for name in names:
        stage.cluster.create_pod(name, asks(1, 1))

    def phases() -> list[str]:
        return [stage.cluster.phase(name) for name in names]

    await stage.cluster.until(lambda: phases().count("Running") >= 3, "the first to run")
    # Stopped first: the scheduler binds nothing more to a node whose plugin is gone, and there may
    # be no lock at that moment.
    os.kill(stage.agent.pid, signal.SIGSTOP)
    await stage.cluster.until(
        lambda: LOCK in stage.cluster.node_object()["metadata"]["annotations"],
        "a lock to be left behind",
    )
    await stage.agent.kill()
    await stage.restart_agent()
    await stage.cluster.until(
        lambda: {"Running", "Failed"}.issuperset(phases()), "the others to run", timeout_seconds=60
    )
    assert phases().count("Failed") <= 2
    await stage.cluster.until(
        lambda: LOCK not in stage.cluster.node_object()["metadata"]["annotations"],
        "the last lock to be given back",
    )
    stage.check()
