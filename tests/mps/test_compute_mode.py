"""Times at which GPUs are in exclusive mode:
one that leaves a daemon, is lost, or changes to another daemon.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.mps.supervised import RESOURCE, Node, until, until_running, why_not
from vgpu_agent.isolation.mps import DaemonPlan
from vgpu_agent.sim.mps_tools import end_daemon
from vgpu_agent.status import MpsState

NOBODY: frozenset[str] = frozenset()

# each test starts dozens of processes
pytestmark = [pytest.mark.component, pytest.mark.usefixtures("nothing_blocks")]


def _first_only(plan: DaemonPlan) -> DaemonPlan:
    return msgspec.structs.replace(plan, devices=plan.devices[:1])


@pytest.mark.parametrize("replicas", [4, 2], ids=["same limits", "other limits"])
async def test_a_gpu_that_leaves_the_resource_takes_any_process_again(
    node: Node, replicas: int
) -> None:
    """It serves another pod from now on, whose second process would find the GPU busy; whether the
    daemon goes on or is replaced.
    """
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        supervision.want({RESOURCE: (_first_only(node.plan(replicas)), NOBODY)})
        await until(lambda: node.compute_modes == [3, 0])
        supervision.want({RESOURCE: (node.plan(replicas), NOBODY)})
        await until(lambda: node.compute_modes == [3, 3])


async def test_a_lost_gpu_keeps_no_other_in_exclusive_mode(node: Node) -> None:
    """MPS is switched off while nvidia-smi does not know a GPU any more:
    the others are given back all the same.
    """
    lost = msgspec.structs.replace(
        node.plan().devices[0], uuid="GPU-00000000-0000-0000-0000-000000000000"
    )
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        daemon = supervision._daemons[RESOURCE]
        daemon._plan = msgspec.structs.replace(daemon._plan, devices=(lost, *daemon._plan.devices))
        supervision.want({})
        await until(lambda: node.compute_modes == [0, 0])
        await until(lambda: lost.uuid in supervision.statuses[0].trouble)
        await until(lambda: not (node.root / RESOURCE / "log").exists())


async def test_a_daemon_starts_again_without_a_gpu_that_is_lost(node: Node) -> None:
    """The lost one cannot be given back, which is tried again,
    and blocks no sharing of the others.
    """
    lost = "GPU-00000000-0000-0000-0000-000000000000"
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        supervision._daemons[RESOURCE]._modes._last_set[lost] = "EXCLUSIVE_PROCESS"
        end_daemon(node.pipe)
        await until(lambda: node.events("mps.daemon_lost"))
        await until_running(supervision)
        assert node.compute_modes == [3, 3]


async def test_a_daemon_that_ends_late_leaves_its_successors_gpus_exclusive(node: Node) -> None:
    """The resource gets another name: the old daemon is stopped
    while the new one starts on the same GPUs.
    """
    renamed = node.plan(resource=f"{RESOURCE}.shared")
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        old = await until_running(supervision)
        supervision.want({renamed.resource: (renamed, NOBODY)})
        await until(lambda: old.state is MpsState.STOPPED)
        await until(lambda: why_not(supervision, renamed) == "")
        assert node.compute_modes == [3, 3]
    end_daemon(renamed.pipe)


async def test_a_daemon_that_stays_for_its_last_holders_keeps_nobody_else_out(node: Node) -> None:
    """Sharing by MPS is switched off under pods: later holders of the GPUs come without MPS, and
    their programs must find them free.
    """
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        supervision.want({})
        await until(lambda: node.compute_modes == [0, 0])
        await until(lambda: "ends once team/train-0 have ended" in supervision.statuses[0].trouble)
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until(lambda: node.compute_modes == [3, 3])
        node.pods = ()
