"""The `volcano-gpushare` family and the simulated Volcano scheduler, which share no code:
what one writes, the other reads.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from vgpu_agent.families.family import NodeView, Question
from vgpu_agent.families.volcano_gpushare.family import (
    VolcanoGpushareFamily,
    VolcanoGpushareOptions,
)
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Gpu, Grant, Health, Inventory, Resource, Share
from vgpu_agent.nodes import Node
from vgpu_agent.pods import Pod, PodContainer
from vgpu_agent.sim.volcano.gpushare import GpushareLedger

UUIDS = (
    "GPU-11111111-aaaa-bbbb-cccc-000000000001",
    "GPU-22222222-aaaa-bbbb-cccc-000000000002",
    "GPU-33333333-aaaa-bbbb-cccc-000000000003",
)
CARDS = tuple(
    Gpu(uuid, index, index, "NVIDIA A10", 24576, f"0000:0{index + 1}:00.0")
    for index, uuid in enumerate(UUIDS)
)
TWO = Inventory(1, CARDS[:2])

Strategy = Literal["share", "number"]


class _NodeOfOurs:
    """A node that offers with one strategy, and what the scheduler and the API server see of it."""

    def __init__(self, strategy: Strategy, inventory: Inventory) -> None:
        self.strategy: Strategy = strategy
        self.inventory = inventory
        self.family = VolcanoGpushareFamily(VolcanoGpushareOptions(strategy=strategy))
        self.resource: Resource
        (self.resource,) = self.family.resources(inventory)
        self.ledger = Ledger()
        self.ledger.observe(inventory)
        self.ledger.offer([self.resource])

    @property
    def published(self) -> dict[str, Any]:
        """The Node after the kubelet has counted our ids and our desired state has been written."""
        rooms = {self.resource.name: self.ledger.rooms(self.resource.name)}
        desired_state = self.family.desired_node(
            NodeView(Node("node-a"), self.inventory, rooms, {}, now=0.0)
        )
        capacity = {self.resource.name: str(len(self.resource.ids)), **desired_state.capacity}
        annotations = {
            key: value for key, value in desired_state.annotations.items() if value is not None
        }
        return {
            "metadata": {"name": "node-a", "annotations": annotations},
            "status": {"capacity": capacity},
        }

    def scheduler(self, *pods: dict[str, Any]) -> GpushareLedger:
        """The scheduler's book of this node with these pods on it."""
        book = GpushareLedger.of(self.published, pods, strategy=self.strategy)
        assert book is not None
        return book

    def pod(self, *limits: int) -> dict[str, Any]:
        """A pod as the API server has it."""
        containers = [
            {"name": f"c{n}", "resources": {"limits": {self.resource.name: str(limit)}}}
            for n, limit in enumerate(limits)
        ]
        return {
            "metadata": {"name": "p", "namespace": "default", "uid": "uid-1"},
            "spec": {"containers": containers},
            "status": {},
        }

    def decided(
        self, limits: tuple[int, ...], annotations: dict[str, str]
    ) -> dict[str, tuple[Share, ...]]:
        """Return the shares of each container, one after the other."""
        shares: dict[str, tuple[Share, ...]] = {}
        pod = self.seen(limits, annotations)
        rooms = self.ledger.rooms(self.resource.name)
        for container, limit in zip(pod.containers, limits, strict=True):
            ids = tuple(f"id-{number}" for number in range(limit))
            question = Question(
                self.resource,
                pod,
                container.name,
                ids,
                "node-a",
                self.inventory,
                rooms,
                dict(shares),
            )
            shares[container.name] = self.family.decide(question).shares
        return shares

    def seen(self, limits: tuple[int, ...], annotations: dict[str, str]) -> Pod:
        """The same pod as our watch has it."""
        containers = tuple(
            PodContainer(f"c{n}", limits={self.resource.name: limit})
            for n, limit in enumerate(limits)
        )
        return Pod(
            "uid-1", "default", "p", "node-a", annotations=annotations, containers=containers
        )


@pytest.mark.parametrize(
    ("strategy", "limits", "devices"),
    [
        ("share", (1000, 1000), [[UUIDS[0]], [UUIDS[0]]]),
        ("number", (1, 1), [[UUIDS[0]], [UUIDS[1]]]),
    ],
)
def test_what_the_scheduler_writes_is_what_containers_get(
    strategy: Strategy, limits: tuple[int, ...], devices: list[list[str]]
) -> None:
    """volcano-gpushare:S2, volcano-gpushare:S7: it sees the node as we publish it, writes
    gpu-index, and each container gets its part.
    """
    node = _NodeOfOurs(strategy, TWO)
    placed = node.scheduler().place(node.pod(*limits), now=1795200991.0)
    assert placed is not None
    shares = node.decided(limits, dict(placed.annotations))
    assert [[share.device for share in each] for each in shares.values()] == devices


@pytest.mark.parametrize("strategy", ["share", "number"])
def test_the_scheduler_sees_a_fresh_node_in_either_strategy(strategy: Strategy) -> None:
    """volcano-gpushare:S1, volcano-gpushare:D3: both counts are in the capacity:
    two cards, of 24576 MiB where that counts.
    """
    book = _NodeOfOurs(strategy, TWO).scheduler()
    assert list(book.holders) == [0, 1]
    assert book.card_memory == (24576 if strategy == "share" else 0)


@pytest.mark.parametrize("strategy", ["share", "number"])
def test_the_scheduler_leaves_an_ill_card_alone(strategy: Strategy) -> None:
    """volcano-gpushare:S6: what we publish makes it place on card 0 only."""
    ill = Inventory(
        2, (CARDS[0], msgspec.structs.replace(CARDS[1], health=Health(ok=False, reason="XID 79")))
    )
    assert list(_NodeOfOurs(strategy, ill).scheduler().holders) == [0]


def test_a_card_that_never_answered_costs_no_pod_its_place() -> None:
    """volcano-gpushare:D5: with cards 0 and 2 the scheduler uses just these,
    and never believes in more memory than they have.
    """
    book = _NodeOfOurs("share", Inventory(1, (CARDS[0], CARDS[2]))).scheduler()
    assert list(book.holders) == [0, 2]
    assert book.card_memory <= 24576


@pytest.mark.parametrize(
    ("strategy", "limits", "left"), [("share", (20000, 1000), [0, 21000]), ("number", (1, 1), [])]
)
def test_pods_that_the_agent_placed_are_in_the_schedulers_book(
    strategy: Strategy, limits: tuple[int, ...], left: list[int]
) -> None:
    """volcano-gpushare:D12: the annotation that we write is one that the scheduler counts by."""
    node = _NodeOfOurs(strategy, TWO)
    shares = node.decided(limits, {})
    grants = {
        name: Grant(1, "volcano-gpushare", node.resource.name, ("x",), each)
        for name, each in shares.items()
    }
    written = node.family.desired_pod(node.seen(limits, {}), grants, failed=False).annotations
    pod = node.pod(*limits)
    pod["metadata"]["annotations"] = dict(written)
    book = node.scheduler(pod)
    assert [index for index, pods in book.holders.items() if not pods] == ([1] if left else [])
    assert sorted(sum(pods.values()) for pods in book.holders.values()) == (left or [0, 0])
