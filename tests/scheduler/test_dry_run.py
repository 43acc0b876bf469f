"""The verb filter-dryrun: a question without consequences."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.families.vgpu_manager.scheduling.nodes import KEYS, entry, node_texts, uuid
from tests.scheduler.test_extender import SMALL, WHOLE, Cluster, a_pod
from vgpu_agent.cluster import decode
from vgpu_agent.families.vgpu_manager.scheduling.family import VgpuManagerScheduling
from vgpu_agent.scheduler.dry_run import FilterDryRun


def ask(cluster: Cluster, pod: Any, *names: str, **more: Any) -> dict[str, Any]:
    """The answer of a dry run."""
    verb = FilterDryRun(
        book=cluster.book,
        family=VgpuManagerScheduling(KEYS),
        read_pod=decode.pod,
        read_node=decode.node,
        alignment=cluster.extender.alignment,
    )
    arguments = {"Pod": pod, "NodeNames": list(names) or list(cluster.nodes), **more}
    found: dict[str, Any] = json.loads(verb.answer(json.dumps(arguments).encode()))
    return found


async def test_all_nodes_that_fit_are_named_and_nothing_is_kept() -> None:
    """vgpu-manager §5.2; filter names one."""
    cluster = Cluster(3)
    cluster.filter(a_pod("other", **WHOLE), "n1")
    assert ask(cluster, a_pod(**SMALL), "n2", "n1", "n0", "nowhere") == {
        "Nodes": None,
        "NodeNames": ["n2", "n0"],
        "FailedNodes": {
            "n1": "Insufficient vGPU cores",
            "nowhere": "node missing from cache",
        },
        "FailedAndUnresolvableNodes": None,
        "Error": "",
    }
    assert cluster.book.taken("n0") == cluster.book.taken("n2") == ((0, 0, 0), (0, 0, 0))
    assert cluster.server.requests == []
    assert cluster.filter(a_pod("b", **WHOLE))["NodeNames"] == ["n0"]


async def test_a_refusal_counts_the_cards() -> None:
    """Filter's short phrase must not vary with the sample; this one is for people."""
    cluster = Cluster(1)
    cluster.filter(a_pod("a", number="1", cores="60", memory="1"))
    cluster.filter(a_pod("b", number="1", cores="60", memory="1"))
    answer = ask(cluster, a_pod("c", number="1", cores="50", memory="1"))
    assert answer["FailedNodes"] == {
        "n0": "Insufficient vGPU cores (cards: 2 × Insufficient vGPU cores)"
    }


async def test_what_the_pod_was_promised_does_not_stand_in_its_way() -> None:
    """It would be moved, so its own cards are free for it."""
    cluster, pod = Cluster(1), a_pod(**WHOLE)
    assert cluster.filter(pod)["NodeNames"] == ["n0"]
    before = cluster.book.taken("n0")
    assert ask(cluster, pod)["NodeNames"] == ["n0"]
    assert cluster.book.taken("n0") == before
    assert ask(cluster, a_pod("b", **WHOLE))["NodeNames"] == []


async def test_nodes_that_do_not_exist_yet_are_described_by_their_objects() -> None:
    """The Cluster Autoscaler asks whether a new Node would help; of a Node that exists the book
    knows more than the object says.
    """
    cluster = Cluster(1)
    cluster.filter(a_pod("other", **WHOLE), "n0")
    texts = node_texts([entry(card, uuid=uuid(9, card)) for card in range(2)])
    items = [
        {
            "metadata": {"name": name, "annotations": annotations},
            "status": {"allocatable": {KEYS.number: "20"}},
        }
        for name, annotations in (("n0", texts), ("template", texts), ("without", {}))
    ]
    answer = ask(cluster, a_pod(**WHOLE), NodeNames=None, Nodes={"items": items})
    assert answer["Nodes"] == {"items": [items[1]]}
    assert answer["NodeNames"] is None
    assert answer["FailedNodes"] == {
        "n0": "Insufficient vGPU cores",
        "without": "node has no vGPU registered",
    }


async def test_a_pod_that_asks_for_no_card_goes_anywhere() -> None:
    """Like filter."""
    assert ask(Cluster(), a_pod(), "x", "y")["NodeNames"] == ["x", "y"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "no ExtenderArgs"),
        (b"{}", "no Pod"),
        (json.dumps({"Pod": a_pod(**SMALL)}).encode(), "No schedulable nodes"),
        (
            json.dumps({"Pod": a_pod(node="n0", **SMALL), "NodeNames": ["n0"]}).encode(),
            "pod default/train is bound to n0 already",
        ),
        (
            json.dumps(
                {
                    "Pod": a_pod(**SMALL),
                    "Nodes": {"items": [{"metadata": {"name": "x", "annotations": 5}}]},
                }
            ).encode(),
            "x that cannot be read",
        ),
    ],
)
async def test_bad_arguments_get_one_sentence(body: bytes, error: str) -> None:
    """The answer is well-formed whatever the question was."""
    cluster = Cluster()
    verb = FilterDryRun(
        book=cluster.book,
        family=VgpuManagerScheduling(KEYS),
        read_pod=decode.pod,
        read_node=decode.node,
        alignment=cluster.extender.alignment,
    )
    answer = json.loads(verb.answer(body))
    assert error in answer["Error"]
    assert (answer["NodeNames"], answer["FailedNodes"]) == (None, {})
