"""The explanation of one pod: why it does not start, or where it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from tests.families.vgpu_manager.scheduling.nodes import KEYS, MEMORY_MIB, entry, node_texts, uuid
from tests.scheduler.test_extender import SMALL, WHOLE, Cluster, a_pod
from vgpu_agent.cluster import decode
from vgpu_agent.families.vgpu_manager.scheduling.family import VgpuManagerScheduling
from vgpu_agent.nodes import Node
from vgpu_agent.placement.nodes import survey
from vgpu_agent.placement.nodes.book import Book
from vgpu_agent.placement.nodes.cards import Unfit
from vgpu_agent.placement.nodes.demand import ContainerDemand, Demand
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.placement.nodes.survey import finish
from vgpu_agent.pods import ContainerKind
from vgpu_agent.scheduler import page, shortage
from vgpu_agent.scheduler.explain import (
    FITS,
    MAX_ROWS,
    Explanation,
    Facts,
    Waiting,
    _amounts,
    explain,
)

NOW = 1787331600.0  # 2026-08-21 17:00:00 UTC, that of `Cluster`


def explained(
    cluster: Cluster,
    pod: Mapping[str, Any],
    *,
    every_node: bool = False,
    waiting: Waiting = Waiting(),  # noqa: B008 - a frozen value
) -> Explanation:
    """The explanation of a pod of the API server."""
    read, extender = decode.pod(json.dumps(pod).encode()), cluster.extender
    facts = Facts(
        read,
        waiting,
        VgpuManagerScheduling(KEYS),
        cluster.book.views(),
        cluster.book.holding(read.uid),
        None if read.node else extender.kept(read.uid),
        extender.records.filter_calls(read.uid),
        extender.records.started_at,
        tuple(extender.records.schedulers),
        extender.name_of,
        NOW + 12,
    )
    return finish(explain(facts, every_node=every_node))


def annotated(pod: dict[str, Any], **annotations: str) -> dict[str, Any]:
    """The pod with annotations by the names of `Keys`."""
    pod["metadata"]["annotations"] = {getattr(KEYS, key): each for key, each in annotations.items()}
    return pod


def bound(cluster: Cluster, name: str, claims: str, node: str = "n0") -> dict[str, Any]:
    """A pod that is bound with these claims, and that the watch shows."""
    pod = annotated(a_pod(name, node=node, **SMALL), pre_allocated=claims)
    cluster.extender.see_pod(decode.pod(json.dumps(pod).encode()))
    return pod


def claim(node: int, card: int, cores: int, memory: int) -> str:
    """The claim of a container ``default``."""
    return f"default[{card}_{uuid(node, card)}_{cores}_{memory}]"


def node(cluster: Cluster, name: str, texts: Mapping[str, str], slots: str = "20") -> None:
    """Show a Node to the extender."""
    cluster.extender.see_node(
        Node(name, "u", texts, {}, "", "", {}, {KEYS.number: slots} if slots else {}, {}, "1")
    )


async def test_a_pod_that_fits_and_that_nobody_has_asked_about() -> None:
    """The extender is fine; kube-scheduler is where to look."""
    found = explained(Cluster(), a_pod(**SMALL))
    assert (found.pod, found.situation) == ("default/train", "fits")
    assert found.answer == (
        "Pod default/train is not bound, and no cards are kept for it.",
        "It fits on 2 of 2 Nodes now. 40 such pods fit one after the other, this one included.",
        (
            "No kube-scheduler has asked this extender about it since 2026-08-21 17:00:00 UTC. Its "
            "schedulerName is default-scheduler."
        ),
        (
            "Either default-scheduler does not run or does not use this extender, or it has not "
            "reached the pod: it asks only when a Node has passed its own checks."
        ),
        (
            "kube-scheduler also checks taints, cordons, selectors, CPU and memory of Nodes; they "
            "are not counted here."
        ),
    )
    assert found.request == ("container default: 1 card with 1024 MiB and 10 % of the compute",)
    assert (found.nodes, found.fitting_nodes, found.fitting_pods) == (2, 2, 40)
    assert (found.missing, found.changes, found.left_out) == ((), (), 0)
    (row,) = found.table
    assert (row.code, row.nodes, row.names) == (FITS, 2, ("n0", "n1"))
    assert (row.largest_free_mib, row.largest_free_cores_percent, row.untouched_cards) == (
        MEMORY_MIB,
        100,
        2,
    )


async def test_a_pod_that_must_be_near_its_group_is_told_so() -> None:
    """The sentence stands where it fits, because that is counted as for a pod without peers."""
    sentence = (
        "Once another pod of its group has cards, it goes only to cards near those "
        "(nvidia.com/device-topology-mode: link-strict, with cross-pod topology); that is not "
        "counted here."
    )
    pod = a_pod(**SMALL)
    linked = node_texts([entry(card) for card in range(2)], {(0, 1): [10]})
    cluster = Cluster(0)
    node(cluster, "n0", linked)
    strict = annotated(pod, topology_mode="link-strict", cross_pod="true")
    assert sentence in explained(cluster, strict).answer
    assert sentence not in explained(cluster, annotated(pod, topology_mode="link-strict")).answer
    lenient = annotated(pod, topology_mode="link", cross_pod="true")
    assert sentence not in explained(cluster, lenient).answer
    assert sentence not in explained(Cluster(0), strict).answer


async def test_a_pod_without_room_is_given_figures_holders_and_changes() -> None:
    """An operator can wait for a pod that is named, or make the request smaller."""
    cluster = Cluster()
    bound(cluster, "a", claim(0, 0, 10, 12288))
    bound(cluster, "b", claim(0, 1, 10, 16384))
    bound(cluster, "c", claim(1, 0, 10, 20000), "n1")
    bound(cluster, "d", claim(1, 1, 10, 20000), "n1")
    pod = a_pod(number="1", cores="10", memory="16384")
    cluster.filter(pod)
    found = explained(cluster, pod)
    assert (found.situation, found.fitting_nodes, found.fitting_pods) == ("no-room", 0, 0)
    assert found.answer[1:4] == (
        "It fits on none of 2 Nodes now.",
        (
            "It would fit on 2 of them without other pods: it waits until pods end, unless one "
            "of the changes below helps."
        ),
        (
            "kube-scheduler (default-scheduler) has asked about it once, last at 2026-08-21 "
            "17:00:00 UTC (12 s ago) with 2 Nodes; it fitted on none of these."
        ),
    )
    assert found.missing == (
        (
            "2 Nodes (n0, n1): the largest share that is free for it on any card is 12288 MiB "
            "(card 0 of n0, held by default/a); the pod asks for 16384 MiB."
        ),
    )
    assert found.changes == (
        "With nvidia.com/vgpu-memory: 12288 instead of 16384, it would fit on 1 Node now.",
    )
    (row,) = found.table
    assert (row.code, row.cards) == ("InsufficientVGPUMemory", {"InsufficientVGPUMemory": 4})
    assert page.explanation(found).splitlines()[-2:] == [
        (
            "  2      Insufficient vGPU memory  4 × Insufficient vGPU memory  12288 MiB, 90 %      "
            "   0          n0, n1"
        ),
        "  all=1 (--all) shows every Node",
    ]


async def test_cards_of_a_type_are_all_held() -> None:
    """The pods that hold them are named, as far as there is room for names."""
    cluster = Cluster(1)
    texts = node_texts([entry(card, uuid=uuid(7, card), type="NVIDIA H100") for card in range(2)])
    node(cluster, "n7", texts)
    for name, card in (("x", 0), ("y", 1)):
        bound(cluster, name, claim(7, card, 100, MEMORY_MIB), "n7")
    found = explained(cluster, annotated(a_pod(**SMALL), include_type="h100"))
    assert found.situation == "no-room"
    assert found.missing[1] == (
        "1 Node (n0): no card of a type that the pod wants (annotation "
        "nvidia.com/include-gpu-type: h100)."
    )
    assert found.missing[-1] == (
        "2 cards that the pod wants (annotation nvidia.com/include-gpu-type: h100) exist on 1 "
        "Node: 0 untouched, 2 in use; held by pods default/x, default/y."
    )
    assert found.changes == (
        "Without the annotation nvidia.com/include-gpu-type: h100, it would fit on 1 Node now.",
    )


async def test_the_size_of_cards_that_the_pod_does_not_want_is_no_reason_for_endpoints() -> None:
    """Filter looks at sizes first, and so names a reason that would mislead."""
    cluster = Cluster(1)
    node(cluster, "n7", node_texts([entry(0, uuid=uuid(7, 0), type="NVIDIA H100", memory=81920)]))
    bound(cluster, "x", claim(7, 0, 10, 81920 - 30000), "n7")
    found = explained(cluster, annotated(a_pod(number="1", memory="40000"), include_type="h100"))
    assert [(row.code, row.cards) for row in found.table] == [
        ("InsufficientVGPUMemory", {"DeviceTypeMismatch": 2}),
        ("InsufficientVGPUMemory", {"InsufficientVGPUMemory": 1}),
    ]
    assert "is 30000 MiB (card 0 of n7, held by default/x)" in found.missing[0]
    assert found.missing[1].startswith("1 Node (n0): no card of a type that the pod wants")


async def test_a_type_that_the_cluster_does_not_have() -> None:
    """Waiting does not help, and the types that there are show the typing error."""
    found = explained(Cluster(), annotated(a_pod(**SMALL), include_type="a1000"))
    assert found.situation == "never-fits"
    assert found.answer[2].endswith(
        "so waiting does not help: change the pod, repair Nodes, or add Nodes."
    )
    assert found.missing[1] == (
        "No card of the cluster is one that the pod wants (annotation nvidia.com/include-gpu-type: "
        "a1000). The types of cards are: NVIDIA A10. Correct the annotation, or add such cards."
    )


def _h(**config: Any) -> dict[str, str]:
    return node_texts([entry(card, uuid=uuid(9, card)) for card in range(2)], **config)


@pytest.mark.parametrize(
    ("texts", "slots", "reason", "sentence"),
    [
        (_h(), "", Reason.NodeNotVGPUEnabled, "no nvidia.com/vgpu-number in status.allocatable"),
        ({}, "20", Reason.NodeNoVGPURegister, "nvidia.com/node-device-register is missing"),
        (
            {KEYS.node_register: _h()[KEYS.node_register]},
            "20",
            Reason.NodeNoVGPUConfig,
            "nvidia.com/node-config-info is missing",
        ),
        (
            {KEYS.node_register: "[]"},
            "20",
            Reason.NodeBadVGPURegister,
            "nvidia.com/node-device-register cannot be read. n9 has: no card.",
        ),
        (_h(memoryFactor=0), "20", Reason.NodeBadMemoryFactor, "n9 has: memoryFactor is 0."),
        (_h(deviceSplit=0), "20", Reason.NodeNotVGPUEnabled, "n9 has: deviceSplit is 0."),
    ],
)
async def test_a_node_that_can_take_no_pod(
    texts: Mapping[str, str], slots: str, reason: Reason, sentence: str
) -> None:
    """With the text that is wrong, and where to look."""
    cluster = Cluster(0)
    node(cluster, "n9", texts, slots)
    found = explained(cluster, a_pod(**SMALL))
    assert [(row.code, row.nodes, row.cards) for row in found.table] == [(reason.name, 1, {})]
    assert found.missing[0].startswith("1 Node (n9): ")
    assert sentence in found.missing[0]
    assert found.situation == "never-fits"


@pytest.mark.parametrize(
    ("limits", "words", "sentence"),
    [
        (
            {"number": "3", "memory": "1"},
            {},
            (
                "A container asks for 3 different cards of one Node (nvidia.com/vgpu-number); the "
                "most that are usable on one are 2 (on n0)."
            ),
        ),
        (
            {"number": "1", "memory": "1", "cores": "95"},
            {},
            (
                "the most compute that is free for it on any card is 90 % (card 0 of n0, held by "
                "default/a); the pod asks for 95 %."
            ),
        ),
        (
            {"number": "2", "memory": "1", "cores": "95"},
            {},
            (
                "n0 comes closest, with 80 % of compute free on each of 2 cards; the pod asks for "
                "95 % on each of 2 cards of one Node."
            ),
        ),
        (
            {"number": "2", "memory": "20000"},
            {},
            (
                "n0 comes closest, with 12288 MiB free on each of 2 cards; the pod asks for 20000 "
                "MiB on each of 2 cards of one Node."
            ),
        ),
        (
            {"number": "1"},
            {},
            (
                "the pod asks for all memory of 1 card of one Node, so no other pod may have "
                "memory of them; the most such cards of one Node are 0."
            ),
        ),
        (
            {"number": "1", "memory": "30000"},
            {},
            (
                "no card there has more than 24576 MiB in all; the pod asks for 30000 MiB on each "
                "of its cards."
            ),
        ),
        (
            {"number": "1", "memory": "1"},
            {"memory_policy": "virtual"},
            (
                "the memory of the cards is physical, and the pod wants virtual (annotation "
                "nvidia.com/memory-scheduler-policy)."
            ),
        ),
        (
            {"number": "2", "memory": "1"},
            {"topology_mode": "link-strict"},
            (
                "no 2 free cards joined by NVLink, as the annotation "
                "nvidia.com/device-topology-mode: link-strict demands."
            ),
        ),
        (
            {"number": "1", "memory": "1"},
            {"include_uuid": "gpu-nowhere"},
            (
                "no card with a UUID that the pod wants (annotation "
                "nvidia.com/include-gpu-uuid: gpu-nowhere)."
            ),
        ),
        (
            {"number": "1", "memory": "1"},
            {"exclude_uuid": uuid(0, 0) + "," + uuid(0, 1)},
            ("no card with a UUID that the pod wants (annotation nvidia.com/exclude-gpu-uuid: "),
        ),
    ],
)
async def test_each_reason_has_a_sentence_with_figures(
    limits: dict[str, str], words: dict[str, str], sentence: str
) -> None:
    """The reader decides by them whether to wait, to change the pod or to add Nodes."""
    cluster = Cluster(1)
    bound(cluster, "a", claim(0, 0, 10, 12288))
    bound(cluster, "b", claim(0, 1, 20, 4096))
    found = explained(cluster, annotated(a_pod(**limits), **words))
    assert found.fitting_nodes == 0
    assert sentence in found.missing[0]


async def test_slots_and_unhealthy_cards_have_sentences() -> None:
    """The last two reasons."""
    cluster = Cluster(0)
    node(cluster, "n0", node_texts([entry(0, number=1)]))
    bound(cluster, "a", claim(0, 0, 1, 1))
    text = explained(cluster, a_pod(**SMALL)).missing[0]
    assert "The pod takes 1 slot of cards of one Node; the most that are left for it" in text
    cluster = Cluster(0)
    node(cluster, "n0", node_texts([entry(0), entry(1, healthy=False), entry(2, mig=True)]))
    text = explained(cluster, a_pod(**WHOLE)).missing[0]
    assert (
        "the most that are usable on one are 1 (on n0); 1 card is unhealthy and 1 card is" in text
    )
    bound(cluster, "a", claim(0, 0, 100, MEMORY_MIB))
    found = explained(cluster, annotated(a_pod(**SMALL), include_uuid=uuid(0, 1)))
    assert found.missing[1] == (
        f"1 card that the pod wants (annotation nvidia.com/include-gpu-uuid: {uuid(0, 1).lower()}) "
        "exists on 1 Node: 0 untouched, 0 in use, 1 unhealthy or divided by MIG."
    )


def test_nodes_whose_cards_are_divided_have_a_sentence_with_the_note() -> None:
    """A family may leave such a Node out as a whole, so that the book has none of its cards."""
    book = Book()
    note = "its cards are divided for each pod (mode mig)"
    book.put_node("n0", Unfit(Reason.DeviceMIGEnabled, note))
    wanted = Demand((ContainerDemand(ContainerKind.MAIN, 1, 10, 1024),), "none", "none")
    groups = finish(survey.grouped(wanted, book.views()))
    words = VgpuManagerScheduling(KEYS).key_names
    (text,) = finish(shortage.sentences(wanted, groups, words, str))
    assert text.startswith(
        f"1 Node (n0): no card is of use to the pod. n0 has: {note}. `vgpu-agent status` on such a"
    )


@pytest.mark.parametrize(
    ("container", "asked", "sentence"),
    [
        (
            ContainerDemand(ContainerKind.MAIN, 1, 10, None, memory_percent=90),
            "1 card with 90 % of its memory and 10 % of the compute",
            (
                "the pod asks for 90 % of the memory of 1 card of one Node; the largest share that "
                "is free for it on any card is 20480 MiB (card 1 of n0, held by default/b)."
            ),
        ),
        (
            ContainerDemand(ContainerKind.MAIN, 1, 10, 1, alone=True),
            "1 card with 1 MiB and 10 % of the compute, with no other pod on it",
            (
                "the pod wants 1 card of one Node for itself; the most cards without any pod on "
                "one are 0."
            ),
        ),
    ],
)
async def test_parts_of_cards_and_cards_for_one_pod(
    container: ContainerDemand, asked: str, sentence: str
) -> None:
    """Another family asks for these."""
    cluster, words = Cluster(1), VgpuManagerScheduling(KEYS).key_names
    bound(cluster, "a", claim(0, 0, 10, 12288))
    bound(cluster, "b", claim(0, 1, 20, 4096))
    demand = Demand((container,))
    groups = finish(survey.grouped(demand, cluster.book.views()))
    name_of = cluster.extender.name_of
    (text,) = finish(shortage.sentences(demand, groups, words, name_of))
    assert sentence in text
    assert _amounts(container, {1}, words) == asked


@pytest.mark.looptime
async def test_a_pod_for_which_cards_are_kept() -> None:
    """Until when, and how many more fit besides it."""
    cluster, pod = Cluster(1), a_pod(**SMALL)
    cluster.filter(pod)
    await asyncio.sleep(10)
    found = explained(cluster, pod)
    assert (found.situation, found.fitting_pods, found.missing) == ("kept", 19, ())
    assert found.answer[:3] == (
        (
            "Pod default/train is not bound yet. It will have 1024 MiB and 10 % of the compute of "
            f"card 0 ({uuid(0, 0)}) on Node n0."
        ),
        (
            "The cards are kept for it until 2026-08-21 17:00:32 UTC (20 s from now). If it is not "
            "bound by then, other pods may have them, and it is placed again when kube-scheduler "
            "asks again."
        ),
        "19 more such pods fit now, besides it.",
    )
    assert (
        "last at 2026-08-21 17:00:00 UTC (12 s ago) with 1 Node; the answer was n0."
        in found.answer[3]
    )


async def test_a_pod_that_is_bound() -> None:
    """The explanation names the pod's cards. It refers to the Node's agent for the rest."""
    cluster = Cluster(2)
    pod = bound(cluster, "train", claim(1, 1, 10, 1024), "n1")
    found = explained(cluster, pod)
    assert (found.situation, found.missing, found.changes) == ("bound", (), ())
    assert found.answer == (
        "Pod default/train is bound to Node n1; its phase is Pending.",
        f"It holds 1024 MiB and 10 % of the compute of card 1 ({uuid(1, 1)}) on Node n1.",
        (
            "The kubelet of n1 starts it: on that Node, vgpu-agent status --pod default/train "
            "tells more."
        ),
        "39 more such pods fit now, besides it.",
    )
    node(cluster, "n1", {})
    assert (
        "Node n1 can take no other pods: node has no vGPU registered."
        in explained(cluster, pod).answer
    )


@pytest.mark.parametrize(
    ("claims", "sentence"),
    [
        ("nonsense", "because its annotations cannot be read"),
        ("", "it was bound without an extender (schedulerName unknown)"),
    ],
)
async def test_a_bound_pod_that_counts_for_nothing(claims: str, sentence: str) -> None:
    """Other pods may get its cards."""
    cluster = Cluster()
    found = explained(cluster, bound(cluster, "train", claims))
    assert found.situation == "bound"
    assert sentence in found.answer[1]


async def test_a_bound_pod_that_the_watch_has_not_shown() -> None:
    """The API server is asked about the pod, the watch about the others."""
    pod = annotated(a_pod(node="n0", **SMALL), pre_allocated=claim(0, 0, 10, 1024))
    assert "the watch of pods is a moment behind" in explained(Cluster(), pod).answer[1]


async def test_a_pod_that_has_ended() -> None:
    """It needs nothing."""
    pod = a_pod(node="n0", **SMALL)
    pod["status"] = {"phase": "Failed"}
    assert explained(Cluster(), pod) == Explanation(
        "default/train",
        "ended",
        ("Pod default/train has ended (Failed). It holds no cards any more.",),
    )


async def test_a_pod_that_asks_for_nothing() -> None:
    """The extender has no part in it; memory alone is the usual mistake."""
    found = explained(Cluster(), a_pod(memory="1024"))
    assert found.situation == "no-request"
    assert found.answer[:2] == (
        (
            "No container of pod default/train asks for nvidia.com/vgpu-number, so the extender "
            "has no part in its placement; its limits name nvidia.com/vgpu-memory."
        ),
        "A container that asks for memory or compute must also ask for nvidia.com/vgpu-number.",
    )
    assert (found.table, found.fitting_pods) == ((), None)


async def test_a_request_that_no_node_can_ever_serve() -> None:
    """The sentence of filter, with the value."""
    found = explained(Cluster(), a_pod(number="1", cores="101"))
    assert found.situation == "bad-request"
    assert "nvidia.com/vgpu-cores is '101'; expected percent" in found.answer[0]


async def test_a_pod_of_a_scheduler_that_does_not_ask() -> None:
    """The most frequent mistake: ``schedulerName`` is missing."""
    cluster = Cluster()
    other = a_pod("other", **SMALL)
    other["spec"]["schedulerName"] = "vgpu-scheduler"
    cluster.filter(other)
    answer = " ".join(explained(cluster, a_pod(**SMALL)).answer)
    assert "Its schedulerName is default-scheduler." in answer
    assert (
        "The extender was asked about pods of vgpu-scheduler, and of no other scheduler." in answer
    )


async def test_gates_and_the_report_of_kube_scheduler_are_shown() -> None:
    """Both can keep a pod waiting although the extender was never asked about it."""
    waiting = Waiting(
        ("queue/admission",), "SchedulingGated", "Scheduling is blocked\ndue to gates"
    )
    answer = explained(Cluster(), a_pod(**SMALL), waiting=waiting).answer
    assert (
        "It has scheduling gates (queue/admission), so kube-scheduler does not look at it"
        in (answer[2])
    )
    assert (
        r"kube-scheduler last reported SchedulingGated: 'Scheduling is blocked\ndue to gates'"
        in answer
    )


async def test_init_containers_and_units_of_memory() -> None:
    """The request is shown as the Nodes count it, and as the pod does where they disagree or cannot
    tell.
    """
    cluster = Cluster(0)
    without = explained(cluster, a_pod(number="1", memory="30")).request
    assert without == (
        "container default: 1 card with 30 units of nvidia.com/vgpu-memory and no limit of compute",
    )
    node(cluster, "n0", node_texts([entry(0)], memoryFactor=100))
    pod = a_pod(number="1", memory="30")
    pod["spec"]["initContainers"] = [
        {"name": "load", "resources": {"limits": {KEYS.number: "1"}}},
    ]
    found = explained(cluster, annotated(pod, topology_mode="numa"))
    assert found.request == (
        "container load (init): 1 card with all of its memory and 100 % of the compute",
        "container default: 1 card with 3000 MiB and no limit of compute",
        "nvidia.com/device-topology-mode: numa",
    )
    node(cluster, "n1", node_texts([entry(0)], memoryFactor=1))
    assert (
        "30 units of nvidia.com/vgpu-memory, which Nodes count differently, and"
        in explained(cluster, pod).request[1]
    )


async def test_many_answers_are_cut_and_every_node_can_be_shown() -> None:
    """A page is read from its top."""
    cluster = Cluster(3)
    for number in range(MAX_ROWS + 5):
        node(cluster, f"bad{number:02d}", _h(memoryFactor=-number))
    found = explained(cluster, a_pod(**SMALL))
    assert (len(found.table), found.left_out) == (MAX_ROWS, 6)
    assert found.table[0].code == FITS
    assert "  … and 6 more rows; all=1 (--all) shows every Node\n" in page.explanation(found)
    every = explained(cluster, a_pod(**SMALL), every_node=True)
    assert [row.names for row in every.table] == sorted(
        [(f"bad{number:02d}",) for number in range(MAX_ROWS + 5)] + [(f"n{n}",) for n in range(3)]
    )
    assert {row.nodes for row in every.table} == {1}


async def test_text_has_no_control_characters() -> None:
    """Texts of Nodes and pods must not drive a terminal."""
    cluster = Cluster(0)
    node(cluster, "n0", {KEYS.node_register: '["\x1b[31m"]'})
    found = explained(cluster, annotated(a_pod(**SMALL), include_type="\x1b[2J"))
    assert "\x1b" not in page.explanation(found)


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    claims=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 1),
            st.sampled_from([0, 40, 100]),
            st.sampled_from([1024, 9000, MEMORY_MIB]),
        ),
        max_size=5,
    ),
    number=st.integers(1, 3),
    cores=st.sampled_from([0, 30, 100]),
    memory=st.sampled_from([0, 2048, MEMORY_MIB]),
    words=st.fixed_dictionaries(
        {},
        optional={
            "topology_mode": st.sampled_from(["link-strict", "numa-strict", "link"]),
            "include_uuid": st.just(uuid(1, 0)),
            "memory_policy": st.just("virtual"),
        },
    ),
)
def test_the_reason_of_each_node_is_the_answer_of_filter(
    claims: list[tuple[int, int, int, int]],
    number: int,
    cores: int,
    memory: int,
    words: dict[str, str],
) -> None:
    """The table would be worth nothing otherwise. And each sentence is made without an error."""

    async def compare() -> None:
        cluster = Cluster(3)
        node(cluster, "n3", {})
        for place, (on, card, percent, mib) in enumerate(claims):
            bound(cluster, f"p{place}", claim(on, card, percent, mib), f"n{on}")
        limits = {"number": number, "cores": cores, "memory": memory}
        pod = annotated(a_pod(**{key: str(each) for key, each in limits.items() if each}), **words)
        found = explained(cluster, pod, every_node=True)
        assert page.explanation(found)
        assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found
        rows = {row.names[0]: row for row in found.table}
        answer = cluster.filter(pod, "n0", "n1", "n2", "n3")
        cluster.extender.forget_pod("uid-train")
        fitting = [name for name, row in rows.items() if row.code == FITS]
        assert bool(answer["NodeNames"]) is bool(fitting)
        assert set(answer["NodeNames"]) <= set(fitting)
        reasons = {name: row.reason for name, row in rows.items() if name not in fitting}
        assert answer["FailedNodes"] == ({} if fitting else reasons)
        wanted = VgpuManagerScheduling(KEYS).read_demand(decode.pod(json.dumps(pod).encode()))
        assert wanted is not None
        choice = cluster.book.choose(wanted.demand, list(rows))
        assert {name: reason.value for name, reason in choice.reasons.items()} == reasons
        if found.fitting_pods and found.fitting_pods < 100:
            for place in range(found.fitting_pods + 1):
                copy = json.loads(json.dumps(pod))
                copy["metadata"]["uid"] = f"copy{place}"
                fits = bool(cluster.filter(copy, "n0", "n1", "n2", "n3")["NodeNames"])
                assert fits is (place < found.fitting_pods)

    asyncio.run(compare())
