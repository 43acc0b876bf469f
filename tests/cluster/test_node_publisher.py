"""Writes to our Node, and their number; on virtual time against an API server in memory."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.cluster.fake_api import NODE, node, running, unavailable
from tests.cluster.node_world import GPUS, HANDSHAKE, LOCK, READY, REGISTER, World, ignore
from vgpu_agent.nodes import DesiredNode

pytestmark = pytest.mark.looptime


async def test_annotations_and_labels_are_one_patch_and_set_first() -> None:
    """`agent` may register with kubelet as soon as the scheduler can see the node."""
    world = World(
        DesiredNode(annotations={REGISTER: "U0,10:"}, labels={"vgpu-agent.io/isolation": "none"})
    )
    async with running(world.publisher.run(ignore)):
        await asyncio.wait_for(world.publisher.first.wait(), 5)
    assert world.patches == [
        {
            "metadata": {
                "annotations": {REGISTER: "U0,10:"},
                "labels": {"vgpu-agent.io/isolation": "none"},
            }
        }
    ]


async def test_an_agent_that_leaves_tries_until_everything_is_written() -> None:
    """Three refusals cost pauses and lose nothing. What is on the Node already costs no request."""
    world = World(
        DesiredNode(annotations={REGISTER: None, HANDSHAKE: "Deleted_x"}, labels={"ours": None}),
        annotations={REGISTER: "U0,10:"},
    )
    times = itertools.count(1)
    world.api.fault = lambda verb, path, body: (
        unavailable(verb, path, body) if next(times) <= 3 else None
    )
    await asyncio.sleep(1)
    await world.publisher.publish_all()
    assert world.annotations == {HANDSHAKE: "Deleted_x"}
    assert len(world.patches) == 4


async def test_an_agent_that_leaves_is_not_done_before_its_node_has_been_read() -> None:
    """It cannot know the current content."""
    world = World(
        DesiredNode(annotations={REGISTER: None}),
        delay_seconds=20,
        annotations={REGISTER: "U0,10:"},
    )
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(world.publisher.publish_all(), 5)
    assert world.patches == []
    await asyncio.wait_for(world.publisher.publish_all(), 60)
    assert world.annotations == {}


async def test_nothing_is_requested_while_nothing_changes() -> None:
    """Ten virtual minutes after everything is written:
    not one request, not even the first one of a new process.
    """
    desired_state = DesiredNode(
        annotations={REGISTER: "U0,10:", LOCK: None},
        labels={"a": "b"},
        capacity={GPUS: "1000"},
        conditions={"GpuReady": READY},
        min_write_interval_seconds={REGISTER: 15},
        guarded=frozenset({LOCK}),
    )
    world = World(desired_state)
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(60)
    # as the API server writes the number
    world.api.change(NODE, {"status": {"capacity": {GPUS: "1k"}}})
    await asyncio.sleep(1)
    world.api.requests.clear()
    async with running(world.another().run(ignore)):
        await asyncio.sleep(600)
    assert world.api.requests == []
    assert world.asked_at[-1] > 1600


async def test_a_write_is_not_repeated_while_the_watch_lags() -> None:
    """The old value is still shown for ten seconds,
    and other changes of the Node arrive meanwhile.
    """
    world = World(delay_seconds=10)
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(12)
        for _ in range(5):
            world.wake.advance()
            await asyncio.sleep(1)
        await asyncio.sleep(60)
    assert len(world.patches) == 1


async def test_an_annotation_that_somebody_removes_is_written_again() -> None:
    """`kubectl annotate node n1 …-` by mistake must not hide the node's GPUs."""
    world = World()
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(60)
        world.api.change(NODE, {"metadata": {"annotations": {REGISTER: None}}})
        await asyncio.sleep(1)
        assert world.annotations == {REGISTER: "U0,10:"}
        world.api.change(NODE, {"metadata": {"annotations": {REGISTER: "forged"}}})
        await asyncio.sleep(1)
        assert world.annotations == {REGISTER: "U0,10:"}


async def test_a_node_that_was_deleted_and_made_anew_gets_everything_again_at_once() -> None:
    """A re-created Node has nothing of ours, and pauses of the one before do not count."""
    world = World(
        DesiredNode(
            annotations={HANDSHAKE: "Reported"},
            capacity={GPUS: "2"},
            min_write_interval_seconds={HANDSHAKE: 3600},
        )
    )
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(5)
        world.api.remove(NODE)
        await asyncio.sleep(30)
        world.api.put(NODE, node(uid="another"))
        await asyncio.sleep(1)
    assert world.annotations == {HANDSHAKE: "Reported"}
    assert world.api.objects[NODE]["status"]["allocatable"] == {GPUS: "2"}


async def test_while_there_is_no_node_nothing_is_requested() -> None:
    """The Node may be registered long after the agent has started."""
    world = World()
    await asyncio.sleep(1)
    world.api.remove(NODE)
    await asyncio.sleep(1)
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(60)
    assert world.api.requests == []
    assert not world.publisher.first.is_set()


async def test_an_unhurried_key_is_not_written_more_often_than_it_may() -> None:
    """volcano-vgpu §2.3: the scheduler asks at each Node event,
    and is answered every 15 seconds.
    """
    world = World(
        DesiredNode(annotations={HANDSHAKE: "Reported"}, min_write_interval_seconds={HANDSHAKE: 15})
    )

    async def scheduler() -> None:
        while True:
            await asyncio.sleep(2)
            world.api.change(
                NODE,
                {
                    "metadata": {
                        "annotations": {
                            HANDSHAKE: f"Requesting_{asyncio.get_running_loop().time()}"
                        }
                    }
                },
            )

    async with running(world.publisher.run(ignore), scheduler()):
        await asyncio.sleep(300)
    written = [request.at for request in world.api.requests]
    assert 10 <= len(written) <= 21
    assert min(later - earlier for earlier, later in itertools.pairwise(written)) >= 15


async def test_conditions_of_others_stay_and_times_move_only_with_a_change() -> None:
    """A merge patch replaces the list: kubelet's Ready must be in it, as it was."""
    world = World(DesiredNode(conditions={"GpuReady": READY}))
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(100)
        world.desire(conditions={"GpuReady": ("True", "AllGpus", "1 GPU")})
        await asyncio.sleep(100)
    kubelets, ours = world.api.objects[NODE]["status"]["conditions"]
    assert kubelets == node()["status"]["conditions"][0]
    assert (ours["status"], ours["message"]) == ("True", "1 GPU")
    assert (ours["lastTransitionTime"], ours["lastHeartbeatTime"]) == (
        "1970-01-01T00:16:40Z",
        "1970-01-01T00:18:20Z",
    )
    assert len(world.patches) == 2


async def test_a_desired_state_that_depends_on_the_time_is_noticed_without_any_event() -> None:
    """A lock of a scheduler that has died is removed when it is old enough."""
    world = World(annotations={LOCK: "10:00:00"})
    world.publisher._desired_state = lambda _seen, now: DesiredNode(
        annotations={LOCK: None} if now > 1300 else {}
    )
    async with running(world.publisher.run(ignore)):
        await asyncio.sleep(299)
        assert LOCK in world.annotations
        await asyncio.sleep(12)
    assert LOCK not in world.annotations


async def test_a_resource_that_must_go_is_removed_until_it_stays_away() -> None:
    """vgpu-manager §2.2: for five minutes the kubelet writes what it had, then 0, and then leaves
    it alone. Each of its writes is undone with growing pauses, the last one too, and nothing is
    asked after that.
    """
    world = World(DesiredNode(capacity={GPUS: None, "volcano.sh/other": None}))
    counts = {GPUS: "0", "cpu": "8"}
    world.api.change(NODE, {"status": {"capacity": counts, "allocatable": counts}})

    async def kubelet() -> None:
        for count in [*["20"] * 30, "0"]:
            await asyncio.sleep(10)
            world.api.change(NODE, {"status": {"capacity": {GPUS: count}}})

    async with running(world.publisher.run(ignore), kubelet()):
        await asyncio.sleep(5)
        status = world.api.objects[NODE]["status"]
        assert (status["capacity"], status["allocatable"]) == ({"cpu": "8"}, {"cpu": "8"})
        assert world.patches == [
            {"status": {"capacity": {GPUS: None}, "allocatable": {GPUS: None}}}
        ]
        await asyncio.sleep(600)
        assert world.api.objects[NODE]["status"]["capacity"] == {"cpu": "8"}
        written = len(world.patches)
        assert written < 20
        await asyncio.sleep(600)
    assert len(world.patches) == written
    assert world.events("node.contested") == []


async def test_a_resource_that_is_not_there_needs_no_removal() -> None:
    """The usual case costs no request, also in a new process."""
    world = World(DesiredNode(capacity={GPUS: None}))
    async with running(world.publisher.run(ignore)):
        await asyncio.wait_for(world.publisher.first.wait(), 5)
        await asyncio.sleep(600)
    assert world.patches == []


async def test_a_second_plugin_that_offers_what_must_go_is_named() -> None:
    """The DaemonSet of the replaced plugin was not removed: it would go on for ever."""
    world = World(DesiredNode(capacity={GPUS: None}))

    async def plugin() -> None:
        while True:
            world.api.change(NODE, {"status": {"capacity": {GPUS: "20"}}})
            await asyncio.sleep(10)

    async with running(world.publisher.run(ignore), plugin()):
        await asyncio.sleep(1200)
    (contested,) = world.events("node.contested")
    assert "a second device plugin?" in contested["error"]
