"""The verbs of the extender, against an API server in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tests.families.vgpu_manager.scheduling.nodes import KEYS, entry, node_texts, uuid
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.api import Api
from vgpu_agent.errors import ClusterError
from vgpu_agent.families.vgpu_manager.scheduling.family import VgpuManagerScheduling
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import Node
from vgpu_agent.placement.nodes.book import Book
from vgpu_agent.pods import Pod
from vgpu_agent.scheduler import extender as extender_module
from vgpu_agent.scheduler.extender import Extender
from vgpu_agent.scheduler.pod_events import PodEvents

GRACE_SECONDS = 30.0


class Server:
    """An API server that binds what it is told to. State: pods by path, and the requests."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str, Mapping[str, Any]]] = []
        self.failure: dict[str, ClusterError] = {}

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """The pod."""
        if path not in self.pods:
            raise ClusterError(f"GET {path}: 404", status=404)
        return json.dumps(self.pods[path]).encode()

    async def patch(
        self, path: str, body: Mapping[str, Any], *, params: Mapping[str, str] | None = None
    ) -> bytes:
        """Note the change."""
        return self._do("PATCH", path, body)

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Note the object."""
        return self._do("POST", path, body)

    async def delete(self, path: str, *, uid: str) -> bytes:
        """Nobody deletes."""
        raise AssertionError("the extender deletes nothing")

    def _do(self, verb: str, path: str, body: Mapping[str, Any]) -> bytes:
        self.requests.append((verb, path, body))
        if verb in self.failure:
            raise self.failure[verb]
        return b"{}"


class Cluster:
    """Nodes ``n0``, ``n1``, … with two cards each, and their extender."""

    def __init__(
        self,
        nodes: int = 2,
        *,
        server: Api | None = None,
        grace_seconds: float = GRACE_SECONDS,
        **more: Any,
    ) -> None:
        self.server, self.book, self.journal = Server(), Book(), Journal()
        self.raised: list[tuple[str, str]] = []
        self.extender = Extender(
            book=self.book,
            family=VgpuManagerScheduling(KEYS),
            read_pod=decode.pod,
            api=server or self.server,
            journal=self.journal,
            grace_seconds=grace_seconds,
            clock=lambda: 1787331600.0,
            events=PodEvents(self),  # type: ignore[arg-type]  # a stand-in with the members that are used
            **more,
        )
        self.nodes = {}
        for node in range(nodes):
            texts = node_texts([entry(card, uuid=uuid(node, card)) for card in range(2)])
            self.nodes[f"n{node}"] = texts
            self.extender.see_node(
                Node(f"n{node}", "u", texts, {}, "", "", {}, {KEYS.number: "20"}, {}, "1")
            )

    def raise_event(self, regarding: Pod, reason: str, message: str, kind: str = "Warning") -> None:
        """Keep an event, in the place of the queue."""
        assert kind == ("Normal" if reason.endswith("Succeed") else "Warning")
        self.raised.append((f"{regarding.name} {reason}", message))

    def filter(self, pod: Mapping[str, Any] | None, *names: str, **more: Any) -> dict[str, Any]:
        """The answer of a filter."""
        arguments = {"Pod": pod, "NodeNames": list(names) or list(self.nodes), **more}
        found: dict[str, Any] = json.loads(self.extender.filter(json.dumps(arguments).encode()))
        return found

    async def bind(self, pod: Mapping[str, Any], node: str) -> str:
        """The error of a bind."""
        metadata = pod["metadata"]
        arguments = {
            "PodName": metadata["name"],
            "PodNamespace": metadata["namespace"],
            "PodUID": metadata["uid"],
            "Node": node,
        }
        answer = json.loads(await self.extender.bind(json.dumps(arguments).encode()))
        assert list(answer) == ["Error"]
        return str(answer["Error"])


def a_pod(name: str = "train", *, node: str = "", **limits: str) -> dict[str, Any]:
    """A pod as the API server has it, with one container ``default``."""
    asked = {f"nvidia.com/vgpu-{key}": value for key, value in limits.items()}
    spec: dict[str, Any] = {"containers": [{"name": "default", "resources": {"limits": asked}}]}
    if node:
        spec["nodeName"] = node
    return {"metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"}, "spec": spec}


SMALL = {"number": "1", "cores": "10", "memory": "1024"}
WHOLE = {"number": "2"}


async def test_a_pod_of_the_contract_from_filter_to_bind() -> None:
    """vgpu-manager §13.3: the labels of both patches in one, the annotations in the Binding."""
    cluster, pod = Cluster(), a_pod(**SMALL)
    assert cluster.filter(pod) == {
        "Nodes": None,
        "NodeNames": ["n0"],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": None,
        "Error": "",
    }
    assert cluster.server.requests == []
    assert await cluster.bind(pod, "n0") == ""
    (patch, binding) = cluster.server.requests
    annotations = {
        "nvidia.com/pre-allocated": f"default[0_{uuid(0, 0)}_10_1024]",
        "nvidia.com/predicate-node": "n0",
        "nvidia.com/predicate-time": "1787331600000000000",
        "nvidia.com/real-allocated": "",
    }
    assert patch == (
        "PATCH",
        "/api/v1/namespaces/default/pods/train",
        {
            "metadata": {
                "uid": "uid-train",
                # the other label comes with the Binding, see `test_binding`
                "labels": {"nvidia.com/assigned-phase": "allocating"},
            }
        },
    )
    assert binding[:2] == ("POST", "/api/v1/namespaces/default/pods/train/binding")
    assert binding[2]["target"]["name"] == "n0"
    assert binding[2]["metadata"]["uid"] == "uid-train"
    assert binding[2]["metadata"]["annotations"] == annotations
    assert binding[2]["metadata"]["labels"] == {
        "nvidia.com/assigned-phase": "allocating",
        "nvidia.com/metrics-node": "n0",
    }


def _version(pod: dict[str, Any], version: str) -> bytes:
    """The pod's JSON, after it was given this version."""
    pod["metadata"]["resourceVersion"] = version
    return json.dumps(pod).encode()


async def test_a_pod_that_the_watch_has_shown_is_not_decoded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenth of a filter call. A version that the watch has not shown counts as it is in the
    call: kube-scheduler may be ahead.
    """
    cluster, pod = Cluster(), a_pod(**SMALL)
    decoded: list[str] = []

    def read_pod(raw: bytes | msgspec.Raw) -> Pod:
        found = decode.pod(raw)
        decoded.append(found.resource_version)
        return found

    monkeypatch.setattr(cluster.extender, "_read_pod", read_pod)
    cluster.extender.see_pod(decode.pod(_version(pod, "7")))
    assert cluster.filter(pod)["NodeNames"] == ["n0"]
    assert decoded == []
    newer = a_pod(number="17")
    _version(newer, "8")
    assert "vgpu-number" in cluster.filter(newer)["Error"]
    assert decoded == ["8"]
    # two texts without a version may differ
    cluster.extender.see_pod(decode.pod(_version(pod, "")))
    _version(newer, "")
    assert "vgpu-number" in cluster.filter(newer)["Error"]
    assert decoded == ["8", ""]


async def test_waiting_pods_are_forgotten_once_they_are_bound_or_gone_or_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An extender runs for months."""
    monkeypatch.setattr(extender_module, "_MAX_WAITING", 2)
    cluster = Cluster()

    def see(name: str, node: str = "") -> None:
        cluster.extender.see_pod(decode.pod(_version(a_pod(name, node=node, **SMALL), "7")))

    for name in ("a", "b", "c", "d"):
        see(name)
    assert list(cluster.extender._waiting) == ["uid-c", "uid-d"]
    see("c", node="n0")
    cluster.extender.forget_pod("uid-d")
    assert not cluster.extender._waiting


async def test_a_large_pod_is_not_kept_while_it_waits() -> None:
    """A tenant may create thousands; it is decoded at each call instead."""
    cluster, pod = Cluster(), a_pod(**SMALL)
    cluster.extender.see_pod(decode.pod(_version(pod, "7")))
    assert list(cluster.extender._waiting) == ["uid-train"]
    pod["metadata"]["annotations"] = {
        f"nvidia.com/exclude-gpu-{what}": "x" * 4000 for what in ("uuid", "type")
    }
    cluster.extender.see_pod(decode.pod(_version(pod, "8")))
    assert not cluster.extender._waiting
    assert cluster.filter(pod)["NodeNames"] == ["n0"]


async def test_pods_are_told_what_became_of_them() -> None:
    """vgpu-manager §5.2, §5.8: the reasons that operators know, on the pod itself."""
    cluster = Cluster(1)
    first, second = a_pod("a", **WHOLE), a_pod("b", **WHOLE)
    cluster.filter(first)
    cluster.filter(second)
    cluster.filter(a_pod("c", number="17"))
    assert await cluster.bind(first, "n0") == ""
    cluster.server.failure["PATCH"] = ClusterError("PATCH: 404", status=404)
    cluster.extender.forget_pod("uid-a")
    cluster.filter(second)
    assert await cluster.bind(second, "n0") == "PATCH: 404"
    assert [name for name, _ in cluster.raised] == [
        "a FilteringSucceed",
        "b FilteringFailed",
        "c ResourceInvalid",
        "a BindingSucceed",
        "b FilteringSucceed",
        "b BindingFailed",
    ]
    texts = dict(cluster.raised)
    assert texts["a FilteringSucceed"] == 'Successfully matched node "n0"'
    assert texts["b FilteringFailed"] == ("0/1 nodes are available: 1 Insufficient vGPU cores (n0)")
    assert "nvidia.com/vgpu-number" in texts["c ResourceInvalid"]
    assert texts["a BindingSucceed"].startswith(f"Bound to n0 with GPU 0 ({uuid(0, 0)}): 100 %")


async def test_a_policy_that_means_nothing_is_told_on_the_pod_once() -> None:
    """vgpu-manager §4.1: it counts as none, and its owner would never know. One event for all."""
    cluster, pod = Cluster(1), a_pod(**SMALL)
    pod["metadata"]["annotations"] = {KEYS.node_policy: "binpak", KEYS.topology_mode: "numa-strct"}
    for _ in range(2):
        assert cluster.filter(pod)["NodeNames"] == ["n0"]
    (text,) = [text for name, text in cluster.raised if name == "train PolicyInvalid"]
    assert text == (
        f"annotation {KEYS.node_policy}='binpak' means nothing and counts as none; "
        "expected binpack, spread, none; "
        f"annotation {KEYS.topology_mode}='numa-strct' means nothing and counts as none; "
        "expected numa, numa-strict, link, link-strict, none"
    )


async def test_what_users_write_on_pods_counts() -> None:
    """From the JSON on: a decoder that leaves an annotation out would switch its policy off."""
    cluster = Cluster()
    assert cluster.filter(a_pod("other", **SMALL), "n1")["NodeNames"] == ["n1"]
    for policy, expected in (("binpack", "n1"), ("spread", "n0")):
        pod = a_pod(policy, **SMALL)
        pod["metadata"]["annotations"] = {"nvidia.com/node-scheduler-policy": policy}
        assert cluster.filter(pod)["NodeNames"] == [expected]


async def test_cards_are_kept_from_filter_on() -> None:
    """The next pod is filtered before this one is bound."""
    cluster = Cluster(1)
    assert cluster.filter(a_pod("a", **WHOLE))["NodeNames"] == ["n0"]
    assert cluster.filter(a_pod("b", **WHOLE)) == {
        "Nodes": None,
        "NodeNames": [],
        "FailedNodes": {"n0": "Insufficient vGPU cores"},
        "FailedAndUnresolvableNodes": None,
        "Error": "",
    }
    assert cluster.filter(a_pod("a", **WHOLE))["NodeNames"] == ["n0"]


async def test_a_pod_is_moved_when_its_node_is_not_in_the_next_sample() -> None:
    """kube-scheduler shows another part of the Nodes each time. Held back for its first Node, the
    pod would wait for minutes.
    """
    cluster, pod = Cluster(3), a_pod(**WHOLE)
    assert cluster.filter(pod, "n0", "n1")["NodeNames"] == ["n0"]
    assert cluster.filter(pod, "n1", "n2")["NodeNames"] == ["n1"]
    assert cluster.book.taken("n0") == ((0, 0, 0), (0, 0, 0))
    assert "has its cards on n1" in await cluster.bind(pod, "n0")
    assert await cluster.bind(pod, "n1") == ""


def _put_node(cluster: Cluster, number: int, cards: int) -> None:
    """Add or change a Node."""
    texts = node_texts([entry(card, uuid=uuid(number, card)) for card in range(cards)])
    slots = {KEYS.number: str(10 * cards)}
    name = f"n{number}"
    cluster.extender.see_node(Node(name, "u", texts, {}, "", "", {}, slots, {}, "1"))


async def test_a_refusal_has_one_text_for_any_nodes() -> None:
    """kube-scheduler counts the texts and writes the counts into the pod's status. When these
    change with the Nodes that it happened to name, it filters the pod again and again.
    """
    cluster = Cluster(3)
    _put_node(cluster, 2, 1)
    pod = a_pod(number="2", memory="30000")
    text = "Insufficient vGPU memory or Insufficient GPU cards"
    assert cluster.filter(pod, "n0", "n1")["FailedNodes"] == {"n0": text, "n1": text}
    assert cluster.filter(pod, "n1", "n2")["FailedNodes"] == {"n1": text, "n2": text}
    assert cluster.filter(a_pod(number="3"), "n2")["FailedNodes"] == {
        "n2": "Insufficient GPU cards"
    }


@pytest.mark.looptime
async def test_a_refusal_changes_ten_times_while_other_nodes_may_have_room() -> None:
    """A Node that kube-scheduler has not named may have room; with the same text, the pod would
    wait for five minutes. Its samples leave Nodes out, so two samples of half of the Nodes are not
    enough. A Node that is never named, because of a taint, must not let the pod be filtered without
    end.
    """
    cluster, pod = Cluster(201), a_pod(number="3")
    _put_node(cluster, 200, 3)
    sample = [f"n{number}" for number in range(100)]

    def texts(count: int) -> list[str]:
        return [cluster.filter(pod, *sample)["FailedNodes"]["n0"] for _ in range(count)]

    text = "Insufficient GPU cards, and other nodes may have room (try {})"
    assert texts(12) == [text.format(number) for number in (*range(1, 11), 10, 10)]
    await asyncio.sleep(300)
    assert texts(2) == [text.format(number) for number in (1, 2)]
    cluster.extender.forget_pod("uid-train")
    assert texts(1) == [text.format(1)]
    assert cluster.filter(pod, "n200")["NodeNames"] == ["n200"]


async def test_a_pod_that_may_use_few_nodes_is_not_tried_again_and_again() -> None:
    """kube-scheduler names all Nodes that a selector leaves, if these are fewer than a hundred. So
    none that it has not named can take the pod. Then the reasons are those of the named ones.
    """
    cluster, pod = Cluster(3), a_pod(number="3")
    _put_node(cluster, 2, 3)
    for _ in range(3):
        text = cluster.filter(pod, "n0", "n1")["FailedNodes"]["n0"]
        assert text == "Insufficient GPU cards"
    cluster.extender.see_node(Node("n0", "u", {}, {}, "", "", {}, {}, {}, "1"))
    assert cluster.filter(pod, "n0")["FailedNodes"] == {"n0": "node not vGPU-enabled"}


@pytest.mark.looptime
async def test_a_pod_that_names_cards_is_told_the_reasons_of_the_named_nodes() -> None:
    """Over all Nodes it would take too long to look at each card's UUID."""
    cluster = Cluster(201)
    few, many = ("n1", "n0"), tuple(f"n{number}" for number in range(200))
    cluster.filter(a_pod("a", **WHOLE), "n0")
    pod = a_pod("b", **SMALL)
    pod["metadata"]["annotations"] = {KEYS.include_uuid: uuid(0, 0)}
    texts = set(cluster.filter(pod, *few)["FailedNodes"].values())
    reasons = "Insufficient vGPU cores or GPU UUID mismatch"
    assert texts == {reasons}
    again = ", and other nodes may have room (try {})"
    for number in (*range(1, 11), 10):
        texts = set(cluster.filter(pod, *many)["FailedNodes"].values())
        assert texts == {reasons + again.format(number)}
    # the same text although this sample has fewer reasons: each change makes it tried again
    texts = set(cluster.filter(pod, *many[1:])["FailedNodes"].values())
    assert texts == {reasons + again.format(10)}


@pytest.mark.parametrize("as_objects", [False, True], ids=["names", "objects"])
async def test_a_pod_that_fits_nowhere_counts_as_refused(as_objects: bool) -> None:
    """Whichever way the Nodes are sent."""
    cluster = Cluster(1)
    more: dict[str, Any] = {}
    if as_objects:
        more = {"NodeNames": None, "Nodes": {"items": [{"metadata": {"name": "n0"}}]}}
    for number, outcome in (("1", "success"), ("3", "refused")):
        cluster.filter(a_pod(f"p{number}", number=number), **more)
        text, _ = cluster.extender._metrics.text("")
        assert f'verb_total{{result="{outcome}",verb="filter"}} 1.0' in text.decode()


async def test_a_refusal_of_nodes_without_cards_says_so() -> None:
    """No Node has any, or the extender does not know the Nodes."""
    cluster = Cluster(0)
    assert cluster.filter(a_pod(**SMALL), "x")["FailedNodes"] == {"x": "node missing from cache"}
    cluster.extender.see_node(Node("n0", "u", {}, {}, "", "", {}, {}, {}, "1"))
    assert cluster.filter(a_pod(**SMALL), "n0")["FailedNodes"] == {"n0": "node not vGPU-enabled"}


@pytest.mark.looptime
async def test_cards_of_a_pod_that_is_never_bound_are_given_back() -> None:
    """Another plugin of the scheduler may have refused it."""
    cluster = Cluster(1)
    cluster.filter(a_pod("a", **WHOLE))
    await asyncio.sleep(GRACE_SECONDS - 1)
    cluster.extender.expire_promises()
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == []
    await asyncio.sleep(2)
    cluster.extender.expire_promises()
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == ["n0"]
    assert "no cards are kept" in await _bind_known(cluster, a_pod("a", **WHOLE))


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        (" 1m30s ", 90),
        ("2s", 2),
        # what nobody could mean leaves it to the operator, and no tenant keeps cards for hours
        ("0.5s", GRACE_SECONDS),
        ("-2m", GRACE_SECONDS),
        ("for ever", GRACE_SECONDS),
        ("9h", 300),
    ],
)
async def test_a_pod_says_how_long_its_cards_are_kept(text: str, seconds: float) -> None:
    """vgpu-manager §4.1: its annotation overrides the extender's flag."""
    cluster, pod = Cluster(1), a_pod("a", **WHOLE)
    pod["metadata"]["annotations"] = {KEYS.stuck_grace: text}
    cluster.filter(pod)
    await asyncio.sleep(seconds - 0.5)
    assert cluster.filter(pod)["NodeNames"] == ["n0"]  # begins the time anew
    await asyncio.sleep(seconds - 0.5)
    cluster.extender.expire_promises()
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == []
    await asyncio.sleep(1)
    cluster.extender.expire_promises()
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == ["n0"]


@pytest.mark.looptime
async def test_a_corrected_annotation_counts_from_the_next_filter_on() -> None:
    """The owner need not delete the pod."""
    cluster, pod = Cluster(1), a_pod("a", **WHOLE)
    pod["metadata"]["annotations"] = {KEYS.stuck_grace: "2s"}
    cluster.filter(pod)
    pod["metadata"]["annotations"] = {KEYS.stuck_grace: "200s"}
    cluster.filter(pod)
    await asyncio.sleep(199)
    cluster.extender.expire_promises()
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == []
    pod["metadata"]["annotations"] = {}
    cluster.filter(pod)
    await asyncio.sleep(GRACE_SECONDS + 1)
    cluster.extender.expire_promises()
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == ["n0"]


@pytest.mark.looptime
async def test_a_pod_may_ask_for_what_the_operator_gives_all() -> None:
    """With ``--stuck-grace-period 10m`` nine hours are ten minutes."""
    cluster, pod = Cluster(1, grace_seconds=600.0), a_pod("a", **WHOLE)
    pod["metadata"]["annotations"] = {KEYS.stuck_grace: "9h"}
    cluster.filter(pod)
    await asyncio.sleep(599)
    cluster.extender.expire_promises()
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == []
    await asyncio.sleep(2)
    cluster.extender.expire_promises()
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == ["n0"]


async def _bind_known(cluster: Cluster, pod: dict[str, Any]) -> str:
    cluster.server.pods[f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"] = pod
    return await cluster.bind(pod, "n0")


@pytest.mark.parametrize("verb", ["PATCH", "POST"])
async def test_a_refused_bind_gives_the_cards_back(verb: str) -> None:
    """The pod was deleted meanwhile, or bound by another scheduler."""
    cluster, pod = Cluster(1), a_pod(**WHOLE)
    cluster.filter(pod)
    cluster.server.failure[verb] = ClusterError("409 Conflict: the pod is bound", status=409)
    assert await cluster.bind(pod, "n0") == "409 Conflict: the pod is bound"
    assert cluster.book.taken("n0") == ((0, 0, 0), (0, 0, 0))


@pytest.mark.looptime
async def test_a_pod_that_may_be_bound_goes_nowhere_else() -> None:
    """kube-scheduler tries again after a bind without an answer. On its first Node the pod may be
    bound once more, and its cards there are not given away meanwhile.
    """
    cluster, pod = Cluster(2), a_pod(**WHOLE)
    cluster.filter(pod, "n0")
    cluster.server.failure["POST"] = ClusterError("no answer within 15 s")
    await cluster.bind(pod, "n0")
    refused = cluster.filter(pod, "n1")
    assert "has not said whether pod default/train was bound to n0" in refused["Error"]
    assert cluster.book.taken("n1") == ((0, 0, 0), (0, 0, 0))
    assert cluster.filter(pod, "n0", "n1")["NodeNames"] == ["n0"]
    await asyncio.sleep(10 * GRACE_SECONDS)
    cluster.extender.expire_promises()
    assert cluster.filter(a_pod("b", **WHOLE), "n0")["NodeNames"] == []
    cluster.server.failure.clear()
    assert await cluster.bind(pod, "n0") == ""


@pytest.mark.looptime
async def test_a_bind_without_an_answer_keeps_the_cards() -> None:
    """The pod may be bound; only the watch can tell."""
    cluster, pod = Cluster(1), a_pod(**WHOLE)
    cluster.filter(pod)
    cluster.server.failure["POST"] = ClusterError("no answer within 15 s")
    assert await cluster.bind(pod, "n0") == "no answer within 15 s"
    await asyncio.sleep(10 * GRACE_SECONDS)
    cluster.extender.expire_promises()
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == []
    cluster.extender.forget_pod("uid-train")
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == ["n0"]


async def test_a_bound_pod_holds_what_its_annotations_say() -> None:
    """Also after the extender was started anew, when it has promised nothing to anybody."""
    cluster = Cluster(1)
    bound = a_pod("a", node="n0", **WHOLE)
    bound["metadata"]["annotations"] = {
        "nvidia.com/pre-allocated": (f"default[0_{uuid(0, 0)}_100_24576,1_{uuid(0, 1)}_100_24576]")
    }
    cluster.extender.see_pod(decode.pod(json.dumps(bound).encode()))
    assert cluster.filter(a_pod("b", **SMALL))["NodeNames"] == []
    bound["status"] = {"phase": "Succeeded"}
    cluster.extender.see_pod(decode.pod(json.dumps(bound).encode()))
    assert cluster.filter(a_pod("b", **SMALL))["NodeNames"] == ["n0"]


async def test_forged_claims_of_a_pod_that_is_not_bound_are_worth_nothing() -> None:
    """A tenant would dictate its own cards, or block all of a cluster (vgpu-manager §12.3)."""
    cluster = Cluster(1)
    forged = a_pod("forged", **SMALL)
    forged["metadata"]["annotations"] = {
        "nvidia.com/pre-allocated": f"default[1_{uuid(0, 1)}_100_24576]",
        "nvidia.com/predicate-node": "n0",
        "nvidia.com/predicate-time": "9999999999999999999",
    }
    cluster.extender.see_pod(decode.pod(json.dumps(forged).encode()))
    assert cluster.book.taken("n0") == ((0, 0, 0), (0, 0, 0))
    assert cluster.filter(forged)["NodeNames"] == ["n0"]
    assert cluster.book.taken("n0") == ((1, 1024, 10), (0, 0, 0))


async def test_nonsense_in_a_bound_pod_is_told_and_costs_nothing_else() -> None:
    """It counts for nothing, and the journal names the pod."""
    cluster = Cluster(1)
    bound = a_pod("a", node="n0", **SMALL)
    bound["metadata"]["annotations"] = {"nvidia.com/pre-allocated": "nonsense"}
    for _ in range(3):  # each change of the pod shows it again
        cluster.extender.see_pod(decode.pod(json.dumps(bound).encode()))
    (told,) = [
        entry.facts
        for entry in cluster.journal.entries
        if entry.event == "scheduler.claims_unreadable"
    ]
    assert told["pod"] == "default/a"
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == ["n0"]


async def test_a_pod_that_asks_for_no_card_goes_anywhere() -> None:
    """The extender is asked about every pod of its scheduler, and binds those, too."""
    cluster, pod = Cluster(), a_pod()
    assert cluster.filter(pod, "n1", "elsewhere") == {
        "Nodes": None,
        "NodeNames": ["n1", "elsewhere"],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": None,
        "Error": "",
    }
    assert await _bind_known(cluster, pod) == ""
    ((verb, path, body),) = cluster.server.requests
    assert (verb, path) == ("POST", "/api/v1/namespaces/default/pods/train/binding")
    assert body["metadata"]["annotations"] == {}


async def test_another_pod_of_the_name_is_not_bound() -> None:
    """It was made anew since kube-scheduler read it, and may ask for cards now."""
    cluster, pod = Cluster(), a_pod()
    new = {**pod, "metadata": {**pod["metadata"], "uid": "uid-new"}}
    cluster.server.pods["/api/v1/namespaces/default/pods/train"] = new
    assert "no cards are kept for pod default/train" in await cluster.bind(pod, "n0")
    assert cluster.server.requests == []


async def test_nodes_are_answered_in_the_form_in_which_they_came() -> None:
    """A scheduler without ``nodeCacheCapable`` sends and wants objects."""
    cluster = Cluster()
    items = [{"metadata": {"name": name}, "spec": {"x": 1}} for name in ("n1", "n0")]
    answer = cluster.filter(a_pod(**SMALL), NodeNames=None, Nodes={"items": items})
    assert answer["Nodes"] == {"items": items[:1]}
    assert answer["NodeNames"] is None
    assert answer["FailedNodes"] == {}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "no ExtenderArgs"),
        (b"[" * 100_000, "no ExtenderArgs"),
        (b"{}", "no Pod"),
        (b'{"Pod": null, "NodeNames": []}', "no Pod"),
        (b'{"Pod": 5, "NodeNames": []}', "the API server sent a pod that cannot be read"),
        (b'{"Pod": {"metadata": {}}, "NodeNames": 7}', "no ExtenderArgs"),
        (json.dumps({"Pod": a_pod(**SMALL), "NodeNames": []}).encode(), "No schedulable nodes"),
        (json.dumps({"Pod": a_pod(**SMALL)}).encode(), "No schedulable nodes"),
        (
            json.dumps({"Pod": a_pod(**SMALL), "Nodes": {"items": [{"a": 1}]}}).encode(),
            "Nodes: Object missing required field",
        ),
        (
            json.dumps({"Pod": a_pod(node="n0", **SMALL), "NodeNames": ["n0"]}).encode(),
            "pod default/train is bound to n0 already",
        ),
        (
            json.dumps({"Pod": a_pod(number="1", cores="101"), "NodeNames": ["n0"]}).encode(),
            "nvidia.com/vgpu-cores is '101'; expected percent of each GPU's compute",
        ),
    ],
)
async def test_bad_arguments_get_one_sentence_and_keep_no_card(body: bytes, error: str) -> None:
    """The answer is well-formed whatever the question was."""
    cluster = Cluster()
    answer = json.loads(cluster.extender.filter(body))
    assert error in answer["Error"]
    assert len(answer["Error"]) < 1000
    assert (answer["NodeNames"], answer["FailedNodes"]) == (None, {})
    assert cluster.book.taken("n0") == ((0, 0, 0), (0, 0, 0))


@pytest.mark.parametrize("name", ["../../nodes/n0", "", "A", "a" * 300])
async def test_a_name_that_leads_elsewhere_is_no_path(name: str) -> None:
    """Anybody in the scheduler's pod can send a bind."""
    cluster = Cluster()
    for field in ("PodName", "PodNamespace", "Node"):
        arguments = {"PodName": "a", "PodNamespace": "b", "PodUID": "c", "Node": "n0", field: name}
        answer = json.loads(await cluster.extender.bind(json.dumps(arguments).encode()))
        assert "is not a name that Kubernetes allows" in answer["Error"]
    assert cluster.server.requests == []


@pytest.mark.parametrize("body", [b"", b"{}", b'{"PodName": 5}', b"[" * 100_000])
async def test_bad_arguments_of_a_bind_get_one_sentence(body: bytes) -> None:
    """Nothing is sent to the API server."""
    cluster = Cluster()
    assert "no ExtenderBindingArgs" in json.loads(await cluster.extender.bind(body))["Error"]
    assert cluster.server.requests == []


async def test_a_topology_mode_that_cannot_be_followed_is_told_and_counted() -> None:
    """vgpu-manager §5.6, §5.10: the pod runs all the same; a strict mode waits."""
    cluster = Cluster(1)
    loose, strict = a_pod("loose", **WHOLE), a_pod("strict", **WHOLE)
    loose["metadata"]["annotations"] = {"nvidia.com/device-topology-mode": "link"}
    strict["metadata"]["annotations"] = {"nvidia.com/device-topology-mode": "link-strict"}
    assert cluster.filter(strict)["FailedNodes"] == {"n0": "Link topology unsatisfied"}
    assert cluster.filter(loose)["NodeNames"] == ["n0"]
    assert ("loose TopologyFallback", "link is not possible on n0: no links are known") in (
        cluster.raised
    )
    text, _ = cluster.extender._metrics.text("")
    assert b'vgpu_scheduler_topology_placement_total{mode="link",result="fallback"} 1.0' in text
    assert b'vgpu_scheduler_topology_strict_reject_total{mode="link-strict"} 1.0' in text
