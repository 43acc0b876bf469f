"""Restarts of the kubelet and SIGHUP leave each loop of the agent single,
and nothing is written twice.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.component.volcano import (
    CORES,
    MEMORY,
    NODE,
    NUMBER,
    REGISTER,
    U1,
    VolcanoStage,
    asks,
    volcano_stage,
)

RESOURCES = (NUMBER, MEMORY, CORES)
IDLE_SECONDS = 2.0


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        yield stage


async def tasks(stage: VolcanoStage) -> dict[str, int]:
    """Name → restarts of every loop that runs, as ``/debug/tasks`` has them."""
    found = (await stage.agent.get("/debug/tasks"))["tasks"]
    # asks once and ends
    found = [task for task in found if task["name"] != "pods failed while the agent was down"]
    assert [task["name"] for task in found if task["state"] != "running"] == []
    names = collections.Counter(task["name"] for task in found)
    assert set(names.values()) == {1}
    return {task["name"]: task["restarts"] for task in found}


def writes(stage: VolcanoStage) -> list[str]:
    """Every write of the agent to Node and pods at the API server since the requests were
    forgotten.
    """
    return [
        f"{one.verb} {one.path}"
        for one in stage.cluster.api.writes
        if one.resource in {"nodes", "pods", "nodes/status"}
    ]


async def registered(stage: VolcanoStage, times: int) -> None:
    """Wait until each resource has been registered so often with the kubelet of now,
    and its list has come.
    """
    kubelet = stage.cluster.kubelet
    await stage.cluster.until(
        lambda: all(
            len(kubelet.called("Register", name)) >= times and kubelet.resource(name).allocatable
            for name in RESOURCES
        ),
        f"{times} registrations of each resource",
    )
    await stage.agent.until_ready()


async def restart_kubelet(stage: VolcanoStage) -> None:
    """The kubelet goes and comes back."""
    await stage.cluster.kubelet.restart()


async def send_sighup(stage: VolcanoStage) -> None:
    """Send the signal by which an operator makes the replaced plugin begin anew."""
    os.kill(stage.agent.pid, signal.SIGHUP)


@pytest.mark.parametrize(
    "disturb", [restart_kubelet, send_sighup], ids=["the kubelet restarts", "SIGHUP"]
)
async def test_loops_and_writes_do_not_multiply(
    stage: VolcanoStage, disturb: Callable[[VolcanoStage], Awaitable[None]]
) -> None:
    """volcano-vgpu:D13: three times, and there are the same loops as before, none of them failed,
    and no write more than before.
    """
    await stage.start_agent()
    await stage.serve("before", asks(1, 10))
    await stage.settled("before")
    await stage.cluster.stop_volcano()  # its writes are not ours
    await stage.quiet(IDLE_SECONDS)
    loops = await tasks(stage)
    register = stage.cluster.node_object()["metadata"]["annotations"][REGISTER]
    stage.cluster.api.requests.clear()
    for _ in range(3):
        times = len(stage.cluster.kubelet.called("Register", NUMBER)) + 1
        await disturb(stage)
        await registered(stage, times)
    await asyncio.sleep(IDLE_SECONDS)
    assert await tasks(stage) == loops
    assert writes(stage) == []
    assert stage.cluster.node_object()["metadata"]["annotations"][REGISTER] == register
    await stage.cluster.start_volcano()
    await stage.serve("after", asks(1, 20))
    await stage.settled("after")
    stage.check()


async def test_what_changes_afterwards_is_written_once(stage: VolcanoStage) -> None:
    """volcano-vgpu:D13: no loop with an old list of cards is left that would fight the one
    with the new list over a lost GPU.
    """
    await stage.start_agent()
    for _ in range(3):
        times = len(stage.cluster.kubelet.called("Register", NUMBER)) + 1
        await restart_kubelet(stage)
        await registered(stage, times)
        await send_sighup(stage)
        await registered(stage, times + 1)
    await stage.quiet(IDLE_SECONDS)
    stage.cluster.api.requests.clear()
    before = stage.cluster.node_object()["metadata"]["annotations"][REGISTER]
    await asyncio.to_thread(stage.gpus.lose, U1)

    def shown() -> str:
        return str(stage.cluster.node_object()["metadata"]["annotations"][REGISTER])

    await stage.cluster.until(lambda: shown() != before, "the lost card to be shown")
    after = shown()
    await asyncio.sleep(IDLE_SECONDS)
    assert shown() == after
    assert writes(stage) == [f"patch /api/v1/nodes/{NODE}"]


async def test_an_agent_in_a_terminal_ends_with_it(stage: VolcanoStage) -> None:
    """There, SIGHUP says that the terminal was closed,
    and the agent cannot be ended from it any more.
    """
    stage.configure()
    stage.deliver_library()
    ours, its = pty.openpty()
    flags = [
        "--kubelet-dir",
        str(stage.cluster.kubelet_directory),
        "--simulate",
        str(stage.gpus.directory),
        "--config",
        str(stage.config),
    ]
    listen = ["--listen", "127.0.0.1:0", "--debug-listen", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vgpu_agent", "run", *flags, *listen, stderr=its
    )
    os.close(its)
    try:
        shown = b""
        while b"agent.started" not in shown:
            shown += await asyncio.to_thread(os.read, ours, 65536)
        process.send_signal(signal.SIGHUP)
        reading = asyncio.ensure_future(asyncio.to_thread(read_to_the_end, ours))
        assert await asyncio.wait_for(process.wait(), 20) == 0
        await reading
    finally:
        if process.returncode is None:
            process.kill()
        os.close(ours)


def read_to_the_end(terminal: int) -> None:
    """A terminal without a reader blocks its writers, and its end is an error (EIO)."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass
