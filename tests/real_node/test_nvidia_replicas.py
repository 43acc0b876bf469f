"""Many pods at once on the replicas of many GPUs."""

from __future__ import annotations

import collections

from tests.real_node.agents import NodeAgent, kubelets_view, shared, wait_allocatable
from tests.real_node.nvidia import gpu_pod, printed, running, wait_running
from tests.real_node.rig import Rig


def test_forty_pods_at_once_on_forty_replicas_of_eight_gpus(rig: Rig) -> None:
    """Each pod has one replica, none is had twice, and after each Allocate the fullest GPU is one
    pod ahead of the emptiest at most.
    """
    names = [f"burst-{number:02}" for number in range(40)]
    with running(NodeAgent(rig, shared(5), gpus=8)) as agent:
        wait_allocatable(rig, 40)
        for name in names:
            rig.create_pod(gpu_pod(name))
        wait_running(rig, names)
        view = kubelets_view(rig)
        assert sorted(view) == names
        ids = [id_ for each in view.values() for id_ in each]
        assert len(ids) == len(set(ids)) == 40
        assert agent.knows(40) == view
        assert {name: printed(rig, name).devices for name in names} == {
            name: ids[0].partition("::")[0] for name, ids in view.items()
        }

        pods = dict.fromkeys(agent.simulated.uuids, 0)
        for line in agent.process.log_lines():
            if line["msg"] == "allocate.reserved":
                pods[line["ids"][0].partition("::")[0]] += 1
                assert max(pods.values()) - min(pods.values()) <= 1, "spread unevenly"
        assert collections.Counter(pods.values()) == {5: 8}
        assert agent.run(agent.process.metric("vgpu_agent_ledger_drift_total")) == 0
