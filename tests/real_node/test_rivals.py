"""Two agents for one resource beside a real kubelet,
as a mistake or an overlapping rollout makes them.
"""

from __future__ import annotations

import contextlib

from tests.real_node.agents import GPU, QUICK, NodeAgent, kubelets_view, wait_allocatable
from tests.real_node.rig import Rig
from tests.real_node.rig.manifests import pod


def test_allocatable_comes_back_when_the_second_agent_has_gone(rig: Rig) -> None:
    """The kubelet's book is by resource name, so the end of the last to register ends both. The
    first one mends it by itself (#121994).
    """
    with contextlib.ExitStack() as ended:
        first, second = (NodeAgent(rig, QUICK, gpus=2, numa=None) for _ in range(2))
        ended.callback(first.close)
        ended.callback(second.close)
        first.start()
        wait_allocatable(rig, 2)
        second.start()
        wait_allocatable(rig, 2)
        second.run(second.process.terminate())
        # The node's status may never show the 0 in between: kubelet publishes it every ten seconds.
        rig.wait_for(
            lambda: "plugin.not_listed" in first.events() or None,
            30,
            what="the first agent to notice",
        )
        rig.wait_for(
            lambda: first.events().count("plugin.registered") > 1 or None,
            30,
            what="a new registration",
        )
        wait_allocatable(rig, 2, 30)
        rig.create_pod(pod("after", command="sleep 100000", limits={GPU: 1}))
        rig.wait_for_phase("after", "Running")
        assert list(kubelets_view(rig)) == ["after"]
