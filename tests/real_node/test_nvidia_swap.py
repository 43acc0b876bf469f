"""The agent takes the place of a plugin with the same ids while its pods run: nothing of theirs
changes, and no id is given twice.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.real_node.agents import GPU, QUICK, NodeAgent, kubelets_view, shared, wait_allocatable
from tests.real_node.nvidia import (
    containers_of,
    former_plugin,
    gpu_pod,
    printed,
    restart_container,
    wait_running,
)
from tests.real_node.rig import Rig


@pytest.mark.parametrize(
    ("infix", "config"),
    [("::", shared(4)), ("-replica-", QUICK + 'iktos: {resourceConfig: "gpu:gpu:4"}\n')],
    ids=["NVIDIA's", "iktos'"],
)
def test_pods_of_the_plugin_before_keep_their_replicas(rig: Rig, infix: str, config: str) -> None:
    """The checkpoint that it left names the holders;
    four replicas are held, four are had, and a fifth pod waits.
    """
    agent = NodeAgent(rig, config, gpus=2)
    with contextlib.closing(agent):
        with former_plugin(rig, {GPU: {f"{uuid}{infix}": 4 for uuid in agent.simulated.uuids}}):
            wait_allocatable(rig, 8)
            for name, number in {"one": 1, "two": 2, "crashes": 1}.items():
                rig.create_pod(gpu_pod(name, number, restartPolicy="Always"))
            held = ("one", "two", "crashes")
            wait_running(rig, held)
            told = {name: printed(rig, name).devices for name in held}
            before, containers = kubelets_view(rig), containers_of(rig, held)
        agent.start()
        events = agent.events()
        assert events.count("ledger.adopted") == 3
        assert events.index("ledger.rebuilt") < events.index("plugin.registered")
        assert agent.knows(3) == before
        wait_allocatable(rig, 8)

        fresh = [f"fresh-{number}" for number in range(4)]
        for name in fresh:
            rig.create_pod(gpu_pod(name))
        wait_running(rig, fresh)
        view = kubelets_view(rig)
        assert {name: view[name] for name in held} == before
        ids = [id_ for each in view.values() for id_ in each]
        assert len(ids) == len(set(ids)) == 8
        assert agent.knows(7) == view
        rig.create_pod(gpu_pod("fifth"))

        assert containers_of(rig, held) == containers
        restart_container(rig, "crashes")
        assert printed(rig, "crashes").devices == told["crashes"]
        assert containers_of(rig, ["one", "two"]) == {
            name: containers[name] for name in ("one", "two")
        }
        (resource,) = agent.get("/debug/resources")["resources"]
        # a container that is started again is not allocated again
        assert resource["allocations"] == 4
        # known from the start
        assert agent.run(agent.process.metric("vgpu_agent_ledger_drift_total")) == 0

        rig.delete_pod("two")
        wait_running(rig, ["fifth"])
        assert set(kubelets_view(rig)["fifth"]) <= set(before["two"])


def test_whole_gpus_of_the_plugin_before_are_not_had_again(rig: Rig) -> None:
    """Its ids are UUIDs, as ours: of three GPUs two are held, so one pod gets the third,
    and the next waits.
    """
    begin = "GPU-aaaaaaaa-0000-4000-8000-00000000000"
    agent = NodeAgent(rig, QUICK, gpus=3, uuids=[f"{begin}{number}" for number in range(3)])
    with contextlib.closing(agent):
        with former_plugin(rig, {GPU: {begin: 3}}):
            wait_allocatable(rig, 3)
            for name in ("one", "other"):
                rig.create_pod(gpu_pod(name))
            wait_running(rig, ["one", "other"])
            before, containers = kubelets_view(rig), containers_of(rig, ["one", "other"])
        agent.start()
        assert agent.knows(2) == before
        wait_allocatable(rig, 3)
        rig.create_pod(gpu_pod("third"))
        wait_running(rig, ["third"])
        view = kubelets_view(rig)
        assert view == {**before, "third": view["third"]}
        assert sorted(id_ for ids in view.values() for id_ in ids) == sorted(agent.simulated.uuids)
        assert printed(rig, "third").devices == view["third"][0]
        assert containers_of(rig, ["one", "other"]) == containers


def test_a_kubelet_that_restarts_between_the_two_plugins_changes_nothing(rig: Rig) -> None:
    """All that is left of the plugin before is the kubelet's checkpoint: the holders are known
    again, and a new pod gets a free replica.
    """
    agent = NodeAgent(rig, shared(2), gpus=1)
    with contextlib.closing(agent):
        with former_plugin(rig, {GPU: {f"{agent.simulated.uuids[0]}::": 2}}):
            wait_allocatable(rig, 2)
            rig.create_pod(gpu_pod("stays"))
            wait_running(rig, ["stays"])
            before, containers = kubelets_view(rig), containers_of(rig, ["stays"])
        rig.restart_kubelet()
        agent.start()
        assert agent.knows(1) == before
        wait_allocatable(rig, 2)
        rig.create_pod(gpu_pod("fresh"))
        wait_running(rig, ["fresh"])
        view = kubelets_view(rig)
        assert view == {**before, "fresh": view["fresh"]}
        assert not set(view["fresh"]) & set(before["stays"])
        assert containers_of(rig, ["stays"]) == containers
