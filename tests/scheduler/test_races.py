"""Races between filter, bind and the watch: retries, late events, cards that change, and the loss
of the lead. An independent sum over the API server's pods finds every card given twice.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.families.vgpu_manager.scheduling.nodes import KEYS, entry, node_texts, uuid
from tests.scheduler.strict_server import StrictCluster
from tests.scheduler.test_extender import GRACE_SECONDS, SMALL, WHOLE, a_pod
from vgpu_agent.cluster import decode
from vgpu_agent.errors import ClusterError
from vgpu_agent.nodes import Node

FREE = ((0, 0, 0), (0, 0, 0))


def change_node(cluster: StrictCluster, *entries: dict[str, Any], node: str = "n0") -> None:
    """Let the watch show a Node with these cards."""
    texts = node_texts(entries)
    cluster.extender.see_node(Node(node, "u", texts, {}, "", "", {}, {KEYS.number: "20"}, {}, "2"))


# -- the watch is behind --------------------------------------------------------------------------


async def test_a_bound_pod_is_not_placed_again() -> None:
    """kube-scheduler's own watch may be behind: it asks again about a pod whose bind got no answer.
    Placed on another Node, the pod would free the cards of that on which it runs.
    """
    cluster = StrictCluster()
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod, "n0")
    cluster.strict.silent.add("POST")
    assert "no answer" in await cluster.bind(pod, "n0")
    cluster.see("a")
    before = cluster.book.taken("n0")
    answer = cluster.filter(pod, "n0", "n1")
    assert "is bound to n0 already" in answer["Error"]
    assert cluster.book.taken("n0") == before != FREE
    assert cluster.book.taken("n1") == FREE


async def test_a_second_bind_of_a_bound_pod_keeps_its_cards() -> None:
    """The first one got no answer. The API server refuses the second one since the pod is bound
    already, and the watch has not shown that yet.
    """
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    cluster.strict.silent.add("POST")
    await cluster.bind(pod, "n0")
    cluster.strict.silent.clear()
    cluster.filter(pod)
    assert await cluster.bind(pod, "n0") == ""
    assert cluster.bound("a") == "n0"
    assert cluster.filter(cluster.create("b", **WHOLE))["NodeNames"] == []


@pytest.mark.parametrize("status", [403, 409, 429])
async def test_a_refusal_after_a_bind_without_an_answer_proves_nothing(status: int) -> None:
    """The pod may be bound by the first try."""
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    cluster.strict.silent.add("POST")
    await cluster.bind(pod, "n0")
    cluster.strict.failure["PATCH"] = ClusterError(f"{status}: not now", status=status)
    cluster.strict.away.add("GET")
    assert await cluster.bind(pod, "n0") == f"{status}: not now"
    assert cluster.filter(cluster.create("b", **WHOLE))["NodeNames"] == []


async def test_two_binds_of_a_pod_at_once_are_one() -> None:
    """The refusal of the second one must not free what the first one is about to take."""
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    cluster.strict.slow["POST"] = asyncio.Event()
    first = asyncio.ensure_future(cluster.bind(pod, "n0"))
    await asyncio.sleep(0)
    assert "is being bound to n0 already" in await cluster.bind(pod, "n0")
    assert cluster.filter(pod)["NodeNames"] == ["n0"]
    cluster.strict.slow["POST"].set()
    assert await first == ""
    assert cluster.filter(cluster.create("b", **WHOLE))["NodeNames"] == []
    assert [verb for verb, *_ in cluster.strict.requests] == ["PATCH", "POST"]


async def test_a_pod_that_is_deleted_during_its_bind_keeps_nothing() -> None:
    """The watch may show it before the API server answers the bind, or after."""
    for deleted_first in (True, False):
        cluster = StrictCluster(1)
        pod = cluster.create("a", **WHOLE)
        cluster.filter(pod)
        cluster.strict.slow["POST"] = asyncio.Event()
        bind = asyncio.ensure_future(cluster.bind(pod, "n0"))
        await asyncio.sleep(0)
        if deleted_first:
            cluster.gone("a")
        else:
            cluster.strict.remove("a")
        cluster.strict.slow["POST"].set()
        assert "404" in await bind
        assert cluster.book.taken("n0") == FREE
        if not deleted_first:
            cluster.extender.forget_pod("uid-a")
        assert cluster.book.taken("n0") == FREE


async def test_a_pod_that_is_made_anew_during_its_bind_is_not_bound() -> None:
    """Its name is that of another pod now."""
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    new = a_pod("a", **SMALL)
    new["metadata"]["uid"] = "uid-new"
    cluster.strict.create(new)
    assert "another UID" in await cluster.bind(pod, "n0")
    assert cluster.bound("a") == ""
    assert cluster.book.taken("n0") == FREE


async def test_the_watch_may_show_a_bind_before_its_answer() -> None:
    """Both orders lead to the same book."""
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    cluster.strict.slow["POST"] = asyncio.Event()
    bind = asyncio.ensure_future(cluster.bind(pod, "n0"))
    await asyncio.sleep(0)
    seen = cluster.strict.pod("a")
    seen["spec"]["nodeName"] = "n0"  # by another scheduler, in the same moment
    cluster.see("a")
    cluster.strict.slow["POST"].set()
    await bind
    assert cluster.book.taken("n0") == ((1, 24576, 100), (1, 24576, 100))
    cluster.gone("a")
    assert cluster.book.taken("n0") == FREE


@pytest.mark.looptime
@pytest.mark.parametrize("bound", [True, False])
async def test_cards_of_a_pod_that_the_watch_never_shows_are_given_back(bound: bool) -> None:
    """It was created, placed and deleted while the watch was broken off, or its bind never reached
    the API server. Nothing but a question can end the promise.
    """
    cluster = StrictCluster()
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod, "n0")
    (cluster.strict.silent if bound else cluster.strict.away).add("POST")
    await cluster.bind(pod, "n0")
    if bound:
        cluster.strict.remove("a")
    cluster.extender.expire_promises()
    await cluster.extender.check_unconfirmed_binds()
    assert cluster.book.taken("n0") != FREE  # the answer may still be under way
    await asyncio.sleep(GRACE_SECONDS + 1)
    cluster.strict.away.add("GET")
    await cluster.extender.check_unconfirmed_binds()
    assert cluster.book.taken("n0") != FREE  # the API server did not answer
    cluster.strict.away.clear()
    await asyncio.sleep(GRACE_SECONDS + 1)
    await cluster.extender.check_unconfirmed_binds()
    assert cluster.book.taken("n0") == FREE


@pytest.mark.looptime
@pytest.mark.parametrize("asked_by", ["clear-up", "second bind"])
async def test_a_bound_pod_that_the_watch_never_shows_keeps_its_cards_until_it_is_gone(
    asked_by: str,
) -> None:
    """The API server says that it is bound. The watch, which has not shown it, will not show its
    end either if history is lost meanwhile, so the question is repeated.
    """
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    if asked_by == "second bind":
        cluster.strict.silent.add("POST")
        await cluster.bind(pod, "n0")
        cluster.strict.silent.clear()
    assert await cluster.bind(pod, "n0") == ""
    for _ in range(2):
        await asyncio.sleep(GRACE_SECONDS + 1)
        cluster.extender.expire_promises()
        await cluster.extender.check_unconfirmed_binds()
        assert cluster.book.taken("n0") == ((1, 24576, 100), (1, 24576, 100))
        assert cluster.filter(cluster.create("b", **WHOLE))["NodeNames"] == []
    cluster.strict.remove("a")
    await asyncio.sleep(GRACE_SECONDS + 1)
    await cluster.extender.check_unconfirmed_binds()
    assert cluster.book.taken("n0") == FREE


@pytest.mark.looptime
@pytest.mark.parametrize("end", ["bound to another Node", "ended"])
async def test_a_promise_that_the_api_server_contradicts_ends(end: str) -> None:
    """Cards that the pod holds elsewhere are counted when the watch shows them."""
    cluster = StrictCluster()
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod, "n0")
    cluster.strict.silent.add("POST")
    await cluster.bind(pod, "n0")
    stored = cluster.strict.pod("a")
    if end == "ended":
        stored["status"] = {"phase": "Succeeded"}
    else:
        stored["spec"]["nodeName"] = "n1"
    await asyncio.sleep(GRACE_SECONDS + 1)
    await cluster.extender.check_unconfirmed_binds()
    assert cluster.book.taken("n0") == cluster.book.taken("n1") == FREE
    assert cluster.extender.kept("uid-a") is None


# -- cards change ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entries",
    [
        [entry(0, healthy=False), entry(1)],
        [entry(0, mig=True), entry(1)],
        [entry(0, uuid=uuid(7, 0)), entry(1)],
        [entry(0, memory=1000), entry(1)],
        [entry(0)],
        [],
    ],
    ids=["unhealthy", "mig", "replaced", "smaller", "taken out", "unreadable"],
)
async def test_cards_that_change_between_filter_and_bind_are_not_bound(
    entries: list[dict[str, Any]],
) -> None:
    """The container could not start there; its claim would name another card."""
    cluster = StrictCluster()
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod, "n0")
    change_node(cluster, *entries)
    assert "can no longer have its cards on n0" in await cluster.bind(pod, "n0")
    assert cluster.bound("a") == ""
    assert cluster.strict.requests == []
    (node,) = cluster.filter(pod, "n0", "n1")["NodeNames"]
    assert await cluster.bind(pod, node) == ""


async def test_a_card_that_falls_ill_while_labels_are_written_is_not_bound() -> None:
    """The request before the Binding took long. Filtered again, the pod gets another card."""
    cluster = StrictCluster(1)
    pod = cluster.create("a", **SMALL)
    cluster.filter(pod)
    cluster.strict.slow["PATCH"] = asyncio.Event()
    bind = asyncio.ensure_future(cluster.bind(pod, "n0"))
    await asyncio.sleep(0)
    change_node(cluster, entry(0, healthy=False), entry(1))
    cluster.strict.slow["PATCH"].set()
    assert "can no longer have its cards on n0" in await bind
    assert cluster.bound("a") == ""
    assert cluster.book.taken("n0") == FREE
    cluster.filter(pod)
    assert await cluster.bind(pod, "n0") == ""
    assert cluster.book.taken("n0") == ((0, 0, 0), (1, 1024, 10))


async def test_a_node_that_is_deleted_between_filter_and_bind_is_not_bound_to() -> None:
    """Created again, it may have other cards."""
    cluster = StrictCluster()
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod, "n0")
    cluster.extender.forget_node("n0")
    assert "can no longer have its cards on n0" in await cluster.bind(pod, "n0")
    assert cluster.bound("a") == ""


async def test_a_promise_on_a_card_that_fell_ill_is_made_anew() -> None:
    """FilterCalls again, the extender chooses other cards, here and on other Nodes."""
    cluster = StrictCluster(1)
    pod = cluster.create("a", **SMALL)
    cluster.filter(pod)
    assert cluster.book.taken("n0") == ((1, 1024, 10), (0, 0, 0))
    change_node(cluster, entry(0, healthy=False), entry(1))
    assert cluster.filter(pod)["NodeNames"] == ["n0"]
    assert cluster.book.taken("n0") == ((0, 0, 0), (1, 1024, 10))


async def test_the_numbers_of_cards_are_those_of_the_moment_of_the_bind() -> None:
    """A restarted agent may have found its cards in another order."""
    cluster = StrictCluster(1)
    pod = cluster.create("a", **SMALL)
    cluster.filter(pod)
    change_node(cluster, entry(0, uuid=uuid(0, 1)), entry(1, uuid=uuid(0, 0)))
    assert await cluster.bind(pod, "n0") == ""
    annotations = cluster.strict.pod("a")["metadata"]["annotations"]
    assert annotations[KEYS.pre_allocated] == f"default[1_{uuid(0, 0)}_10_1024]"


# -- who leads ------------------------------------------------------------------------------------


async def test_promises_of_a_leader_end_with_its_lead() -> None:
    """The next leader does not know them and gives the cards to others. Leading again, this one
    must not give them once more.
    """
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    cluster.extender.stop_leading()
    assert cluster.book.taken("n0") == FREE
    assert "no cards are kept" in await cluster.bind(pod, "n0")


async def test_what_another_leader_has_given_away_is_not_given_again() -> None:
    """Two kube-schedulers, each with an extender of its own, change places."""
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    other = cluster.create("b", **SMALL)
    other["spec"]["nodeName"] = "n0"
    other["metadata"]["annotations"] = {KEYS.pre_allocated: f"default[0_{uuid(0, 0)}_10_1024]"}
    cluster.strict.create(other)
    cluster.see("b")
    assert "can no longer have its cards on n0" in await cluster.bind(pod, "n0")
    assert cluster.filter(pod)["NodeNames"] == []


async def test_a_leader_that_loses_its_lead_during_a_bind_does_not_bind() -> None:
    """The first request took so long that another one leads."""
    leads = [True]
    cluster = StrictCluster(1, leads=lambda: leads[0])
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    cluster.strict.slow["PATCH"] = asyncio.Event()
    bind = asyncio.ensure_future(cluster.bind(pod, "n0"))
    await asyncio.sleep(0)
    leads[0] = False
    cluster.extender.stop_leading()
    cluster.strict.slow["PATCH"].set()
    assert "leads no longer" in await bind
    assert cluster.bound("a") == ""
    assert cluster.book.taken("n0") == FREE


async def test_a_request_that_arrives_late_does_not_spoil_the_claims_of_a_bound_pod() -> None:
    """Meanwhile the next leader has bound the pod elsewhere. The claims are written together with
    the Node or not at all.
    """
    leads = [True]
    cluster = StrictCluster(leads=lambda: leads[0])
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod, "n0")
    cluster.strict.slow["PATCH"] = asyncio.Event()
    bind = asyncio.ensure_future(cluster.bind(pod, "n0"))
    await asyncio.sleep(0)
    leads[0] = False
    stored, claims = cluster.strict.pod("a"), f"default[0_{uuid(1, 0)}_100_24576]"
    stored["spec"]["nodeName"] = "n1"
    stored["metadata"]["annotations"] = {KEYS.pre_allocated: claims}
    cluster.strict.slow["PATCH"].set()
    assert "leads no longer" in await bind
    assert cluster.strict.pod("a")["metadata"]["annotations"][KEYS.pre_allocated] == claims


# -- texts of pods --------------------------------------------------------------------------------


async def test_a_bound_pod_whose_claims_are_spoiled_keeps_its_cards() -> None:
    """Any user who may edit the pod can write there, and the containers run on."""
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    assert await cluster.bind(pod, "n0") == ""
    stored = cluster.strict.pod("a")
    good = stored["metadata"]["annotations"][KEYS.pre_allocated]
    for text in ("nonsense", good + " " * 40_000, "x" * 200_000):
        stored["metadata"]["annotations"] = {KEYS.pre_allocated: text}
        cluster.see("a")
        assert cluster.filter(cluster.create("b", **SMALL))["NodeNames"] == []


@pytest.mark.parametrize("amounts", ["0_0", "100_999999999", "1_1"])
async def test_a_bound_pod_whose_claims_are_changed_keeps_its_cards(amounts: str) -> None:
    """Less would give its card to others as well, and more would block it."""
    cluster = StrictCluster(1)
    pod = cluster.create("a", **SMALL)
    cluster.filter(pod)
    assert await cluster.bind(pod, "n0") == ""
    taken = cluster.book.taken("n0")
    text = f"default[0_{uuid(0, 0)}_{amounts}]"
    for key in (KEYS.pre_allocated, KEYS.real_allocated):
        cluster.strict.pod("a")["metadata"]["annotations"][key] = text
        cluster.see("a")
        assert cluster.book.taken("n0") == taken


async def test_claims_of_containers_that_ask_for_nothing_count_for_nothing() -> None:
    """A tenant who names the Node itself would block all of its cards for ever, without one device
    from the kubelet.
    """
    cluster = StrictCluster(1)
    text = f"default[0_{uuid(0, 0)}_100_24576,1_{uuid(0, 1)}_100_24576]"
    for name in ("default", "elsewhere"):
        forged = a_pod("forged", node="n0")
        forged["metadata"]["annotations"] = {
            KEYS.pre_allocated: text.replace("default", name),
            KEYS.real_allocated: text.replace("default", name),
        }
        cluster.extender.see_pod(decode.pod(json.dumps(forged).encode()))
        assert cluster.book.taken("n0") == FREE


@pytest.mark.parametrize(("text", "fits"), [("2k", True), ("20", True), ("0", False), ("x", False)])
async def test_slots_are_read_as_kubernetes_writes_them(text: str, fits: bool) -> None:
    """The kubelet of a Node with eight cards of 250 slots reports ``2k``."""
    cluster = StrictCluster(1)
    texts = node_texts([entry(card) for card in range(2)])
    cluster.extender.see_node(Node("n0", "u", texts, {}, "", "", {}, {KEYS.number: text}, {}, "2"))
    assert bool(cluster.filter(cluster.create("a", **SMALL))["NodeNames"]) is fits
