"""Another chance for pods that this node has failed:
evicted, made anew, or left alone; on virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_api import FakeApi, pod_at, running
from tests.cluster.node_world import ignore
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.cluster import rescue
from vgpu_agent.cluster.events import Events
from vgpu_agent.cluster.pod_copies import PodCopies
from vgpu_agent.cluster.recreation import TRIES
from vgpu_agent.cluster.rescue import Rescue
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.pods import MIRROR_POD, Pod, PodCache

NUMBER = "nvidia.com/vgpu-number"
STALE = ("nvidia.com/pre-allocated", "nvidia.com/real-allocated", "nvidia.com/assigned-phase")
EVENTS = "/api/v1/namespaces/default/events"
START = 1_795_200_000.0

pytestmark = pytest.mark.looptime


def _now() -> float:
    return START + asyncio.get_running_loop().time()


def _time(unix_seconds: float) -> str:
    return dt.datetime.fromtimestamp(unix_seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def failed(
    name: str,
    *,
    uid: str = "",
    controller: str | None = None,
    owner: Mapping[str, Any] | None = None,
    in_init: bool = False,
    created: float = 0.0,
    phase: str = "Failed",
    **spec: Any,
) -> dict[str, Any]:
    """Return a pod as the API server has it after the kubelet has failed its admission."""
    asking = {"name": "main", "resources": {"limits": {NUMBER: "1"}}}
    quiet = {"name": "quiet"}
    owners = [dict(owner)] if owner else []
    if controller:
        owners = [
            {"kind": "ReplicaSet", "name": controller, "uid": f"rs-{controller}"}
            | {"controller": True}
        ]
    status = {"phase": phase}
    if phase == "Failed":
        status |= {"reason": "UnexpectedAdmissionError", "message": "Allocate failed"}
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or f"uid-{name}",
            "creationTimestamp": _time(created or START),
            "annotations": {
                "team": "vision",
                "nvidia.com/pre-allocated": "main[0_GPU-0_10_1024]",
                "nvidia.com/real-allocated": "",
                "nvidia.com/vgpu-compute-policy": "balance",
            },
            "labels": {"app": "train", "nvidia.com/assigned-phase": "failed"},
            **({"ownerReferences": owners} if owners else {}),
        },
        "spec": {
            "nodeName": "n1",
            "priority": 0,
            "initContainers": [asking] if in_init else [],
            "containers": [quiet if in_init else asking],
            **spec,
        },
        "status": status,
    }


class ListingApi(FakeApi):
    """An API server that also lists the failed pods."""

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        if path != "/api/v1/pods":
            return await super().get(path, params)
        async with self._request("list", path, params or {}):
            pods = [
                thing
                for name, thing in self.objects.items()
                if "/pods/" in name and thing.get("status", {}).get("phase") == "Failed"
            ]
            return json.dumps({"metadata": {}, "items": pods}).encode()

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Give each new object an identity, as the real one does."""
        if path.endswith("/pods"):
            self._version += 1
            metadata = {**body["metadata"], "uid": f"new-{self._version}"}
            metadata["creationTimestamp"] = _time(_now())
            body = {**body, "metadata": metadata}
        return await super().post(path, body)


class World:
    """An API server, a node, and the part under test; a `life` is one process of the agent."""

    def __init__(self, directory: Path) -> None:
        self.api, self.directory = ListingApi(), directory
        self.refusals = Refusals(_now)
        self.lives = 0

    def put(self, pod: dict[str, Any]) -> None:
        """Let the pod be there."""
        self.api.put(pod_at(pod["metadata"]["name"]), pod)

    def end(self, name: str) -> None:
        """Let the watch see that a pod has ended."""
        pod = Pod(f"uid-{name}", "default", name)
        self.book.put(pod)
        self.book.end(pod)

    @contextlib.asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """Run one process of the agent."""
        self.book, self.journal = PodCache(), Journal()
        self.events = Events(self.api, "vgpu-agent", "n1", self.journal, _now)
        self.rescue = Rescue(
            self.api,
            "n1",
            self.book,
            lambda: {NUMBER},
            lambda: self.refusals.current,
            self.refusals.revision,
            STALE,
            self.events,
            PodCopies(str(self.directory)),
            self.journal,
            clock=_now,
        )
        async with running(self.rescue.run(ignore), self.events.run(ignore)):
            yield

    def pod(self, name: str) -> dict[str, Any] | None:
        """Return the pod of that name, if there is one."""
        return self.api.objects.get(pod_at(name))

    @property
    def told(self) -> list[tuple[str, str]]:
        """Reason and message of each event."""
        return [(event["reason"], event["message"]) for event in self.api.below(EVENTS)]

    def requests(self, verb: str, ending: str) -> int:
        """Count the requests of that kind."""
        return sum(one.verb == verb and one.path.endswith(ending) for one in self.api.requests)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A fresh one."""
    return World(tmp_path)


# -- who ------------------------------------------------------------------------------------------


async def test_a_failed_pod_of_a_controller_is_evicted(world: World) -> None:
    """Its controller makes another, which a scheduler may send elsewhere."""
    world.put(failed("a", controller="train"))
    async with world.life():
        await asyncio.sleep(20)
    assert world.pod("a") is None
    assert world.requests("post", "/pods/a/eviction") == 1
    why = "UnexpectedAdmissionError: Allocate failed"
    assert world.told == [
        ("VgpuEvicted", f"evicted, so that ReplicaSet train makes another: {why}")
    ]
    assert world.rescue.counts == {"evicted": 1, "recreated": 0, "left_alone": 0}


async def test_a_disruption_budget_is_waited_for(world: World) -> None:
    """429 is the budget's answer: asked again with growing pauses, and never gone around."""
    world.put(failed("a", controller="train"))
    world.api.fault = lambda verb, path, body: (
        ClusterError(f"POST {path}: budget", status=429)
        if path.endswith("/eviction") and _now() < START + 60
        else None
    )
    async with world.life():
        await asyncio.sleep(59)
        assert world.pod("a") is not None
        assert 3 <= world.requests("post", "/eviction") <= 12
        await asyncio.sleep(60)
    assert world.pod("a") is None
    assert world.requests("delete", "") == 0


@pytest.mark.parametrize(
    "pod",
    [
        failed("a", priority=2_000_000_000),
        failed("a", priorityClassName="system-node-critical", controller="ds"),
    ],
)
async def test_a_critical_pod_is_left_alone(world: World, pod: dict[str, Any]) -> None:
    """An event says so once, and nothing else is done."""
    world.put(pod)
    async with world.life():
        await asyncio.sleep(60)
        world.end("other")
        await asyncio.sleep(60)
    ((reason, message),) = world.told
    assert reason == "VgpuNotRescheduled"
    assert "it is critical" in message
    assert world.pod("a") is not None


async def test_the_mirror_of_a_static_pod_is_left_alone(world: World) -> None:
    """Only its file on the node brings it back or ends it."""
    pod = failed("a")
    pod["metadata"]["annotations"][MIRROR_POD] = "x"
    world.put(pod)
    async with world.life():
        await asyncio.sleep(60)
    assert world.pod("a") is not None
    assert [reason for reason, _ in world.told] == ["VgpuNotRescheduled"]


@pytest.mark.parametrize("kind", ["Pod", "Workflow"])
async def test_a_pod_with_an_owner_that_makes_no_other_is_named_and_left(
    world: World, kind: str
) -> None:
    """Deleted, it might be gone for ever; created anew, its owner might have two.
    vgpu-manager ignores it without a word.
    """
    owner = {"kind": kind, "name": "boss", "uid": "u", "controller": kind == "Pod"}
    world.put(failed("a", owner=owner))
    async with world.life():
        await asyncio.sleep(60)
    ((reason, message),) = world.told
    assert reason == "VgpuNotRescheduled"
    assert f"its owner {kind} boss is not its controller" in message
    assert world.pod("a") is not None


async def test_pods_of_others_are_none_of_ours(world: World) -> None:
    """Other resources, other reasons, other nodes, and pods on their way out."""
    others = failed("others")
    others["spec"]["containers"][0]["resources"]["limits"] = {"example.com/fpga": "1"}
    crashed = failed("crashed")
    crashed["status"]["reason"] = "Error"
    elsewhere = failed("elsewhere", nodeName="n2")
    leaving = failed("leaving")
    leaving["metadata"]["deletionTimestamp"] = _time(START)
    for pod in (others, crashed, elsewhere, leaving):
        world.put(pod)
    async with world.life():
        await asyncio.sleep(60)
    assert world.told == []
    assert {one.verb for one in world.api.requests} <= {"list", "get"}


async def test_nothing_is_asked_while_no_pod_ends(world: World) -> None:
    """One list at the start, one after pods have ended or may have, and none in between."""
    async with world.life():
        await asyncio.sleep(600)
        assert world.requests("list", "/pods") == 1
        for name in ("x", "y", "z"):
            world.end(name)
        await asyncio.sleep(600)
        assert world.requests("list", "/pods") == 2
        world.book.replace([])  # after an outage of the watch
        await asyncio.sleep(600)
        assert world.requests("list", "/pods") == 3


# -- made anew ------------------------------------------------------------------------------------


async def test_a_bare_pod_is_created_anew_without_its_old_claim(world: World) -> None:
    """With `pre-allocated` and `real-allocated` it would go back to the card that it could not
    get, as with vgpu-manager; vgpu-manager:D24. What its owner wrote stays.
    """
    world.put(failed("a", runtimeClassName="nvidia", overhead={"memory": "1Mi"}))
    async with world.life():
        await asyncio.sleep(20)
        made = world.pod("a")
    assert made is not None
    assert made["metadata"]["uid"] != "uid-a"
    annotations = made["metadata"]["annotations"]
    assert annotations.pop(TRIES).startswith("1 ")
    assert annotations == {"team": "vision", "nvidia.com/vgpu-compute-policy": "balance"}
    assert made["metadata"]["labels"] == {"app": "train"}
    assert "status" not in made
    assert made["spec"].keys() == {"containers", "initContainers", "runtimeClassName"}
    assert [reason for reason, _ in world.told] == ["VgpuDeleted", "VgpuRecreated"]
    (copies,) = world.directory.glob("*.json")
    assert b"uid-a" not in copies.read_bytes().partition(b'"tries"')[0]


@pytest.mark.parametrize("grace", [0.0, 30.0])
async def test_a_pod_comes_back_whatever_its_grace_period(world: World, grace: float) -> None:
    """One deleted with grace period 0 is gone at once, without ever showing a time of deletion;
    vgpu-manager waits for that and may lose the pod; vgpu-manager:D25.
    """
    world.api.grace_seconds = grace
    world.put(failed("a"))
    async with world.life():
        await asyncio.sleep(60)
    made = world.pod("a")
    assert made is not None
    assert made["metadata"]["uid"].startswith("new-")
    assert world.requests("delete", "/pods/a") == 1


@pytest.mark.parametrize("sent", [False, True], ids=["before-delete", "after-delete"])
async def test_a_crash_between_delete_and_create_loses_no_pod(world: World, sent: bool) -> None:
    """The copy is on the disk before the deletion is sent, and the next process goes on;
    vgpu-manager:D25.
    """
    world.put(failed("a"))
    reached = asyncio.Event()

    def die(verb: str, path: str, body: Mapping[str, Any]) -> ClusterError | None:
        if verb == "delete":
            if sent:
                world.api.remove(path)
            reached.set()
            return ClusterError(f"DELETE {path}: no answer", status=0)
        return ClusterError("", status=0) if reached.is_set() else None

    world.api.fault = die
    async with world.life():
        await reached.wait()
    assert (world.pod("a") is None) == sent
    world.api.fault = None
    async with world.life():
        await asyncio.sleep(60)
    made = world.pod("a")
    assert made is not None
    assert made["metadata"]["uid"].startswith("new-")
    assert world.requests("post", "/pods") == 1


async def test_a_pod_that_its_owner_deletes_meanwhile_stays_deleted(world: World) -> None:
    """Nobody may find a pod again that he has deleted himself."""
    world.put(failed("a"))

    def owner(verb: str, path: str, body: Mapping[str, Any]) -> ClusterError | None:
        if verb == "delete" and world.pod("a"):
            world.api.remove(path)
        return None

    world.api.fault = owner
    async with world.life():
        await asyncio.sleep(60)
    async with world.life():
        await asyncio.sleep(60)
    assert world.pod("a") is None
    assert world.requests("post", "/pods") == 0


async def test_a_pod_that_its_owner_has_created_himself_is_not_created_twice(world: World) -> None:
    """A name that is taken ends it, and what took it is not touched."""
    world.api.grace_seconds = 5
    world.put(failed("a"))
    async with world.life():
        await asyncio.sleep(1)
        world.api.watchers.append(
            lambda path, thing: (
                world.put(failed("a", uid="his", phase="Running")) if thing is None else None
            )
        )
        await asyncio.sleep(60)
    found = world.pod("a")
    assert found is not None
    assert found["metadata"]["uid"] == "his"
    assert world.requests("delete", "/pods/a") == 1


async def test_nothing_is_deleted_that_cannot_be_kept(world: World) -> None:
    """A full disk: the pod stays as it is, and the log names the remedy once."""
    (world.directory / "file").write_text("")
    world.directory /= "file"
    world.put(failed("a"))
    async with world.life():
        await asyncio.sleep(60)
    assert world.requests("delete", "") == 0
    assert [entry.event for entry in world.journal.entries] == ["rescue.not_stored"]


async def test_a_damaged_file_is_kept_for_a_person(world: World) -> None:
    """It may be the only place where a pod still is."""
    file = world.directory / "rescued-pods.json"
    file.write_text('0000\n{"copies":{}}')
    async with world.life():
        await asyncio.sleep(1)
    assert file.with_suffix(".damaged").read_text() == '0000\n{"copies":{}}'


async def test_a_pod_that_cannot_be_created_for_a_day_is_given_up(world: World) -> None:
    """Its quota is used up, say; an event tells the owner, and no request is sent for ever."""
    world.put(failed("a"))
    world.api.fault = lambda verb, path, body: (
        ClusterError(f"POST {path}: exceeded quota", status=403)
        if verb == "post" and path.endswith("/pods")
        else None
    )
    async with world.life():
        await asyncio.sleep(25 * 3600)
        asked = world.requests("post", "/pods")
        await asyncio.sleep(3600)
        assert world.requests("post", "/pods") == asked
    assert asked < 1500
    assert world.rescue.counts["left_alone"] == 1
    assert world.journal.entries[-1].event == "rescue.left_alone"


# -- never in a loop ------------------------------------------------------------------------------


def _fails_again(world: World) -> None:
    """Let each pod that is created fail here at once."""

    def changed(path: str, thing: dict[str, Any] | None) -> None:
        if (
            "/pods/" in path
            and thing is not None
            and thing["metadata"]["uid"].startswith("new-")
            and "status" not in thing
        ):
            name = thing["metadata"]["name"]
            status = failed(name)["status"]
            world.api.change(path, {"spec": {"nodeName": "n1"}, "status": status})
            world.end(name)

    world.api.watchers.append(changed)


async def test_a_bare_pod_that_fails_again_and_again_is_left_after_five_times(
    world: World,
) -> None:
    """Longer pauses each time, then an event; vgpu-manager deletes and creates it without end;
    vgpu-manager:D22.
    """
    world.put(failed("a"))
    _fails_again(world)
    async with world.life():
        await asyncio.sleep(1800)
        at = [one.at for one in world.api.requests if one.verb == "delete"]
    assert len(at) == rescue.MAX_TRIES
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert pauses == sorted(pauses)
    assert pauses[0] >= rescue.PAUSE_SECONDS - 1
    assert world.told[-1][0] == "VgpuNotRescheduled"
    assert "it was replaced 5 times and failed each time" in world.told[-1][1]


async def test_a_restart_does_not_begin_to_count_anew(world: World) -> None:
    """Neither here nor on another node, whose agent reads the number from the pod;
    vgpu-manager:D22.
    """
    world.put(failed("a"))
    _fails_again(world)
    async with world.life():
        await asyncio.sleep(45)
    tried = world.requests("delete", "/pods/a")
    assert 1 < tried < rescue.MAX_TRIES
    (world.directory / "rescued-pods.json").unlink()  # another node's agent has another file
    async with world.life():
        await asyncio.sleep(1800)
    assert world.requests("delete", "/pods/a") == rescue.MAX_TRIES


async def test_ten_pods_of_one_owner_that_fail_together_are_one_failure(world: World) -> None:
    """The kubelet was restarted, say: each of them gets its chance at once."""
    for number in range(10):
        world.put(failed(f"p{number}", controller="train"))
    async with world.life():
        await asyncio.sleep(30)
    assert world.requests("post", "/eviction") == 10


async def test_an_owner_whose_new_pods_fail_here_is_left_after_five_times(world: World) -> None:
    """A DaemonSet makes the next pod on the same node."""
    async with world.life():
        for number in range(100):
            world.put(failed(f"p{number}", controller="train", created=_now()))
            world.end("other")
            await asyncio.sleep(20)
    assert world.requests("post", "/eviction") == rescue.MAX_TRIES


# -- refused starts -------------------------------------------------------------------------------


async def test_a_start_that_can_never_succeed_is_a_failure_also_of_an_init_container(
    world: World,
) -> None:
    """vgpu-manager does not look at the statuses of init containers, so that such a pod waits for
    ever; vgpu-manager:D23.
    """
    world.put(failed("a", controller="train", in_init=True, phase="Pending"))
    world.put(failed("b", in_init=True))
    async with world.life():
        pod = Pod("uid-a", "default", "a")
        world.refusals.refuse(pod, "main", NUMBER, "no room now")
        await asyncio.sleep(60)
        assert world.requests("post", "/eviction") == 0
        world.refusals.refuse(pod, "main", NUMBER, "never here", final=True)
        await asyncio.sleep(20)
    assert world.pod("a") is None
    made = world.pod("b")
    assert made is not None
    assert made["metadata"]["uid"] != "uid-b"
    assert (
        "VgpuEvicted",
        "evicted, so that ReplicaSet train makes another: container main may not start: never here",
    ) in world.told


@pytest.mark.parametrize("crashes", [False, True], ids=["no-answer", "crash"])
async def test_a_refused_pod_that_has_started_after_all_is_not_deleted(
    world: World, crashes: bool
) -> None:
    """The API server was away when the pod was to be deleted, or the agent ended then. Meanwhile
    the pod was allowed to start; it may run a training by now. Nobody was told of a deletion.
    """
    pod = _refused_without_deletion(world)
    async with world.life():
        await asyncio.sleep(30)
        assert world.rescue._state.copies
        if not crashes:
            await _start_after_all(world, pod)
    if crashes:
        world.refusals.clear(pod.uid, "main")
        async with world.life():
            await _start_after_all(world, pod)
    (left,) = [one for one in world.api.objects.values() if one["metadata"].get("uid") == pod.uid]
    assert left["status"]["phase"] == "Running"
    assert not world.rescue._state.copies
    assert not world.rescue._state.tries  # it was not given another chance
    assert world.told == []


def _refused_without_deletion(world: World) -> Pod:
    """Put a pod whose start is refused for good, at an API server that answers no DELETE."""
    world.put(failed("a", phase="Pending"))
    pod = Pod("uid-a", "default", "a")
    world.refusals.refuse(pod, "main", NUMBER, "its ids were given to another pod", final=True)
    world.api.fault = lambda verb, path, _: (
        ClusterError(f"DELETE {path}: no answer") if verb == "delete" else None
    )
    return pod


async def _start_after_all(world: World, pod: Pod) -> None:
    world.refusals.clear(pod.uid, "main")
    world.api.change(pod_at(pod.name), {"status": {"phase": "Running"}})
    await asyncio.sleep(20)
    world.api.fault = None
    await asyncio.sleep(60)


async def test_a_refused_pod_is_deleted_once_the_api_server_is_back(world: World) -> None:
    """It is still refused. Its owner is told of the deletion when it has taken place."""
    _refused_without_deletion(world)
    async with world.life():
        await asyncio.sleep(60)
        assert world.told == []
        world.api.fault = None
        await asyncio.sleep(60)
    made = world.pod("a")
    assert made is not None
    assert made["metadata"]["uid"].startswith("new-")
    assert [reason for reason, _ in world.told] == ["VgpuDeleted", "VgpuRecreated"]
