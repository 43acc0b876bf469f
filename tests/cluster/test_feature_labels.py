"""Labels of GPU Feature Discovery on our Node, and how they are left to that program; on virtual
time.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.cluster.fake_api import NODE, FakeApi, WatchedNode, node, running
from tests.cluster.gpu_world import ignore
from vgpu_agent.cluster.feature_labels import ANNOTATION, FeatureLabels
from vgpu_agent.cluster.node_publisher import NodePublisher
from vgpu_agent.concurrency import Revision
from vgpu_agent.journal import Journal

PRODUCT, COUNT, TIMESTAMP = "nvidia.com/gpu.product", "nvidia.com/gpu.count", "nvidia.com/gfd.time"

pytestmark = pytest.mark.looptime


class World:
    """A Node, and one publisher of its labels after the other."""

    def __init__(self) -> None:
        self.api, self.journal, self.wake = FakeApi(), Journal(), Revision()
        self.watched = WatchedNode(self.api)
        self.desired: dict[str, str] | None = {PRODUCT: "A100", COUNT: "2"}
        self.api.put(NODE, node())

    def run(self, *, on: bool = True) -> contextlib.AbstractAsyncContextManager[None]:
        """Run the publisher of a new process."""
        labels = FeatureLabels((lambda: self.desired) if on else None, TIMESTAMP, self.journal)
        publisher = NodePublisher(
            self.api,
            "n1",
            self.watched.latest,
            lambda node, _now: labels.desired_node(node),
            self.wake,
            self.journal,
        )
        return running(publisher.run(ignore))

    def label(self, **labels: str | None) -> None:
        """Change labels as another client."""
        named = {"product": PRODUCT, "count": COUNT, "timestamp": TIMESTAMP}
        patch = {named.get(key, key): value for key, value in labels.items()}
        self.api.change(NODE, {"metadata": {"labels": patch}})

    @property
    def labels(self) -> dict[str, str]:
        """Return the Node's labels."""
        found: dict[str, str] = self.api.objects[NODE]["metadata"].get("labels", {})
        return found

    @property
    def annotations(self) -> dict[str, str]:
        """Return the Node's annotations."""
        found: dict[str, str] = self.api.objects[NODE]["metadata"].get("annotations", {})
        return found

    @property
    def left(self) -> list[str]:
        """The reasons why the labels were left to another program."""
        return [
            entry.facts["reason"]
            for entry in self.journal.entries
            if entry.event == "node.feature_labels_left"
        ]


async def test_labels_follow_the_configuration_and_stale_ones_go() -> None:
    """Replicas are another value at once, and a profile that is gone has no label."""
    world = World()
    async with world.run():
        await asyncio.sleep(1)
        assert world.labels == {PRODUCT: "A100", COUNT: "2"}
        world.desired = {PRODUCT: "A100-SHARED"}
        world.wake.advance()
        await asyncio.sleep(1)
    assert world.labels == {PRODUCT: "A100-SHARED"}
    assert world.annotations[ANNOTATION] == PRODUCT


async def test_nothing_is_written_twice_and_nothing_while_no_gpu_answers() -> None:
    """Four hours cost one write."""
    world = World()
    async with world.run():
        await asyncio.sleep(1)
        world.desired = None
        await asyncio.sleep(4 * 3600)
    assert len(world.api.requests) == 1
    assert world.labels == {PRODUCT: "A100", COUNT: "2"}


async def test_switched_off_the_agent_removes_its_labels_and_no_others() -> None:
    """By the annotation, since the process that wrote them has ended."""
    world = World()
    async with world.run():
        await asyncio.sleep(1)
        world.label(foreign="1")
        await asyncio.sleep(1)
    async with world.run(on=False):
        await asyncio.sleep(1)
    assert world.labels == {"foreign": "1"}
    assert ANNOTATION not in world.annotations


async def test_switched_off_without_labels_it_writes_nothing() -> None:
    """The labels of GPU Feature Discovery stay, as on most nodes."""
    world = World()
    world.label(product="Theirs", timestamp="1")
    async with world.run(on=False):
        await asyncio.sleep(100)
    assert world.api.requests == []
    assert world.left == []


async def test_a_node_with_the_timestamp_is_left_to_the_program() -> None:
    """Before the start and during it; again ours when the label is removed."""
    world = World()
    world.label(product="Theirs", timestamp="1")
    async with world.run():
        await asyncio.sleep(100)
        assert world.api.requests == []
        (reason,) = world.left
        assert "remove that label" in reason
        world.label(timestamp=None)
        await asyncio.sleep(10)
        assert world.labels == {PRODUCT: "A100", COUNT: "2"}
        world.label(product="Theirs", count=None, timestamp="2")
        await asyncio.sleep(100)
        assert world.labels == {PRODUCT: "Theirs", TIMESTAMP: "2"}
        assert ANNOTATION not in world.annotations
    assert len(world.left) == 2


async def test_an_edit_by_hand_does_not_keep_the_labels_from_coming_back() -> None:
    """Weeks later GPU Feature Discovery runs for a while, and is removed."""
    world = World()
    async with world.run():
        await asyncio.sleep(1)
        world.label(product="by hand")
        await asyncio.sleep(10)
        assert world.labels[PRODUCT] == "A100"
        world.label(product="Theirs", timestamp="1")
        await asyncio.sleep(10)
        world.label(timestamp=None)
        await asyncio.sleep(10)
        assert world.labels == {PRODUCT: "A100", COUNT: "2"}


async def test_a_program_that_keeps_changing_the_values_wins_after_three_times() -> None:
    """GPU Feature Discovery without timestamp writes every minute. A person who changes one label
    once gets it back.
    """
    world = World()
    async with world.run():
        await asyncio.sleep(10)
        for number in range(3):
            world.label(product="Theirs")
            await asyncio.sleep(60)
            assert world.labels[PRODUCT] == ("Theirs" if number == 2 else "A100")
        writes = len(world.api.requests)
        world.label(product="Theirs-2")
        await asyncio.sleep(3600)
        assert world.labels[PRODUCT] == "Theirs-2"
        assert len(world.api.requests) == writes
    assert len(world.left) == 1


async def test_changes_by_people_now_and_then_are_taken_back() -> None:
    """Three in a week are no program."""
    world = World()
    async with world.run():
        await asyncio.sleep(10)
        for _ in range(4):
            world.label(product="Theirs")
            await asyncio.sleep(3 * 3600)
            assert world.labels[PRODUCT] == "A100"
    assert world.left == []
