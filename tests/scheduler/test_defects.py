"""The defects of the replaced extender that concern filter and bind, one row for each
(vgpu-manager §12.1 to §12.3).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from tests.families.vgpu_manager.scheduling.nodes import KEYS, entry, node_texts, uuid
from tests.scheduler.strict_server import StrictCluster
from tests.scheduler.test_extender import GRACE_SECONDS, SMALL, WHOLE, a_pod
from vgpu_agent.cluster import decode
from vgpu_agent.families.scheduling import SchedulingOptions
from vgpu_agent.families.vgpu_manager.scheduling.family import VgpuManagerScheduling
from vgpu_agent.nodes import Node

pytestmark = pytest.mark.looptime

FREE = ((0, 0, 0), (0, 0, 0))
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


class Row(NamedTuple):
    """A defect: where the contract has it, what it is, and what holds here instead."""

    contract: str
    defect: str
    check: Callable[[], Awaitable[None]]


def show_node(cluster: StrictCluster, name: str, texts: dict[str, str], slots: str = "20") -> None:
    """Let the watch show a Node."""
    cluster.extender.see_node(Node(name, "u", texts, {}, "", "", {}, {KEYS.number: slots}, {}, "1"))


def see(cluster: StrictCluster, pod: dict[str, Any]) -> None:
    """Let the watch show a pod that the API server need not have."""
    cluster.extender.see_pod(decode.pod(json.dumps(pod).encode()))


def with_texts(pod: dict[str, Any], **texts: str) -> dict[str, Any]:
    """Annotate a pod, by the names of keys."""
    pod["metadata"]["annotations"] = {getattr(KEYS, key): text for key, text in texts.items()}
    return pod


async def _containers_share_cards() -> None:
    cluster = StrictCluster(1)

    def pod(name: str, count: int) -> dict[str, Any]:
        found = a_pod(name, number="1", cores="60", memory="1000")
        (container,) = found["spec"]["containers"]
        found["spec"]["containers"] = [{**container, "name": f"c{each}"} for each in range(count)]
        return found

    assert cluster.filter(pod("three", 3))["FailedNodes"] == {"n0": "Insufficient vGPU cores"}
    assert cluster.filter(pod("two", 2))["NodeNames"] == ["n0"]
    assert cluster.book.taken("n0") == ((1, 1000, 60), (1, 1000, 60))


async def _pods_of_one_moment_are_told_apart() -> None:
    cluster = StrictCluster(1)
    pods = [cluster.create(f"p{number}", **SMALL) for number in range(5)]
    for pod in pods:
        cluster.filter(pod)
    await asyncio.gather(*(cluster.bind(pod, "n0") for pod in pods))
    times = [
        int(cluster.strict.pod(f"p{number}")["metadata"]["annotations"][KEYS.predicate_time])
        for number in range(5)
    ]
    assert len(set(times)) == len(times)


async def _filter_asks_the_api_server_nothing() -> None:
    cluster = StrictCluster()
    for number in range(100):
        cluster.filter(a_pod(f"p{number}", **SMALL))
    assert cluster.strict.requests == []


async def _nothing_is_decoded_again() -> None:
    cluster = StrictCluster()
    cluster.extender._family = counting = Counting(KEYS)
    for number in range(20):
        cluster.filter(a_pod(f"p{number}", **SMALL))
    assert counting.demands == 20


class Counting(VgpuManagerScheduling):
    """Counts what is read. State: how often the demand of a pod was."""

    demands = 0

    def read_demand(self, pod: Any) -> Any:
        """Count it."""
        self.demands += 1
        return super().read_demand(pod)

    def read_cards(self, *_: Any) -> Any:
        """No Node is read for a pod."""
        raise AssertionError("a Node is read for a pod")

    def read_holding(self, pod: Any) -> Any:
        """No pod is read for another one."""
        raise AssertionError("a pod is read for another one")


async def _a_pod_costs_two_requests() -> None:
    cluster = StrictCluster()
    pod = cluster.create("a", **SMALL)
    cluster.filter(pod)
    began = asyncio.get_running_loop().time()
    assert await cluster.bind(pod, "n0") == ""
    assert asyncio.get_running_loop().time() == began  # no pause of 30 ms either
    assert [verb for verb, *_ in cluster.strict.requests] == ["PATCH", "POST"]


async def _a_pod_moves_with_the_sample() -> None:
    cluster = StrictCluster(3)
    pod = cluster.create("a", **WHOLE)
    assert cluster.filter(pod, "n0", "n1")["NodeNames"] == ["n0"]
    assert cluster.filter(pod, "n2")["NodeNames"] == ["n2"]
    assert [cluster.book.taken(f"n{node}") == FREE for node in range(3)] == [True, True, False]
    assert await cluster.bind(pod, "n2") == ""


async def _a_pod_that_is_never_bound_keeps_nothing() -> None:
    cluster = StrictCluster(1)
    cluster.filter(cluster.create("a", **WHOLE))  # it has no condition PodScheduled
    await asyncio.sleep(GRACE_SECONDS + 1)
    cluster.extender.expire_promises()
    assert cluster.book.taken("n0") == FREE


async def _a_slow_bind_keeps_its_cards() -> None:
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    cluster.strict.slow["PATCH"] = asyncio.Event()
    bind = asyncio.ensure_future(cluster.bind(pod, "n0"))
    await asyncio.sleep(10 * GRACE_SECONDS)
    cluster.extender.expire_promises()
    await cluster.extender.check_unconfirmed_binds()
    assert cluster.filter(cluster.create("b", **WHOLE))["NodeNames"] == []
    cluster.strict.slow["PATCH"].set()
    assert await bind == ""


async def _forged_state_is_worth_nothing() -> None:
    cluster = StrictCluster(1)
    forged = with_texts(
        a_pod("a", **SMALL),
        pre_allocated=f"default[1_{uuid(0, 1)}_100_24576]",
        real_allocated=f"default[1_{uuid(0, 1)}_100_24576]",
        predicate_node="n0",
        predicate_time="9999999999999999999",
    )
    see(cluster, forged)
    assert cluster.book.taken("n0") == FREE
    cluster.strict.create(forged)
    cluster.filter(forged)
    assert cluster.book.taken("n0") == ((1, 1024, 10), (0, 0, 0))
    assert await cluster.bind(forged, "n0") == ""
    annotations = cluster.strict.pod("a")["metadata"]["annotations"]
    assert annotations[KEYS.pre_allocated] == f"default[0_{uuid(0, 0)}_10_1024]"
    assert annotations[KEYS.real_allocated] == ""


async def _a_card_that_recovers_is_offered_again() -> None:
    cluster = StrictCluster(1)
    for healthy, expected in ((False, []), (True, ["n0"])):
        show_node(cluster, "n0", node_texts([entry(card, healthy=healthy) for card in range(2)]))
        assert cluster.filter(a_pod(**SMALL))["NodeNames"] == expected


async def _a_long_node_name_is_no_bad_label() -> None:
    cluster = StrictCluster(0)
    for name in ("n" * 63, "n" * 64, "gpu." * 50 + "example", "n." * 20 + "x"):
        show_node(cluster, name, node_texts([entry(0)]))
        pod = cluster.create("a", **SMALL)
        assert cluster.filter(pod, name)["NodeNames"] == [name]
        assert await cluster.bind(pod, name) == ""
        patch = cluster.strict.requests[-2][2]
        assert all(LABEL.fullmatch(text or "") for text in patch["metadata"]["labels"].values())
        annotations = cluster.strict.pod("a")["metadata"]["annotations"]
        assert annotations[KEYS.predicate_node] == name
        cluster.gone("a")


async def _one_bad_node_harms_no_other() -> None:
    texts = node_texts([entry(0), entry(1)])
    for spoiled, reason in (
        ({KEYS.node_register: json.dumps([entry(0), entry(2)])}, "node vGPU registry invalid"),
        ({KEYS.node_register: json.dumps([entry(1)])}, "node vGPU registry invalid"),
        ({KEYS.node_register: "[" * 50_000}, "node vGPU registry invalid"),
        ({KEYS.node_register: "x" * 262_144}, "node vGPU registry invalid"),
        ({KEYS.node_register: ""}, "node has no vGPU registered"),
        ({KEYS.node_config: "{}"}, "node vGPU configuration invalid"),
        ({KEYS.node_config: ""}, "node has no vGPU configuration"),
    ):
        cluster = StrictCluster(1)
        show_node(cluster, "bad", {**texts, **spoiled})
        answer = cluster.filter(a_pod(**SMALL), "bad", "n0")
        assert (answer["NodeNames"], answer["Error"]) == (["n0"], "")
        answer = cluster.filter(a_pod("c", number="1", memory="999999"), "bad", "n0")
        assert answer["FailedNodes"] == {"bad": reason, "n0": "Insufficient vGPU memory"}
        show_node(cluster, "bad", texts)  # mended
        assert cluster.filter(a_pod("b", **WHOLE), "bad")["NodeNames"] == ["bad"]


async def _a10_is_no_a100() -> None:
    for cut, expected in ((False, []), (True, ["n0"])):
        cluster = StrictCluster(1)
        cluster.extender._family = VgpuManagerScheduling(
            KEYS, SchedulingOptions(types_match_substrings=cut)
        )
        show_node(cluster, "n0", node_texts([entry(0, type="NVIDIA A100-SXM4-80GB")]))
        pod = with_texts(a_pod(**SMALL), include_type="A10")
        assert cluster.filter(pod)["NodeNames"] == expected


async def _too_many_cards_are_refused_once() -> None:
    cluster = StrictCluster(0)
    show_node(cluster, "n0", node_texts([entry(card) for card in range(20)]), "200")
    refused = cluster.filter(a_pod("a", number="17"), "n0")
    assert "at most 16" in refused["Error"]
    assert cluster.filter(a_pod("b", number="16"), "n0")["NodeNames"] == ["n0"]


async def _a_bind_that_comes_twice_is_one() -> None:
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    assert await cluster.bind(pod, "n0") == ""
    again = await cluster.bind(pod, "n0")  # the watch has not shown the first one
    assert again == ""
    cluster.see("a")
    assert "no cards are kept" in await cluster.bind(pod, "n0")
    assert cluster.book.taken("n0") == ((1, 24576, 100), (1, 24576, 100))


async def _a_node_that_is_made_anew_has_its_pods() -> None:
    cluster = StrictCluster(1)
    pod = cluster.create("a", **SMALL)
    cluster.filter(pod)
    await cluster.bind(pod, "n0")
    cluster.see("a")
    cluster.extender.forget_node("n0")
    assert cluster.filter(a_pod("b", **SMALL), "n0")["FailedNodes"] == {
        "n0": "node missing from cache"
    }
    show_node(cluster, "n0", cluster.nodes["n0"])
    assert cluster.book.taken("n0") == ((1, 1024, 10), (0, 0, 0))


async def _a_pod_that_is_made_anew_is_another_one() -> None:
    cluster = StrictCluster(1)
    pod = cluster.create("a", **WHOLE)
    cluster.filter(pod)
    new = a_pod("a", **SMALL)
    new["metadata"]["uid"] = "uid-new"
    cluster.gone("a")
    cluster.strict.create(new)
    assert "no cards are kept" in await cluster.bind(pod, "n0")
    assert cluster.filter(new)["NodeNames"] == ["n0"]
    assert await cluster.bind(new, "n0") == ""
    assert cluster.book.taken("n0") == ((1, 1024, 10), (0, 0, 0))


ROWS = (
    Row(
        "vgpu-manager §12.1, #2",
        "pods of one moment are mixed up",
        _pods_of_one_moment_are_told_apart,
    ),
    Row("vgpu-manager §12.1, #4", "containers of a pod exceed a card", _containers_share_cards),
    Row(
        "vgpu-manager §12.2", "filter waits for the API server", _filter_asks_the_api_server_nothing
    ),
    Row("vgpu-manager §12.2", "everything is decoded for each pod", _nothing_is_decoded_again),
    Row("vgpu-manager §12.2", "a pod costs four requests and 30 ms", _a_pod_costs_two_requests),
    Row(
        "vgpu-manager §12.2, vgpu-manager §5.2",
        "a pod waits for its first Node",
        _a_pod_moves_with_the_sample,
    ),
    Row("vgpu-manager §12.3, 4", "a reservation leaks", _a_pod_that_is_never_bound_keeps_nothing),
    Row("vgpu-manager §12.3, 4", "a slow bind loses its claim", _a_slow_bind_keeps_its_cards),
    Row("vgpu-manager §12.3, 5", "users dictate their cards", _forged_state_is_worth_nothing),
    Row("vgpu-manager §12.3, 6", "a card never recovers", _a_card_that_recovers_is_offered_again),
    Row(
        "vgpu-manager §12.3, 9",
        "a label of more than 63 characters",
        _a_long_node_name_is_no_bad_label,
    ),
    Row(
        "vgpu-manager §12.3, 10; vgpu-manager §3",
        "a malformed annotation ends it all",
        _one_bad_node_harms_no_other,
    ),
    Row("vgpu-manager §12.3, 10; vgpu-manager §4.1", "A10 matches A100", _a10_is_no_a100),
    Row("vgpu-manager §12.3, 11", "more than 16 cards", _too_many_cards_are_refused_once),
    Row("vgpu-manager §5.8", "a bind comes twice", _a_bind_that_comes_twice_is_one),
    Row(
        "vgpu-manager §4.4",
        "a Node is deleted and created again",
        _a_node_that_is_made_anew_has_its_pods,
    ),
    Row(
        "vgpu-manager §5.8",
        "a pod is made anew under its name",
        _a_pod_that_is_made_anew_is_another_one,
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.contract}: {row.defect}" for row in ROWS])
async def test_a_defect_of_the_replaced_extender_is_not_copied(row: Row) -> None:
    """See the row; two of them are vgpu-manager:D36."""
    await row.check()
