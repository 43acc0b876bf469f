"""The verb preempt, on a book that is fed as the watches feed it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.families.vgpu_manager.scheduling.nodes import (
    KEYS,
    MEMORY_MIB,
    entry,
    node_texts,
    uuid,
)
from tests.scheduler.test_extender import GRACE_SECONDS, Server
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.decode_scheduling import with_facts
from vgpu_agent.errors import AgentError
from vgpu_agent.families.vgpu_manager.scheduling.family import VgpuManagerScheduling
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import Node
from vgpu_agent.placement.nodes.book import Book
from vgpu_agent.placement.nodes.budgets import Budget, Budgets, Selector
from vgpu_agent.pods import Pod
from vgpu_agent.scheduler.extender import Extender
from vgpu_agent.scheduler.known_pods import KnownPods
from vgpu_agent.scheduler.metrics import Metrics
from vgpu_agent.scheduler.pod_events import PodEvents
from vgpu_agent.scheduler.preemption import Preemption


class Cluster:
    """Nodes ``n0``, ``n1``, … with two cards each, their extender and its verb."""

    def __init__(
        self, nodes: int = 1, cards: int = 2, resources: Mapping[str, str] | None = None
    ) -> None:
        family, read_pod = VgpuManagerScheduling(KEYS), with_facts(decode.pod)
        self.book, self.known, self.budgets = Book(), KnownPods(), Budgets()
        self.journal, self.metrics = Journal(), Metrics()
        self.told: list[tuple[str, str, str]] = []
        self.extender = Extender(
            book=self.book,
            family=family,
            read_pod=read_pod,
            api=Server(),
            journal=self.journal,
            grace_seconds=GRACE_SECONDS,
            known_pods=self.known,
        )
        self.verb = Preemption(
            book=self.book,
            family=family,
            read_pod=read_pod,
            known_pods=self.known,
            alignment=self.extender.alignment,
            budgets=self.budgets,
            resources_of_node=self.extender.resources_of_node,
            journal=self.journal,
            metrics=self.metrics,
            events=PodEvents(self),  # type: ignore[arg-type]  # a stand-in with the members that are used
        )
        self._read_pod = read_pod
        for node in range(nodes):
            texts = node_texts([entry(card, uuid=uuid(node, card)) for card in range(cards)])
            allocatable = {KEYS.number: str(10 * cards), **(resources or {})}
            self.extender.see_node(
                Node(f"n{node}", "u", texts, {}, "", "", {}, allocatable, {}, "1")
            )

    def raise_event(self, regarding: Pod, reason: str, message: str, kind: str = "Warning") -> None:
        """Keep an event, in the place of the queue."""
        assert kind == "Warning"
        self.told.append((regarding.name, reason, message))

    def runs(self, pod: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let the watch show a pod."""
        self.extender.see_pod(self._read_pod(json.dumps(pod).encode()))
        return pod

    async def victims(
        self, pod: Mapping[str, Any], proposed: Mapping[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        """Node → UIDs of the victims; ``proposed`` are UIDs by Node."""
        meta = {
            node: {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": 0}
            for node, uids in (proposed or {}).items()
        }
        arguments = {
            "Pod": pod,
            "NodeNameToVictims": None,
            "NodeNameToMetaVictims": meta,
            **more,
        }
        answer = json.loads(await self.verb.answer(json.dumps(arguments).encode()))
        assert list(answer) == ["NodeNameToMetaVictims"]
        return {
            node: [each["UID"] for each in victims["Pods"]]
            for node, victims in answer["NodeNameToMetaVictims"].items()
        }


def a_pod(
    name: str,
    node: int | None = None,
    *cards: int,
    part: int = 100,
    priority: int | None = 0,
    cpu: str = "1",
    number: int = 0,
    metadata: Mapping[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod as the API server has it: one that holds parts of cards of a Node, or one that asks for
    ``number`` of them.
    """
    amount = MEMORY_MIB * part // 100
    limits = {"cpu": cpu}
    if cards or number:
        limits |= {
            KEYS.number: str(number or len(cards)),
            KEYS.cores: str(part),
            KEYS.memory: str(amount),
        }
    found: dict[str, Any] = {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            **(metadata or {}),
        },
        "spec": {
            "containers": [{"name": "default", "resources": {"limits": limits}}],
            "priority": priority,
            **spec,
        },
    }
    if node is not None:
        found["spec"]["nodeName"] = f"n{node}"
        found["status"] = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
        claims = ",".join(f"{card}_{uuid(node, card)}_{part}_{amount}" for card in cards)
        if cards:
            annotations = found["metadata"].setdefault("annotations", {})
            annotations[KEYS.pre_allocated] = f"default[{claims}]"
    return found


def in_a_gang(name: str = "train", **more: Any) -> dict[str, Any]:
    """The metadata of a pod of a gang."""
    return {"annotations": {"scheduling.k8s.io/group-name": name}, **more}


def a_preemptor(**changed: Any) -> dict[str, Any]:
    """A pod that asks for one card."""
    return a_pod("high", **{"number": 1, "priority": 100, **changed})


async def test_victims_that_hold_the_cards_are_added() -> None:
    """kube-scheduler knows slots; which of the pods holds the card that the pod needs it does not
    know (vgpu-manager §5.9). Its own victims are superfluous then: vgpu-manager:D39.
    """
    cluster = Cluster(2)
    for node in range(2):
        cluster.runs(a_pod(f"small{node}", node, 0, part=10))
        cluster.runs(a_pod(f"fixed{node}", node, 0, part=50, priority=200))
    cluster.runs(a_pod("large", 0, 1))
    cluster.runs(a_pod("more", 1, 1, priority=200))
    proposed = {"n0": ["uid-small0"], "n1": ["uid-small1"], "elsewhere": ["uid-x"]}
    assert await cluster.victims(a_preemptor(), proposed) == {"n0": ["uid-large"]}
    text = cluster.metrics.text("")[0].decode()
    assert "vgpu_scheduler_preempt_victims_added_sum 1.0" in text
    assert 'vgpu_scheduler_verb_total{result="success",verb="preempt"} 1.0' in text


async def test_nodes_on_which_only_resources_were_short_stay_as_they_are() -> None:
    """Here a pod without cards has to go, for its CPU."""
    cluster = Cluster(1)
    cluster.runs(a_pod("web", 0, cpu="8"))
    arguments = {"n0": {"Pods": [{"UID": "uid-web"}], "NumPDBViolations": 1}}
    body = {"Pod": a_preemptor(), "NodeNameToMetaVictims": arguments}
    answer = json.loads(await cluster.verb.answer(json.dumps(body).encode()))
    assert answer == {"NodeNameToMetaVictims": arguments}


async def test_a_newer_kube_scheduler_proposes_nobody() -> None:
    """It also asks about Nodes where only the extender lacks room."""
    cluster = Cluster(1)
    cluster.runs(a_pod("a", 0, 0))
    cluster.runs(a_pod("b", 0, 1, priority=7))
    assert await cluster.victims(a_preemptor(), {"n0": []}) == {"n0": ["uid-a"]}
    assert await cluster.victims(a_preemptor(), NodeNameToMetaVictims={"n0": None}) == {
        "n0": ["uid-a"]
    }


async def test_nobody_goes_where_a_card_has_come_free() -> None:
    """Not on another Node either. Of a Node without victims kube-scheduler makes an error. No event
    calls it a failure: the pod is filtered again.
    """
    cluster = Cluster(2)
    cluster.runs(a_pod("a", 0, 0, 1, metadata=in_a_gang()))
    assert await cluster.victims(a_preemptor(), {"n0": [], "n1": []}) == {}
    assert cluster.told == []


async def test_a_pod_is_told_that_preemption_would_not_help() -> None:
    """vgpu-manager §5.9: without the event, its owner sees kube-scheduler's sentence alone, and not
    that the cards were the reason. Once, for kube-scheduler tries again and again.
    """
    cluster = Cluster(2)
    for node in range(2):
        cluster.runs(a_pod(f"high{node}", node, 0, 1, priority=200, metadata=in_a_gang()))
        cluster.runs(a_pod(f"web{node}", node))
    for _ in range(2):
        proposed = {"n0": ["uid-web0"], "n1": ["uid-web1"]}
        assert await cluster.victims(a_preemptor(), proposed) == {}
    ((name, reason, text),) = cluster.told
    assert (name, reason) == ("high", "PreemptionFailed")
    assert text.startswith("preemption: 0/2 nodes are available: ")


async def test_pods_that_may_not_preempt_or_ask_for_no_cards_are_told_nothing() -> None:
    """Nobody looked for victims of theirs."""
    cluster = Cluster(1)
    cluster.runs(a_pod("a", 0, 0, 1, metadata=in_a_gang()))
    assert await cluster.victims(a_preemptor(preemptionPolicy="Never"), {"n0": ["uid-a"]}) == {}
    assert await cluster.victims(a_preemptor(number=0), {"n0": ["uid-a"]}) == {"n0": ["uid-a"]}
    assert await cluster.victims(a_preemptor(), {}) == {}
    assert cluster.told == []


async def test_a_pod_is_told_which_gangs_it_may_break_up() -> None:
    """vgpu-manager §5.9: of the victims on any of the Nodes, as kube-scheduler has still to choose.
    Neither those of pods that stay nor those of pods in none.
    """
    cluster = Cluster(3)
    cluster.runs(a_pod("one", 0, 0, 1, metadata=in_a_gang()))
    cluster.runs(a_pod("two", 1, 0, 1, metadata=in_a_gang(namespace="bank")))
    cluster.runs(a_pod("three", 2, 0, 1))
    cluster.runs(a_pod("stays", 2, priority=200, metadata=in_a_gang("stays")))
    found = await cluster.victims(a_preemptor(), {f"n{node}": [] for node in range(3)})
    assert found == {"n0": ["uid-one"], "n1": ["uid-two"], "n2": ["uid-three"]}
    ((name, reason, text),) = cluster.told
    assert (name, reason) == ("high", "GangDisruptedByPreemption")
    assert "together: 'default/train' and 1 of other namespaces; " in text
    assert cluster.journal.entries[-1].facts["gangs"] == ["bank/train", "default/train"]


async def test_promises_count_and_are_no_victims() -> None:
    """Deleting a pod that is being bound would leave its Binding in flight."""
    cluster = Cluster(1)
    promised = a_pod("promised", number=1)
    cluster.extender.filter(json.dumps({"Pod": promised, "NodeNames": ["n0"]}).encode())
    cluster.runs(a_pod("low", 0, 1))
    assert await cluster.victims(a_preemptor(), {"n0": []}) == {"n0": ["uid-low"]}
    assert await cluster.victims(a_preemptor(number=2), {"n0": ["uid-low"]}) == {}
    assert await cluster.victims(a_preemptor(number=2), {"n0": ["uid-promised", "uid-low"]}) == {}
    text = cluster.metrics.text("")[0].decode()
    assert 'vgpu_scheduler_preempt_protected_total{reason="not_bound"} ' in text


async def test_the_preemptors_own_promise_does_not_count() -> None:
    """It is the room that it asks for."""
    cluster, pod = Cluster(1), a_preemptor()
    cluster.extender.filter(json.dumps({"Pod": pod, "NodeNames": ["n0"]}).encode())
    cluster.runs(a_pod("low", 0, 1))
    assert await cluster.victims(pod, {"n0": ["uid-low"]}) == {"n0": ["uid-low"]}
    assert await cluster.victims(pod, {"n0": []}) == {}


@pytest.mark.parametrize(
    "guarded",
    [
        {"priority": 100},
        {"priority": None},
        {"priority": 2_000_000_000},
        {"metadata": {"ownerReferences": [{"kind": "DaemonSet", "uid": "d", "controller": True}]}},
        {"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}},
        {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "g"}}},
        {"metadata": {"labels": {"app": "web"}}},
    ],
)
async def test_protected_pods_are_not_added(guarded: dict[str, Any]) -> None:
    """vgpu-manager §5.9; the last one by a budget."""
    cluster = Cluster(1)
    cluster.budgets.put(Budget("default", "b", Selector((("app", "web"),)), 0))
    cluster.runs(a_pod("low", 0, 0))
    cluster.runs(a_pod("guarded", 0, 1, **{"priority": -5, **guarded}))
    pod = a_preemptor(metadata={"labels": {"scheduling.x-k8s.io/pod-group": "g"}})
    assert await cluster.victims(pod, {"n0": []}) == {"n0": ["uid-low"]}
    pod = a_preemptor(number=2, metadata=pod["metadata"])
    pod["metadata"] |= {"name": "high", "namespace": "default", "uid": "uid-high"}
    assert await cluster.victims(pod, {"n0": ["uid-low"]}) == {}


async def test_a_protected_pod_that_goes_anyhow_is_waited_for() -> None:
    """Another one would go for nothing."""
    cluster = Cluster(1)
    cluster.runs(a_pod("low", 0, 0))
    going = {
        "ownerReferences": [{"kind": "DaemonSet", "uid": "d", "controller": True}],
        "deletionTimestamp": "2026-01-01T00:00:00Z",
    }
    cluster.runs(a_pod("going", 0, 1, metadata=going))
    assert await cluster.victims(a_preemptor(), {"n0": []}) == {"n0": ["uid-going"]}


async def test_priorities_must_be_known_for_more_victims() -> None:
    """vgpu-manager §5.9."""
    cluster = Cluster(1)
    cluster.runs(a_pod("low", 0, 0, 1, priority=-5))
    assert await cluster.victims(a_preemptor(priority=None), {"n0": []}) == {}
    assert await cluster.victims(a_preemptor(priority=None), {"n0": ["uid-low"]}) == {
        "n0": ["uid-low"]
    }


async def test_a_pod_that_may_not_preempt_has_no_victims() -> None:
    """``preemptionPolicy: Never``."""
    cluster = Cluster(1)
    cluster.runs(a_pod("low", 0, 0, 1))
    pod = a_preemptor(preemptionPolicy="Never")
    assert await cluster.victims(pod, {"n0": ["uid-low"]}) == {}


async def test_a_pod_without_cards_gets_its_victims_unchanged() -> None:
    """In both forms."""
    cluster, pod = Cluster(1), a_pod("high", priority=100)
    assert await cluster.victims(pod, {"n0": ["a", "b"], "x": ["c"]}) == {
        "n0": ["a", "b"],
        "x": ["c"],
    }
    full = {"n0": {"Pods": [a_pod("a", 0), a_pod("b", 0)], "NumPDBViolations": 2}}
    body = {"Pod": pod, "NodeNameToVictims": full, "NodeNameToMetaVictims": None}
    assert json.loads(await cluster.verb.answer(json.dumps(body).encode())) == {
        "NodeNameToMetaVictims": {
            "n0": {"Pods": [{"UID": "uid-a"}, {"UID": "uid-b"}], "NumPDBViolations": 2}
        }
    }


async def test_victims_as_pods() -> None:
    """Without ``nodeCacheCapable`` kube-scheduler sends whole pods; what they say counts, also
    before the watch has shown it.
    """
    cluster = Cluster(1)
    cluster.runs(a_pod("small", 0, 0, part=10))
    cluster.runs(a_pod("fixed", 0, 0, part=50, priority=200))
    cluster.runs(a_pod("large", 0, 1))
    for has_port, expected in ((False, ["uid-large"]), (True, ["uid-large", "uid-small"])):
        full = {"n0": {"Pods": [a_pod("small", 0, 0, part=10, hostNetwork=has_port)]}}
        pod = a_preemptor(hostNetwork=has_port)
        found = await cluster.victims(pod, NodeNameToVictims=full, NodeNameToMetaVictims=None)
        assert found == {"n0": expected}


async def test_resources_that_the_node_does_not_have_need_no_replacement() -> None:
    """kube-scheduler leaves ``vgpu-cores`` to the extender where the Node does not offer it."""
    for resources, spared in ((dict[str, str](), True), ({KEYS.cores: "200"}, False)):
        cluster = Cluster(1, resources=resources)
        cluster.runs(a_pod("small", 0, 0, part=10))
        cluster.runs(a_pod("fixed", 0, 0, part=50, priority=200))
        large = a_pod("large", 0, 1)
        del large["spec"]["containers"][0]["resources"]["limits"][KEYS.cores]
        cluster.runs(large)
        found = await cluster.victims(a_preemptor(), {"n0": ["uid-small"]})
        assert found == {"n0": ["uid-large"] if spared else ["uid-large", "uid-small"]}


async def test_violations_are_counted_anew() -> None:
    """kube-scheduler prefers the Node with the fewest."""
    cluster = Cluster(1)
    cluster.budgets.put(Budget("default", "b", Selector((("app", "web"),)), 0))
    web = {"labels": {"app": "web"}}
    cluster.runs(a_pod("small", 0, 0, part=10, metadata=web))
    cluster.runs(a_pod("fixed", 0, 0, part=50, priority=200))
    cluster.runs(a_pod("large", 0, 1))
    for proposed, violations in (("small", 0), ("unknown", 0)):
        meta = {"n0": {"Pods": [{"UID": f"uid-{proposed}"}], "NumPDBViolations": 1}}
        body = {"Pod": a_preemptor(), "NodeNameToMetaVictims": meta}
        answer = json.loads(await cluster.verb.answer(json.dumps(body).encode()))
        assert answer["NodeNameToMetaVictims"]["n0"]["NumPDBViolations"] == violations
    cluster.runs(a_pod("port", 0, 0, part=10, metadata=web, hostNetwork=True))
    meta = {"n0": {"Pods": [{"UID": "uid-port"}], "NumPDBViolations": 1}}
    body = {"Pod": a_preemptor(hostNetwork=True), "NodeNameToMetaVictims": meta}
    answer = json.loads(await cluster.verb.answer(json.dumps(body).encode()))
    assert answer["NodeNameToMetaVictims"]["n0"] == {
        "Pods": [{"UID": "uid-large"}, {"UID": "uid-port"}],
        "NumPDBViolations": 1,
    }


async def test_a_victim_that_the_watch_has_not_shown_is_kept() -> None:
    """kube-scheduler may be ahead by a moment."""
    cluster = Cluster(1)
    cluster.runs(a_pod("fixed", 0, 0, priority=200))
    cluster.runs(a_pod("large", 0, 1))
    found = await cluster.victims(a_preemptor(), {"n0": ["uid-new"]})
    assert set(found["n0"]) == {"uid-new", "uid-large"}


_POD = a_preemptor()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "no ExtenderPreemptionArgs"),
        (b"[" * 100_000, "no ExtenderPreemptionArgs"),
        (b"{}", "no Pod"),
        (b'{"Pod": null}', "no Pod"),
        (b'{"Pod": 5, "NodeNameToMetaVictims": {}}', "a pod that cannot be read"),
        (json.dumps({"Pod": _POD}).encode(), "neither NodeNameToVictims nor"),
        (
            json.dumps({"Pod": _POD, "NodeNameToMetaVictims": {"n": {"Pods": [{}]}}}).encode(),
            "a victim on Node 'n' has no UID",
        ),
        (
            json.dumps({"Pod": _POD, "NodeNameToMetaVictims": {"n": {"Pods": [7]}}}).encode(),
            "no ExtenderPreemptionArgs",
        ),
        (
            json.dumps({"Pod": _POD, "NodeNameToMetaVictims": {"n": 7}}).encode(),
            "no ExtenderPreemptionArgs",
        ),
        (
            json.dumps({"Pod": _POD, "NodeNameToVictims": {"n0": {"Pods": [{"a": 1}]}}}).encode(),
            "a victim: Object missing required field",
        ),
        (
            json.dumps(
                {"Pod": _POD, "NodeNameToVictims": {"n0": {"Pods": [{"metadata": {"uid": "u"}}]}}}
            ).encode(),
            "without a name or a UID",
        ),
        (
            json.dumps({"Pod": a_pod("a", 0, 0), "NodeNameToMetaVictims": {}}).encode(),
            "pod default/a is bound to n0 already",
        ),
        (
            json.dumps({"Pod": a_preemptor(priority="x"), "NodeNameToMetaVictims": {}}).encode(),
            "its priority cannot be read",
        ),
        (
            json.dumps({"Pod": a_preemptor(part=101), "NodeNameToMetaVictims": {}}).encode(),
            "expected percent of each GPU's compute",
        ),
    ],
)
async def test_bad_arguments_are_one_error(body: bytes, error: str) -> None:
    """The service answers 400 with it."""
    with pytest.raises(AgentError) as raised:
        await Cluster().verb.answer(body)
    assert error in str(raised.value)
    assert len(str(raised.value)) < 1000


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["", "uid-low"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["n0", "elsewhere", "Pods", "UID", "NumPDBViolations", "metadata", "uid", "spec"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@hypothesis.given(victims=_json, meta=_json)
def test_no_arguments_break_the_verb(victims: Any, meta: Any) -> None:
    """One error, or a well-formed answer that names a pod on each Node."""
    cluster = Cluster(1)
    cluster.runs(a_pod("low", 0, 0, 1))
    before = cluster.book.taken("n0")
    body = {"Pod": _POD, "NodeNameToVictims": victims, "NodeNameToMetaVictims": meta}
    with contextlib.suppress(AgentError):
        answer = json.loads(asyncio.run(cluster.verb.answer(json.dumps(body).encode())))
        for found in answer["NodeNameToMetaVictims"].values():
            assert found["Pods"]
            assert all(each["UID"] for each in found["Pods"])
    assert cluster.book.taken("n0") == before


async def test_a_hundred_nodes_are_answered_quickly() -> None:
    """Measured 20 ms on one core; other verbs wait meanwhile for a part of it only."""
    cluster = Cluster(100, 8)
    for node in range(100):
        for card in range(8):
            for place in range(2):
                name = f"p{node}-{card}-{place}"
                cluster.runs(a_pod(name, node, card, part=40 + node % 10, priority=place))
    proposed = {f"n{node}": [f"uid-p{node}-0-0"] for node in range(100)}
    began = time.perf_counter()
    found = await cluster.victims(a_preemptor(number=2), proposed)
    seconds = time.perf_counter() - began
    assert len(found) == 100
    assert {len(uids) for uids in found.values()} == {4}
    assert seconds < 1.0
