"""MPS on a real node: the control daemon (a stand-in of NVIDIA's) dies under running pods,
and all can see that it is back.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from tests import constants
from tests.real_node.agents import (
    GPU,
    QUICK,
    QUICK_CONSTANTS,
    NodeAgent,
    allocatable,
    wait_allocatable,
)
from tests.real_node.nvidia import containers_of, gpu_pod, printed, running, wait_running
from tests.real_node.rig import Rig
from vgpu_agent.sim.mps_tools import MpsTools, daemon_pid, end_daemon

CONFIG = f"""{QUICK}
sharing: {{mps: {{resources: [{{name: {GPU}, replicas: 4}}]}}}}
mps:
  root: FOLDER/mps
  shmSizeMib: 16
"""


CONSTANTS: dict[str, float | str] = {
    **QUICK_CONSTANTS,
    constants.MPS_CONTAINER_ROOT: "FOLDER/mps",
    constants.MPS_CONTROL_BINARY: "FOLDER/tools/nvidia-cuda-mps-control",
    constants.MPS_SMI_BINARY: "FOLDER/tools/nvidia-smi",
    constants.MPS_PROBE: 0.2,
    constants.MPS_BACKOFF_MIN: 0.2,
    constants.MPS_BACKOFF_MAX: 1,
}


@pytest.fixture
def agent(rig: Rig) -> Iterator[NodeAgent]:
    """An agent with the stand-in tools, not started yet; what it has mounted goes with the test."""
    made = NodeAgent(rig, CONFIG, gpus=2, constants=CONSTANTS)
    MpsTools.install(made.folder / "tools", made.simulated.directory)
    yield made
    with contextlib.suppress(FileNotFoundError):
        end_daemon(made.folder / "mps" / GPU / "pipe")
    subprocess.run(
        ["umount", "--lazy", str(made.folder / "mps" / "shm")], check=False, capture_output=True
    )


def test_a_daemon_that_is_killed_under_running_pods_comes_back(rig: Rig, agent: NodeAgent) -> None:
    """Pods run on with their share, the loss is logged with their names, no new share is given
    until the limits hold again, then it is.
    """
    pipe, tools = agent.folder / "mps" / GPU / "pipe", MpsTools(agent.folder / "tools")
    with running(agent):
        wait_allocatable(rig, 8)
        names = ["one", "two"]
        for name in names:
            rig.create_pod(gpu_pod(name))
        wait_running(rig, names)
        assert {printed(rig, name).environment["CUDA_MPS_PIPE_DIRECTORY"] for name in names} == {
            str(pipe)
        }
        assert "control" in rig.exec("one", "ls", str(pipe)).split()
        containers, first = containers_of(rig, names), daemon_pid(pipe)
        # On the host, for a container of the rig has nothing that could speak to a socket; the
        # directory is the one that it has.
        with tools.client(pipe) as client:
            agent.until(
                "/debug/mps", lambda answer: any(daemon["clients"] for daemon in answer["daemons"])
            )
            tools.misbehave(start="refuse")
            end_daemon(pipe)
            assert client.wait(10) != 0
        lost = agent.run(agent.process.until_logged("mps.daemon_lost"))
        assert lost["resource"] == GPU
        assert lost["clients"] == [client.pid]
        assert sorted(lost["pods"]) == ["default/one", "default/two"]
        wait_allocatable(rig, 0)
        tools.behave()
        wait_allocatable(rig, 8)
        agent.until(
            "/debug/mps",
            lambda answer: [daemon["state"] for daemon in answer["daemons"]] == ["running"],
        )
        second = daemon_pid(pipe)
        assert second not in (None, first)
        assert agent.run(agent.process.metric("vgpu_agent_mps_restarts_total")) == 1
        assert agent.run(agent.process.metric("vgpu_agent_mps_clients_lost_total")) == 1

        rig.create_pod(gpu_pod("fresh"))
        wait_running(rig, ["fresh"])
        assert "control" in rig.exec("fresh", "ls", str(pipe)).split()
        assert containers_of(rig, names) == containers


def test_a_control_binary_that_refuses_withholds_its_resource(rig: Rig, agent: NodeAgent) -> None:
    """No pod is sent to a daemon with unknown limits.
    As soon as it answers, the resource is there.
    """
    tools = MpsTools(agent.folder / "tools")
    tools.misbehave(start="refuse")
    with contextlib.closing(agent):
        agent.run(agent.process.start())
        agent.until(
            "/debug/mps",
            lambda answer: [daemon["state"] for daemon in answer["daemons"]] == ["failed"],
        )
        status, ready = agent.run(agent.process.get_text("/readyz"))
        assert status != HTTPStatus.OK
        assert "nvidia-cuda-mps-control" in ready
        assert allocatable(rig) == 0
        tools.behave()
        wait_allocatable(rig, 8)
