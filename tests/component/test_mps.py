"""MPS through the real agent process: NVIDIA's resource and AWS's,
with stand-ins of the host tools and a kubelet beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests import constants
from tests.component.conftest import GPU, QUICK, Stage, until_not_ready
from tests.golden import U0
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.mps_tools import MpsTools, daemon_pid, end_daemon
from vgpu_agent.sim.state import SimulatedNode

VGPU = "k8s.amazonaws.com/vgpu"


class Mps:
    """A stage with the tools installed."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        stage.constants |= {
            constants.MPS_PROBE: 0.1,
            constants.MPS_BACKOFF_MIN: 0.1,
            constants.MPS_BACKOFF_MAX: 0.5,
        }
        self.tools = MpsTools.install(stage.folder / "tools", stage.node.directory)
        self.root = stage.node.directory / "mps"
        stage.constants |= {
            constants.MPS_CONTROL_BINARY: str(self.tools.control),
            constants.MPS_SMI_BINARY: str(self.tools.smi),
        }
        self.pipe = self.root / GPU / "pipe"
        self.config = f"""{QUICK}
mps:
  shmSizeMib: 1
"""

    @property
    def shared(self) -> str:
        """A configuration with four replicas by MPS."""
        return self.config + f"sharing: {{mps: {{resources: [{{name: {GPU}, replicas: 4}}]}}}}\n"

    @property
    def compute_modes(self) -> list[int]:
        """Return the compute modes that NVML would show: 0 default, 3 exclusive process."""
        state = SimulatedNode.open(self.stage.node.directory).state
        return [state.gpus[number].compute_mode for number in range(2)]

    async def daemon(self, agent: AgentProcess, **wanted: object) -> dict[str, Any]:
        """The one daemon in ``/debug/mps``, once it is as wanted."""
        answer = await agent.until(
            "/debug/mps",
            lambda found: any(wanted.items() <= daemon.items() for daemon in found["daemons"]),
        )
        return dict(answer["daemons"][0])


@pytest.fixture
async def mps(stage: Stage) -> AsyncIterator[Mps]:
    """Yield the MPS parts, and clean up what the test has started and mounted."""
    made = await asyncio.to_thread(Mps, stage)
    yield made
    for agent in stage.agents:
        with contextlib.suppress(Exception):
            await agent.terminate()
    end_daemon(made.pipe)


def _is_proven(ledger: Any) -> bool:
    return any(grant["state"] == "identified" for grant in ledger["grants"])


async def test_pods_share_a_gpu_through_a_daemon_that_outlives_the_agent(mps: Mps) -> None:
    """nvidia:A19, nvidia:G11: the answer names pipe and shared memory. A new agent adopts the
    daemon. The last one without pods ends it.
    """
    stage = mps.stage
    agent = await stage.ready_agent(mps.shared)
    await stage.allocatable(8)
    pod = await stage.admit("train")
    answer = pod.answers["main"]
    assert dict(answer.envs) == {
        "NVIDIA_VISIBLE_DEVICES": U0,
        "CUDA_MPS_PIPE_DIRECTORY": str(mps.pipe),
    }
    mounts = {(mount.container_path, mount.host_path) for mount in answer.mounts}
    assert mounts == {
        (str(mps.pipe), str(mps.pipe)),
        ("/dev/shm", f"{mps.root}/shm"),
    }
    await agent.until("/debug/ledger", _is_proven)
    first = daemon_pid(mps.pipe)
    assert mps.compute_modes == [3, 3]
    await agent.terminate()
    assert daemon_pid(mps.pipe) == first

    agent = await stage.ready_agent(mps.shared)
    assert (await mps.daemon(agent, state="running"))["adopted"] is True
    assert daemon_pid(mps.pipe) == first
    await stage.kubelet.delete(pod)
    await agent.until("/debug/ledger", lambda ledger: ledger["grants"] == [])
    await agent.terminate()
    assert daemon_pid(mps.pipe) is None
    assert mps.compute_modes == [0, 0]


async def test_a_killed_daemon_is_told_with_its_pods_and_comes_back(mps: Mps) -> None:
    """nvidia:D7: the journal has the pod's name, the metrics count,
    and kubelet sees 0 until the limits are in force again.
    """
    stage = mps.stage
    agent = await stage.ready_agent(mps.shared)
    await stage.admit("train")
    await agent.until("/debug/ledger", _is_proven)
    mps.tools.misbehave(start="refuse")
    end_daemon(mps.pipe)
    lost = await agent.until_logged("mps.daemon_lost")
    assert lost["pods"] == ["default/train"]
    await stage.allocatable(0)
    await agent.until(
        "/debug/mps", lambda found: "Insufficient permissions" in found["daemons"][0]["trouble"]
    )
    mps.tools.behave()
    await stage.allocatable(8)
    assert await agent.metric("vgpu_agent_mps_restarts_total") == 1


async def test_an_agent_that_wakes_up_beside_its_successor_ends_no_daemon(mps: Mps) -> None:
    """It hung, so another one serves the node and has adopted the daemon. The containers that were
    granted since then are not in the ledger of the first.
    """
    stage = mps.stage
    stage.constants |= {constants.SUCCESSION_ANSWER: 1, constants.VERIFY: 60}
    old = await stage.ready_agent(mps.shared)
    await stage.allocatable(8)
    daemon = daemon_pid(mps.pipe)
    os.kill(old.pid, signal.SIGSTOP)
    new = stage.agent(mps.shared)
    await new.start()
    await new.until_ready()
    await stage.allocatable(8)
    await stage.admit("train")
    await new.until("/debug/ledger", _is_proven)
    os.kill(old.pid, signal.SIGCONT)
    await old.until_logged("agent.handed_over")
    await new.until_logged("plugin.registering_again")
    assert daemon_pid(mps.pipe) == daemon
    assert await old.terminate() == 0
    assert daemon_pid(mps.pipe) == daemon


@pytest.mark.parametrize("binary", ["missing", "nonsense"])
async def test_a_bad_control_binary_withholds_its_resource_only(mps: Mps, binary: str) -> None:
    """Issue part 7: the readiness and /debug/resources have the reason.
    Another family's resource is offered.
    """
    stage = mps.stage
    config = mps.shared + "families: {aws: true}\n"
    if binary == "missing":
        stage.constants[constants.MPS_CONTROL_BINARY] = "/nowhere/mps-control"
        said = "cannot run /nowhere/mps-control: No such file or directory"
    else:
        mps.tools.misbehave(get_default_active_thread_percentage="nonsense")
        said = "expected a percentage"
    agent = stage.agent(config)
    await agent.start()
    await stage.allocatable(20, resource=VGPU)
    await mps.daemon(agent, state="failed")
    await until_not_ready(agent, said)
    await agent.until("/debug/resources", lambda answer: said in str(answer["withheld"]))
    assert await stage.admit("other", 1, VGPU)


async def test_more_replicas_than_clients_withhold_the_resource_only(mps: Mps) -> None:
    """nvidia:G15: no retry every 30 seconds but a reason with the number that fits; AWS's resource
    is offered, and no tool was started.
    """
    stage = mps.stage
    agent = stage.agent(
        mps.shared.replace("replicas: 4", "replicas: 49") + "families: {aws: true}\n"
    )
    await agent.start()
    await stage.allocatable(20, resource=VGPU)
    await until_not_ready(agent, "49 replicas of GPU 0", "set replicas to 48 or fewer")
    assert mps.tools.calls == []


async def test_a_virtual_gpu_of_aws_is_told_as_before(mps: Mps) -> None:
    """aws:W1, aws:§II.6-1: twenty ids, and one variable for a container; aws:D3:
    registered anew when kubelet restarts.
    """
    stage = mps.stage
    agent = stage.agent(mps.config + "families: {nvidia: false, aws: true}\n")
    await agent.start()
    await stage.allocatable(20, resource=VGPU)
    pod = await stage.admit("train", 1, VGPU)
    assert stage.ids(pod, VGPU) == [f"{U0}-0"]
    assert dict(pod.answers["main"].envs) == {"NVIDIA_VISIBLE_DEVICES": U0}
    assert not pod.answers["main"].mounts
    await stage.kubelet.restart()
    await stage.allocatable(20, resource=VGPU)


async def test_sharing_that_is_switched_off_while_no_agent_runs(mps: Mps) -> None:
    """The next agent takes the plan of a killed one back: daemon, compute modes, directory."""
    agent = await mps.stage.ready_agent(mps.shared)
    assert mps.compute_modes == [3, 3]
    await agent.kill()
    assert daemon_pid(mps.pipe) is not None
    plan = mps.pipe.parent / ".plan.json"
    assert await asyncio.to_thread(plan.is_file)
    agent = await mps.stage.ready_agent(mps.config)
    await agent.until_logged("mps.daemon_recalled")
    await agent.until_logged("mps.daemon_stopped")
    assert daemon_pid(mps.pipe) is None
    assert mps.compute_modes == [0, 0]
    assert not await asyncio.to_thread(mps.pipe.parent.exists)


async def test_a_simulated_daemon_of_aws_stays_in_the_simulation(mps: Mps) -> None:
    """On a node, its pipe is in /tmp/nvidia-mps, which may be that of a daemon of this machine."""
    stage = mps.stage
    config = mps.config + "families: {nvidia: false, aws: true}\naws: {mps: supervised}\n"
    agent = stage.agent(config)
    await agent.start()
    await stage.allocatable(20, resource=VGPU)
    pod = await stage.admit("train", 1, VGPU)
    pipe = f"{mps.root}/{VGPU}/pipe"
    assert dict(pod.answers["main"].envs)["CUDA_MPS_PIPE_DIRECTORY"] == pipe
    assert daemon_pid(pipe) is not None
    end_daemon(pipe)
