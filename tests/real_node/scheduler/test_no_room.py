"""Pods without room: they must not keep kube-scheduler and the extender busy, and find room that
kube-scheduler has not shown to the extender.
"""

from __future__ import annotations

import time

from tests.real_node.rig import Rig
from tests.real_node.scheduler.objects import (
    MEMORY_MIB,
    add_nodes,
    container,
    create,
    node_name,
    pod,
)
from tests.real_node.scheduler.processes import Bound, Extender, KubeScheduler

# With this share, kube-scheduler hands over 100 of these Nodes, others each time. One of them that
# takes a pod was found after six tries at the latest, of eleven, in 230 trials; 80 of these were
# made beside four busy processes.
_NODES, _PERCENTAGE = 270, 34
# The first text in a pod's status lets it be tried once more. With other texts each time, it was
# tried again after 1, 3, 7, 15, 25, … s.
_PODS, _SECONDS = 9, 10.0
PATIENCE_SECONDS = 60


def test_pods_without_room_are_filtered_seldom(plane: Rig) -> None:
    """Nodes refuse for two reasons, and each sample of them has another mixture. A pod that fits on
    one Node alone is bound to it all the same.
    """
    half, last = _NODES // 2, _NODES - 1
    add_nodes(plane, range(half), cards=4)
    add_nodes(plane, range(half, last), cards=6)
    add_nodes(plane, [last], cards=8)
    without = [
        pod(f"none-{place}", [container("main", 5, 10, MEMORY_MIB + 1)]) for place in range(_PODS)
    ]
    with (
        Extender(plane) as extender,
        KubeScheduler(plane, percentage_of_nodes=_PERCENTAGE),
        Bound(plane) as bound,
    ):
        create(plane, without)
        # kube-scheduler may have yet to start
        extender.wait("each pod to be filtered", lambda: extender.calls("filter") >= _PODS)
        time.sleep(_SECONDS)
        calls = extender.calls("filter")
        create(plane, [pod("alone", [container("main", 8)])])
        bound.wait(["alone"], timeout=PATIENCE_SECONDS)
        found = plane.pod("alone")
    print(f"{calls} filter calls in {_SECONDS:g} s for {_PODS} pods without room")  # noqa: T201 - the figure
    assert _PODS <= calls <= 3 * _PODS
    assert found is not None
    assert found["spec"]["nodeName"] == node_name(last)
