"""The `volcano-gpushare` family against the golden vectors and the defect table of the volcano-gpushare contract (§9, §10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.golden import golden_inventory
from vgpu_agent.config.load import Sources, load_content
from vgpu_agent.device_ids import IdBlock, NumberedIds
from vgpu_agent.errors import CapacityError, ConfigError, RequestRefusedError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.family import NodeView, Question
from vgpu_agent.families.volcano_gpushare import VolcanoGpushareFamily, VolcanoGpushareOptions
from vgpu_agent.isolation.edits import Edits, Provision
from vgpu_agent.kubelet.codec import list_size_bytes
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Decider, DeviceRoom, Gpu, Grant, Health, Inventory, Owner, Resource, Share
from vgpu_agent.nodes import Node
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

U0 = "GPU-11111111-aaaa-bbbb-cccc-000000000001"
U1 = "GPU-22222222-aaaa-bbbb-cccc-000000000002"
U2 = "GPU-33333333-aaaa-bbbb-cccc-000000000003"

MEMORY, NUMBER = "volcano.sh/gpu-memory", "volcano.sh/gpu-number"
INDEX, ASSIGNED, UNHEALTHY = "volcano.sh/gpu-index", "volcano.sh/gpu-assigned", "volcano.sh/gpu-unhealthy-ids"
PREDICATE_TIME = "volcano.sh/predicate-time"
SCHEDULED = {INDEX: "0", PREDICATE_TIME: "1795200991257414295"}
BY_INDEX = ListOptions(id_strategy="index", cdi_id_strategy="uuid")
BY_NUMBER = VolcanoGpushareOptions(strategy="number", lists=BY_INDEX)

NODE_0 = Gpu(U0, 0, 0, "NVIDIA A10", 24576, "0000:07:00.0", 0, (8, 6))
NODE_1 = Gpu(U1, 1, 1, "NVIDIA A10", 24576, "0000:0f:00.0", 1, (8, 6))
TWO = Inventory(1, (NODE_0, NODE_1))
THREE = Inventory(1, (NODE_0, NODE_1, Gpu(U2, 2, 2, "NVIDIA A10", 24576, "0000:1f:00.0", 1, (8, 6))))


def _family(options: VolcanoGpushareOptions | None = None, inventory: Inventory = TWO) -> VolcanoGpushareFamily:
    family = VolcanoGpushareFamily(options or VolcanoGpushareOptions())
    family.resources(inventory)
    return family


def _offer(options: VolcanoGpushareOptions | None = None, inventory: Inventory = TWO) -> Resource:
    (resource,) = _family(options).resources(inventory)
    return resource


def _pod(*limits: int, annotations: dict[str, str] | None = None, resource: str = MEMORY, init: tuple[int, ...] = ()) -> Pod:
    before = [PodContainer(f"i{number}", ContainerKind.INIT, {resource: limit}) for number, limit in enumerate(init)]
    mains = [PodContainer(f"c{number}", limits={resource: limit} if limit else {}) for number, limit in enumerate(limits)]
    return Pod("uid-1", "default", "p", "node-a", annotations=annotations or {}, containers=(*before, *mains))


def _ledger(resource: Resource, inventory: Inventory = TWO) -> Ledger:
    ledger = Ledger()
    ledger.observe(inventory)
    ledger.offer([resource])
    return ledger


def _question(
    pod: Pod,
    container: str = "c0",
    *,
    options: VolcanoGpushareOptions | None = None,
    inventory: Inventory = TWO,
    rooms: tuple[DeviceRoom, ...] | None = None,
    siblings: Mapping[str, tuple[Share, ...]] | None = None,
) -> Question:
    """What `allocation` asks for a container that kubelet has given as many ids as its limit says."""
    resource = _offer(options, inventory)
    found = pod.container(container)
    ids = tuple(f"id-{number}" for number in range(found.limits.get(resource.name, 0) if found else 0))
    rooms = _ledger(resource, inventory).rooms(resource.name) if rooms is None else rooms
    return Question(resource, pod, container, ids, "node-a", inventory, rooms, siblings or {})


def _grant(*shares: Share, resource: str = MEMORY, number: int = 1, reserved_at: float = 1795200990.25) -> Grant:
    return Grant(number, "volcano-gpushare", resource, ("0-0",), shares, reserved_at=reserved_at)


def _environment(question: Question, options: VolcanoGpushareOptions | None = None) -> dict[str, str]:
    family = _family(options, question.inventory)
    provision = family.provision(question, family.decide(question).shares)
    assert provision == Provision(Edits(environment=provision.edits.environment))
    return dict(provision.edits.environment)


def _view(
    options: VolcanoGpushareOptions | None = None,
    inventory: Inventory = TWO,
    *,
    node: Node | None = None,
    troubles: dict[str, str] | None = None,
    allocated_at: float | None = None,
) -> NodeView:
    resource = _offer(options, inventory)
    rooms = _ledger(resource, inventory).rooms(resource.name)
    rooms = tuple(dataclasses.replace(room, trouble=(troubles or {}).get(room.device, room.trouble)) for room in rooms)
    allocated = {} if allocated_at is None else {resource.name: allocated_at}
    return NodeView(node or Node("node-a"), inventory, {resource.name: rooms}, allocated, now=1795201000.0)


# -- golden vectors -------------------------------------------------------------------------------------------------------------------


def test_memory_is_offered_by_the_mebibyte_and_cards_are_counted() -> None:
    """volcano-gpushare:S1: ids ``0-0`` to ``0-24575`` and ``1-0`` to ``1-24575``, gpu-number 2 by patch, no list of unhealthy cards."""
    resource = _offer()
    assert resource.name == MEMORY
    assert isinstance(resource.ids, NumberedIds)
    assert [(block.prefix, block.count, block.device, block.numa_node) for block in resource.ids.blocks] == [
        ("0-", 24576, U0, None),
        ("1-", 24576, U1, None),
    ]
    assert (resource.decided_by, resource.pre_start_required, resource.prefers) == (Decider.POD, True, False)
    wishes = _family().node_wishes(_view())
    assert wishes.capacity == {NUMBER: "2"}
    assert wishes.annotations == {UNHEALTHY: None}


def test_the_schedulers_choice_is_followed() -> None:
    """volcano-gpushare:S2: 3000 MiB of the card that gpu-index names."""
    decision = _family().decide(_question(_pod(3000, annotations=SCHEDULED)))
    assert decision.shares == (Share(U0, 3000),)
    assert decision.by == "the scheduler, in volcano.sh/gpu-index"


def test_the_container_is_told_card_budget_and_size() -> None:
    """volcano-gpushare:S3: three variables and nothing else; afterwards the pod is assigned."""
    pod = _pod(3000, annotations=SCHEDULED)
    assert _environment(_question(pod)) == {
        "NVIDIA_VISIBLE_DEVICES": "0",
        "VOLCANO_GPU_ALLOCATED": "3000",
        "VOLCANO_GPU_MEMORY_TOTAL": "24576",
    }
    assert _family().pod_wishes(pod, {"c0": _grant(Share(U0, 3000))}, failed=False) == {ASSIGNED: "true"}


def test_a_factor_makes_larger_units() -> None:
    """volcano-gpushare:S4: with factor 10 a card has 2457 units, and 300 of them are 3000 MiB."""
    tens = VolcanoGpushareOptions(factor=10)
    resource = _offer(tens)
    assert len(resource.ids) == 4914
    assert resource.ids[2456].id == "0-2456"
    question = _question(_pod(300, annotations=SCHEDULED), options=tens)
    assert _family(tens).decide(question).shares == (Share(U0, 3000),)
    assert _environment(question, tens) == {
        "NVIDIA_VISIBLE_DEVICES": "0",
        "VOLCANO_GPU_ALLOCATED": "3000",
        "VOLCANO_GPU_MEMORY_TOTAL": "24576",
    }


def test_whole_cards_are_offered_by_uuid() -> None:
    """volcano-gpushare:S5: two UUIDs with their NUMA nodes; a pod that asks for 2 gets both, exclusively."""
    resource = _offer(BY_NUMBER)
    assert resource.name == NUMBER
    assert [(entry.id, entry.device, entry.numa_node) for entry in resource.ids] == [(U0, U0, 0), (U1, U1, 1)]
    assert resource.decided_by is Decider.POD
    question = _question(_pod(2, annotations={INDEX: "0,1"}, resource=NUMBER), options=BY_NUMBER)
    assert _family(BY_NUMBER).decide(question).shares == (
        Share(U0, 24576, 100, exclusive=True),
        Share(U1, 24576, 100, exclusive=True),
    )
    assert _environment(question, BY_NUMBER) == {
        "NVIDIA_VISIBLE_DEVICES": "0,1",
        "VOLCANO_GPU_ALLOCATED": "2",
        "VOLCANO_GPU_MEMORY_TOTAL": "24576",
    }


def test_an_ill_card_is_named_to_the_scheduler_and_to_kubelet() -> None:
    """volcano-gpushare:S6: the annotation names card 1.

    Deliberately unlike the vector, kubelet's list has the ids of that card Unhealthy, so that its own count is right as well; capacity,
    which the scheduler divides by the number of cards, stays.
    """
    ill = Inventory(2, (NODE_0, dataclasses.replace(NODE_1, health=Health(ok=False, reason="XID 79"))))
    wishes = _family().node_wishes(_view(inventory=ill))
    assert wishes.annotations == {UNHEALTHY: "1"}
    assert wishes.capacity == {NUMBER: "2"}
    listing = _ledger(_offer(inventory=ill), ill).listing(MEMORY)
    assert len(listing) == 49152
    assert {entry.id.device for entry in listing if not entry.healthy} == {U1}


def test_both_containers_of_a_pod_are_served_on_one_card() -> None:
    """volcano-gpushare:S7: 1000 and 1000 MiB of the card that the pod has, where the replaced plugin fails the second."""
    pod = _pod(1000, 1000, annotations=SCHEDULED)
    for name in ("c0", "c1"):
        question = _question(pod, name)
        assert _family().decide(question).shares == (Share(U0, 1000),)
        assert _environment(question)["VOLCANO_GPU_ALLOCATED"] == "1000"


# -- defects of the replaced plugin ---------------------------------------------------------------------------------------------------


def test_a_pod_is_assigned_when_its_last_container_is_served() -> None:
    """volcano-gpushare:D1: nothing is written after the first of two, ``true`` after the second; one without a GPU does not count."""
    pod = _pod(1000, 0, 2000, annotations=SCHEDULED)
    first, last = _grant(Share(U0, 1000)), _grant(Share(U0, 2000), number=2)
    assert _family().pod_wishes(pod, {"c0": first}, failed=False) == {}
    assert _family().pod_wishes(pod, {"c0": first, "c2": last}, failed=False) == {ASSIGNED: "true"}
    assert _family().pod_wishes(pod, {"c0": first, "c2": last}, failed=True) == {}


def test_two_pods_of_equal_size_get_their_own_cards() -> None:
    """volcano-gpushare:D2: the proven pod's own annotation decides, not the order of equal requests."""
    shares = [_family().decide(_question(_pod(3000, annotations={INDEX: index}))).shares for index in ("1", "0")]
    assert shares == [(Share(U1, 3000),), (Share(U0, 3000),)]


def test_a_count_that_is_not_the_pods_limit_is_refused() -> None:
    """volcano-gpushare:D2: ids of another amount cannot be this container's, however much the pod looks like it."""
    question = dataclasses.replace(_question(_pod(3000, annotations=SCHEDULED)), ids=("0-1", "0-2"))
    with pytest.raises(RequestRefusedError, match=r"pod default/p, container c0: limit volcano.sh/gpu-memory is 3000 .* counted 2"):
        _family().decide(question)


def test_whole_cards_work_on_a_fresh_node() -> None:
    """volcano-gpushare:D3: a zero for gpu-memory makes the scheduler see the cards; gpu-number is kubelet's own."""
    assert _family(BY_NUMBER).node_wishes(_view(BY_NUMBER)).capacity == {MEMORY: "0"}


def test_cards_of_different_size_are_refused_with_both_remedies() -> None:
    """volcano-gpushare:D4: the scheduler takes cards for equal, so the error names each card and what to set."""
    unequal = Inventory(1, (NODE_0, dataclasses.replace(NODE_1, name="NVIDIA T4", memory_mib=15360)))
    with pytest.raises(ConfigError) as refused:
        _offer(inventory=unequal)
    (problem,) = refused.value.problems
    assert problem.startswith("volcano.sh/gpu-memory: ")
    assert "GPU 0 (NVIDIA A10) has 24576 MiB, GPU 1 (NVIDIA T4) has 15360 MiB" in problem
    assert "volcanoGpushare.unequalGpus: minimum" in problem
    assert "volcanoGpushare.strategy: number" in problem


def test_cards_of_different_size_are_offered_with_the_smallest() -> None:
    """volcano-gpushare:D4: by setting each card counts as the smallest, also when this agent places; the size told is the card's own."""
    minimum = VolcanoGpushareOptions(unequal_gpus="minimum")
    unequal = Inventory(1, (NODE_0, dataclasses.replace(NODE_1, memory_mib=15360)))
    resource = _offer(minimum, unequal)
    assert len(resource.ids) == 2 * 15360
    family = _family(minimum, unequal)
    ledger = _ledger(resource, unequal)
    ledger.decide(MEMORY, ["0-0"], [Share(U0, 10000)], Owner("c", "uid-0"))
    question = _question(_pod(6000), options=minimum, inventory=unequal, rooms=ledger.rooms(MEMORY))
    assert family.decide(question).shares == (Share(U1, 6000),)
    assert _environment(_question(_pod(6000), options=minimum, inventory=unequal), minimum)["VOLCANO_GPU_MEMORY_TOTAL"] == "24576"


def test_a_container_may_be_told_its_card_by_uuid() -> None:
    """volcano-gpushare:D5: by setting NVIDIA_VISIBLE_DEVICES is the UUID, which no renumbering touches."""
    by_uuid = VolcanoGpushareOptions(lists=ListOptions(id_strategy="uuid"))
    question = _question(_pod(3000, annotations={INDEX: "1"}), options=by_uuid)
    assert _environment(question, by_uuid)["NVIDIA_VISIBLE_DEVICES"] == U1


def test_numbers_stay_when_a_card_falls_off_the_bus() -> None:
    """volcano-gpushare:D5: NVML moves card 1 up to index 0; ids and annotations keep its number, the container gets the present index."""
    lost = Inventory(2, (dataclasses.replace(NODE_0, present=False), dataclasses.replace(NODE_1, index=0)))
    assert [entry.prefix for entry in _blocks(_offer(inventory=lost))] == ["0-", "1-"]
    question = _question(_pod(3000, annotations={INDEX: "1"}), inventory=lost)
    assert _family(inventory=lost).decide(question).shares == (Share(U1, 3000),)
    assert _environment(question)["NVIDIA_VISIBLE_DEVICES"] == "0"
    assert _family().node_wishes(_view(inventory=lost)).annotations[UNHEALTHY] == "0"


def test_a_card_that_never_answered_is_counted_and_not_to_be_used() -> None:
    """volcano-gpushare:D5: the scheduler counts from 0 without a gap, so a gap in NVML's indices is told as an unhealthy card."""
    gap = Inventory(1, (NODE_0, dataclasses.replace(NODE_1, index=2)))
    wishes = _family(inventory=gap).node_wishes(_view(inventory=gap))
    assert wishes.capacity == {NUMBER: "3"}
    assert wishes.annotations == {UNHEALTHY: "1"}


def test_only_the_one_annotation_is_written() -> None:
    """volcano-gpushare:D6: nothing else of the pod is mentioned, so no concurrent change of it can be in the way."""
    pod = _pod(3000, annotations=SCHEDULED | {"somebody": "else"})
    assert set(_family().pod_wishes(pod, {"c0": _grant(Share(U0, 3000))}, failed=False)) == {ASSIGNED}


@pytest.mark.parametrize("capacity", [{}, {NUMBER: "0"}, {NUMBER: "2"}], ids=["dropped", "zeroed", "right"])
def test_the_count_of_cards_is_wished_whatever_kubelet_made_of_it(capacity: dict[str, str]) -> None:
    """volcano-gpushare:D7: the wish does not depend on what stands there, so what is lost is written again."""
    node = Node("node-a", capacity=capacity, allocatable=capacity)
    assert _family().node_wishes(_view(node=node)).capacity == {NUMBER: "2"}


def test_a_list_of_ill_cards_goes_when_none_is_ill() -> None:
    """volcano-gpushare:D8: a stale list does not outlive the recovery, and the health is the agent's own, one for all families."""
    stale = Node("node-a", annotations={UNHEALTHY: "1"})
    assert _family().node_wishes(_view(node=stale)).annotations == {UNHEALTHY: None}


def test_a_card_that_serves_another_family_is_not_to_be_used() -> None:
    """volcano-gpushare:D8: whatever keeps a card from being given out is told in the same list."""
    view = _view(troubles={U0: "the GPU serves nvidia until its last share is returned"})
    assert _family().node_wishes(view).annotations == {UNHEALTHY: "0"}


def test_an_init_container_is_served_and_assigns_nothing() -> None:
    """volcano-gpushare:D9: it gets its card like any other, and the pod is assigned only with its main container."""
    pod = _pod(1000, annotations=SCHEDULED, init=(500,))
    assert _family().decide(_question(pod, "i0")).shares == (Share(U0, 500),)
    init = {"i0": _grant(Share(U0, 500))}
    assert _family().pod_wishes(pod, init, failed=False) == {}
    assert _family().pod_wishes(pod, init | {"c0": _grant(Share(U0, 1000))}, failed=False) == {ASSIGNED: "true"}


def test_a_list_that_is_too_long_is_refused_with_the_factor_that_fits() -> None:
    """volcano-gpushare:D10: eight cards of 80 GB at 1 MiB do not fit into a message of kubelet (kubelet contract V13)."""
    with pytest.raises(ConfigError, match=r"volcano.sh/gpu-memory: 652472 ids .* volcanoGpushare.gpuMemoryFactor: 4 would fit"):
        _offer(inventory=_eight_large())


def test_the_agent_chooses_the_factor_that_fits() -> None:
    """volcano-gpushare:D10: factor 0 gives the smallest power of two, and amounts follow it."""
    automatic = VolcanoGpushareOptions(factor=0)
    resource = _offer(automatic, _eight_large())
    assert len(resource.ids) == 8 * (81559 // 4)
    assert list_size_bytes(resource.ids) <= automatic.message_budget_bytes
    question = _question(_pod(100, annotations=SCHEDULED), options=automatic, inventory=_eight_large())
    assert _family(automatic).decide(question).shares == (Share(question.inventory.gpus[0].uuid, 400),)
    assert len(_offer(automatic).ids) == 49152


def test_a_unit_larger_than_a_card_is_refused() -> None:
    """volcano-gpushare:D10: a factor that leaves no unit at all is an error that names the card's size."""
    with pytest.raises(ConfigError, match=r"a unit of 65536 MiB is more than a GPU has, 24576 MiB; set volcanoGpushare.gpuMemoryFactor"):
        _offer(VolcanoGpushareOptions(factor=65536))


def test_the_configuration_counts() -> None:
    """volcano-gpushare:D11: what the file says is what is offered; a word that is no strategy is refused instead of meaning ``number``."""
    assert _configured("strategy: number") == BY_NUMBER
    assert _configured("gpuMemoryFactor: 10") == VolcanoGpushareOptions(factor=10, lists=BY_INDEX)
    with pytest.raises(ConfigError, match=r'volcanoGpushare.strategy: expected share or number, got "whole"'):
        _configured("strategy: whole")


def test_a_pod_without_a_gpu_scheduler_is_placed_by_the_agent() -> None:
    """volcano-gpushare:D12: the first card with room for the whole pod, written into the pod as a scheduler would have."""
    pod = _pod(3000)
    decision = _family().decide(_question(pod))
    assert decision.shares == (Share(U0, 3000),)
    assert decision.by == "the agent, the first GPU with room (no volcano.sh/gpu-index)"
    assert _family().pod_wishes(pod, {"c0": _grant(Share(U0, 3000))}, failed=False) == {
        INDEX: "0",
        PREDICATE_TIME: "1795200990250000000",
        ASSIGNED: "true",
    }


def test_a_pod_that_nobody_placed_and_that_does_not_fit_is_told_why() -> None:
    """volcano-gpushare:D12: the text names the room of each card and the switch that the scheduler lacks."""
    with pytest.raises(CapacityError) as refused:
        _family().decide(_question(_pod(30000)))
    assert "pod default/p has no volcano.sh/gpu-index" in str(refused.value)
    assert f"no GPU has 30000 MiB for the whole pod: {U0}: 24576 MiB free of 24576" in str(refused.value)
    assert "deviceshare.GPUSharingEnable: true" in str(refused.value)


def test_of_many_cards_in_the_annotation_a_memory_pod_has_the_first() -> None:
    """volcano-gpushare:D13: old schedulers wrote every card that would do."""
    assert _family().decide(_question(_pod(3000, annotations={INDEX: "1,0"}))).shares == (Share(U1, 3000),)


# -- placing a whole pod --------------------------------------------------------------------------------------------------------------


def test_a_pod_is_placed_with_all_its_containers_in_mind() -> None:
    """The first of two containers goes where both have room, and the second where the first is, before any annotation says so."""
    ledger = _ledger(_offer())
    ledger.decide(MEMORY, ["0-0"], [Share(U0, 22000)], Owner("c", "uid-0"))
    pod = _pod(2000, 2000)
    assert _family().decide(_question(pod, rooms=ledger.rooms(MEMORY))).shares == (Share(U1, 2000),)
    siblings = {"c0": (Share(U1, 2000),)}
    assert _family().decide(_question(pod, "c1", siblings=siblings)).shares == (Share(U1, 2000),)


def test_a_sidecar_and_an_init_container_count_as_kubernetes_counts_them() -> None:
    """A sidecar runs beside everything after it; an ordinary init container before the main ones."""
    containers = (
        PodContainer("s", ContainerKind.SIDECAR, {MEMORY: 1000}),
        PodContainer("i", ContainerKind.INIT, {MEMORY: 24000}),
        PodContainer("c", limits={MEMORY: 2000}),
    )
    pod = dataclasses.replace(_pod(), containers=containers)
    with pytest.raises(CapacityError, match="no GPU has 25000 MiB"):
        _family().decide(_question(pod, "c"))


def test_a_choice_beyond_a_cards_memory_is_refused_by_the_ledger() -> None:
    """The family follows the annotation, whoever wrote it; the book does not give more than there is."""
    resource = _offer()
    ledger = _ledger(resource)
    ledger.decide(MEMORY, ["1-0"], [Share(U0, 23000)], Owner("c", "uid-0"))
    shares = _family().decide(_question(_pod(3000, annotations=SCHEDULED))).shares
    with pytest.raises(CapacityError, match="26000 MiB booked of 24576"):
        ledger.decide(MEMORY, ["0-0"], shares, Owner("c0", "uid-1"))


def test_whole_cards_of_several_containers_do_not_overlap() -> None:
    """Of three cards in the annotation the first container has its two, the second the third."""
    pod = _pod(2, 1, annotations={INDEX: "2,0,1"}, resource=NUMBER)
    shares = [_devices(_question(pod, name, options=BY_NUMBER, inventory=THREE)) for name in ("c0", "c1")]
    assert shares == [[U2, U0], [U1]]


def test_whole_cards_are_placed_by_the_agent_on_idle_ones() -> None:
    """Containers of a pod without annotation get different cards, and the pod is told once all are known."""
    ledger = _ledger(_offer(BY_NUMBER, THREE), THREE)
    ledger.decide(NUMBER, [U2], [Share(U0, 24576, 100, exclusive=True)], Owner("c", "uid-0"))
    pod = _pod(1, 1, resource=NUMBER)
    rooms = ledger.rooms(NUMBER)
    assert _devices(_question(pod, "c0", options=BY_NUMBER, inventory=THREE, rooms=rooms)) == [U1]
    siblings = {"c0": (Share(U1, 24576, 100, exclusive=True),)}
    assert _devices(_question(pod, "c1", options=BY_NUMBER, inventory=THREE, rooms=rooms, siblings=siblings)) == [U2]

    family = _family(BY_NUMBER, THREE)
    first = {"c0": _grant(Share(U1), resource=NUMBER)}
    assert family.pod_wishes(pod, first, failed=False) == {}
    both = first | {"c1": _grant(Share(U2), resource=NUMBER)}
    assert family.pod_wishes(pod, both, failed=False)[INDEX] == "1,2"


def test_too_few_idle_cards_are_refused_with_the_reason() -> None:
    """A pod that wants more whole cards than are idle is told what keeps each of them."""
    ledger = _ledger(_offer(BY_NUMBER))
    ledger.decide(NUMBER, [U1], [Share(U0, 24576, 100, exclusive=True)], Owner("c", "uid-0"))
    question = _question(_pod(2, resource=NUMBER), options=BY_NUMBER, rooms=ledger.rooms(NUMBER))
    with pytest.raises(CapacityError, match=r"2 idle GPUs are wanted, 1 can be had: .*deviceshare.GPUNumberEnable"):
        _family(BY_NUMBER).decide(question)


def test_what_stands_in_the_pod_is_not_written_again() -> None:
    """The scheduler's choice and time are never replaced by ours."""
    pod = _pod(3000, annotations={INDEX: "1"})
    assert _family().pod_wishes(pod, {"c0": _grant(Share(U1, 3000))}, failed=False) == {ASSIGNED: "true"}


def test_a_running_container_is_recalled_from_its_pod() -> None:
    """After a restart the annotation says what a container has; without one nobody can say."""
    assert _recalled("1") == (Share(U1, 3000),)
    assert _family().recall(_question(_pod(3000))) is None


def test_an_unreadable_limit_is_refused() -> None:
    """A limit that is no whole number is named with its text."""
    container = PodContainer("c0", unreadable={MEMORY: "1.5k"})
    with pytest.raises(RequestRefusedError, match=r"limit volcano.sh/gpu-memory: '1.5k' is no whole number"):
        _family().decide(_question(dataclasses.replace(_pod(), containers=(container,))))


def test_a_container_that_the_pod_does_not_have_is_refused() -> None:
    """kubelet's records and the pod disagree: an error, not an exception of the family's own."""
    with pytest.raises(RequestRefusedError, match="pod default/p has no container other"):
        _family().decide(_question(_pod(3000, annotations=SCHEDULED), "other"))


# -- offers and ids -------------------------------------------------------------------------------------------------------------------


def test_a_node_without_cards_offers_nothing() -> None:
    """No GPU, no resource; a count from before is taken back so that the scheduler does not believe in cards."""
    family = _family(inventory=Inventory())
    assert family.resources(Inventory()) == ()
    empty = NodeView(Node("node-a", capacity={NUMBER: "2"}), Inventory(), {}, {}, now=0.0)
    assert family.node_wishes(empty).capacity == {NUMBER: "0"}
    assert family.node_wishes(dataclasses.replace(empty, node=Node("node-a"))).capacity == {}


def test_the_size_of_the_list_is_exact() -> None:
    """The sum that decides about the factor is, to the byte, what the encoder would need for the ill list."""
    resource = _offer()
    size = list_size_bytes(resource.ids)
    assert _offer(VolcanoGpushareOptions(message_budget_bytes=size)) == resource
    with pytest.raises(ConfigError):
        _offer(VolcanoGpushareOptions(message_budget_bytes=size - 1))


def test_both_names_are_claimed() -> None:
    """After a change of strategy kubelet's records still speak of the other resource."""
    assert [_family().claims(name) for name in (MEMORY, NUMBER, "volcano.sh/vgpu-number")] == [True, True, False]


# -- bad input ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "-1",
        "+1",
        "0x1",
        "0, 1",
        "0,",
        ",0",
        "1.0",
        "٣",
        "00",
        "0\n",
        "1e3",
        "9" * 5000,
        "0," * 100_000,
        "GPU-1",
        "\x00",
        "2",
        "999",
    ],
)
def test_an_annotation_that_names_no_card_is_refused_with_its_text(text: str) -> None:
    """Malformed, foreign and huge values of gpu-index: one clear line that names pod, key, value and remedy, and no recollection."""
    with pytest.raises(RequestRefusedError) as refused:
        _family().decide(_question(_pod(3000, annotations={INDEX: text})))
    message = str(refused.value)
    assert message.startswith("pod default/p: volcano.sh/gpu-index is '")
    assert "delete the pod so that it is scheduled anew" in message
    assert message.isprintable()
    assert len(message) < 300
    assert _recalled(text) is None


@pytest.mark.parametrize(
    ("text", "reason"), [("0", "the pod needs 2 GPUs"), ("1,1", "names a GPU twice"), ("0,7", "no GPU 7; it has 0, 1")]
)
def test_an_annotation_that_does_not_suffice_for_whole_cards_is_refused(text: str, reason: str) -> None:
    """Too few cards, one twice, or an unknown one."""
    question = _question(_pod(2, annotations={INDEX: text}, resource=NUMBER), options=BY_NUMBER)
    with pytest.raises(RequestRefusedError, match=reason):
        _family(BY_NUMBER).decide(question)


@given(text=st.one_of(st.text(max_size=40), st.from_regex(r"[0-9, +-]{0,12}")), strategy=st.sampled_from(["share", "number"]))
@example(text="0,1", strategy="number")
def test_no_annotation_raises_anything_but_a_refusal(text: str, strategy: str) -> None:
    """Whatever stands in gpu-index: cards of this node, or a refusal."""
    options = VolcanoGpushareOptions(strategy=strategy, factor=1024)
    pod = _pod(1, annotations={INDEX: text}, resource=MEMORY if strategy == "share" else NUMBER)
    question = _question(pod, options=options)
    try:
        shares = _family(options).decide(question).shares
    except RequestRefusedError:
        assert _family(options).recall(question) is None
    else:
        assert {share.device for share in shares} <= {U0, U1}


@pytest.mark.parametrize("text", ["", "false", "true", "TRUE", "x" * 5000, "\x00", "18446744073709551616", "-1"])
def test_other_annotations_of_the_pod_decide_nothing(text: str) -> None:
    """predicate-time and gpu-assigned may say anything: the pod is proven and not guessed from them, and ends up assigned."""
    pod = _pod(3000, annotations={INDEX: "1", PREDICATE_TIME: text, ASSIGNED: text})
    assert _family().decide(_question(pod)).shares == (Share(U1, 3000),)
    assert _family().pod_wishes(pod, {"c0": _grant(Share(U1, 3000))}, failed=False) == {ASSIGNED: "true"}


def test_the_schedulers_lock_is_given_back_after_an_allocate() -> None:
    """The lock ``gpu`` goes once an Allocate came after it, guarded against one that is taken anew meanwhile."""
    locked = Node("node-a", annotations={"gpu": "2026-11-20T16:36:31Z"})  # unix second 1795192591
    wishes = _family().node_wishes(_view(node=locked, allocated_at=1795192592.0))
    assert wishes.annotations == {UNHEALTHY: None, "gpu": None}
    assert wishes.guarded == {"gpu"}
    assert "gpu" not in _family().node_wishes(_view(node=locked, allocated_at=1795192589.0)).annotations


def _blocks(resource: Resource) -> list[IdBlock]:
    assert isinstance(resource.ids, NumberedIds)
    return list(resource.ids.blocks)


def _devices(question: Question) -> list[str]:
    return [share.device for share in _family(BY_NUMBER, question.inventory).decide(question).shares]


def _recalled(text: str) -> tuple[Share, ...] | None:
    decision = _family().recall(_question(_pod(3000, annotations={INDEX: text})))
    return decision.shares if decision else None


def _eight_large() -> Inventory:
    return Inventory(1, tuple(Gpu(f"GPU-{index}", index, index, "NVIDIA H100 80GB HBM3", 81559) for index in range(8)))


def _configured(line: str) -> VolcanoGpushareOptions:
    content = f"version: v1\nvolcanoGpushare:\n  {line}\n".encode()
    return VolcanoGpushareOptions.from_settings(load_content(Sources({}, {}, "config.yaml"), content).settings, lists=ListOptions())


def test_a_card_is_told_by_cdi_name_where_asked_for() -> None:
    """The specs of this node name cards by UUID, whatever the variable would show; what the card is shared as is told as ever."""
    settings = load_content(Sources({}, {}, "config.yaml"), b"version: v1\n").settings
    options = VolcanoGpushareOptions.from_settings(settings, lists=ListOptions(strategies=("cdi-cri",)))
    of = _family(options)
    asked = _question(_pod(2000, annotations=SCHEDULED | {INDEX: "1"}))
    edits = of.provision(asked, of.decide(asked).shares).edits
    assert edits.cdi_names == (f"k8s.device-plugin.nvidia.com/gpu={TWO.gpus[1].uuid}",)
    assert set(edits.environment) == {"VOLCANO_GPU_ALLOCATED", "VOLCANO_GPU_MEMORY_TOTAL"}


def test_a_gpu_in_mig_mode_is_unhealthy_and_keeps_its_number() -> None:
    """Nothing can use it as one piece; the cards behind it must not change their numbers for the scheduler."""
    first, second = golden_inventory().gpus
    family = VolcanoGpushareFamily(VolcanoGpushareOptions(factor=4096))
    inventory = Inventory(version=1, gpus=(dataclasses.replace(first, mig_enabled=True), second))
    ledger = Ledger()
    ledger.observe(inventory)
    ledger.offer(family.resources(inventory))

    listed = {entry.id.id: entry.healthy for entry in ledger.listing("volcano.sh/gpu-memory")}

    assert listed == {f"{card}-{unit}": card == 1 for card in range(2) for unit in range(10)}
