"""The `volcano-gpushare` family against the defects of volcano-gpushare §9 and the golden vectors
of volcano-gpushare §10.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.families.volcano_gpushare.parts import (
    ASSIGNED,
    BY_INDEX,
    BY_NUMBER,
    INDEX,
    MEMORY,
    NODE_0,
    NODE_1,
    NUMBER,
    PREDICATE_TIME,
    SCHEDULED,
    U0,
    U1,
    UNHEALTHY,
    environment_of,
    family_of,
    grant_of,
    ledger_of,
    offer_of,
    pod_of,
    question_of,
    view_of,
)
from vgpu_agent.config.load import Contents, Sources, load_contents
from vgpu_agent.device_ids import MESSAGE_BUDGET_BYTES, IdBlock, NumberedIds, list_size_bytes
from vgpu_agent.errors import CapacityError, ConfigError, RequestRefusedError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.volcano_gpushare.family import VolcanoGpushareOptions
from vgpu_agent.model import Decider, Gpu, Health, Inventory, Owner, Resource, Share
from vgpu_agent.nodes import Node


def test_memory_is_offered_by_the_mebibyte_and_cards_are_counted() -> None:
    """volcano-gpushare:S1: ids ``0-0`` to ``0-24575`` and ``1-0`` to ``1-24575``, gpu-number 2 by
    patch, no list of unhealthy cards.
    """
    resource = offer_of()
    assert resource.name == MEMORY
    assert isinstance(resource.ids, NumberedIds)
    assert [
        (block.prefix, block.count, block.device, block.numa_node) for block in resource.ids.blocks
    ] == [
        ("0-", 24576, U0, None),
        ("1-", 24576, U1, None),
    ]
    assert (resource.decided_by, resource.pre_start_required, resource.offers_preference) == (
        Decider.POD,
        True,
        False,
    )
    desired_state = family_of().desired_node(view_of())
    assert desired_state.capacity == {NUMBER: "2"}
    assert desired_state.annotations == {UNHEALTHY: None}


def test_the_schedulers_choice_is_followed() -> None:
    """volcano-gpushare:S2: 3000 MiB of the card that gpu-index names."""
    decision = family_of().decide(question_of(pod_of(3000, annotations=SCHEDULED)))
    assert decision.shares == (Share(U0, 3000),)
    assert decision.by == "the scheduler, in volcano.sh/gpu-index"


def test_the_container_is_told_card_budget_and_size() -> None:
    """volcano-gpushare:S3: three variables and nothing else. Afterwards the pod is assigned."""
    pod = pod_of(3000, annotations=SCHEDULED)
    assert environment_of(question_of(pod)) == {
        "NVIDIA_VISIBLE_DEVICES": "0",
        "VOLCANO_GPU_ALLOCATED": "3000",
        "VOLCANO_GPU_MEMORY_TOTAL": "24576",
    }
    assert family_of().desired_pod(
        pod, {"c0": grant_of(Share(U0, 3000))}, failed=False
    ).annotations == {ASSIGNED: "true"}


def test_a_factor_makes_larger_units() -> None:
    """volcano-gpushare:S4: with factor 10 a card has 2457 units, and 300 of them are 3000 MiB."""
    tens = VolcanoGpushareOptions(factor=10)
    resource = offer_of(tens)
    assert len(resource.ids) == 4914
    assert resource.ids[2456].id == "0-2456"
    question = question_of(pod_of(300, annotations=SCHEDULED), options=tens)
    assert family_of(tens).decide(question).shares == (Share(U0, 3000),)
    assert environment_of(question, tens) == {
        "NVIDIA_VISIBLE_DEVICES": "0",
        "VOLCANO_GPU_ALLOCATED": "3000",
        "VOLCANO_GPU_MEMORY_TOTAL": "24576",
    }


def test_whole_cards_are_offered_by_uuid() -> None:
    """volcano-gpushare:S5: two UUIDs with their NUMA nodes.
    A pod that asks for 2 gets both, exclusively.
    """
    resource = offer_of(BY_NUMBER)
    assert resource.name == NUMBER
    assert [(entry.id, entry.device, entry.numa_node) for entry in resource.ids] == [
        (U0, U0, 0),
        (U1, U1, 1),
    ]
    assert resource.decided_by is Decider.POD
    question = question_of(
        pod_of(2, annotations={INDEX: "0,1"}, resource=NUMBER), options=BY_NUMBER
    )
    assert family_of(BY_NUMBER).decide(question).shares == (
        Share(U0, 24576, 100, exclusive=True),
        Share(U1, 24576, 100, exclusive=True),
    )
    assert environment_of(question, BY_NUMBER) == {
        "NVIDIA_VISIBLE_DEVICES": "0,1",
        "VOLCANO_GPU_ALLOCATED": "2",
        "VOLCANO_GPU_MEMORY_TOTAL": "24576",
    }


def test_an_ill_card_is_named_to_the_scheduler_and_to_kubelet() -> None:
    """volcano-gpushare:S6: the annotation names card 1.

    Deliberately unlike the vector, kubelet's list has the ids of that card Unhealthy, so that its
    own count is right as well; capacity, which the scheduler divides by the number of cards, stays.
    """
    ill = Inventory(
        2, (NODE_0, msgspec.structs.replace(NODE_1, health=Health(ok=False, reason="XID 79")))
    )
    desired_state = family_of().desired_node(view_of(inventory=ill))
    assert desired_state.annotations == {UNHEALTHY: "1"}
    assert desired_state.capacity == {NUMBER: "2"}
    listing = ledger_of(offer_of(inventory=ill), ill).listing(MEMORY)
    assert len(listing) == 49152
    assert {entry.id.device for entry in listing if not entry.healthy} == {U1}


def test_both_containers_of_a_pod_are_served_on_one_card() -> None:
    """volcano-gpushare:S7: 1000 and 1000 MiB of the card that the pod has,
    where the replaced plugin fails the second.
    """
    pod = pod_of(1000, 1000, annotations=SCHEDULED)
    for name in ("c0", "c1"):
        question = question_of(pod, name)
        assert family_of().decide(question).shares == (Share(U0, 1000),)
        assert environment_of(question)["VOLCANO_GPU_ALLOCATED"] == "1000"


def test_a_pod_is_assigned_when_its_last_container_is_served() -> None:
    """volcano-gpushare:D1: nothing is written after the first of two, ``true`` after the second.
    One without a GPU does not count.
    """
    pod = pod_of(1000, 0, 2000, annotations=SCHEDULED)
    first, last = grant_of(Share(U0, 1000)), grant_of(Share(U0, 2000), number=2)
    assert family_of().desired_pod(pod, {"c0": first}, failed=False).annotations == {}
    assert family_of().desired_pod(pod, {"c0": first, "c2": last}, failed=False).annotations == {
        ASSIGNED: "true"
    }
    assert family_of().desired_pod(pod, {"c0": first, "c2": last}, failed=True).annotations == {}


def test_two_pods_of_equal_size_get_their_own_cards() -> None:
    """volcano-gpushare:D2: the proven pod's own annotation decides,
    not the order of equal requests.
    """
    shares = [
        family_of().decide(question_of(pod_of(3000, annotations={INDEX: index}))).shares
        for index in ("1", "0")
    ]
    assert shares == [(Share(U1, 3000),), (Share(U0, 3000),)]


def test_a_count_that_is_not_the_pods_limit_is_refused() -> None:
    """volcano-gpushare:D2: ids of another amount cannot be this container's,
    however much the pod looks like it.
    """
    question = msgspec.structs.replace(
        question_of(pod_of(3000, annotations=SCHEDULED)), ids=("0-1", "0-2")
    )
    with pytest.raises(
        RequestRefusedError,
        match=r"pod default/p, container c0: limit volcano.sh/gpu-memory is 3000 .* counted 2",
    ):
        family_of().decide(question)


def test_whole_cards_work_on_a_fresh_node() -> None:
    """volcano-gpushare:D3: a zero for gpu-memory makes the scheduler see the cards;
    gpu-number is kubelet's own.
    """
    assert family_of(BY_NUMBER).desired_node(view_of(BY_NUMBER)).capacity == {MEMORY: "0"}


def test_cards_of_different_size_are_refused_with_both_remedies() -> None:
    """volcano-gpushare:D4: the scheduler takes cards for equal,
    so the error names each card and what to set.
    """
    unequal = Inventory(
        1, (NODE_0, msgspec.structs.replace(NODE_1, name="NVIDIA T4", memory_mib=15360))
    )
    with pytest.raises(ConfigError) as refused:
        offer_of(inventory=unequal)
    (problem,) = refused.value.problems
    assert problem.startswith("volcano.sh/gpu-memory: ")
    assert "GPU 0 (NVIDIA A10) has 24576 MiB, GPU 1 (NVIDIA T4) has 15360 MiB" in problem
    assert "volcanoGpushare.unequalGpus: minimum" in problem
    assert "volcanoGpushare.strategy: number" in problem


def test_cards_of_different_size_are_offered_with_the_smallest() -> None:
    """volcano-gpushare:D4: by setting each card counts as the smallest, also when this agent
    places. Its reported size is its own.
    """
    minimum = VolcanoGpushareOptions(unequal_gpus="minimum")
    unequal = Inventory(1, (NODE_0, msgspec.structs.replace(NODE_1, memory_mib=15360)))
    resource = offer_of(minimum, unequal)
    assert len(resource.ids) == 2 * 15360
    family = family_of(minimum, unequal)
    ledger = ledger_of(resource, unequal)
    ledger.decide(MEMORY, ["0-0"], [Share(U0, 10000)], Owner("c", "uid-0"))
    question = question_of(
        pod_of(6000), options=minimum, inventory=unequal, rooms=ledger.rooms(MEMORY)
    )
    assert family.decide(question).shares == (Share(U1, 6000),)
    assert (
        environment_of(question_of(pod_of(6000), options=minimum, inventory=unequal), minimum)[
            "VOLCANO_GPU_MEMORY_TOTAL"
        ]
        == "24576"
    )


def test_a_container_may_be_told_its_card_by_uuid() -> None:
    """volcano-gpushare:D5: by setting NVIDIA_VISIBLE_DEVICES is the UUID,
    which no renumbering touches.
    """
    by_uuid = VolcanoGpushareOptions(lists=ListOptions(id_strategy="uuid"))
    question = question_of(pod_of(3000, annotations={INDEX: "1"}), options=by_uuid)
    assert environment_of(question, by_uuid)["NVIDIA_VISIBLE_DEVICES"] == U1


def test_numbers_stay_when_a_card_falls_off_the_bus() -> None:
    """volcano-gpushare:D5: NVML moves card 1 up to index 0; ids and annotations keep its number,
    the container gets the present index.
    """
    lost = Inventory(
        2,
        (msgspec.structs.replace(NODE_0, present=False), msgspec.structs.replace(NODE_1, index=0)),
    )
    assert [entry.prefix for entry in _blocks(offer_of(inventory=lost))] == ["0-", "1-"]
    question = question_of(pod_of(3000, annotations={INDEX: "1"}), inventory=lost)
    assert family_of(inventory=lost).decide(question).shares == (Share(U1, 3000),)
    assert environment_of(question)["NVIDIA_VISIBLE_DEVICES"] == "0"
    assert family_of().desired_node(view_of(inventory=lost)).annotations[UNHEALTHY] == "0"


def test_a_card_that_never_answered_is_counted_and_not_to_be_used() -> None:
    """volcano-gpushare:D5: the scheduler counts from 0 without a gap, so a gap in NVML's indices is
    reported as an unhealthy card.
    """
    gap = Inventory(1, (NODE_0, msgspec.structs.replace(NODE_1, index=2)))
    desired_state = family_of(inventory=gap).desired_node(view_of(inventory=gap))
    assert desired_state.capacity == {NUMBER: "3"}
    assert desired_state.annotations == {UNHEALTHY: "1"}


def test_only_the_one_annotation_is_written() -> None:
    """volcano-gpushare:D6: nothing else of the pod is mentioned,
    so no concurrent change of it can be in the way.
    """
    pod = pod_of(3000, annotations=SCHEDULED | {"somebody": "else"})
    assert set(
        family_of().desired_pod(pod, {"c0": grant_of(Share(U0, 3000))}, failed=False).annotations
    ) == {ASSIGNED}


@pytest.mark.parametrize(
    "capacity", [{}, {NUMBER: "0"}, {NUMBER: "2"}], ids=["dropped", "zeroed", "right"]
)
def test_the_count_of_cards_is_desired_whatever_kubelet_made_of_it(
    capacity: dict[str, str],
) -> None:
    """volcano-gpushare:D7: the desired state does not depend on the current one,
    so what is lost is written again.
    """
    node = Node("node-a", capacity=capacity, allocatable=capacity)
    assert family_of().desired_node(view_of(node=node)).capacity == {NUMBER: "2"}


def test_a_list_of_ill_cards_goes_when_none_is_ill() -> None:
    """volcano-gpushare:D8: a stale list does not outlive the recovery, and the health is the
    agent's own, one for all families.
    """
    stale = Node("node-a", annotations={UNHEALTHY: "1"})
    assert family_of().desired_node(view_of(node=stale)).annotations == {UNHEALTHY: None}


def test_a_card_that_serves_another_family_is_not_to_be_used() -> None:
    """volcano-gpushare:D8: any reason to keep a card from being given out is reported
    in the same list.
    """
    view = view_of(troubles={U0: "the GPU serves nvidia until its last share is returned"})
    assert family_of().desired_node(view).annotations == {UNHEALTHY: "0"}


def test_an_init_container_is_served_and_assigns_nothing() -> None:
    """volcano-gpushare:D9: it gets its card like any other,
    and the pod is assigned only with its main container.
    """
    pod = pod_of(1000, annotations=SCHEDULED, init=(500,))
    assert family_of().decide(question_of(pod, "i0")).shares == (Share(U0, 500),)
    init = {"i0": grant_of(Share(U0, 500))}
    assert family_of().desired_pod(pod, init, failed=False).annotations == {}
    assert family_of().desired_pod(
        pod, init | {"c0": grant_of(Share(U0, 1000))}, failed=False
    ).annotations == {ASSIGNED: "true"}


def test_a_list_that_is_too_long_is_refused_with_the_factor_that_fits() -> None:
    """volcano-gpushare:D10: eight cards of 80 GB at 1 MiB do not fit into a message
    of kubelet (kubelet V13).
    """
    with pytest.raises(
        ConfigError,
        match=r"volcano.sh/gpu-memory: 652472 ids .* volcanoGpushare.gpuMemoryFactor: 4 would fit",
    ):
        offer_of(inventory=_eight_large())


def test_the_agent_chooses_the_factor_that_fits() -> None:
    """volcano-gpushare:D10: factor 0 gives the smallest power of two, and amounts follow it."""
    automatic = VolcanoGpushareOptions(factor=0)
    resource = offer_of(automatic, _eight_large())
    assert len(resource.ids) == 8 * (81559 // 4)
    assert list_size_bytes(resource.ids) <= MESSAGE_BUDGET_BYTES
    question = question_of(
        pod_of(100, annotations=SCHEDULED), options=automatic, inventory=_eight_large()
    )
    assert family_of(automatic).decide(question).shares == (
        Share(question.inventory.gpus[0].uuid, 400),
    )
    assert len(offer_of(automatic).ids) == 49152


def test_a_unit_larger_than_a_card_is_refused() -> None:
    """volcano-gpushare:D10: a factor that leaves no unit at all is an error
    that names the card's size.
    """
    with pytest.raises(
        ConfigError,
        match=(
            r"a unit of 65536 MiB is more than a GPU has, 24576 MiB; set "
            r"volcanoGpushare.gpuMemoryFactor"
        ),
    ):
        offer_of(VolcanoGpushareOptions(factor=65536))


def test_the_configuration_counts() -> None:
    """volcano-gpushare:D11: what the file says is what is offered. A word that is no strategy is
    refused instead of meaning ``number``.
    """
    assert _configured("strategy: number") == BY_NUMBER
    assert _configured("gpuMemoryFactor: 10") == VolcanoGpushareOptions(factor=10, lists=BY_INDEX)
    with pytest.raises(
        ConfigError, match=r'volcanoGpushare.strategy: expected share or number, got "whole"'
    ):
        _configured("strategy: whole")


def test_a_pod_without_a_gpu_scheduler_is_placed_by_the_agent() -> None:
    """volcano-gpushare:D12: the first card with room for the whole pod,
    written into the pod as a scheduler would have.
    """
    pod = pod_of(3000)
    decision = family_of().decide(question_of(pod))
    assert decision.shares == (Share(U0, 3000),)
    assert decision.by == "the agent, the first GPU with room (no volcano.sh/gpu-index)"
    assert family_of().desired_pod(
        pod, {"c0": grant_of(Share(U0, 3000))}, failed=False
    ).annotations == {
        INDEX: "0",
        PREDICATE_TIME: "1795200990250000000",
        ASSIGNED: "true",
    }


def test_a_pod_that_nobody_placed_and_that_does_not_fit_is_told_why() -> None:
    """volcano-gpushare:D12: the text names the room of each card and the switch
    that the scheduler lacks.
    """
    with pytest.raises(CapacityError) as refused:
        family_of().decide(question_of(pod_of(30000)))
    assert "pod default/p has no volcano.sh/gpu-index" in str(refused.value)
    assert f"no GPU has 30000 MiB for the whole pod: {U0}, {U1}: 24576 MiB free of 24576" in str(
        refused.value
    )
    assert "deviceshare.GPUSharingEnable: true" in str(refused.value)


def test_of_many_cards_in_the_annotation_a_memory_pod_has_the_first() -> None:
    """volcano-gpushare:D13: old schedulers wrote every card that would do."""
    assert family_of().decide(question_of(pod_of(3000, annotations={INDEX: "1,0"}))).shares == (
        Share(U1, 3000),
    )


def _blocks(resource: Resource) -> list[IdBlock]:
    assert isinstance(resource.ids, NumberedIds)
    return list(resource.ids.blocks)


def _eight_large() -> Inventory:
    return Inventory(
        1,
        tuple(
            Gpu(f"GPU-{index}", index, index, "NVIDIA H100 80GB HBM3", 81559) for index in range(8)
        ),
    )


def _configured(line: str) -> VolcanoGpushareOptions:
    content = f"version: v1\nvolcanoGpushare:\n  {line}\n".encode()
    return VolcanoGpushareOptions.from_settings(
        load_contents(Sources({}, {}, "config.yaml"), Contents(content)).settings,
        lists=ListOptions(),
    )
