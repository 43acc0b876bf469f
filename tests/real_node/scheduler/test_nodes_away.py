"""Nodes that die and come back: pods bound there keep their cards until they are deleted, nothing
new goes there, and no card is given twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import pytest

from tests.real_node.rig import Rig
from tests.real_node.scheduler.checker import cards_of_pods, judge
from tests.real_node.scheduler.objects import (
    CARDS,
    PODS,
    Json,
    add_nodes,
    beat,
    container,
    create,
    delete_node,
    mixed_pods,
    node_name,
    pod,
    remove_pod,
    set_ready,
    uuid,
)
from tests.real_node.scheduler.processes import Bound, Extender, KubeScheduler

PATIENCE_SECONDS = 60
_FIRST, _SECOND = 6, 11
_NODES, _PODS = 40, 300
_DELETED, _SILENT = range(10), range(10, 20)

Way = Literal["not ready", "deleted", "deleted, and the extender dies"]


def _nodes(rig: Rig) -> list[Json]:
    items: list[Json] = rig.api.get("/api/v1/nodes")["items"]
    return items


def _of(rig: Rig, names: Sequence[str]) -> list[Json]:
    """Those of these pods that are bound."""
    return [
        each
        for each in rig.pods()
        if each["metadata"]["name"] in names and each["spec"].get("nodeName")
    ]


def _wait_avoided(rig: Rig, number: int) -> None:
    """Wait until kube-scheduler knows that a Node is away: a pod without cards for that Node alone
    is refused. Its watches of Nodes and of pods are not in step.
    """
    numbers = itertools.count()

    def is_avoided() -> bool | None:
        name = f"probe-{next(numbers)}"
        made = pod(name, [container("main", 0)])
        made["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node_name(number)}
        rig.create_pod(made)
        found = rig.wait_for(
            lambda: _seen(rig.api.get(f"{PODS}/{name}")),
            PATIENCE_SECONDS,
            what=f"a verdict: {name}",
        )
        remove_pod(rig, name)
        return None if found["spec"].get("nodeName") else True

    rig.wait_for(is_avoided, PATIENCE_SECONDS, what="kube-scheduler to avoid the Node")


def _seen(found: Json) -> Json | None:
    """Return the pod if it is bound or refused."""
    return found if found["spec"].get("nodeName") or found["status"].get("conditions") else None


@pytest.mark.parametrize("way", ["not ready", "deleted", "deleted, and the extender dies"])
def test_a_node_dies_and_comes_back(plane: Rig, way: Way) -> None:
    """Six of its eight cards are claimed, and three pods wait for cards. When it comes back, two of
    them get the two free cards, and the third one that of a pod of before once that has ended.
    """
    add_nodes(plane, [0, 1])
    nodes = _nodes(plane)
    whole = [container("main", 1)]
    with Extender(plane) as extender, KubeScheduler(plane), Bound(plane) as bound:
        first = create(
            plane, [pod(f"first-{place}", whole, policy="binpack") for place in range(_FIRST)]
        )
        bound.wait(first, timeout=PATIENCE_SECONDS)
        claimed = cards_of_pods(_of(plane, first))
        assert {node: len(cards) for node, cards in claimed.items()} == {node_name(0): _FIRST}

        if way == "not ready":
            set_ready(plane, 0, ready=False)
        else:
            delete_node(plane, 0)
        if way == "deleted, and the extender dies":
            extender.kill()
            extender.start()
        _wait_avoided(plane, 0)
        second = create(
            plane, [pod(f"second-{place}", whole, policy="binpack") for place in range(_SECOND)]
        )
        plane.wait_for(
            lambda: all(_seen(plane.api.get(f"{PODS}/{name}")) for name in second) or None,
            PATIENCE_SECONDS,
            what="a verdict for each pod",
        )
        bound.wait(second, CARDS, timeout=PATIENCE_SECONDS)
        placed = _of(plane, second)
        assert cards_of_pods(placed) == {node_name(1): {uuid(1, card) for card in range(CARDS)}}
        assert cards_of_pods(_of(plane, first)) == claimed
        # Its kubelet would confirm the end of the pod, whose container may run on.
        plane.api.delete(f"{PODS}/{first[0]}")

        if way == "not ready":
            set_ready(plane, 0, ready=True)
        else:
            add_nodes(plane, [0])
        bound.wait(second, _SECOND - 1, timeout=PATIENCE_SECONDS, beat=lambda: beat(plane, 0))
        assert judge(nodes, plane.pods()).problems == []
        remove_pod(plane, first[0])
        bound.wait(second, timeout=PATIENCE_SECONDS, beat=lambda: beat(plane, 0))
        assert judge(nodes, plane.pods()).problems == []
        assert cards_of_pods(_of(plane, [*first, *second])) == {
            node_name(number): {uuid(number, card) for card in range(CARDS)} for number in (0, 1)
        }

        delete_node(plane, 0)
        for each in _of(plane, [*first, *second]):
            if each["spec"]["nodeName"] == node_name(0):
                remove_pod(plane, each["metadata"]["name"])
        plane.wait_for(
            lambda: extender.metric("vgpu_scheduler_nodes{") == 1 or None,
            PATIENCE_SECONDS,
            what="the extender to forget the Node",
        )


def test_nodes_die_in_the_middle_of_a_burst(plane: Rig) -> None:
    """Ten are deleted and ten go silent while 300 pods are placed, and all come back."""
    add_nodes(plane, range(_NODES))
    nodes = _nodes(plane)
    with Extender(plane), KubeScheduler(plane) as scheduler, Bound(plane) as bound:
        with scheduler.held():
            names = create(plane, mixed_pods("pod", _PODS))
        bound.wait(names, _PODS // 3, timeout=PATIENCE_SECONDS)
        assert bound.number(names) < _PODS, "all pods were bound before any Node was away"
        for number in _DELETED:
            delete_node(plane, number)
        for number in _SILENT:
            set_ready(plane, number, ready=False)
        bound.wait(names, _PODS // 2, timeout=PATIENCE_SECONDS)
        assert judge(nodes, plane.pods()).problems == []
        add_nodes(plane, _DELETED)
        for number in _SILENT:
            set_ready(plane, number, ready=True)
        bound.wait(names, timeout=PATIENCE_SECONDS, beat=lambda: beat(plane, _DELETED[0]))
    verdict = judge(nodes, plane.pods())
    assert verdict.problems == []
    assert sorted(verdict.bound) == sorted(names)
