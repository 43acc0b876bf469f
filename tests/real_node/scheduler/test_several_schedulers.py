"""Several kube-schedulers at once: two with the same extender, and one that places pods without
cards.
"""

from __future__ import annotations

import random

from tests.real_node.rig import Rig
from tests.real_node.scheduler.checker import Amounts, fits_somewhere, judge
from tests.real_node.scheduler.objects import (
    CARDS,
    MEMORY_MIB,
    SCHEDULER,
    Json,
    add_nodes,
    container,
    create,
    mixed_pods,
    pod,
    remove_pod,
)
from tests.real_node.scheduler.processes import PORT, Bound, Extender, KubeScheduler

PATIENCE_SECONDS = 90
_NODES, _SHARES, _PLAIN, _WHOLE_NODES = 60, 240, 60, 60
_WHOLE, _LEAST_JUDGED = Amounts(1, 100, MEMORY_MIB), 5
_OTHER, _DEFAULT = "vgpu-scheduler-packed", "default-scheduler"
_PACKED = {
    "schedulerName": _OTHER,
    "pluginConfig": [
        {
            "name": "NodeResourcesFit",
            "args": {"scoringStrategy": {"type": "MostAllocated"}},
        }
    ],
}


def _burst() -> list[Json]:
    """Pods for all schedulers, in any order."""
    made = [pod(f"whole-{place}", [container("main", CARDS)]) for place in range(_WHOLE_NODES)]
    made += mixed_pods("share", _SHARES)
    for place, each in enumerate(made):
        each["spec"]["schedulerName"] = (SCHEDULER, _OTHER)[place % 2]
    plain = [container("main", 0)]
    made += [pod(f"plain-{place}", plain, scheduler=_DEFAULT) for place in range(_PLAIN)]
    random.Random(16).shuffle(made)
    return made


def test_no_card_is_given_twice_by_schedulers_side_by_side(plane: Rig) -> None:
    """More pods than fit, some of which are deleted meanwhile. At no moment is a card given out
    beyond its size, and in the end no Node has room for a pod that waits.
    """
    add_nodes(plane, range(_NODES))
    nodes: list[Json] = plane.api.get("/api/v1/nodes")["items"]
    made = _burst()
    shares = [each["metadata"]["name"] for each in made if "share" in each["metadata"]["name"]]
    ended, names = set(shares[::6]), {each["metadata"]["name"] for each in made}
    judged = 0
    with (
        Extender(plane),
        KubeScheduler(plane, PORT) as spreading,
        KubeScheduler(plane, PORT, profile=_PACKED) as packing,
        KubeScheduler(plane, None, profile={"schedulerName": _DEFAULT}) as plain,
        Bound(plane) as bound,
    ):
        with spreading.held(), packing.held(), plain.held():
            create(plane, made)
        left = set(names)

        def is_settled() -> bool | None:
            """Judge all pods, and delete those that are to end as they come to be bound."""
            nonlocal judged
            pods = plane.pods()
            verdict = judge(nodes, pods)
            assert verdict.problems == []
            judged += 1
            for name in sorted(ended & left & bound.times.keys()):
                remove_pod(plane, name)
                left.discard(name)
            is_bound = {each["metadata"]["name"]: "nodeName" in each["spec"] for each in pods}
            if is_bound.keys() & ended or not all(
                each for name, each in is_bound.items() if not name.startswith("whole")
            ):
                return None
            return not fits_somewhere(nodes, verdict, _WHOLE, CARDS) or None

        plane.wait_for(is_settled, PATIENCE_SECONDS, what="all pods that fit to be bound")
        pods = plane.pods()
    verdict = judge(nodes, pods)
    print(f"judged {judged} times, {len(verdict.waiting)} of {len(left)} pods wait")  # noqa: T201 - the figure
    assert verdict.problems == []
    assert verdict.waiting, "the test is meant to fill the Nodes"
    assert {each["metadata"]["name"] for each in pods} == names - ended
    by = {each["spec"]["schedulerName"] for each in pods if each["spec"].get("nodeName")}
    assert by == {SCHEDULER, _OTHER, _DEFAULT}
    assert judged >= _LEAST_JUDGED, "all pods were bound before they were looked at"
