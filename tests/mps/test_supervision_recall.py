"""Remains of a killed agent are undone by the next one, even when no daemon is desired by then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.mps.supervised import RESOURCE, Node, until, until_running, why_not
from vgpu_agent.isolation.mps import DeviceLimit
from vgpu_agent.mps import directories, processes
from vgpu_agent.sim.mps_tools import daemon_pid, end_daemon
from vgpu_agent.status import MpsState

NOBODY: frozenset[str] = frozenset()

# each test starts dozens of processes
pytestmark = [pytest.mark.component, pytest.mark.usefixtures("nothing_blocks")]


@pytest.mark.parametrize("daemon", ["lives", "died with its container"])
async def test_sharing_that_was_switched_off_between_two_agents_leaves_nothing(
    node: Node, daemon: str
) -> None:
    """The daemon ends and the GPUs take any process again,
    once the pods that held shares are gone.
    """
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
    if daemon != "lives":
        end_daemon(node.pipe)
        await until(lambda: daemon_pid(node.pipe) is None)
    node.pods = ()
    assert node.compute_modes == [3, 3]
    async with node.agent() as supervision:
        supervision.want({})
        await supervision.end_former_daemons()
        await until(lambda: supervision.statuses[0].state is MpsState.STOPPED)
        assert await asyncio.to_thread(processes.written_pid, str(node.pipe)) is None
        assert node.compute_modes == [0, 0]
    async with node.agent() as supervision:
        await supervision.end_former_daemons()
        assert supervision.statuses == ()


async def test_a_daemon_that_is_wanted_again_is_recalled_by_nobody(node: Node) -> None:
    """It is adopted; and a file that is no plan is passed over."""
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
    broken = node.root / "example.com/gpu/.plan.json"
    await asyncio.to_thread(broken.parent.mkdir, parents=True)
    await asyncio.to_thread(broken.write_text, '{"resource": "example.com/gpu", "dev')
    assert [
        plan.resource for plan in await asyncio.to_thread(directories.remembered, str(node.root))
    ] == [RESOURCE]
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await supervision.end_former_daemons()
        status = await until_running(supervision)
        assert status.adopted
        assert [entry.resource for entry in supervision.statuses] == [RESOURCE]
        node.pods = ()


async def test_a_daemon_that_nobody_wants_does_not_count_for_the_mark(node: Node) -> None:
    """``.ready`` says that all daemons are up. One that has been ended is none of them."""
    other = node.plan(2, "nvidia.com/other")
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY), other.resource: (other, NOBODY)})
        await until(lambda: why_not(supervision, other) == why_not(supervision, node.plan()) == "")
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until(lambda: supervision.statuses[1].state is MpsState.STOPPED)
        await until((node.root / ".ready").exists)


@pytest.mark.parametrize("pods", [(), ("team/serve-0",)])
async def test_an_agent_without_mps_clears_away_what_a_dead_daemon_has_left(
    node: Node, pods: tuple[str, ...]
) -> None:
    """It has none of NVIDIA's programs and needs none. Its pods under the same name share by other
    means, and nothing has failed.
    """
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
    end_daemon(node.pipe)
    await until(lambda: daemon_pid(node.pipe) is None)  # a killed process is there for a moment
    node.pods = pods
    node.use_programs(control="no-such-program")
    async with node.agent() as supervision:
        supervision.want({})
        await supervision.end_former_daemons()
        await until(lambda: supervision.statuses[0].state is MpsState.STOPPED)
    assert node.compute_modes == [0, 0]
    assert await asyncio.to_thread(directories.remembered, str(node.root)) == []
    assert await asyncio.to_thread(node.pipe.exists) == bool(pods)
    assert "mps.daemon_failed" not in [entry.event for entry in node.journal.entries]


async def test_a_gpu_that_cannot_be_given_back_is_left_to_an_agent_that_can(node: Node) -> None:
    """It may still be exclusive, so the plan stays. That is a warning and no daemon's failure."""
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
    end_daemon(node.pipe)
    node.pods = ()
    node.use_programs(control="no-such-program", smi="no-such-program")
    async with node.agent() as supervision:
        with capture_logs() as lines:
            await supervision.end_former_daemons()
            await until(lambda: supervision.statuses[0].state is MpsState.STOPPED)
        supervision.want({})
        (status,) = supervision.statuses  # a problem as long as this agent runs
        assert "no-such-program" in status.not_given_back
    assert [line["log_level"] for line in lines if line["event"] == "mps.gpu_not_given_back"] == [
        "warning"
    ]
    node.use_programs()
    async with node.agent() as supervision:
        await supervision.end_former_daemons()
        await until(lambda: supervision.statuses[0].state is MpsState.STOPPED)
    assert node.compute_modes == [0, 0]
    assert await asyncio.to_thread(directories.remembered, str(node.root)) == []


async def test_gpus_of_another_node_need_not_be_given_back(node: Node) -> None:
    """The card was replaced since, and no program could find it."""
    plan = msgspec.structs.replace(node.plan(), devices=(DeviceLimit("GPU-gone", 0, 1024),))
    await asyncio.to_thread(directories.prepare, plan)
    await asyncio.to_thread(directories.remember, plan)
    node.use_programs(control="no-such-program", smi="no-such-program")
    async with node.agent() as supervision:
        await supervision.end_former_daemons()
        await until(lambda: supervision.statuses[0].state is MpsState.STOPPED)
    assert await asyncio.to_thread(directories.remembered, str(node.root)) == []


async def test_a_daemon_that_lives_is_never_taken_for_a_dead_one(node: Node) -> None:
    """Without the program it cannot be ended, which the operator reads. Its clients go on."""
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
    await asyncio.to_thread(
        Path(processes.pid_path(str(node.pipe))).rename, node.pipe / "elsewhere"
    )
    node.use_programs(control="no-such-program")
    async with node.agent() as supervision:
        await supervision.end_former_daemons()
        await until(lambda: supervision.statuses[0].state is MpsState.FAILED)
        assert await asyncio.to_thread(processes.any_of, str(node.pipe))
    await asyncio.to_thread((node.pipe / "elsewhere").rename, processes.pid_path(str(node.pipe)))
