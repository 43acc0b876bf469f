"""Counts in the Node's status as soon as kubelet has them;
on virtual time against an API server in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.fake_api import NODE, FakeApi, WatchedNode, node, running, unavailable
from vgpu_agent.cluster.allocatable import AllocatableWriter
from vgpu_agent.concurrency import Revision
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import SentCounts

pytestmark = pytest.mark.looptime

GPU, VGPU = "nvidia.com/gpu", "volcano.sh/vgpu-number"


class World:
    """A Node n1 whose kubelet has 4 GPUs and 40 shares of them, all healthy, and one writer."""

    def __init__(self, *, delay_seconds: float = 0.05) -> None:
        self.api, self.journal, self.lists, self.withdrawn = (
            FakeApi(),
            Journal(),
            Revision(),
            Revision(),
        )
        self.counted: list[int | None] = []
        self.watched = WatchedNode(self.api, delay_seconds=delay_seconds)
        self.sent = {GPU: SentCounts(4, 4, 4), VGPU: SentCounts(40, 40, 40)}
        self.writer = AllocatableWriter(
            self.api,
            "n1",
            self.watched.latest,
            lambda: self.sent,
            self.lists,
            self.withdrawn,
            self.counted.append,
            self.journal,
        )
        self.api.put(NODE, node())
        self.kubelet(**{GPU: 4, VGPU: 40})

    def kubelet(self, **healthy: int) -> None:
        """The kubelet writes its status, with the capacity of the start."""
        counts = {resource: str(count) for resource, count in healthy.items()}
        self.api.change(
            NODE, {"status": {"capacity": {GPU: "4", VGPU: "40"}, "allocatable": counts}}
        )

    def send(self, **healthy: int) -> None:
        """The kubelet is sent lists in which so many are healthy."""
        self.sent |= {
            resource: SentCounts(self.sent[resource].listed, count, count)
            for resource, count in healthy.items()
        }
        self.lists.advance()

    @property
    def allocatable(self) -> dict[str, str]:
        """Return the allocatable resources that schedulers see."""
        found: dict[str, str] = self.api.objects[NODE]["status"]["allocatable"]
        return found

    @property
    def patches(self) -> list[Mapping[str, Any]]:
        """The counts that were written, one mapping a request."""
        return [request.body["status"]["allocatable"] for request in self.api.requests]


def beat() -> None:
    """A heartbeat without a listener."""


async def test_a_count_that_kubelet_was_sent_stands_on_the_node_at_once() -> None:
    """All counts that have changed together in one request, and nothing while nothing changes."""
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        assert world.patches == []
        world.send(**{VGPU: 0})
        world.send(**{GPU: 3})
        await asyncio.sleep(0.3)
        assert world.allocatable == {GPU: "3", VGPU: "0"}
        await asyncio.sleep(60)
        assert world.patches == [{GPU: "3", VGPU: "0"}]
        world.send(**{VGPU: 40})
        await asyncio.sleep(0.3)
        assert world.allocatable == {GPU: "3", VGPU: "40"}


@pytest.mark.parametrize("delay_seconds", [0.05, 3])
async def test_a_count_goes_up_only_when_kubelet_has_had_time_for_the_list(
    delay_seconds: float,
) -> None:
    """A pod that is bound before the kubelet has the ids is failed for good. A count that goes
    down meanwhile is written without it, whether or not the watch has shown the last write.
    """
    world = World(delay_seconds=delay_seconds)
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.send(**{GPU: 3})
        await asyncio.sleep(1)
        world.send(**{GPU: 4})
        world.sent[VGPU] = SentCounts(40, 40, 30)
        world.withdrawn.publish(1)
        await asyncio.sleep(0.09)
        assert world.allocatable == {GPU: "3", VGPU: "30"}
        assert world.counted[-1] == 1, "no pod is bound by what is gone"
        await asyncio.sleep(0.3)
        assert world.allocatable == {GPU: "4", VGPU: "30"}


async def test_what_kubelet_has_written_already_is_not_written_again() -> None:
    """The kubelet computes the same and may be quicker."""
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.kubelet(**{GPU: 3, VGPU: 40})
        await asyncio.sleep(1)
        world.send(**{GPU: 3})
        await asyncio.sleep(60)
    assert world.patches == []


async def test_kubelet_has_the_last_word_about_each_count() -> None:
    """It may know what we do not: that another plugin has taken the resource,
    or that our stream has broken.
    """
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.send(**{GPU: 3})
        await asyncio.sleep(1)
        world.kubelet(**{GPU: 0, VGPU: 40})
        await asyncio.sleep(60)
        assert world.allocatable[GPU] == "0"
        assert world.patches == [{GPU: "3"}]
        world.send(**{GPU: 4})  # a new list is a new word
        await asyncio.sleep(1)
        assert world.allocatable[GPU] == "4"


@pytest.mark.parametrize("allocatable", [{VGPU: "40"}, {GPU: "10", VGPU: "40"}])
async def test_a_resource_that_kubelet_shows_otherwise_is_kubelets_business(
    allocatable: Mapping[str, str],
) -> None:
    """One that it has not written yet, or has removed,
    or of which it has another list than the one that was sent.
    """
    world = World()
    status: dict[str, Any] = {
        "capacity": {GPU: None, **allocatable},
        "allocatable": {GPU: None, **allocatable},
    }
    await asyncio.sleep(1)  # the watch shows one change after the other
    world.api.change(NODE, {"status": status})
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.send(**{GPU: 3})
        await asyncio.sleep(60)
    assert world.patches == []


async def test_a_resource_without_an_open_stream_is_left_alone() -> None:
    """The kubelet counts its ids as unhealthy from the end of the stream on."""
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        del world.sent[GPU]
        world.kubelet(**{GPU: 0, VGPU: 40})
        world.lists.publish(1)
        await asyncio.sleep(60)
    assert world.patches == []


async def test_a_late_watch_does_not_pass_off_an_old_count_as_the_new_one() -> None:
    """4, 0 and 4 again within a second, of which the watch still shows the first 4."""
    world = World(delay_seconds=3)
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.send(**{GPU: 0})
        await asyncio.sleep(0.5)
        world.send(**{GPU: 4})
        await asyncio.sleep(10)
        assert world.patches == [{GPU: "0"}, {GPU: "4"}]
        assert world.allocatable[GPU] == "4"


async def test_a_count_goes_down_before_kubelet_has_the_list() -> None:
    """Pods are no longer sent to ids that the kubelet has only for pods on their way,
    and later nothing is left to write.
    """
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.sent[GPU] = SentCounts(4, 4, 3)
        world.withdrawn.publish(1)
        await asyncio.sleep(0.3)
        assert world.allocatable[GPU] == "3"
        world.send(**{GPU: 3})
        await asyncio.sleep(60)
        assert world.patches == [{GPU: "3"}]


async def test_the_ledger_hears_when_the_node_has_the_counts() -> None:
    """The kubelet keeps the ids until then, and a count from before says nothing."""
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        assert world.counted
        assert set(world.counted) == {0}
        world.api.request_seconds = 1.0
        world.sent[GPU] = SentCounts(4, 4, 3)
        world.withdrawn.publish(1)
        await asyncio.sleep(0.5)
        assert set(world.counted) == {0}
        await asyncio.sleep(1)
        assert world.counted[-1] == 1


async def test_a_count_that_goes_down_waits_for_no_other_write() -> None:
    """Handovers of several GPUs write more than one count a second. Pods are bound
    by the count of before until it is there.
    """
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        for number in range(1, 41):
            world.sent[GPU] = SentCounts(4, 4, 3 - number % 2)
            world.withdrawn.publish(number)
            await asyncio.sleep(0.1)
        assert world.allocatable[GPU] == "2", "going up can wait"
        world.sent[GPU] = SentCounts(4, 4, 1)
        world.withdrawn.publish(41)
        await asyncio.sleep(0.3)
        assert world.allocatable[GPU] == "1"
        assert world.counted[-1] == 41
        for number in range(42, 82):
            world.sent[GPU] = SentCounts(4, 4, 4 - number % 2)
            world.withdrawn.publish(number)
            await asyncio.sleep(0.1)
        assert world.allocatable[GPU] == "3"
        world.sent[GPU] = SentCounts(4, 4, 4)
        world.lists.publish(1)
        await asyncio.sleep(1.2)
        assert world.allocatable[GPU] == "4", "soon after the last write"


async def test_what_kubelet_writes_while_ids_are_withdrawn_is_written_over() -> None:
    """It counts what it is about to lose, and a pod that comes by that count comes too late."""
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.sent[GPU] = SentCounts(4, 4, 3)
        world.withdrawn.publish(1)
        await asyncio.sleep(0.3)
        world.kubelet(**{GPU: 4, VGPU: 40})
        await asyncio.sleep(0.3)
        assert world.allocatable[GPU] == "3"


async def test_what_kubelet_wrote_at_the_moment_of_a_new_list_is_written_over_once() -> None:
    """Otherwise schedulers use the old list for ten seconds."""
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.sent[GPU] = SentCounts(4, 4, 3)
        world.withdrawn.publish(1)
        await asyncio.sleep(0.4)
        world.send(**{GPU: 3})
        await asyncio.sleep(0.2)
        for _ in range(2):
            world.kubelet(**{GPU: 4, VGPU: 40})
            await asyncio.sleep(0.5)
        assert world.patches == [{GPU: "3"}, {GPU: "3"}]
        assert world.allocatable[GPU] == "4"


async def test_many_changes_cost_four_writes_a_second() -> None:
    """Every scheduler and proxy of the cluster watches Nodes. A few in a row go out at once, and
    later two a second that go up, and those that go down. The last count is there in the
    end.
    """
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        for number in range(100):
            world.send(**{GPU: number % 4})
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)
    assert len(world.patches) <= 4 * 12 + 8
    assert world.allocatable[GPU] == "3"


async def test_an_outage_is_borne_in_silence_and_the_count_follows() -> None:
    """The watches say that the API server is away."""
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.api.fault = unavailable
        world.send(**{GPU: 3})
        await asyncio.sleep(600)
        assert len(world.patches) < 60
        world.api.fault = None
        await asyncio.sleep(31)
    assert world.allocatable[GPU] == "3"
    assert not list(world.journal.entries)


async def test_a_missing_right_is_said_once_for_each_resource() -> None:
    """The kubelet goes on writing, so nothing is broken; asking again is rare."""
    world = World()
    world.api.fault = lambda *_: ClusterError("forbidden", status=403)
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.send(**{GPU: 3, VGPU: 0})
        await asyncio.sleep(3600)
    said = [(entry.event, entry.facts["resource"]) for entry in world.journal.entries]
    assert said == [("allocatable.refused", GPU), ("allocatable.refused", VGPU)]
    assert len(world.patches) < 40


async def test_a_resource_that_a_policy_refuses_does_not_hold_up_the_others() -> None:
    """A renamed resource is not in the policy of the manifests."""
    world = World()
    world.api.fault = lambda _verb, _path, body: (
        ClusterError("policy", status=403) if GPU in body["status"]["allocatable"] else None
    )
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.send(**{GPU: 3, VGPU: 0})
        await asyncio.sleep(1)
        assert world.allocatable == {GPU: "4", VGPU: "0"}
        world.send(**{VGPU: 30})
        await asyncio.sleep(2)
        assert world.allocatable == {GPU: "4", VGPU: "30"}
        world.send(**{VGPU: 40})
        world.sent[GPU] = SentCounts(4, 4, 2)
        world.withdrawn.publish(1)
        await asyncio.sleep(0.5)
        assert world.allocatable == {GPU: "4", VGPU: "40"}


async def test_another_node_of_the_name_begins_anew() -> None:
    """Values written on the Node before are lost with it."""
    world = World()
    async with running(world.writer.run(beat)):
        await asyncio.sleep(5)
        world.send(**{GPU: 3})
        await asyncio.sleep(1)
        world.api.put(NODE, node("another"))
        world.kubelet(**{GPU: 4, VGPU: 40})
        await asyncio.sleep(5)
        assert world.allocatable[GPU] == "3"
