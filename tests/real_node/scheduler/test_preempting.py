"""Pods of higher priority, through a real kube-scheduler and ``vgpu-agent scheduler``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.real_node.rig import Rig
from tests.real_node.scheduler.objects import PODS, Json, container, create, node_name, pod, uuid
from tests.real_node.scheduler.processes import Bound, Extender, KubeScheduler

pytestmark = pytest.mark.cluster

PATIENCE_SECONDS = 60
_PRIORITIES = {"low": 1, "middle": 2, "high": 100}
_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture
def extender(plane: Rig) -> Iterator[Extender]:
    """The extender beside a kube-scheduler that calls it, and classes of priority."""
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
    with Extender(plane) as running, KubeScheduler(plane):
        yield running
    for name in _PRIORITIES:
        plane.api.delete(f"{_CLASSES}/{name}")


def _node(rig: Rig, *, slots: int) -> None:
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
    resources = {
        "cpu": "64",
        "memory": "256Gi",
        "pods": "110",
        "nvidia.com/vgpu-number": str(2 * slots),
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
                "capacity": resources,
                "allocatable": resources,
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
