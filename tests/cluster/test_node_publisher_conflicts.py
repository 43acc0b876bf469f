"""Writes to our Node that must not overwrite another client's:
guarded removals and the list of conditions.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.fake_api import NODE, running
from tests.cluster.node_world import LOCK, READY, World, ignore
from vgpu_agent.errors import ClusterError
from vgpu_agent.nodes import DesiredNode

pytestmark = pytest.mark.looptime


async def test_a_guarded_removal_fails_when_somebody_wrote_meanwhile() -> None:
    """A scheduler has taken the lock anew: the removal carries the version that was seen,
    and the new lock stays.
    """
    world = World(DesiredNode(), annotations={LOCK: "10:00:00"})
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(1)
        world.watched.delay_seconds = 5
        # the watch has not shown it yet
        world.api.change(NODE, {"metadata": {"annotations": {LOCK: "10:00:07"}}})
        world.desire(annotations={LOCK: None}, guarded=frozenset({LOCK}))
        await asyncio.sleep(1)
        assert world.annotations == {LOCK: "10:00:07"}
        world.desire()
        await asyncio.sleep(60)
    assert world.annotations == {LOCK: "10:00:07"}
    assert len(world.api.requests) == 1


async def test_a_guarded_removal_is_tried_again_on_the_node_as_it_is_then() -> None:
    """A change that is still desired on the newer Node succeeds there,
    without a pause in between.
    """
    world = World(DesiredNode(), annotations={LOCK: "10:00:00"})
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(1)
        world.api.change(NODE, {"metadata": {"annotations": {"other": "x"}}})
        world.desire(annotations={LOCK: None}, guarded=frozenset({LOCK}))
        await asyncio.sleep(0.2)
    assert world.annotations == {"other": "x"}


async def test_a_conflict_storm_slows_the_writer_down_and_ends_with_the_write() -> None:
    """The Node changes ten times a second and each guarded removal conflicts, for a minute."""
    world = World(DesiredNode(), annotations={LOCK: "10:00:00"})
    storming = True

    def conflict(*_: object) -> ClusterError | None:
        return ClusterError("the object has been modified", status=409) if storming else None

    async def others() -> None:
        for count in range(600):
            await asyncio.sleep(0.1)
            world.api.change(NODE, {"metadata": {"annotations": {"other": str(count)}}})

    world.api.fault = conflict
    async with running(world.publisher.run(ignore), others()):
        world.desire(annotations={LOCK: None}, guarded=frozenset({LOCK}))
        await asyncio.sleep(61)
        tried = len(world.api.requests)
        storming = False
        await asyncio.sleep(31)
    assert tried < 20
    assert LOCK not in world.annotations


async def test_a_condition_that_conflicts_is_written_into_the_newer_list() -> None:
    """The kubelet changed its own conditions between our reading and our writing.
    Its change is kept.
    """
    world = World(DesiredNode(conditions={"GpuReady": READY}))
    changed = False

    def kubelet(verb: str, *_: object) -> None:
        nonlocal changed
        if verb == "patch" and not changed:
            changed = True
            world.api.change(
                NODE,
                {
                    "status": {
                        "conditions": [
                            {"type": "Ready", "status": "False", "reason": "", "message": ""}
                        ]
                    }
                },
            )

    world.api.fault = kubelet
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(0.5)
    assert [
        (one["type"], one["status"]) for one in world.api.objects[NODE]["status"]["conditions"]
    ] == [
        ("Ready", "False"),
        ("GpuReady", "True"),
    ]


async def test_each_lock_of_a_burst_is_removed_at_once_although_they_look_the_same() -> None:
    """A scheduler takes the next lock as soon as the last is gone, twenty times within seconds,
    and the text has whole seconds.
    """
    world = World(DesiredNode(annotations={LOCK: None}, guarded=frozenset({LOCK})))
    stood: list[float] = []

    async def scheduler() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(20):
            world.api.change(NODE, {"metadata": {"annotations": {LOCK: "2026-11-22T10:00:00Z"}}})
            began = loop.time()
            # time is virtual, and the server in memory announces nothing
            while LOCK in world.annotations:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stood.append(loop.time() - began)
            await asyncio.sleep(0.05)

    async with running(world.publisher.run(ignore)):
        await scheduler()
        await asyncio.sleep(60)
    assert max(stood) < 0.4
    assert len(world.patches) == 20
    assert world.events("node.contested") == []


async def test_a_removed_lock_is_not_removed_again_while_the_watch_is_late() -> None:
    """The watch shows the old Node for ten seconds: one request, no conflict, and the lock taken
    meanwhile goes when it is shown.
    """
    world = World(
        DesiredNode(annotations={LOCK: None}, guarded=frozenset({LOCK})),
        annotations={LOCK: "10:00:00"},
    )
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(0.06)
        world.watched.delay_seconds = 10
        await asyncio.sleep(1)
        assert LOCK not in world.annotations
        world.api.change(NODE, {"metadata": {"annotations": {LOCK: "10:00:00"}}})
        world.wake.advance()
        await asyncio.sleep(5)
        assert len(world.api.requests) == 1
        await asyncio.sleep(7)
    assert LOCK not in world.annotations
    assert len(world.api.requests) == 2


async def test_a_removal_that_meets_a_conflict_does_not_delay_the_registration() -> None:
    """The Node is written in the moment in which we begin.
    What this node offers is there all the same.
    """
    world = World(
        DesiredNode(annotations={LOCK: None, "register": "U0"}, guarded=frozenset({LOCK})),
        annotations={LOCK: "10:00:00"},
    )
    world.api.fault = lambda _verb, _path, body: (
        ClusterError("the object has been modified", status=409)
        if "resourceVersion" in body["metadata"]
        else None
    )
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(0.5)
        assert world.publisher.first.is_set()


async def test_a_lock_that_stood_through_an_outage_goes_when_the_api_server_is_back() -> None:
    """No scheduling happens while it is away, and nothing is forgotten."""
    world = World(
        DesiredNode(annotations={LOCK: None}, guarded=frozenset({LOCK})),
        annotations={LOCK: "10:00:00"},
    )
    world.api.fault = lambda *_: ClusterError("connection refused")
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(600)
        world.api.fault = None
        await asyncio.sleep(31)
    assert LOCK not in world.annotations
    (failed,) = world.events("node.failed")
    assert failed["again_in_seconds"] > 0
