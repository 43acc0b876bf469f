"""Changes between filter and bind: no pod is bound to claims that were right only before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.real_node.rig import Rig
from tests.real_node.scheduler.checker import cards_of_pods, judge
from tests.real_node.scheduler.objects import (
    CARDS,
    PODS,
    add_nodes,
    beat,
    container,
    create,
    delete_node,
    mark_ill,
    node_name,
    pod,
    remove_pod,
    uuid,
)
from tests.real_node.scheduler.processes import (
    BIND,
    PORT,
    Bound,
    Extender,
    Forwarder,
    KubeScheduler,
)

PATIENCE_SECONDS = 60
_SHARE = [container("main", 1, 60, 4096)]


class _Placing(NamedTuple):
    extender: Extender
    calls: Forwarder  # from kube-scheduler to the extender


@pytest.fixture
def placing(plane: Rig) -> Iterator[_Placing]:
    """The extender and a kube-scheduler, whose calls can be held up."""
    with (
        Extender(plane) as extender,
        Forwarder(plane, PORT) as calls,
        KubeScheduler(plane, calls.port),
    ):
        yield _Placing(extender, calls)


def _wait_usable(extender: Extender, number: int) -> None:
    """Wait until the extender knows so many Nodes with cards."""
    usable = 'vgpu_scheduler_nodes{state="usable"}'
    extender.wait(f"{number} usable Nodes", lambda: extender.metric(usable) == number)


def _wait_refused_bind(rig: Rig, name: str) -> None:
    """Wait until the pod's owner is told that its bind was refused."""

    def messages() -> bool | None:
        path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={name}"
        found = [str(each.get("message", "")) for each in rig.api.get(path)["items"]]
        return any("can no longer have its cards" in text for text in found) or None

    rig.wait_for(messages, PATIENCE_SECONDS, what=f"an event of {name} about its bind")


def test_a_card_that_falls_ill(plane: Rig, placing: _Placing) -> None:
    """The bind is refused, with an event of the pod. The pod goes to a healthy card, or waits for
    one.
    """
    add_nodes(plane, [0])
    _wait_usable(placing.extender, 1)
    with Bound(plane) as bound:
        with placing.calls.holding(BIND):
            create(plane, [pod("first", _SHARE)])
            placing.calls.wait("a bind", lambda: placing.calls.held(BIND) == 1)
            mark_ill(plane, 0, [0])
            placing.extender.wait("the ill card", lambda: placing.extender.unhealthy_cards() == 1)
        bound.wait(["first"], timeout=PATIENCE_SECONDS)
        _wait_refused_bind(plane, "first")
        with placing.calls.holding(BIND):
            create(plane, [pod("second", _SHARE)])
            placing.calls.wait("a bind", lambda: placing.calls.held(BIND) == 2)
            mark_ill(plane, 0, range(CARDS))
            placing.extender.wait("ill cards", lambda: placing.extender.unhealthy_cards() == CARDS)
        _wait_refused_bind(plane, "second")
        plane.wait_for(
            lambda: "nodes are available" in _why(plane, "second") or None,
            PATIENCE_SECONDS,
            what="a refusal of the second",
        )
        mark_ill(plane, 0, [card for card in range(CARDS) if card != 5])
        bound.wait(["second"], timeout=PATIENCE_SECONDS, beat=lambda: beat(plane, 0))
    verdict = judge(plane.api.get("/api/v1/nodes")["items"], plane.pods())
    assert verdict.problems == []
    assert set(verdict.used) == {(node_name(0), uuid(0, card)) for card in (1, 5)}
    # a bind is counted after the API server, and so its watch, has it
    placing.extender.wait("the last bind", lambda: placing.extender.calls("bind") >= 4)
    assert placing.extender.calls("bind") == 4


def test_a_node_that_is_deleted(plane: Rig, placing: _Placing) -> None:
    """Its name may come back with other cards, so the pod goes to another Node."""
    add_nodes(plane, [0, 1])
    _wait_usable(placing.extender, 2)
    with Bound(plane) as bound:
        # kube-scheduler, too, must know the Node: a pod without cards is bound to it
        probe = pod("probe", [container("main", 0)])
        probe["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node_name(0)}
        bound.wait(create(plane, [probe]), timeout=PATIENCE_SECONDS)
        remove_pod(plane, "probe")
        with placing.calls.holding(BIND):
            create(plane, [pod("pod", _SHARE, policy="binpack")])
            placing.calls.wait("a bind", lambda: placing.calls.held(BIND) == 1)
            delete_node(plane, 0)
            _wait_usable(placing.extender, 1)
        bound.wait(["pod"], timeout=PATIENCE_SECONDS)
        _wait_refused_bind(plane, "pod")
    assert cards_of_pods(plane.pods()) == {node_name(1): {uuid(1, 0)}}


def _why(rig: Rig, name: str) -> str:
    """The reason in the pod's status for its not being scheduled."""
    conditions = rig.api.get(f"{PODS}/{name}")["status"].get("conditions") or [{}]
    return str(conditions[0].get("message", ""))
