"""What is written to our Node, how often, and through which troubles; on virtual time against an API server in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from tests.api.fake_api import NODE, FakeApi, WatchedNode, node, running, unavailable
from vgpu_agent.cluster.node_publisher import NodePublisher
from vgpu_agent.concurrency import Latest
from vgpu_agent.config.binding import Cluster
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import Node, NodeWishes

REGISTER, HANDSHAKE, LOCK = "volcano.sh/node-vgpu-register", "volcano.sh/node-vgpu-handshake", "hamivgpu"
GPUS = "volcano.sh/gpu-number"
READY = ("True", "AllGpus", "2 GPUs")

pytestmark = pytest.mark.looptime


class World:
    """An API server with the Node n1, its watch, and one publisher of changeable wishes."""

    def __init__(
        self, wishes: NodeWishes | None = None, *, delay_seconds: float = 0.05, annotations: Mapping[str, str] | None = None
    ) -> None:
        self.api, self.journal, self.wake = FakeApi(), Journal(), Latest(0)
        self.watched = WatchedNode(self.api, delay_seconds=delay_seconds)
        self.wishes = wishes or NodeWishes(annotations={REGISTER: "U0,10:"})
        self.asked_at: list[float] = []
        self.publisher = self.another()
        self.api.put(NODE, node(**(annotations or {})))

    def another(self) -> NodePublisher:
        """A publisher as a new process would build it."""
        settings = Cluster()
        return NodePublisher(
            self.api,
            "n1",
            self.watched.latest,
            self.ask,
            self.wake,
            settings,
            self.journal,
            lambda: 1000 + asyncio.get_running_loop().time(),
        )

    def ask(self, seen: Node, now: float) -> NodeWishes:
        """The families' answer."""
        self.asked_at.append(now)
        return self.wishes

    def wish(self, **parts: Any) -> None:
        """The families wish for something else from now on."""
        self.wishes = NodeWishes(**parts)
        self.wake.publish(self.wake.value + 1)

    @property
    def annotations(self) -> dict[str, str]:
        """What stands on the Node."""
        found: dict[str, str] = self.api.objects[NODE]["metadata"].get("annotations", {})
        return found

    @property
    def patches(self) -> list[Mapping[str, Any]]:
        """Bodies of the merge patches so far."""
        return [request.body for request in self.api.requests if request.verb == "patch"]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The facts of the journal's entries of that name."""
        return [entry.facts for entry in self.journal.entries if entry.event == name]


def _ignore() -> None:
    """A sign of life that nobody listens to."""


async def test_annotations_and_labels_are_one_patch_and_set_first() -> None:
    """`agent` may register with kubelet as soon as the scheduler can see the node."""
    world = World(NodeWishes(annotations={REGISTER: "U0,10:"}, labels={"vgpu-agent.io/isolation": "none"}))
    async with running(world.publisher.run(_ignore)):
        await asyncio.wait_for(world.publisher.first.wait(), 5)
    assert world.patches == [{"metadata": {"annotations": {REGISTER: "U0,10:"}, "labels": {"vgpu-agent.io/isolation": "none"}}}]


async def test_an_agent_that_leaves_tries_until_everything_is_written() -> None:
    """Three refusals cost pauses and no wish; what stands already costs no request."""
    world = World(NodeWishes(annotations={REGISTER: None, HANDSHAKE: "Deleted_x"}, labels={"ours": None}), annotations={REGISTER: "U0,10:"})
    times = itertools.count(1)
    world.api.fault = lambda verb, path, body: unavailable(verb, path, body) if next(times) <= 3 else None
    await asyncio.sleep(1)
    await world.publisher.publish_all()
    assert world.annotations == {HANDSHAKE: "Deleted_x"}
    assert len(world.patches) == 4


async def test_an_agent_that_leaves_is_not_done_before_its_node_has_been_read() -> None:
    """It cannot know what stands there."""
    world = World(NodeWishes(annotations={REGISTER: None}), delay_seconds=20, annotations={REGISTER: "U0,10:"})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(world.publisher.publish_all(), 5)
    assert world.patches == []
    await asyncio.wait_for(world.publisher.publish_all(), 60)
    assert world.annotations == {}


async def test_nothing_is_requested_while_nothing_changes() -> None:
    """Ten virtual minutes after everything stands: not one request, not even the first one of a new process."""
    wishes = NodeWishes(
        annotations={REGISTER: "U0,10:", LOCK: None},
        labels={"a": "b"},
        capacity={GPUS: "1000"},
        conditions={"GpuReady": READY},
        unhurried={REGISTER: 15},
        guarded=frozenset({LOCK}),
    )
    world = World(wishes)
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(60)
    world.api.change(NODE, {"status": {"capacity": {GPUS: "1k"}}})  # as the API server writes the number
    await asyncio.sleep(1)
    world.api.requests.clear()
    async with running(world.another().run(_ignore)):
        await asyncio.sleep(600)
    assert world.api.requests == []
    assert world.asked_at[-1] > 1600


async def test_a_write_is_not_repeated_while_the_watch_lags() -> None:
    """The old value is still shown for ten seconds, and other changes of the Node arrive meanwhile."""
    world = World(delay_seconds=10)
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(12)
        for _ in range(5):
            world.wake.publish(world.wake.value + 1)
            await asyncio.sleep(1)
        await asyncio.sleep(60)
    assert len(world.patches) == 1


async def test_a_watch_that_never_shows_the_write_costs_few_requests() -> None:
    """A dead watch is somebody else's trouble; the write is repeated with pauses of up to half a minute."""
    world = World()
    await asyncio.sleep(1)
    world.watched.delay_seconds = 1e6
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(600)
    assert 2 <= len(world.patches) <= 45


async def test_an_annotation_that_somebody_removes_is_written_again() -> None:
    """`kubectl annotate node n1 …-` by mistake must not hide the node's GPUs."""
    world = World()
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(60)
        world.api.change(NODE, {"metadata": {"annotations": {REGISTER: None}}})
        await asyncio.sleep(1)
        assert world.annotations == {REGISTER: "U0,10:"}
        world.api.change(NODE, {"metadata": {"annotations": {REGISTER: "forged"}}})
        await asyncio.sleep(1)
        assert world.annotations == {REGISTER: "U0,10:"}


async def test_a_second_writer_is_met_with_growing_pauses_and_one_warning() -> None:
    """A forgotten device plugin that writes the same key all the time is named, and no storm begins."""
    world = World()

    async def rival() -> None:
        while True:
            await asyncio.sleep(0.5)
            world.api.change(NODE, {"metadata": {"annotations": {REGISTER: "theirs"}}})

    async with running(world.publisher.run(_ignore), rival()):
        await asyncio.sleep(600)
    assert len(world.patches) < 40
    assert [facts["key"] for facts in world.events("node.contested")] == [f"annotations/{REGISTER}"]


async def test_a_node_that_was_deleted_and_made_anew_gets_everything_again_at_once() -> None:
    """A re-created Node has nothing of ours, and pauses of the one before do not count."""
    world = World(NodeWishes(annotations={HANDSHAKE: "Reported"}, capacity={GPUS: "2"}, unhurried={HANDSHAKE: 3600}))
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(5)
        world.api.delete(NODE)
        await asyncio.sleep(30)
        world.api.put(NODE, node(uid="another"))
        await asyncio.sleep(1)
    assert world.annotations == {HANDSHAKE: "Reported"}
    assert world.api.objects[NODE]["status"]["allocatable"] == {GPUS: "2"}


async def test_while_there_is_no_node_nothing_is_requested() -> None:
    """The Node may be registered long after the agent has started."""
    world = World()
    await asyncio.sleep(1)
    world.api.delete(NODE)
    await asyncio.sleep(1)
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(60)
    assert world.api.requests == []
    assert not world.publisher.first.is_set()


async def test_an_outage_of_an_hour_costs_few_requests_and_loses_nothing() -> None:
    """What was wished for last stands soon after the API server is back; the trouble is one line, its end another."""
    world = World()
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(10)
        world.api.fault = unavailable
        world.wish(annotations={REGISTER: "U0,5:"})
        await asyncio.sleep(1800)
        world.wish(annotations={REGISTER: "U0,7:"}, capacity={GPUS: "1"})
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
    world.api.fault = lambda *_: ClusterError("too many requests", status=429, retry_after_seconds=120)
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(110)
        world.wake.publish(1)
        await asyncio.sleep(5)
        assert len(world.api.requests) == 1
        world.api.fault = None
        await asyncio.sleep(10)
    assert world.annotations == {REGISTER: "U0,10:"}


async def test_a_missing_permission_is_named_once_and_does_not_hold_up_the_rest() -> None:
    """Annotations need patch on nodes, quantities need patch on nodes/status."""
    world = World(NodeWishes(annotations={REGISTER: "U0,10:"}, capacity={GPUS: "2"}))
    world.api.fault = lambda _verb, path, _body: ClusterError("forbidden", status=403) if path.endswith("/status") else None
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(3600)
    assert world.annotations == {REGISTER: "U0,10:"}
    (facts,) = world.events("node.forbidden")
    assert "the verb 'patch' on 'nodes/status'" in facts["error"]
    assert len(world.api.requests) <= 14


async def test_a_value_that_the_api_server_refuses_does_not_keep_the_others_away() -> None:
    """A label that is no label spoils only itself, is named, and is tried again when it changes."""
    world = World(NodeWishes(annotations={REGISTER: "U0,10:"}, labels={"bad": "not a label"}))

    def strict(_verb: str, _path: str, body: Mapping[str, Any]) -> ClusterError | None:
        wrong = body["metadata"].get("labels", {}).get("bad") == "not a label"
        return ClusterError("metadata.labels: Invalid value", status=422) if wrong else None

    world.api.fault = strict
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(100)
        assert world.annotations == {REGISTER: "U0,10:"}
        assert len(world.api.requests) == 3
        assert [facts["key"] for facts in world.events("node.refused")] == ["labels/bad"]
        world.wish(annotations={REGISTER: "U0,10:"}, labels={"bad": "good"})
        await asyncio.sleep(1)
    assert world.api.objects[NODE]["metadata"]["labels"] == {"bad": "good"}


async def test_an_unhurried_key_is_not_written_more_often_than_it_may() -> None:
    """volcano-vgpu §2.3: the scheduler asks at each Node event, and is answered every 15 seconds."""
    world = World(NodeWishes(annotations={HANDSHAKE: "Reported"}, unhurried={HANDSHAKE: 15}))

    async def scheduler() -> None:
        while True:
            await asyncio.sleep(2)
            world.api.change(NODE, {"metadata": {"annotations": {HANDSHAKE: f"Requesting_{asyncio.get_running_loop().time()}"}}})

    async with running(world.publisher.run(_ignore), scheduler()):
        await asyncio.sleep(300)
    written = [request.at for request in world.api.requests]
    assert 10 <= len(written) <= 21
    assert min(later - earlier for earlier, later in itertools.pairwise(written)) >= 15


async def test_a_guarded_removal_fails_when_somebody_wrote_meanwhile() -> None:
    """A scheduler has taken the lock anew: the removal carries the version that was seen, and the new lock stays."""
    world = World(NodeWishes(), annotations={LOCK: "10:00:00"})
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(1)
        world.watched.delay_seconds = 5
        world.api.change(NODE, {"metadata": {"annotations": {LOCK: "10:00:07"}}})  # the watch has not shown it yet
        world.wish(annotations={LOCK: None}, guarded=frozenset({LOCK}))
        await asyncio.sleep(1)
        assert world.annotations == {LOCK: "10:00:07"}
        world.wish()
        await asyncio.sleep(60)
    assert world.annotations == {LOCK: "10:00:07"}
    assert len(world.api.requests) == 1


async def test_a_guarded_removal_is_tried_again_on_the_node_as_it_is_then() -> None:
    """Still wished for on the newer Node, it succeeds there, without a pause in between."""
    world = World(NodeWishes(), annotations={LOCK: "10:00:00"})
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(1)
        world.api.change(NODE, {"metadata": {"annotations": {"other": "x"}}})
        world.wish(annotations={LOCK: None}, guarded=frozenset({LOCK}))
        await asyncio.sleep(0.2)
    assert world.annotations == {"other": "x"}


async def test_a_conflict_storm_slows_the_writer_down_and_ends_with_the_write() -> None:
    """The Node changes ten times a second and each guarded removal conflicts, for a minute."""
    world = World(NodeWishes(), annotations={LOCK: "10:00:00"})
    storming = True

    def conflict(*_: object) -> ClusterError | None:
        return ClusterError("the object has been modified", status=409) if storming else None

    async def others() -> None:
        for count in range(600):
            await asyncio.sleep(0.1)
            world.api.change(NODE, {"metadata": {"annotations": {"other": str(count)}}})

    world.api.fault = conflict
    async with running(world.publisher.run(_ignore), others()):
        world.wish(annotations={LOCK: None}, guarded=frozenset({LOCK}))
        await asyncio.sleep(61)
        tried = len(world.api.requests)
        storming = False
        await asyncio.sleep(31)
    assert tried < 20
    assert LOCK not in world.annotations


async def test_conditions_of_others_stay_and_times_move_only_with_a_change() -> None:
    """A merge patch replaces the list: kubelet's Ready must be in it, as it was."""
    world = World(NodeWishes(conditions={"GpuReady": READY}))
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(100)
        world.wish(conditions={"GpuReady": ("True", "AllGpus", "1 GPU")})
        await asyncio.sleep(100)
    kubelets, ours = world.api.objects[NODE]["status"]["conditions"]
    assert kubelets == node()["status"]["conditions"][0]
    assert (ours["status"], ours["message"]) == ("True", "1 GPU")
    assert (ours["lastTransitionTime"], ours["lastHeartbeatTime"]) == ("1970-01-01T00:16:40Z", "1970-01-01T00:18:20Z")
    assert len(world.patches) == 2


async def test_a_condition_that_conflicts_is_written_into_the_newer_list() -> None:
    """kubelet changed its own conditions between our reading and our writing; its change is kept."""
    world = World(NodeWishes(conditions={"GpuReady": READY}))
    changed = False

    def kubelet(verb: str, *_: object) -> None:
        nonlocal changed
        if verb == "patch" and not changed:
            changed = True
            world.api.change(NODE, {"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "", "message": ""}]}})

    world.api.fault = kubelet
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(0.5)
    assert [(one["type"], one["status"]) for one in world.api.objects[NODE]["status"]["conditions"]] == [
        ("Ready", "False"),
        ("GpuReady", "True"),
    ]


async def test_an_answer_that_is_no_node_is_an_error_like_any_other() -> None:
    """A proxy's page instead of the Node: nothing is written into the list of conditions."""
    world = World(NodeWishes(conditions={"GpuReady": READY}))
    world.api.objects[NODE]["status"]["conditions"] = "<html>"
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(5)
    assert world.patches == []
    assert "is not a Node" in world.events("node.failed")[0]["error"]


async def test_a_new_process_finishes_what_a_crash_left_between_two_writes() -> None:
    """Metadata was written, the quantities were not; nothing but the Node itself remembers that."""
    world = World(NodeWishes(annotations={REGISTER: "U0,10:"}, capacity={GPUS: "2"}))

    def crash(_verb: str, path: str, _body: object) -> None:
        if path.endswith("/status"):
            raise SystemError("killed")

    world.api.fault = crash
    with pytest.raises(ExceptionGroup):
        async with running(world.publisher.run(_ignore)):
            await asyncio.sleep(5)
    assert GPUS not in world.api.objects[NODE]["status"].get("capacity", {})
    world.api.fault = None
    await asyncio.sleep(1)  # a new process begins with a list
    async with running(world.another().run(_ignore)):
        await asyncio.sleep(1)
    assert [sorted(body) for body in world.patches] == [["metadata"], ["status"], ["status"]]
    assert world.api.objects[NODE]["status"]["capacity"] == {GPUS: "2"}


async def test_wishes_that_raise_are_reported_once_and_asked_for_again() -> None:
    """A family's bug stops neither the loop nor its sign of life."""
    world = World()
    good, beats = world.publisher._wishes, []

    def broken(seen: Node, now: float) -> NodeWishes:
        raise KeyError("minor")

    world.publisher._wishes = broken
    async with running(world.publisher.run(lambda: beats.append(1))):
        await asyncio.sleep(60)
        world.publisher._wishes = good
        await asyncio.sleep(11)
    assert [facts["error"] for facts in world.events("node.wishes_failed")] == ["KeyError: 'minor'"]
    assert world.annotations == {REGISTER: "U0,10:"}
    assert len(beats) >= 6


async def test_a_wish_that_depends_on_the_time_is_noticed_without_any_event() -> None:
    """A lock of a scheduler that has died is removed when it is old enough."""
    world = World(annotations={LOCK: "10:00:00"})
    world.publisher._wishes = lambda _seen, now: NodeWishes(annotations={LOCK: None} if now > 1300 else {})
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(299)
        assert LOCK in world.annotations
        await asyncio.sleep(12)
    assert LOCK not in world.annotations
