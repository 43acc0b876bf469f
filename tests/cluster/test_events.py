"""Events: written once, counted, kept through outages and given up in time; on virtual time."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.cluster.fake_api import FakeApi, running, unavailable
from vgpu_agent.cluster.events import Events
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import Node
from vgpu_agent.pods import Pod

POD = Pod("uid-a", "team", "a")
TEAM, DEFAULT = "/api/v1/namespaces/team/events", "/api/v1/namespaces/default/events"
REFUSED = "VgpuStartRefused"

pytestmark = pytest.mark.looptime


class World:
    """An API server and the events of one agent."""

    def __init__(self, *, max_queued: int = 256) -> None:
        self.api, self.journal = FakeApi(), Journal()
        self.events = Events(
            self.api,
            "vgpu-agent",
            "n1",
            self.journal,
            lambda: 1000 + asyncio.get_running_loop().time(),
            max_queued=max_queued,
        )

    @property
    def messages(self) -> list[str]:
        """Those of the pod's events, oldest first."""
        return [event["message"] for event in self.api.below(TEAM)]

    def entries(self, name: str) -> list[dict[str, Any]]:
        """The facts of the journal's entries of that name."""
        return [entry.facts for entry in self.journal.entries if entry.event == name]


def _ignore() -> None:
    """A heartbeat without a listener."""


async def test_an_event_of_a_pod_is_complete_and_in_its_namespace() -> None:
    """`kubectl describe pod` finds it by kind, name, namespace and UID."""
    world = World()
    async with running(world.events.run(_ignore)):
        world.events.raise_event(POD, REFUSED, "no GPU has 8000 MiB left")
        await asyncio.sleep(1)
    (event,) = world.api.below(TEAM)
    name = event.pop("metadata")["name"]
    assert re.fullmatch(r"a\.[0-9a-f]{16}", name)
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": "team",
            "name": "a",
            "uid": "uid-a",
        },
        "reason": REFUSED,
        "message": "no GPU has 8000 MiB left",
        "type": "Warning",
        "source": {"component": "vgpu-agent", "host": "n1"},
        "firstTimestamp": "1970-01-01T00:16:40Z",
        "lastTimestamp": "1970-01-01T00:16:40Z",
        "count": 1,
        "reportingComponent": "vgpu-agent",
        "reportingInstance": "n1",
    }


async def test_an_event_of_a_node_stands_in_the_namespace_default() -> None:
    """A Node has no namespace, and the API server accepts no other for it."""
    world = World()
    async with running(world.events.run(_ignore)):
        world.events.raise_event(
            Node("n1", "node-uid"), "GpusSimulated", "this node's GPUs are simulated", "Normal"
        )
        await asyncio.sleep(1)
    (event,) = world.api.below(DEFAULT)
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Node",
        "name": "n1",
        "uid": "node-uid",
    }
    assert event["type"] == "Normal"


async def test_the_same_within_an_hour_is_one_event_whose_count_grows() -> None:
    """Raised every 14 seconds for ten minutes: one event, and about one patch a minute."""
    world = World()
    async with running(world.events.run(_ignore)):
        for _ in range(43):
            world.events.raise_event(POD, REFUSED, "full")
            await asyncio.sleep(14)
        await asyncio.sleep(61)
    (event,) = world.api.below(TEAM)
    assert (event["count"], event["firstTimestamp"], event["lastTimestamp"]) == (
        43,
        "1970-01-01T00:16:40Z",
        "1970-01-01T00:26:28Z",
    )
    assert len(world.api.requests) < 14


async def test_after_an_hour_the_same_is_said_anew() -> None:
    """The API server has forgotten the first one by then."""
    world = World()
    async with running(world.events.run(_ignore)):
        world.events.raise_event(POD, REFUSED, "full")
        await asyncio.sleep(3601)
        world.events.raise_event(POD, REFUSED, "full")
        await asyncio.sleep(1)
    assert world.messages == ["full", "full"]


async def test_another_pod_of_the_name_has_events_of_its_own() -> None:
    """An event about the old pod says nothing about the new one."""
    world = World()
    async with running(world.events.run(_ignore)):
        world.events.raise_event(POD, REFUSED, "full")
        world.events.raise_event(Pod("uid-b", "team", "a"), REFUSED, "full")
        await asyncio.sleep(1)
    assert [event["involvedObject"]["uid"] for event in world.api.below(TEAM)] == ["uid-a", "uid-b"]


async def test_an_event_that_the_api_server_forgot_early_is_written_anew_with_its_count() -> None:
    """--event-ttl may be minutes: the patch of the count finds nothing."""
    world = World()
    async with running(world.events.run(_ignore)):
        world.events.raise_event(POD, REFUSED, "full")
        await asyncio.sleep(100)
        world.api.objects.clear()
        world.events.raise_event(POD, REFUSED, "full")
        await asyncio.sleep(61)
    (event,) = world.api.below(TEAM)
    assert event["count"] == 2


async def test_an_outage_delays_events_and_costs_few_requests() -> None:
    """Raised in the middle of a half-hour outage, they are written soon after it, in order."""
    world = World()
    world.api.fault = unavailable
    async with running(world.events.run(_ignore)):
        world.events.raise_event(POD, REFUSED, "one")
        await asyncio.sleep(900)
        world.events.raise_event(POD, REFUSED, "two")
        await asyncio.sleep(900)
        tried = len(world.api.requests)
        assert world.events.counts.oldest_pending_seconds > 1700
        world.api.fault = None
        await asyncio.sleep(31)
    assert tried < 200
    assert world.messages == ["one", "two"]
    assert len(world.entries("events.failed")) == 1


async def test_an_event_is_given_up_after_an_hour() -> None:
    """At noon it does not matter why a pod waited at ten. Younger events are still written."""
    world = World()
    world.api.fault = unavailable
    async with running(world.events.run(_ignore)):
        world.events.raise_event(POD, REFUSED, "old")
        await asyncio.sleep(3000)
        world.events.raise_event(POD, REFUSED, "young")
        await asyncio.sleep(650)
        world.api.fault = None
        await asyncio.sleep(31)
    assert world.messages == ["young"]
    assert world.events.counts.dropped == 1


async def test_the_oldest_goes_when_too_many_wait() -> None:
    """The queue is bounded and what was lost is counted."""
    world = World(max_queued=3)
    for number in range(5):
        world.events.raise_event(POD, REFUSED, f"message {number}")
    async with running(world.events.run(_ignore)):
        await asyncio.sleep(1)
    assert world.messages == ["message 2", "message 3", "message 4"]
    assert world.events.counts.dropped == 2


async def test_what_was_said_does_not_fill_the_memory() -> None:
    """Ten thousand different messages within the hour."""
    world = World(max_queued=10)
    for number in range(10_000):
        world.events.raise_event(POD, REFUSED, f"message {number}")
    assert len(world.events._events) <= 41


async def test_an_answer_that_was_lost_does_not_make_a_second_event() -> None:
    """The API server had written it before the connection broke;
    trying again meets its own name.
    """
    world = World()
    lost = False

    def lose(_verb: str, path: str, body: Any) -> ClusterError | None:
        nonlocal lost
        if lost:
            return None
        lost = True
        world.api.put(f"{path}/{body['metadata']['name']}", dict(body))
        return ClusterError("connection reset", status=0)

    world.api.fault = lose
    async with running(world.events.run(_ignore)):
        world.events.raise_event(POD, REFUSED, "full")
        await asyncio.sleep(10)
    assert world.messages == ["full"]
    assert world.events.counts.pending == 0


async def test_an_event_that_is_refused_does_not_keep_the_next_one_away() -> None:
    """403 in a namespace that is being deleted. The missing verb is named once."""
    world = World()
    world.api.fault = lambda _verb, path, _body: (
        ClusterError("forbidden", status=403) if path == TEAM else None
    )
    async with running(world.events.run(_ignore)):
        world.events.raise_event(POD, REFUSED, "one")
        world.events.raise_event(POD, REFUSED, "two")
        world.events.raise_event(Node("n1", "node-uid"), "GpuLost", "GPU 1 is lost")
        await asyncio.sleep(1)
    assert len(world.api.below(DEFAULT)) == 1
    assert world.events.counts.dropped == 2
    (facts,) = world.entries("events.forbidden")
    assert "the verb 'create' on 'events'" in facts["error"]


async def test_a_namespace_that_takes_no_events_holds_up_no_other() -> None:
    """Its rate limit may be used up by its owner, or a webhook fails for it alone. Its events come
    when it takes some again.
    """
    world = World()
    world.api.fault = lambda verb, path, body: (
        ClusterError(f"{verb} {path}: too many requests", status=429) if path == TEAM else None
    )
    node = Node("n1", "node-uid")
    async with running(world.events.run(_ignore)):
        for number in range(3):
            world.events.raise_event(POD, REFUSED, f"no room {number}")
        await asyncio.sleep(60)
        for reason in ("GpuLost", "GpuUnhealthy"):
            world.events.raise_event(node, reason, "GPU 0 is lost")
            await asyncio.sleep(60)
        reasons = [event["reason"] for event in world.api.below(DEFAULT)]
        assert reasons == ["GpuLost", "GpuUnhealthy"]
        assert world.messages == []
        assert world.entries("events.recovered") == []
        world.api.fault = None
        await asyncio.sleep(60)
    assert world.messages == ["no room 0", "no room 1", "no room 2"]
    assert len(world.entries("events.failed")) == len(world.entries("events.recovered")) == 1


async def test_a_namespace_whose_events_were_given_up_hides_no_later_outage() -> None:
    """The failure is over with the last of its events. Otherwise the log would stay silent."""
    world, node = World(), Node("n1", "node-uid")

    def blocked(verb: str, path: str, _: object) -> ClusterError | None:
        return (
            ClusterError(f"{verb} {path}: too many requests", status=429) if TEAM in path else None
        )

    world.api.fault = blocked
    async with running(world.events.run(_ignore)):
        world.events.raise_event(POD, REFUSED, "no room")
        await asyncio.sleep(3700)
        world.events.raise_event(node, "GpuLost", "GPU 0 is lost")
        await asyncio.sleep(60)
    assert world.messages == []
    assert len(world.entries("events.recovered")) == 1
    assert not world.events._failures


async def test_names_and_messages_fit_whatever_they_are_made_of() -> None:
    """A pod's name may be 253 characters long, and a message may be cut only between characters."""
    world = World()
    long_name = "a" * 235 + "." + "b" * 17
    async with running(world.events.run(_ignore)):
        world.events.raise_event(Pod("uid", "team", long_name), REFUSED, "ä€" * 1000)
        await asyncio.sleep(1)
    (event,) = world.api.below(TEAM)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", event["metadata"]["name"])
    assert ".." not in event["metadata"]["name"]
    assert len(event["metadata"]["name"]) <= 253
    assert 1020 < len(event["message"].encode()) <= 1024
    assert event["message"].endswith("…")


async def test_nothing_is_requested_while_nothing_is_said() -> None:
    """Ten virtual minutes of silence after an event, with signs of life."""
    world = World()
    beats: list[int] = []
    async with running(world.events.run(lambda: beats.append(1))):
        world.events.raise_event(POD, REFUSED, "full")
        await asyncio.sleep(600)
    assert len(world.api.requests) == 1
    assert len(beats) >= 60
