"""List and watch through everything that clusters do to a watch, on virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.scripted import Script, json_event, json_list, json_pod, running
from tests.patience import eventually
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.reflector import Reflector, Scope
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.pods import Pod, PodCache

pytestmark = pytest.mark.looptime

_SCOPE = Scope("pods of this node", "/api/v1/pods", "spec.nodeName=n1")


def _largest(_: float, high: float) -> float:
    return high


class Node1:
    """A reflector of node n1's pods that reads from a script, without jitter."""

    def __init__(self, journal: Journal, scope: Scope = _SCOPE, **options: Any) -> None:
        self.script = Script()
        self.script.lists = [json_list()]
        self.book = PodCache()
        self.journal = journal
        self.reflector: Reflector[Pod] = Reflector(
            self.script,
            scope,
            decode.pod,
            self.book,
            journal=journal,
            uniform=_largest,
            **options,
        )

    @property
    def names(self) -> list[str]:
        """Return the names of the pods in the cache."""
        return [pod.name for pod in self.book.pods]

    async def run_for(self, seconds: float) -> None:
        """Let it run."""
        async with running(self.reflector.run):
            await asyncio.sleep(seconds)

    def said(self) -> list[str]:
        """Names of the events in the journal."""
        return [entry.event for entry in self.journal.entries]


@pytest.fixture
def node(journal: Journal) -> Node1:
    """Nothing has been asked yet."""
    return Node1(journal)


async def test_the_first_list_comes_from_the_cache_and_the_watch_goes_on_from_its_version(
    node: Node1,
) -> None:
    """The list fills the pod cache, and the watch asks for bookmarks,
    a time limit and our own pods.
    """
    node.script.lists = [json_list(json_pod("a"), version=70)]
    await node.run_for(1)
    (_, listed), (_, watched) = node.script.asked
    assert listed == {"fieldSelector": "spec.nodeName=n1", "limit": "500", "resourceVersion": "0"}
    assert watched == {
        "watch": "true",
        "fieldSelector": "spec.nodeName=n1",
        "allowWatchBookmarks": "true",
        "resourceVersion": "70",
        "timeoutSeconds": "480",
    }
    assert node.names == ["a"]
    assert node.reflector.status.synced
    assert node.book.synced.is_set()


async def test_events_reach_the_book_in_their_order(node: Node1) -> None:
    """Added, changed, deleted."""
    changed = json_pod("a", 102, status={"phase": "Running"})
    node.script.watches = [
        [json_event("ADDED", json_pod("a", 101)), json_event("ADDED", json_pod("b", 101))]
    ]
    node.script.watches[0] = [
        *node.script.watches[0],
        json_event("MODIFIED", changed),
        json_event("DELETED", json_pod("b", 103)),
        None,
    ]
    await node.run_for(1)
    assert [(pod.name, pod.phase) for pod in node.book.pods] == [("a", "Running")]
    assert node.reflector.status.events == 4


async def test_all_pages_of_a_list_count_as_one(node: Node1) -> None:
    """The continue token is handed on, and nothing is replaced before the last page."""
    node.script.lists = [
        json_list(json_pod("a"), token="t1"),
        json_list(json_pod("b"), version=100),
    ]
    await node.run_for(1)
    assert node.script.asked[1][1] == {
        "fieldSelector": "spec.nodeName=n1",
        "limit": "500",
        "continue": "t1",
    }
    assert node.names == ["a", "b"]
    assert node.reflector.status.lists == 1


async def test_a_watch_that_is_closed_at_once_is_begun_again_with_growing_pauses(
    node: Node1,
) -> None:
    """0.8 s, doubling to 30: some 8 requests in two minutes and not thousands,
    from the same version, and no error.
    """
    node.script.watches = [[] for _ in range(100)]
    await node.run_for(120)
    assert node.script.pauses == [0, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
    assert set(node.script.watched_from) == {"100"}
    assert node.reflector.status.errors == 0


async def test_a_watch_that_lasted_is_begun_again_soon(node: Node1) -> None:
    """After half a minute of health the pauses are small again."""
    node.script.lasting_seconds = 480
    node.script.watches = [[], [], []]
    await node.run_for(481 * 2)
    assert node.script.pauses == [0, 480.8, 480.8]


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(ClusterError("Expired", status=410), id="as HTTP status"),
        pytest.param(
            json_event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}),
            id="as ERROR event",
        ),
    ],
)
async def test_a_lost_history_leads_to_a_new_list(node: Node1, gone: bytes | ClusterError) -> None:
    """The list is not from the cache, which may be older than what was seen;
    pods that went meanwhile are gone.
    """
    node.script.lists = [
        json_list(json_pod("a"), json_pod("b")),
        json_list(json_pod("b"), version=200),
    ]
    node.script.watches = [[gone], [None]]
    await node.run_for(10)
    assert "resourceVersion" not in node.script.asked[2][1]
    assert node.script.watched_from == ["100", "200"]
    assert node.names == ["b"]
    assert node.reflector.status.errors == 0


async def test_a_lost_history_between_two_pages_starts_the_list_again(node: Node1) -> None:
    """Objects of the first page are thrown away with the lost history."""
    expired = ClusterError("Expired: continue token", status=410)
    node.script.lists = [json_list(json_pod("a"), token="t1"), expired, json_list(json_pod("b"))]
    await node.run_for(10)
    assert node.names == ["b"]
    assert node.script.watched_from == ["100"]


@pytest.mark.parametrize("status", [0, 403, 500, 502])
async def test_a_failure_keeps_the_version_and_says_so_once(node: Node1, status: int) -> None:
    """A reset, a 502 of a proxy, a missing permission:
    events are neither lost nor seen twice, and the log has two lines.
    """
    failure = ClusterError("it is broken", status=status)
    node.script.watches = [
        [json_event("ADDED", json_pod("a", 105)), failure],
        [failure],
        [failure],
        [json_event("ADDED", json_pod("b", 106)), None],
    ]
    await node.run_for(60)
    assert node.script.watched_from == ["100", "105", "105", "105"]
    assert node.names == ["a", "b"]
    assert node.reflector.status.errors == 3
    assert node.reflector.status.last_error == "it is broken"
    assert not node.reflector.status.failing_since
    assert node.said() == ["cluster.watch_failed", "cluster.watch_recovered"]


async def test_an_outage_is_over_when_a_quiet_watch_is_accepted(node: Node1) -> None:
    """Without changes the next event may be a minute away,
    and an ended outage must not be shown for so long.
    """
    node.script.watches = [[ClusterError("connection refused")], [b"", None]]
    began = time.time()
    await node.run_for(20)
    assert not node.reflector.status.failing_since
    assert node.reflector.status.last_event_at >= began
    assert node.reflector.status.errors == 1


async def test_retry_after_is_kept_to(node: Node1) -> None:
    """429 with a minute: a minute passes, whatever our own pause would be."""
    node.script.watches = [[ClusterError("slow down", status=429, retry_after_seconds=60)], [None]]
    await node.run_for(100)
    assert node.script.pauses == [0, 60]


async def test_what_is_forbidden_is_asked_for_more_and_more_rarely(node: Node1) -> None:
    """Down to once in five minutes: a grant is noticed, and idle agents stay idle."""
    node.script.lists = [ClusterError("pods is forbidden", status=403)]
    await node.run_for(3600)
    assert node.script.pauses[-2:] == [300, 300]
    assert len(node.script.asked) < 25
    assert node.reflector.trouble.value is not None


async def test_an_outage_of_hours_costs_two_requests_a_minute(node: Node1) -> None:
    """The pod cache keeps what it has."""
    node.script.lists = [json_list(json_pod("a"))]
    away = ClusterError("connection refused")
    node.script.watches = [[away] for _ in range(1000)]
    await node.run_for(3600)
    assert len(node.script.asked) == pytest.approx(122, abs=8)
    assert node.names == ["a"]
    assert node.reflector.status.failing_since
    assert node.reflector.reachable_seconds == 0
    assert node.said() == ["cluster.watch_failed"]


async def test_a_first_list_that_fails_is_tried_until_it_succeeds(node: Node1) -> None:
    """The reflector does not report itself synced before."""
    node.script.lists = [
        ClusterError("connection refused"),
        ClusterError("connection refused"),
        json_list(json_pod("a")),
    ]
    async with running(node.reflector.run):
        await asyncio.sleep(0.5)
        assert not node.book.synced.is_set()
        assert node.reflector.reachable_seconds == 0
        await asyncio.sleep(5)
        assert node.book.synced.is_set()
        assert 0 < node.reflector.reachable_seconds < 5


async def test_a_bookmark_moves_the_version_and_nothing_else(node: Node1) -> None:
    """Its object is no pod and must not be read as one."""
    bookmark = json_event(
        "BOOKMARK",
        {
            "kind": "Pod",
            "metadata": {"resourceVersion": "777", "creationTimestamp": None},
            "spec": {"containers": None},
        },
    )
    node.script.watches = [[bookmark], [None]]
    await node.run_for(10)
    assert node.script.watched_from == ["100", "777"]
    assert (node.names, node.reflector.status.events) == ([], 0)


async def test_one_unreadable_pod_costs_neither_the_list_nor_the_watch(node: Node1) -> None:
    """It is named once in the log and counted. All others are there."""
    broken = {
        "metadata": {"name": "broken", "namespace": "default", "uid": 7, "resourceVersion": "101"}
    }
    node.script.lists = [json_list(json_pod("a"), broken, json_pod("b"))]
    node.script.watches = [
        [json_event("MODIFIED", broken), json_event("ADDED", json_pod("c", 102)), None]
    ]
    await node.run_for(1)
    assert node.names == ["a", "b", "c"]
    assert node.reflector.status.unreadable == 2
    (entry,) = node.journal.entries
    assert "default/broken" in entry.facts["error"]


@pytest.mark.parametrize(
    "line",
    [
        b"<html>502</html>",
        b"{}",
        json_event("SHUTDOWN", json_pod("a", 150)),
        json_event("ADDED", {"metadata": {}}),
        json_event("DELETED", {"metadata": {"name": "a", "uid": 7, "resourceVersion": "150"}}),
    ],
)
async def test_a_line_that_is_no_event_leads_to_a_new_list(node: Node1, line: bytes) -> None:
    """Its object is unknown, so the list decides."""
    node.script.lists = [json_list(json_pod("a")), json_list(json_pod("b"), version=200)]
    node.script.watches = [[line], [None]]
    await node.run_for(10)
    assert node.script.watched_from == ["100", "200"]
    assert node.names == ["b"]
    assert node.reflector.status.errors == 1


async def test_a_single_object_is_listed_by_its_name(journal: Journal) -> None:
    """A list has the API server's version of now. The version of the object itself may be so old
    that no watch begins with it.
    """
    one = Node1(journal, Scope.single("one pod", "/api/v1/namespaces/default/pods", "a"))
    one.script.lists = [json_list(json_pod("a", 55), version=4711)]
    one.script.watches = [[None]]
    await one.run_for(10)
    assert one.script.watched_from == ["4711"]
    assert one.names == ["a"]
    assert one.reflector.status.errors == 0


@pytest.mark.parametrize(("options", "seconds"), [({}, 5.8), ({"burst_seconds": 0}, 0.0)])
async def test_a_watch_is_not_followed_faster_than_needed(
    journal: Journal, options: dict[str, Any], seconds: float
) -> None:
    """On a node, a flood of changes must leave time for containers. The extender may not be behind:
    it would take cards for free that are bound.
    """
    node = Node1(journal, **options)
    lines = [json_event("MODIFIED", json_pod("a", version)) for version in range(101, 6101)]
    node.script.watches = [[*lines, json_event("ADDED", json_pod("last", 7000)), None], [None]]
    began = asyncio.get_running_loop().time()
    async with running(node.reflector.run):
        await eventually(lambda: "last" in node.names)
        assert asyncio.get_running_loop().time() - began == pytest.approx(seconds, abs=0.5)


async def test_a_restarted_loop_goes_on_where_it_was(node: Node1) -> None:
    """The version is the reflector's, not the loop's."""
    node.script.watches = [[json_event("ADDED", json_pod("a", 105)), None], [None]]
    await node.run_for(1)
    await node.run_for(1)
    assert node.script.watched_from == ["100", "105"]


async def test_every_sign_of_life_is_a_beat(node: Node1) -> None:
    """Each line of a watch, and each try."""
    beats: list[float] = []
    node.script.watches = [[json_event("ADDED", json_pod("a", 105)), None]]

    async def run(_: Callable[[], None]) -> None:
        await node.reflector.run(lambda: beats.append(1))

    async with running(run):
        await asyncio.sleep(1)
    assert len(beats) == 4
    assert node.reflector.longest_silence_seconds > 540
