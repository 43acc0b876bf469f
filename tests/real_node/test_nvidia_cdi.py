"""Devices by their CDI names on a real kubelet and containerd:
the share of a container that learns of its GPU in no other way.
"""

from __future__ import annotations

import pytest

from tests.real_node.agents import QUICK, NodeAgent, kubelets_view, wait_allocatable
from tests.real_node.nvidia import (
    CONTROL_NODES,
    cdi_config,
    containers_of,
    gpu_pod,
    printed,
    restart_container,
    running,
    wait_running,
)
from tests.real_node.rig import Rig

SMALL, LARGE = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb"


@pytest.mark.parametrize("strategy", ["cdi-cri", "cdi-annotations"])
def test_cdi_names_inject_the_device(rig: Rig, strategy: str) -> None:
    """By the field of the CRI and by annotations: the nodes of the pod's own GPU, and no request
    that an older hook would act upon.
    """
    with running(NodeAgent(rig, QUICK + cdi_config(rig, strategy), gpus=3)) as agent:
        wait_allocatable(rig, 3)
        rig.create_pod(gpu_pod("one"))
        rig.create_pod(gpu_pod("pair", 2))
        wait_running(rig, ["one", "pair"])
        for name, ids in kubelets_view(rig).items():
            found = printed(rig, name)
            nodes = [f"/dev/nvidia{agent.simulated.uuids.index(uuid)}" for uuid in ids]
            assert found.nodes == sorted([*CONTROL_NODES, *nodes])
            assert found.devices == "void"


def test_a_container_by_cdi_starts_again_while_the_agent_is_away(rig: Rig) -> None:
    """The spec of all devices stays when the agent stops,
    so that the runtime can resolve the name again.
    """
    with running(NodeAgent(rig, QUICK + cdi_config(rig, "cdi-cri"), gpus=1)) as agent:
        wait_allocatable(rig, 1)
        rig.create_pod(gpu_pod("stays", restartPolicy="Always"))
        wait_running(rig, ["stays"])
        found = printed(rig, "stays")
        agent.run(agent.process.terminate())
        restart_container(rig, "stays")
        assert printed(rig, "stays") == found


def test_one_container_with_two_profiles_gets_both_by_cdi(rig: Rig) -> None:
    """Variables would overwrite each other, but names add up."""
    agent = NodeAgent(rig, QUICK + cdi_config(rig, "cdi-cri", migStrategy="mixed"), gpus=2)
    agent.simulated.set_mig(1, ["1g.5gb", "3g.20gb"])
    with running(agent):
        for resource in (SMALL, LARGE):
            wait_allocatable(rig, 1, resource=resource)
        rig.create_pod(gpu_pod("both", {SMALL: 1, LARGE: 1}))
        wait_running(rig, ["both"])
        found = printed(rig, "both")
        assert len([node for node in found.nodes if "nvidia-caps" in node]) == 4
        assert {*CONTROL_NODES, "/dev/nvidia1"} <= set(found.nodes)
        assert "/dev/nvidia0" not in found.nodes


def test_names_of_a_new_geometry_mean_something_before_they_are_given_out(rig: Rig) -> None:
    """A GPU is cut anew, a pod that waits for such a slice gets it at once,
    and the runtime finds its name.
    """
    agent = NodeAgent(rig, QUICK + cdi_config(rig, "cdi-cri", migStrategy="mixed"), gpus=1)
    agent.simulated.set_mig(0, ["3g.20gb"])
    with running(agent):
        wait_allocatable(rig, 1, resource=LARGE)
        rig.create_pod(gpu_pod("waits", {SMALL: 1}))
        agent.simulated.set_mig(0, ["1g.5gb"] * 2)
        wait_running(rig, ["waits"])
        caps = [node for node in printed(rig, "waits").nodes if "nvidia-caps" in node]
        assert len(caps) == 2
        assert containers_of(rig, ["waits"])["waits"][1] == 0
