"""MIG slices on a real node: several profiles in one pod, and a geometry that changes under it."""

from __future__ import annotations

from tests.real_node.agents import (
    GPU,
    QUICK,
    NodeAgent,
    allocatable,
    kubelets_view,
    wait_allocatable,
)
from tests.real_node.nvidia import (
    CONTROL_NODES,
    containers_of,
    gpu_container,
    gpu_pod,
    plugin_config,
    printed,
    running,
    wait_running,
)
from tests.real_node.rig import Rig
from tests.real_node.rig.manifests import pod

MIXED = QUICK + plugin_config(migStrategy="mixed", passDeviceSpecs="true")
SMALL, MIDDLE, LARGE = (f"nvidia.com/mig-{profile}" for profile in ("1g.5gb", "2g.10gb", "3g.20gb"))
GEOMETRY = ("1g.5gb", "2g.10gb", "3g.20gb")


def test_a_pod_with_two_profiles_gets_a_slice_of_each(rig: Rig) -> None:
    """nvidia:G6: GPU 0 is whole and GPU 1 in slices.
    Each container gets its own slice, and has its capability files.
    """
    agent = NodeAgent(rig, MIXED, gpus=2)
    agent.simulated.set_mig(1, GEOMETRY)
    with running(agent):
        for resource, number in {GPU: 1, SMALL: 1, MIDDLE: 1, LARGE: 1}.items():
            wait_allocatable(rig, number, resource=resource)
        containers = [
            gpu_container("small", {SMALL: 1}),
            gpu_container("middle", {MIDDLE: 1}),
            gpu_container("whole", {GPU: 1}),
        ]
        rig.create_pod(pod("both", containers=containers))
        wait_running(rig, ["both"])
        slices = agent.simulated.mig_uuids(1)
        small, middle, whole = (printed(rig, "both", name) for name in ("small", "middle", "whole"))
        assert small.devices == slices[0]
        assert middle.devices == slices[1]
        assert whole.devices == agent.simulated.uuids[0]
        for found in (small, middle):
            caps = [node for node in found.nodes if "nvidia-caps" in node]
            assert sorted(set(found.nodes) - set(caps)) == sorted([*CONTROL_NODES, "/dev/nvidia1"])
            assert len(caps) == 2  # its GPU instance and its compute instance
        assert not set(small.nodes) & set(middle.nodes) - {*CONTROL_NODES, "/dev/nvidia1"}
        assert whole.nodes == sorted([*CONTROL_NODES, "/dev/nvidia0"])


def test_a_geometry_that_changes_under_load(rig: Rig) -> None:
    """The old names go to 0, new ones are offered, the pod on a slice that is gone runs on and is
    named, and new pods get new slices.
    """
    agent = NodeAgent(rig, MIXED, gpus=2)
    agent.simulated.set_mig(1, ["3g.20gb", "3g.20gb"])
    with running(agent):
        wait_allocatable(rig, 2, resource=LARGE)
        wait_allocatable(rig, 1)
        rig.create_pod(gpu_pod("old", {LARGE: 1}))
        rig.create_pod(gpu_pod("whole"))
        wait_running(rig, ["old", "whole"])
        containers = containers_of(rig, ["old", "whole"])
        (vanished,) = kubelets_view(rig, LARGE)["old"]

        agent.simulated.set_mig(1, ["1g.5gb"] * 7)
        wait_allocatable(rig, 7, resource=SMALL)
        wait_allocatable(rig, 0, resource=LARGE)
        assert allocatable(rig) == 1
        assert containers_of(rig, ["old", "whole"]) == containers
        names = [f"new-{number}" for number in range(7)]
        for name in names:
            rig.create_pod(gpu_pod(name, {SMALL: 1}))
        wait_running(rig, names)
        slices = agent.simulated.mig_uuids(1)
        assert sorted(printed(rig, name).devices for name in names) == sorted(slices)
        assert vanished not in slices
        assert containers_of(rig, ["old", "whole"]) == containers
        (line,) = [
            line for line in agent.process.log_lines() if line["msg"] == "grant.device_missing"
        ]
        assert (line["pod"], line["device"], line["ids"]) == ("default/old", vanished, [vanished])
        assert agent.run(agent.process.metric("vgpu_agent_grants_on_missing_devices")) == 1

        rig.delete_pod("old")
        agent.until(
            "/debug/ledger",
            lambda ledger: "old" not in {grant["pod"] for grant in ledger["grants"]},
        )
        assert agent.run(agent.process.metric("vgpu_agent_grants_on_missing_devices")) == 0
