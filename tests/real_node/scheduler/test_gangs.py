"""Gangs of eight, and pods with several cards, on Nodes that publish how their cards are linked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from tests.real_node.rig import Rig
from tests.real_node.scheduler.checker import cards_of_pods, judge, linked_groups
from tests.real_node.scheduler.objects import (
    CARDS,
    MEMORY_MIB,
    PODS,
    Json,
    add_nodes,
    container,
    create,
    node_name,
    pod,
    uuid,
)
from tests.real_node.scheduler.processes import Bound, Extender, KubeScheduler

PATIENCE_SECONDS = 60
_MODES = ("link", "link-strict")
_HALF = CARDS // 2


class _Placing(NamedTuple):
    extender: Extender
    scheduler: KubeScheduler


@pytest.fixture
def placing(plane: Rig) -> Iterator[_Placing]:
    """A kube-scheduler with its extender."""
    with Extender(plane) as extender, KubeScheduler(plane) as scheduler:
        yield _Placing(extender, scheduler)


def _member(gang: str, place: int, mode: str) -> Json:
    """A pod of a gang that asks for a whole card, on the fullest Node where several are equally
    good.
    """
    annotations = {
        "nvidia.com/device-topology-mode": mode,
        "nvidia.com/cross-pod-topology": "true",
        "nvidia.com/node-scheduler-policy": "binpack",
        "scheduling.k8s.io/group-name": gang,
    }
    return pod(f"{gang}-{place}", [container("main", 1)], annotations=annotations)


def _take(rig: Rig, extender: Extender, *cards: tuple[int, int]) -> None:
    """Create pods that have these cards, each (Node, card), and wait until the extender knows them,
    and so all pods that were created before.
    """
    known = extender.capacity()["pods"]
    for number, card in cards:
        made = pod(f"taken-{number}-{card}", [container("main", 1)])
        made["spec"]["nodeName"] = node_name(number)
        made["metadata"]["annotations"] = {
            "nvidia.com/pre-allocated": f"main[{card}_{uuid(number, card)}_100_{MEMORY_MIB}]",
            "nvidia.com/real-allocated": "",
            "nvidia.com/predicate-node": node_name(number),
            "nvidia.com/predicate-time": str(time.time_ns()),
        }
        made["metadata"]["labels"] = {
            "nvidia.com/assigned-phase": "succeed",
            "nvidia.com/metrics-node": node_name(number),
        }
        rig.create_pod(made)
    extender.wait("the pods to be known", lambda: extender.capacity()["pods"] == known + len(cards))


def _wait_known(rig: Rig, bound: Bound, number: int) -> None:
    """Wait until kube-scheduler knows a Node: a pod without cards is bound to it."""
    made = pod(f"probe-{number}", [container("main", 0)])
    made["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node_name(number)}
    bound.wait(create(rig, [made]), timeout=PATIENCE_SECONDS)


def _placed(rig: Rig, names: Sequence[str]) -> dict[str, set[str]]:
    """Return Node → the cards of these pods, which are bound; check all pods."""
    verdict = judge(rig.api.get("/api/v1/nodes")["items"], rig.pods())
    assert verdict.problems == []
    return cards_of_pods(each for each in rig.pods() if each["metadata"]["name"] in names)


def _groups(rig: Rig) -> dict[str, list[set[str]]]:
    """Return Node → its cards by what NVLinks join."""
    items: list[Json] = rig.api.get("/api/v1/nodes")["items"]
    return {each["metadata"]["name"]: linked_groups(each) for each in items}


@pytest.mark.parametrize("mode", _MODES)
def test_a_gang_of_eight_gets_the_eight_cards_that_are_joined(
    plane: Rig, placing: _Placing, mode: str
) -> None:
    """Eight Nodes have two groups of four, and of the two Nodes with all eight joined one has a
    card in use.
    """
    add_nodes(plane, [*range(4), *range(6, 10)])
    add_nodes(plane, [4, 5], joined=True)
    with Bound(plane) as bound:
        _wait_known(plane, bound, 5)
        with placing.scheduler.held():  # the first one is placed by the number of those that wait
            names = create(plane, [_member("gang", place, mode) for place in range(CARDS)])
            _take(plane, placing.extender, (4, 3))
        bound.wait(names, timeout=PATIENCE_SECONDS)
    placed = _placed(plane, names)
    assert placed == {node_name(5): {uuid(5, card) for card in range(CARDS)}}
    assert placed[node_name(5)] in _groups(plane)[node_name(5)]


@pytest.mark.parametrize("mode", _MODES)
def test_two_gangs_of_eight_share_no_group_of_linked_cards(
    plane: Rig, placing: _Placing, mode: str
) -> None:
    """Nodes have two groups of four each, so each gang has two groups, and these at the same place
    of their Nodes. Members of both wait in turns.
    """
    add_nodes(plane, range(2))
    with Bound(plane) as bound:
        with placing.scheduler.held():
            gangs = [
                [_member(f"gang{number}", place, mode) for place in range(CARDS)]
                for number in range(2)
            ]
            names = create(plane, [each for pair in zip(*gangs, strict=True) for each in pair])
        bound.wait(names, timeout=PATIENCE_SECONDS)
    groups, halves = _groups(plane), set[int]()
    for number in range(2):
        placed = _placed(plane, [f"gang{number}-{place}" for place in range(CARDS)])
        places = {groups[node].index(cards) for node, cards in placed.items()}
        assert len(placed) == 2
        assert len(places) == 1
        halves |= places
    assert len(halves) == 2


def test_a_pod_gets_cards_that_are_joined(plane: Rig, placing: _Placing) -> None:
    """A strict pod of eight gets the one Node that joins as many, and the next one waits. One of
    four gets the group of which all are free, although cards with lower numbers are free, too.
    """
    add_nodes(plane, [0, 2])
    add_nodes(plane, [1], joined=True)
    link = {"nvidia.com/device-topology-mode": "link-strict"}
    eight, late, four = (
        pod(name, [container("main", number)], annotations=link)
        for name, number in (("eight", CARDS), ("late", CARDS), ("four", _HALF))
    )
    with Bound(plane) as bound:
        bound.wait(create(plane, [eight]), timeout=PATIENCE_SECONDS)
        create(plane, [late])
        reason = plane.wait_for(
            lambda: _why(plane, "late"), PATIENCE_SECONDS, what="a refusal of the second of eight"
        )
        _take(plane, placing.extender, (0, 1), (2, 1), (2, 6))
        bound.wait(create(plane, [four]), timeout=PATIENCE_SECONDS)
    assert "Link topology unsatisfied" in reason
    assert _placed(plane, ["eight"]) == {node_name(1): {uuid(1, card) for card in range(CARDS)}}
    four_cards = {uuid(0, card) for card in range(_HALF, CARDS)}
    assert _placed(plane, ["four"]) == {node_name(0): four_cards}
    assert four_cards in _groups(plane)[node_name(0)]


def _why(rig: Rig, name: str) -> str:
    """The reason in the pod's status for its not being scheduled; empty without one."""
    conditions = rig.api.get(f"{PODS}/{name}")["status"].get("conditions") or [{}]
    return str(conditions[0].get("message", ""))
