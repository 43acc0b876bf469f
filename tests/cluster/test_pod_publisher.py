"""Writes to our pods: the difference, to the right pod, in order, until it is done;
on virtual time.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests import constants
from tests.cluster.fake_api import FakeApi, WatchedPods, pod, pod_at, running, unavailable
from vgpu_agent.cluster.pod_publisher import PodPublisher
from vgpu_agent.concurrency import Revision
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH, DesiredPod, Pod

PHASE, TIME, TODO = (
    "volcano.sh/bind-phase",
    "volcano.sh/vgpu-time",
    "volcano.sh/devices-to-allocate",
)
DONE: dict[str, str | None] = {PHASE: "success", TODO: None}

pytestmark = pytest.mark.looptime


class World:
    """An API server with pods, their watch, and one publisher of a changeable desired state."""

    def __init__(self, *names: str, delay_seconds: float = 0.05) -> None:
        self.api, self.journal, self.wake = FakeApi(), Journal(), Revision()
        self.watched = WatchedPods(self.api, delay_seconds=delay_seconds)
        self.desired_state: dict[str, DesiredPod] = {
            f"uid-{name}": DesiredPod(DONE) for name in names
        }
        self.publisher = self.another()
        for name in names:
            self.api.put(pod_at(name), pod(name, **{PHASE: "allocating", TODO: "U0,NVIDIA,1,0:;"}))

    def another(self) -> PodPublisher:
        """A publisher as a new process would build it."""
        return PodPublisher(
            self.api,
            self.watched.book,
            lambda: self.desired_state,
            self.wake,
            self.journal,
        )

    def desire(self, name: str, **annotations: str | None) -> None:
        """Change the families' desired state from now on.
        Dots and slashes are as they are in ``annotations``.
        """
        self.desired_state[f"uid-{name}"] = DesiredPod(annotations)
        self.wake.advance()

    def annotations(self, name: str) -> dict[str, str]:
        """Return the pod's annotations."""
        found: dict[str, str] = self.api.objects[pod_at(name)]["metadata"]["annotations"]
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        """The facts of the journal's entries of that name."""
        return [entry.facts for entry in self.journal.entries if entry.event == name]


def _ignore() -> None:
    """A heartbeat without a listener."""


async def test_only_what_differs_is_written_and_only_to_that_pod() -> None:
    """volcano-vgpu §3.3: the phase changes, the todo list goes.
    What is already there and what is not ours is not sent.
    """
    world = World("a")
    world.desired_state["uid-a"] = DesiredPod({**DONE, TIME: None})
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(1)
    (request,) = world.api.requests
    assert request.body == {
        "metadata": {"uid": "uid-a", "annotations": {PHASE: "success", TODO: None}}
    }
    assert world.annotations("a") == {PHASE: "success"}


async def test_labels_are_written_with_the_annotations_and_only_when_they_differ() -> None:
    """One request has both, and labels of others stay."""
    world = World("a")
    labelled = pod("a", **{PHASE: "allocating"})
    labelled["metadata"]["labels"] = {
        "app": "train",
        "example.com/old": "x",
        "example.com/same": "y",
    }
    world.api.put(pod_at("a"), labelled)
    labels: dict[str, str | None] = {
        "example.com/state": "done",
        "example.com/old": None,
        "example.com/same": "y",
    }
    world.desired_state["uid-a"] = DesiredPod({PHASE: "success"}, labels)
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(60)
    (request,) = world.api.requests
    written = {"example.com/state": "done", "example.com/old": None}
    assert request.body == {
        "metadata": {"uid": "uid-a", "annotations": {PHASE: "success"}, "labels": written}
    }
    assert world.api.objects[pod_at("a")]["metadata"]["labels"] == {
        "app": "train",
        "example.com/state": "done",
        "example.com/same": "y",
    }
    assert world.events("pods.written")[0]["labels"] == ["example.com/old", "example.com/state"]


async def test_a_label_that_another_writer_keeps_changing_is_named() -> None:
    """A label and an annotation of one name are two things."""
    world = World("a")
    world.desired_state["uid-a"] = DesiredPod({PHASE: "success"}, {PHASE: "done"})

    async def meddler() -> None:
        while True:
            await asyncio.sleep(5)
            changed = copy.deepcopy(world.api.objects[pod_at("a")])
            changed["metadata"]["labels"] = {PHASE: "other"}
            world.api.put(pod_at("a"), changed)

    async with running(world.publisher.run(_ignore), meddler()):
        await asyncio.sleep(120)
    (contested,) = world.events("pods.contested")
    assert f"the label {PHASE} of pod default/a" in contested["error"]
    assert world.annotations("a")[PHASE] == "success"


async def test_the_last_line_about_a_start_bears_the_tokens_of_the_pods_grants() -> None:
    """One correlation id leads from Allocate to the annotations;
    the line has their waiting time, too.
    """
    world = World("a")
    world.api.fault = lambda *request: (
        unavailable(*request) if len(world.api.requests) == 1 else None
    )
    publisher = PodPublisher(
        world.api,
        world.watched.book,
        lambda: world.desired_state,
        world.wake,
        world.journal,
        tokens=lambda uid: [f"token of {uid}"],
    )
    async with running(publisher.run(_ignore)):
        await asyncio.sleep(2)
    (failed,), (written,) = world.events("pods.failed"), world.events("pods.written")
    assert failed["tokens"] == ["token of uid-a"]
    assert (written["pod"], written["tokens"], written["annotations"]) == (
        "default/a",
        ["token of uid-a"],
        [PHASE, TODO],
    )
    assert 0.3 < written["seconds"] < 1.5


async def test_nothing_is_requested_while_nothing_changes() -> None:
    """Ten virtual minutes with twenty pods as they should be, also for a new process."""
    world = World(*(f"p{number}" for number in range(20)))
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(30)
        world.api.requests.clear()
        await asyncio.sleep(600)
    async with running(world.another().run(_ignore)):
        await asyncio.sleep(600)
    assert world.api.requests == []


async def test_a_write_is_not_repeated_while_the_watch_lags() -> None:
    """The ledger changes for other pods meanwhile."""
    world = World("a", delay_seconds=8)
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(9)
        world.wake.publish(1)
        await asyncio.sleep(1)
        world.wake.publish(2)
        await asyncio.sleep(60)
    assert len(world.api.requests) == 1


async def test_a_pod_that_has_ended_is_written_once() -> None:
    """The watch leaves out pods that have ended, so it never shows the write, which was repeated
    for as long as the pod lay there.
    """
    world = World("a", delay_seconds=10_000)
    async with running(world.publisher.run(_ignore)):
        ended = Pod(
            "uid-a",
            "default",
            "a",
            "n1",
            annotations={PHASE: "allocating", TODO: "U0,NVIDIA,1,0:;"},
        )
        world.watched.book.put(ended)
        world.watched.book.end(ended)
        await asyncio.sleep(3600)
    assert len(world.api.requests) == 1


async def test_several_pods_are_written_at_once_and_not_too_many() -> None:
    """A burst of 40 is done in five rounds of eight."""
    world = World(*(f"p{number}" for number in range(40)))
    world.api.request_seconds = 1
    await asyncio.sleep(1)
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(5.5)
    assert world.api.most_under_way == 8
    assert all(world.annotations(f"p{number}") == {PHASE: "success"} for number in range(40))
    assert world.publisher.counts.written == 40


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    constants.use(monkeypatch, {constants.STARTS_FIRST: 3})


def patient(world: World, starting: Callable[[], bool]) -> PodPublisher:
    """A publisher that knows that pods are being started, for 3 s at most,
    and the annotations that only report progress.
    """
    return PodPublisher(
        world.api,
        world.watched.book,
        lambda: world.desired_state,
        world.wake,
        world.journal,
        starting=starting,
        progress_annotations={PHASE, TIME, TODO},
    )


async def test_what_only_says_how_far_a_pod_has_come_waits_while_pods_are_being_started() -> None:
    """The kubelet and the API server have their hands full then. All are written once the last pod
    runs, and the log says how late.
    """
    world, starting = World("a"), asyncio.Event()
    starting.set()
    publisher = patient(world, starting.is_set)
    async with running(publisher.run(_ignore)):
        await asyncio.sleep(2.5)
        assert world.api.requests == []
        assert publisher.counts.pending == 1
        starting.clear()
        await asyncio.sleep(0.3)
    assert world.annotations("a") == {PHASE: "success"}
    assert world.events("pods.written")[0]["seconds"] > 2


async def test_writes_wait_for_starts_only_for_seconds() -> None:
    """`STARTS_FIRST_SECONDS`: an image may take minutes.
    The loop gives signs of life meanwhile.
    """
    world, beats = World("a"), list[float]()
    async with running(
        patient(world, lambda: True).run(lambda: beats.append(asyncio.get_running_loop().time()))
    ):
        await asyncio.sleep(2.9)
        assert world.api.requests == []
        await asyncio.sleep(0.5)
    assert world.annotations("a") == {PHASE: "success"}
    assert max(later - earlier for earlier, later in itertools.pairwise(beats)) < 1


async def test_each_pod_waits_for_starts_once() -> None:
    """Not anew when another one has come, nor when its write has failed."""
    world = World("a", "b")
    second = world.desired_state.pop("uid-b")
    world.api.fault = lambda *request: (
        unavailable(*request) if len(world.api.requests) == 1 else None
    )
    async with running(patient(world, lambda: True).run(_ignore)):
        await asyncio.sleep(2)
        world.desire("b", **second.annotations)
        await asyncio.sleep(2.5)
        assert world.annotations("a") == {PHASE: "success"}
        assert world.annotations("b")[PHASE] == "allocating"


async def test_what_schedulers_count_by_waits_for_no_start() -> None:
    """Until it is written, they would give away again what the pod has; also when the first write
    fails, and beside pods that wait.
    """
    world = World("a", "b")
    world.desired_state["uid-a"] = DesiredPod({**DONE, "volcano.sh/vgpu-ids-new": "U1,NVIDIA,1,0:"})
    world.api.fault = lambda *request: (
        unavailable(*request) if len(world.api.requests) == 1 else None
    )
    async with running(patient(world, lambda: True).run(_ignore)):
        await asyncio.sleep(2)
        assert world.annotations("a") == {
            PHASE: "success",
            "volcano.sh/vgpu-ids-new": "U1,NVIDIA,1,0:",
        }
        assert world.annotations("b")[PHASE] == "allocating"


async def test_writes_of_one_pod_are_in_order() -> None:
    """A change during a request is written after it, never beside it."""
    world = World("a")
    world.api.request_seconds = 5
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(1)
        world.desired_state["uid-a"] = DesiredPod({PHASE: "failed", TODO: None})
        world.wake.publish(1)
        await asyncio.sleep(15)
    assert world.api.most_under_way == 1
    assert world.annotations("a") == {PHASE: "failed"}
    assert len(world.api.requests) == 2


async def test_a_hung_pod_does_not_hold_up_the_others() -> None:
    """One request waits for its time limit. The pod that comes then is written at once."""
    world = World("slow")
    world.api.request_seconds = 15
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(1)
        world.api.request_seconds = 0.02
        world.desired_state["uid-quick"] = DesiredPod(DONE)
        world.api.put(pod_at("quick"), pod("quick"))
        await asyncio.sleep(1)
        assert world.annotations("quick") == {PHASE: "success"}
        assert world.publisher.counts.pending == 1


async def test_a_new_pod_of_the_same_name_is_never_touched() -> None:
    """The watch still shows the old one. The UID in the patch protects the new one,
    and there is no second try.
    """
    world = World("a")
    await asyncio.sleep(1)
    world.watched.delay_seconds = 300
    world.api.put(pod_at("a"), pod("a", uid="another", **{PHASE: "allocating"}))
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(200)
        assert [request.verb for request in world.api.requests] == ["patch", "get"]
        await asyncio.sleep(200)
    assert world.annotations("a") == {PHASE: "allocating"}
    assert world.publisher.counts.dropped == 1


async def test_a_pod_that_is_gone_is_given_up() -> None:
    """404: the annotations have no reader any more."""
    world = World("a")
    await asyncio.sleep(1)
    world.watched.delay_seconds = 1000
    world.api.remove(pod_at("a"))
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(300)
    assert len(world.api.requests) == 1
    assert world.publisher.counts.pending == 0


async def test_a_conflict_with_the_same_pod_is_tried_again() -> None:
    """A storm of conflicts: each is followed by a look at the pod's UID, with pauses,
    and at last by the write.
    """
    world = World("a")
    storm = 12

    def conflict(verb: str, *_: object) -> ClusterError | None:
        nonlocal storm
        storm -= verb == "patch"
        return (
            ClusterError("the object has been modified", status=409)
            if verb == "patch" and storm >= 0
            else None
        )

    world.api.fault = conflict
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(1)
        assert len(world.api.requests) <= 4
        await asyncio.sleep(400)
    assert world.annotations("a") == {PHASE: "success"}
    assert world.publisher.counts.failed == 12


async def test_an_outage_of_an_hour_in_the_middle_of_a_burst_loses_nothing() -> None:
    """Some are written, then the server is away for an hour:
    few requests, one line, and everything is written soon after.
    """
    names = [f"p{number}" for number in range(30)]
    world = World(*names)
    world.api.request_seconds = 1
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(1.5)
        world.api.fault = unavailable
        await asyncio.sleep(3600)
        during = len(world.api.requests)
        assert world.publisher.counts.pending == 22
        assert world.publisher.counts.oldest_pending_seconds > 3500
        world.api.fault = None
        await asyncio.sleep(65)
    assert during < 300
    assert all(world.annotations(name) == {PHASE: "success"} for name in names)
    assert len(world.events("pods.failed")) == 1
    assert world.publisher.counts.pending == 0


async def test_a_pod_whose_writes_always_fail_does_not_keep_the_others_waiting() -> None:
    """An admission webhook answers 500 for one pod only."""
    world = World("bad", "a", "b", "c")
    world.api.fault = lambda _verb, path, _body: (
        ClusterError("webhook", status=500) if path == pod_at("bad") else None
    )
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(5)
        world.desire("a", more="x")
        await asyncio.sleep(40)
    assert world.annotations("a")["more"] == "x"
    assert world.annotations("c") == {PHASE: "success"}


async def test_what_the_api_server_refuses_is_said_once_and_tried_again_when_it_changes() -> None:
    """A mirror pod that an admission plugin protects, for instance."""
    world = World("a", "b")
    world.api.fault = lambda _verb, path, _body: (
        ClusterError("mirror pods are kubelet's", status=422) if path == pod_at("a") else None
    )
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(250)
        assert [request.verb for request in world.api.requests].count("patch") == 2
        world.api.fault = None
        world.desire("a", other="value")
        await asyncio.sleep(1)
    assert [facts["pod"] for facts in world.events("pods.refused")] == ["default/a"]
    assert world.annotations("a")["other"] == "value"
    assert world.annotations("b") == {PHASE: "success"}


async def test_a_static_pod_is_known_by_its_hash_and_written_by_its_uid() -> None:
    """The kubelet and ledger know it by the hash of its file,
    the API server's mirror of it has a UID of its own.
    """
    world = World()
    world.desired_state["hash"] = DesiredPod({PHASE: "success"})
    mirror = pod("static", uid="mirror-uid", **{MIRROR_POD: "hash", STATIC_POD_HASH: "hash"})
    world.api.put(pod_at("static"), mirror | {"status": {"startTime": "2026-01-01T00:00:00Z"}})
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(1)
    assert world.api.requests[0].body == {
        "metadata": {"uid": "mirror-uid", "annotations": {PHASE: "success"}}
    }
    assert world.annotations("static")[PHASE] == "success"


async def test_a_refused_pod_that_goes_leaves_nothing_behind() -> None:
    """A node sees many pods in its life."""
    world = World("a")
    world.api.fault = lambda *_: ClusterError("mirror pods are kubelet's", status=422)
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(5)
        world.api.remove(pod_at("a"))
        await asyncio.sleep(5)
    assert not world.publisher._failure_log._changes
    assert world.publisher._writings == {}


async def test_a_missing_permission_is_one_line_for_all_pods() -> None:
    """Twenty pods, one sentence with the verb, and a slow look whether it was granted."""
    world = World(*(f"p{number}" for number in range(20)))
    world.api.fault = lambda *_: ClusterError("forbidden", status=403)
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(3600)
        assert len(world.api.requests) < 30
        world.api.fault = None
        await asyncio.sleep(601)
    (facts,) = world.events("pods.forbidden")
    assert "the verb 'patch' on 'pods'" in facts["error"]
    assert world.annotations("p19") == {PHASE: "success"}


async def test_an_annotation_that_somebody_changes_back_is_repaired_without_a_war() -> None:
    """A second agent on the node writes the same key all the time."""
    world = World("a")

    async def rival() -> None:
        while True:
            await asyncio.sleep(0.5)
            world.api.change(pod_at("a"), {"metadata": {"annotations": {PHASE: "allocating"}}})

    async with running(world.publisher.run(_ignore), rival()):
        await asyncio.sleep(600)
    assert len(world.api.requests) < 40
    assert len(world.events("pods.contested")) == 1


async def test_a_new_process_finishes_what_a_crash_left_between_two_writes() -> None:
    """Two of five pods are written when the process dies.
    The next one needs only the desired state and the watch.
    """
    names = [f"p{number}" for number in range(5)]
    world = World(*names)

    def crash(*_: object) -> None:
        if world.publisher.counts.written == 2:
            raise SystemError("killed")

    world.publisher._at_once = 1
    world.api.fault = crash
    with pytest.raises(ExceptionGroup):
        async with running(world.publisher.run(_ignore)):
            await asyncio.sleep(5)
    assert [world.annotations(name)[PHASE] for name in names].count("success") == 2
    world.api.fault = None
    await asyncio.sleep(1)
    async with running(world.another().run(_ignore)):
        await asyncio.sleep(1)
    assert [world.annotations(name)[PHASE] for name in names].count("success") == 5
    assert len(world.api.requests) == 6


async def test_a_loop_that_was_restarted_does_not_wait_for_requests_of_its_life_before() -> None:
    """The supervisor cancels and restarts it in the middle of a request."""
    world = World("a")
    world.api.request_seconds = 100
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(1)
    world.api.request_seconds = 0.02
    async with running(world.publisher.run(_ignore)):
        await asyncio.sleep(1)
    assert world.annotations("a") == {PHASE: "success"}


async def test_a_desired_state_that_raises_is_reported_once_and_asked_for_again() -> None:
    """A family's bug stops neither the loop nor its heartbeat."""
    world = World("a")
    beats: list[int] = []

    def broken() -> Mapping[str, DesiredPod]:
        raise KeyError("minor")

    world.publisher._desired_state = broken
    async with running(world.publisher.run(lambda: beats.append(1))):
        await asyncio.sleep(60)
        world.publisher._desired_state = lambda: world.desired_state
        await asyncio.sleep(11)
    assert len(world.events("pods.desired_state_failed")) == 1
    assert world.annotations("a") == {PHASE: "success"}
    assert len(beats) >= 6
