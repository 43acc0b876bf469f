"""Writes to our Node through outages, refusals, rivals and crashes;
on virtual time against an API server in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.fake_api import NODE, running, unavailable
from tests.cluster.node_world import GPUS, HANDSHAKE, READY, REGISTER, World, ignore
from vgpu_agent.errors import ClusterError
from vgpu_agent.nodes import DesiredNode, Node

pytestmark = pytest.mark.looptime


async def test_a_watch_that_never_shows_the_write_costs_few_requests() -> None:
    """A dead watch is reported elsewhere. The write is repeated with pauses of up
    to half a minute.
    """
    world = World()
    await asyncio.sleep(1)
    world.watched.delay_seconds = 1e6
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(600)
    assert 2 <= len(world.patches) <= 45


async def test_a_second_writer_is_met_with_growing_pauses_and_one_warning() -> None:
    """A forgotten device plugin that writes the same key all the time is named,
    and no storm begins.
    """
    world = World()

    async def rival() -> None:
        while True:
            await asyncio.sleep(0.5)
            world.api.change(NODE, {"metadata": {"annotations": {REGISTER: "theirs"}}})

    async with running(world.publisher.run(ignore), rival()):
        await asyncio.sleep(600)
    assert len(world.patches) < 40
    assert [facts["key"] for facts in world.events("node.contested")] == [f"annotations/{REGISTER}"]
    waits = [(facts["key"], facts["reason"]) for facts in world.events("node.write_waits")]
    assert waits == [
        (
            f"annotations/{REGISTER}",
            (
                "the API server no longer shows the written value: another client has changed "
                "it, or the watch is late"
            ),
        ),
    ]


@pytest.mark.parametrize(("minutes", "alarms"), [(5, []), (10, [f"allocatable/{GPUS}"])])
async def test_a_kubelet_that_has_yet_to_forget_an_ended_resource_is_no_second_writer(
    minutes: int, alarms: list[str]
) -> None:
    """After a change of strategy it writes 0 of the resource that our plugin offered before, for
    five minutes. Others never stop.
    """
    world = World(DesiredNode(capacity={GPUS: "2"}))

    async def kubelet() -> None:
        for _ in range(6 * minutes):
            world.api.change(NODE, {"status": {"allocatable": {GPUS: "0"}}})
            await asyncio.sleep(10)

    async with running(world.publisher.run(ignore), kubelet()):
        await asyncio.sleep(1200)
    assert [facts["key"] for facts in world.events("node.contested")] == alarms
    assert world.api.objects[NODE]["status"]["allocatable"] == {GPUS: "2"}


async def test_a_scheduler_that_asks_again_and_again_is_no_second_writer() -> None:
    """An old scheduler writes Requesting into the handshake for reasons of its own;
    answering is no contest.
    """
    world = World(
        DesiredNode(
            annotations={HANDSHAKE: "Reported"}, min_write_interval_seconds={HANDSHAKE: 0.2}
        )
    )

    async def scheduler() -> None:
        while True:
            await asyncio.sleep(1)
            world.api.change(NODE, {"metadata": {"annotations": {HANDSHAKE: "Requesting"}}})

    async with running(world.publisher.run(ignore), scheduler()):
        await asyncio.sleep(600)
    assert world.events("node.contested") == []


async def test_an_outage_of_an_hour_costs_few_requests_and_loses_nothing() -> None:
    """The last desired state is written soon after the API server is back.
    The trouble is one line, its end another.
    """
    world = World()
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(10)
        world.api.fault = unavailable
        world.desire(annotations={REGISTER: "U0,5:"})
        await asyncio.sleep(1800)
        world.desire(annotations={REGISTER: "U0,7:"}, capacity={GPUS: "1"})
        await asyncio.sleep(1800)
        tried = len(world.api.requests)
        world.api.fault = None
        await asyncio.sleep(31)
    assert tried < 500
    assert world.annotations == {REGISTER: "U0,7:"}
    assert world.api.objects[NODE]["status"]["capacity"] == {GPUS: "1"}
    assert len(world.events("node.failed")) == 2  # metadata and quantities
    assert len(world.events("node.recovered")) == 2
    assert world.publisher.counts.pending == 0


async def test_a_busy_api_server_is_left_alone_for_as_long_as_it_asks() -> None:
    """429 with Retry-After: 120."""
    world = World()
    world.api.fault = lambda *_: ClusterError(
        "too many requests", status=429, retry_after_seconds=120
    )
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(110)
        world.wake.publish(1)
        await asyncio.sleep(5)
        assert len(world.api.requests) == 1
        world.api.fault = None
        await asyncio.sleep(10)
    assert world.annotations == {REGISTER: "U0,10:"}


async def test_a_missing_permission_is_named_once_and_does_not_hold_up_the_rest() -> None:
    """Annotations need patch on nodes, quantities need patch on nodes/status."""
    world = World(DesiredNode(annotations={REGISTER: "U0,10:"}, capacity={GPUS: "2"}))
    world.api.fault = lambda _verb, path, _body: (
        ClusterError("forbidden", status=403) if path.endswith("/status") else None
    )
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(3600)
    assert world.annotations == {REGISTER: "U0,10:"}
    (facts,) = world.events("node.forbidden")
    assert "the verb 'patch' on 'nodes/status'" in facts["error"]
    assert len(world.api.requests) <= 14


async def test_a_value_that_the_api_server_refuses_does_not_keep_the_others_away() -> None:
    """A label that is no label spoils only itself, is named, and is tried again when it changes."""
    world = World(DesiredNode(annotations={REGISTER: "U0,10:"}, labels={"bad": "not a label"}))

    def strict(_verb: str, _path: str, body: Mapping[str, Any]) -> ClusterError | None:
        wrong = body["metadata"].get("labels", {}).get("bad") == "not a label"
        return ClusterError("metadata.labels: Invalid value", status=422) if wrong else None

    world.api.fault = strict
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(100)
        assert world.annotations == {REGISTER: "U0,10:"}
        assert len(world.api.requests) == 3
        assert [facts["key"] for facts in world.events("node.refused")] == ["labels/bad"]
        world.desire(annotations={REGISTER: "U0,10:"}, labels={"bad": "good"})
        await asyncio.sleep(1)
    assert world.api.objects[NODE]["metadata"]["labels"] == {"bad": "good"}


async def test_an_answer_that_is_no_node_is_an_error_like_any_other() -> None:
    """A proxy's page instead of the Node: nothing is written into the list of conditions."""
    world = World(DesiredNode(conditions={"GpuReady": READY}))
    world.api.objects[NODE]["status"]["conditions"] = "<html>"
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(5)
    assert world.patches == []
    assert "is not a Node" in world.events("node.failed")[0]["error"]


async def test_a_new_process_finishes_what_a_crash_left_between_two_writes() -> None:
    """Metadata was written, the quantities were not. Nothing but the Node itself remembers that."""
    world = World(DesiredNode(annotations={REGISTER: "U0,10:"}, capacity={GPUS: "2"}))

    def crash(_verb: str, path: str, _body: object) -> None:
        if path.endswith("/status"):
            raise SystemError("killed")

    world.api.fault = crash
    with pytest.raises(ExceptionGroup):
        async with running(world.publisher.run(ignore)):
            await asyncio.sleep(5)
    assert GPUS not in world.api.objects[NODE]["status"].get("capacity", {})
    world.api.fault = None
    await asyncio.sleep(1)  # a new process begins with a list
    async with running(world.another().run(ignore)):
        await asyncio.sleep(1)
    assert [sorted(body) for body in world.patches] == [["metadata"], ["status"], ["status"]]
    assert world.api.objects[NODE]["status"]["capacity"] == {GPUS: "2"}


async def test_a_desired_state_that_raises_is_reported_once_and_asked_for_again() -> None:
    """A family's bug stops neither the loop nor its heartbeat."""
    world = World()
    good, beats = world.publisher._desired_state, []

    def broken(seen: Node, now: float) -> DesiredNode:
        raise KeyError("minor")

    world.publisher._desired_state = broken
    async with running(world.publisher.run(lambda: beats.append(1))):
        await asyncio.sleep(60)
        world.publisher._desired_state = good
        await asyncio.sleep(11)
    assert [facts["error"] for facts in world.events("node.desired_state_failed")] == [
        "KeyError: 'minor'"
    ]
    assert world.annotations == {REGISTER: "U0,10:"}
    assert len(beats) >= 6
