"""Pods of higher priority, through a real kube-scheduler and ``vgpu-agent scheduler``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.real_node.rig import Rig
from tests.real_node.scheduler.objects import PODS, Json, container, create, node_name, pod, uuid
from tests.real_node.scheduler.processes import Bound, Extender, KubeScheduler

pytestmark = pytest.mark.cluster

PATIENCE_SECONDS = 60
_PRIORITIES = {"low": 1, "middle": 2, "high": 100}
_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


class Counting(KubeScheduler):
    """A kube-scheduler that counts compute and memory itself, too."""

    def configuration(self) -> dict[str, Any]:
        """See `KubeScheduler`."""
        found = super().configuration()
        for resource in found["extenders"][0]["managedResources"]:
            resource["ignoredByScheduler"] = False
        return found


@pytest.fixture
def classes(plane: Rig) -> Iterator[None]:
    """Classes of priority."""
    for name, value in _PRIORITIES.items():
        plane.api.post(
            _CLASSES,
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": name},
                "value": value,
            },
        )
    yield
    for name in _PRIORITIES:
        plane.api.delete(f"{_CLASSES}/{name}")


@pytest.fixture
def extender(plane: Rig, classes: None) -> Iterator[Extender]:
    """The extender beside a kube-scheduler that calls it."""
    with Extender(plane) as running, KubeScheduler(plane):
        yield running


def _node(rig: Rig, *, slots: int, resources: Mapping[str, str] | None = None) -> None:
    """A Node of two cards for so many containers each."""
    cards = [
        {
            "id": card,
            "type": "NVIDIA A10",
            "uuid": uuid(0, card),
            "core": 100,
            "memory": 24576,
            "number": slots,
            "numa": 0,
            "mig": False,
            "busId": f"0000:0{card}:00.0",
            "capability": 8.6,
            "healthy": True,
        }
        for card in range(2)
    ]
    config = {"deviceSplit": slots, "coresScaling": 1, "memoryFactor": 1, "memoryScaling": 1}
    allocatable = {
        "cpu": "64",
        "memory": "256Gi",
        "pods": "110",
        "nvidia.com/vgpu-number": str(2 * slots),
        **(resources or {}),
    }
    rig.api.post(
        "/api/v1/nodes",
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": node_name(0),
                "annotations": {
                    "nvidia.com/node-config-info": json.dumps(config),
                    "nvidia.com/node-device-register": json.dumps(cards),
                },
            },
            "status": {
                "capacity": allocatable,
                "allocatable": allocatable,
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        },
    )


def _pod(name: str, priority: str, card: int | None = None, **amounts: int) -> Json:
    """A pod that asks for a card, or for this one. It ends at once when it is deleted."""
    wanted = {} if card is None else {"nvidia.com/include-gpu-uuid": uuid(0, card)}
    made = pod(name, [container("main", 1, **amounts)], annotations=wanted)
    made["spec"] |= {"priorityClassName": priority, "terminationGracePeriodSeconds": 0}
    return made


def _names(rig: Rig) -> set[str]:
    items: list[dict[str, Any]] = rig.api.get(PODS)["items"]
    return {item["metadata"]["name"] for item in items}


def test_only_the_pod_on_the_card_goes(plane: Rig, extender: Extender) -> None:
    """kube-scheduler proposes the pod of the lowest priority, whose card is of no use."""
    _node(plane, slots=1)
    with Bound(plane) as bound:
        first = create(plane, [_pod("on-0", "low", 0), _pod("on-1", "middle", 1)])
        bound.wait(first, timeout=PATIENCE_SECONDS)
        bound.wait(create(plane, [_pod("urgent", "high", 1)]), timeout=PATIENCE_SECONDS)
    assert _names(plane) == {"on-0", "urgent"}
    assert extender.calls("preempt") >= 1


def test_both_pods_on_a_card_go_and_no_other(plane: Rig, extender: Extender) -> None:
    """kube-scheduler proposes one of them, and only one slot is short."""
    _node(plane, slots=2)
    with Bound(plane) as bound:
        halves = [_pod(f"half-{card}-{place}", "low", card, cores=50, memory=12288)
                  for card in range(2) for place in range(2)]  # fmt: skip
        bound.wait(create(plane, halves), timeout=PATIENCE_SECONDS)
        bound.wait(create(plane, [_pod("urgent", "high")]), timeout=PATIENCE_SECONDS)
    left = _names(plane) - {"urgent"}
    assert len(left) == 2
    assert len({name.rpartition("-")[0] for name in left}) == 1


def test_full_cards_with_free_slots_are_seen_where_they_are_counted(
    plane: Rig, classes: None
) -> None:
    """kube-scheduler 1.36 asks only about Nodes where something is short that it counts itself
    (docs/scheduling.md).
    """
    _node(
        plane,
        slots=10,
        resources={"nvidia.com/vgpu-cores": "200", "nvidia.com/vgpu-memory": "49152"},
    )
    whole = {"cores": 100, "memory": 24576}
    with Extender(plane), Counting(plane), Bound(plane) as bound:
        first = create(plane, [_pod("on-0", "low", 0, **whole), _pod("on-1", "middle", 1, **whole)])
        bound.wait(first, timeout=PATIENCE_SECONDS)
        bound.wait(create(plane, [_pod("urgent", "high", 1, **whole)]), timeout=PATIENCE_SECONDS)
    assert _names(plane) == {"on-0", "urgent"}
