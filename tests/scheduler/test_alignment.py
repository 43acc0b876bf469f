"""Gangs, from filter to filter."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.families.vgpu_manager.scheduling.nodes import KEYS, MEMORY_MIB, entry, node_texts, uuid
from tests.scheduler.test_extender import GRACE_SECONDS, Server
from tests.scheduler.test_preemption import a_pod
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.decode_scheduling import with_facts
from vgpu_agent.families.vgpu_manager.scheduling.family import VgpuManagerScheduling
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import Node
from vgpu_agent.placement.nodes.book import Book
from vgpu_agent.placement.nodes.budgets import Budgets
from vgpu_agent.scheduler.dry_run import FilterDryRun
from vgpu_agent.scheduler.extender import Extender
from vgpu_agent.scheduler.known_pods import KnownPods
from vgpu_agent.scheduler.metrics import Metrics
from vgpu_agent.scheduler.preemption import Preemption

QUADS = {
    pair: [1, 10]
    for quad in ((0, 1, 2, 3), (4, 5, 6, 7))
    for pair in itertools.combinations(quad, 2)
}
MESH = {pair: [1, 12] for pair in itertools.combinations(range(8), 2)}


class Cluster:
    """Nodes ``n0``, ``n1``, … with eight cards each."""

    def __init__(self, *links: Mapping[tuple[int, int], Sequence[int]]) -> None:
        family, self.read_pod = VgpuManagerScheduling(KEYS), with_facts(decode.pod)
        self.book, self.known, self.metrics = Book(), KnownPods(), Metrics()
        self.extender = Extender(
            book=self.book,
            family=family,
            read_pod=self.read_pod,
            api=Server(),
            journal=Journal(),
            grace_seconds=GRACE_SECONDS,
            known_pods=self.known,
            metrics=self.metrics,
        )
        self.verb = Preemption(
            book=self.book,
            family=family,
            read_pod=self.read_pod,
            known_pods=self.known,
            alignment=self.extender.alignment,
            budgets=Budgets(),
            resources_of_node=self.extender.resources_of_node,
            journal=Journal(),
            metrics=self.metrics,
        )
        self.names = [f"n{node}" for node in range(len(links))]
        for node, of_node in enumerate(links):
            texts = node_texts([entry(card, uuid=uuid(node, card)) for card in range(8)], of_node)
            self.extender.see_node(
                Node(f"n{node}", "u", texts, {}, "", "", {}, {KEYS.number: "80"}, {}, "1")
            )

    def runs(self, pod: Mapping[str, Any]) -> None:
        """Let the watch show a pod."""
        self.extender.see_pod(self.read_pod(json.dumps(pod).encode()))

    def counted(self, result: str) -> float:
        """The number of pods that were placed so after their peers."""
        name = f'vgpu_scheduler_crosspod_alignment_total{{result="{result}"}} '
        lines = self.metrics.text("")[0].decode().splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    def place(self, pod: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Filter a pod, and return its Node and its cards."""
        body = json.dumps({"Pod": pod, "NodeNames": self.names}).encode()
        answer = json.loads(self.extender.filter(body))
        holding = self.book.holding(pod["metadata"]["uid"])
        if not answer["NodeNames"]:
            return "", []
        assert holding is not None
        numbers = self.book.numbers(holding.node)
        return holding.node, [numbers[card.uuid] for card in holding.cards[0]]

    def refusals(self, pod: Mapping[str, Any], *names: str) -> dict[str, str]:
        """Filter a pod on some of the Nodes, and return why it fits on none of them."""
        body = json.dumps({"Pod": pod, "NodeNames": names}).encode()
        found: dict[str, str] = json.loads(self.extender.filter(body))["FailedNodes"]
        return found

    def dry_run(self, pod: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """The Nodes on which a pod fits, and why not on the others."""
        verb = FilterDryRun(
            book=self.book,
            family=VgpuManagerScheduling(KEYS),
            read_pod=self.read_pod,
            read_node=decode.node,
            alignment=self.extender.alignment,
        )
        answer = json.loads(verb.answer(json.dumps({"Pod": pod, "NodeNames": self.names}).encode()))
        return answer["NodeNames"], answer["FailedNodes"]


def a_member(
    gang: str, place: int, mode: str = "link", number: int = 1, **spec: Any
) -> dict[str, Any]:
    """A pod of a gang that asks for whole cards."""
    annotations = {
        KEYS.topology_mode: mode,
        KEYS.cross_pod: "true",
        "scheduling.k8s.io/group-name": gang,
    }
    return a_pod(f"{gang}-{place}", number=number, metadata={"annotations": annotations}, **spec)


@pytest.mark.parametrize("is_shown", [True, False])
async def test_a_gang_of_eight_gets_the_node_that_has_room_for_it(is_shown: bool) -> None:
    """The first two Nodes have a card less. Once the first pod is placed, the others follow it,
    also those that the watch shows late.
    """
    cluster = Cluster(MESH, MESH, MESH)
    cluster.runs(a_pod("x", 0, 5))
    cluster.runs(a_pod("y", 1, 0))
    gang = [a_member("train", place) for place in range(8)]
    shown = gang if is_shown else gang[:2]
    for member in shown:
        cluster.runs(member)
    places = [cluster.place(member) for member in (gang if is_shown else gang[:7])]
    if is_shown:
        assert places == [("n2", [card]) for card in range(8)]
        assert cluster.counted("same_node") == 7
    else:
        assert {node for node, _ in places} == {places[0][0]}


async def test_a_member_without_nvlinks_is_counted_as_such() -> None:
    """Its own two cards are not joined, though its mode asks for that."""
    cluster = Cluster(QUADS)
    cluster.runs(a_pod("x", 0, 1, 2, 3, 5, 6, 7))
    cluster.runs(a_member("a", 1))
    assert cluster.place(a_member("a", 0, number=2)) == ("n0", [0, 4])
    text = cluster.metrics.text("")[0].decode()
    assert 'topology_placement_total{mode="link",result="fallback"} 1.0' in text


async def test_searches_of_filters_count_and_those_of_dry_runs_do_not() -> None:
    """vgpu-manager §5.10: cards with two NVLinks here and one there have to be searched, and where
    all have the same number nothing is. Nobody gets a card by a dry run.
    """
    uneven = {pair: [1, 8 if 0 in pair else 7] for pair in itertools.combinations(range(8), 2)}
    cluster = Cluster(uneven)
    annotations = {KEYS.topology_mode: "link"}
    assert cluster.dry_run(a_pod("p", number=3, metadata={"annotations": annotations}))[0]
    assert "link_search_total{" not in cluster.metrics.text("")[0].decode()
    assert cluster.place(a_pod("p", number=3, metadata={"annotations": annotations}))[0] == "n0"
    text = cluster.metrics.text("")[0].decode()
    searches = float(
        text.partition('vgpu_scheduler_link_search_total{algo="exhaustive"} ')[2].split()[0]
    )
    assert searches >= 1
    assert (
        f'vgpu_scheduler_link_search_candidates_bucket{{algo="exhaustive",le="8.0"}} {searches}'
        in text
    )
    assert 'vgpu_scheduler_link_search_candidates_bucket{algo="exhaustive",le="6.0"} 0.0' in text
    even = Cluster(MESH)
    assert even.place(a_pod("p", number=3, metadata={"annotations": annotations}))[0] == "n0"
    assert "link_search_total{" not in even.metrics.text("")[0].decode()


async def test_peers_that_ask_for_no_card_are_not_followed() -> None:
    """Such as the launcher of a training. The pod is the first of its group to get cards."""
    cluster = Cluster(QUADS)
    launcher = a_member("a", 0)
    launcher["spec"]["containers"][0]["resources"]["limits"] = {"cpu": "1"}
    cluster.runs(launcher)
    assert cluster.place(a_member("a", 1)) == ("n0", [0])
    results = ("not_aligned", "same_domain", "same_node")
    assert [cluster.counted(each) for each in results] == [0, 0, 0]
    assert cluster.place(a_member("a", 2)) == ("n0", [1])
    assert [cluster.counted(each) for each in results] == [0, 0, 1]


async def test_two_gangs_of_four_get_a_quad_each() -> None:
    """Filtered in turns, as kube-scheduler does."""
    cluster = Cluster(QUADS, QUADS)
    gangs = [[a_member(gang, place) for place in range(4)] for gang in ("a", "b")]
    for member in itertools.chain(*gangs):
        cluster.runs(member)
    places: dict[str, set[int]] = {"a": set(), "b": set()}
    nodes = set()
    for one, other in zip(*gangs, strict=True):
        for gang, member in (("a", one), ("b", other)):
            node, cards = cluster.place(member)
            nodes.add(node)
            places[gang] |= set(cards)
    assert nodes == {"n0"}
    assert sorted(map(sorted, places.values())) == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_a_gang_larger_than_a_node_keeps_its_domain() -> None:
    """Six pods with two cards each, on second quads, of which each Node has one."""
    cluster = Cluster(QUADS, QUADS, QUADS)
    for node in range(3):
        cluster.runs(a_pod(f"x{node}", node, 0, 1, 2, 3))
    gang = [a_member("wide", place, "link-strict", number=2) for place in range(6)]
    for member in gang:
        cluster.runs(member)
    places = [cluster.place(member) for member in gang]
    assert [node for node, _ in places] == ["n0", "n0", "n1", "n1", "n2", "n2"]
    assert cluster.place(a_member("wide", 7, "link-strict")) == ("", [])
    assert [cluster.counted(each) for each in ("same_node", "same_domain")] == [3, 2]


async def test_a_strict_member_is_told_why_it_does_not_fit_on_a_sample() -> None:
    """Its peer's component is full. On all other cards there is room, but not for it: no Node has
    any, whatever kube-scheduler names, so it is not asked to try again.
    """
    cluster = Cluster(QUADS, QUADS, QUADS)
    peer, strict = a_member("a", 0), a_member("a", 1, "link-strict", number=2)
    cluster.runs(peer)
    assert cluster.place(peer) == ("n0", [0])
    cluster.runs(a_pod("x", 0, 1, 2, 3))
    cluster.runs(a_pod("y", 1, 0, 1, 2))
    cluster.runs(a_pod("z", 2, *range(8)))
    everywhere = "Insufficient vGPU cores or Link topology unsatisfied"
    assert cluster.refusals(strict, "n1", "n2") == dict.fromkeys(("n1", "n2"), everywhere)


async def test_a_strict_member_may_fit_on_a_node_that_was_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the text changes on purpose, as for other pods."""
    monkeypatch.setattr("vgpu_agent.scheduler.extender._LEAST_SAMPLE", 1)
    cluster = Cluster(QUADS, QUADS, QUADS)
    peer = a_member("a", 0)
    cluster.runs(peer)
    cluster.names = ["n0"]
    assert cluster.place(peer) == ("n0", [0])
    cluster.runs(a_pod("x", 0, 1, 2, 3))
    cluster.runs(a_pod("y", 1, 0, 1, 2, 3))
    strict = a_member("a", 1, "link-strict")
    text = "Link topology unsatisfied, and other nodes may have room (try {})"
    assert cluster.refusals(strict, "n0") == {"n0": text.format(1)}
    assert cluster.refusals(strict, "n1") == {"n1": text.format(2)}
    assert cluster.refusals(strict, "n2") == {}


async def test_a_dry_run_asks_the_peers_too() -> None:
    """The cards that were promised to a member count as free for that member itself."""
    cluster = Cluster(QUADS, QUADS)
    peer, strict = a_member("a", 0), a_member("a", 1, "link-strict")
    cluster.runs(peer)
    assert cluster.place(peer) == ("n0", [0])
    cluster.runs(a_pod("x", 0, 1, 2))
    assert cluster.place(strict) == ("n0", [3])
    cluster.runs(a_pod("y", 1, 0, 1, 2, 3))
    far = {"n1": "Link topology unsatisfied"}
    assert cluster.dry_run(strict) == (["n0"], far)
    assert cluster.dry_run(a_member("a", 2, "link-strict")) == (
        [],
        {"n0": "Link topology unsatisfied", **far},
    )
    assert cluster.dry_run(a_member("a", 2)) == (["n0", "n1"], {})
    assert cluster.dry_run(a_member("b", 2, "link-strict")) == (["n0", "n1"], {})


async def test_groups_of_other_namespaces_are_strangers() -> None:
    """Any tenant may choose the name of a gang."""
    cluster = Cluster(QUADS, QUADS)
    foreign = a_member("a", 0)
    foreign["metadata"]["namespace"] = "other"
    cluster.runs(foreign)
    assert cluster.place(foreign) == ("n0", [0])
    assert cluster.known.peers("uid-x", "default/a") == []


async def test_pods_of_a_controller_belong_together() -> None:
    """Pods without a gang are grouped by their controller (vgpu-manager §5.7)."""
    cluster = Cluster(QUADS, QUADS)
    pods = []
    for place in range(2):
        pod = a_member("own", place)
        del pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"]
        pod["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": "job", "controller": True}]
        pods.append(pod)
    cluster.runs(a_pod("x", 0, 0, 1, 2))
    for pod in pods:
        cluster.runs(pod)
    assert [cluster.place(pod) for pod in pods] == [("n0", [4]), ("n0", [5])]


async def test_a_promise_that_ends_leaves_nothing() -> None:
    """Its pod may have been deleted before the watch showed it."""
    cluster = Cluster(QUADS)
    member = a_member("a", 0)
    cluster.place(member)
    assert cluster.known.peers("", "default/a") == [member["metadata"]["uid"]]
    cluster.extender._end_promise(member["metadata"]["uid"])
    assert cluster.known.peers("", "default/a") == []
    cluster.place(member)
    cluster.runs(member)
    cluster.extender._end_promise(member["metadata"]["uid"])
    assert cluster.known.peers("", "default/a") == [member["metadata"]["uid"]]


@pytest.mark.parametrize(
    ("mode", "victims"), [("link", ["uid-near"]), ("link-strict", ["uid-near"])]
)
async def test_victims_are_taken_beside_the_peers(mode: str, victims: list[str]) -> None:
    """vgpu-manager §5.9: although they are more important."""
    cluster = Cluster(QUADS)
    cluster.runs(a_pod("far", 0, 4, priority=1))
    cluster.runs(a_pod("fixed", 0, 5, 6, 7, 1, 2, priority=200))
    cluster.runs(a_pod("near", 0, 3, priority=5))
    peer = a_member("a", 0, priority=100)
    cluster.runs(peer)
    assert cluster.place(peer) == ("n0", [0])
    body = {
        "Pod": a_member("a", 1, mode, priority=100),
        "NodeNameToMetaVictims": {"n0": {"Pods": []}},
    }
    answer = json.loads(await cluster.verb.answer(json.dumps(body).encode()))
    found = answer["NodeNameToMetaVictims"]["n0"]["Pods"]
    assert [each["UID"] for each in found] == victims


async def test_a_protected_pod_is_counted_once_in_a_call() -> None:
    """Though two components have peers, and victims are looked for in each."""
    cluster = Cluster(QUADS)
    for place, card in ((0, 0), (1, 4)):
        peer = a_member("a", place, priority=100)
        peer["metadata"]["annotations"][KEYS.pre_allocated] = (
            f"default[{card}_{uuid(0, card)}_100_{MEMORY_MIB}]"
        )
        peer["spec"]["nodeName"] = "n0"
        cluster.runs(peer)
    cluster.runs(a_pod("equal", 0, 1, 2, 3, 5, 6, 7, priority=100))
    body = {
        "Pod": a_member("a", 2, "link-strict", priority=100),
        "NodeNameToMetaVictims": {"n0": {"Pods": [{"UID": "uid-equal"}]}},
    }
    for calls in (1, 2):
        answer = json.loads(await cluster.verb.answer(json.dumps(body).encode()))
        assert answer["NodeNameToMetaVictims"] == {}
        name = 'vgpu_scheduler_preempt_protected_total{reason="not_lower_priority"} '
        assert f"{name}{calls}.0" in cluster.metrics.text("")[0].decode()


async def test_a_strict_pod_has_no_victims_away_from_its_peers() -> None:
    """It would not go there."""
    cluster = Cluster(QUADS)
    cluster.runs(a_pod("far", 0, 4, priority=1))
    cluster.runs(a_pod("fixed", 0, 5, 6, 7, 1, 2, 3, priority=200))
    peer = a_member("a", 0, priority=100)
    cluster.runs(peer)
    assert cluster.place(peer) == ("n0", [0])
    for mode, expected in (("link", 1), ("link-strict", 0)):
        body = {
            "Pod": a_member("a", 1, mode, priority=100),
            "NodeNameToMetaVictims": {"n0": {"Pods": []}},
        }
        answer = json.loads(await cluster.verb.answer(json.dumps(body).encode()))
        assert len(answer["NodeNameToMetaVictims"]) == expected


async def test_a_gang_is_placed_quickly_on_five_hundred_nodes() -> None:
    """All in different states."""
    cluster = Cluster(*(QUADS for _ in range(500)))
    for node in range(500):
        cluster.runs(a_pod(f"x{node}", node, node % 8, part=1 + node % 60))
    gang = [a_member("g", place) for place in range(8)]
    for member in gang:
        cluster.runs(member)
    began = time.perf_counter()
    assert len({cluster.place(member)[0] for member in gang}) < 8
    assert time.perf_counter() - began < 5.0
