"""The node's offer to the kubelet (vgpu-manager §2)."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import constants
from tests.families.vgpu_manager.node import CORES, INVENTORY, MEMORY, NUMBER, U0, U1, cards
from tests.golden import golden_slices
from vgpu_agent.device_ids import MESSAGE_BUDGET_BYTES, NumberedIds, list_size_bytes
from vgpu_agent.errors import OfferError, UnhealthyDeviceError
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.offer import (
    PACKED_CARDS,
    PackedIds,
    cautions_of,
    resources_of,
    shared_gpus,
)
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Decider, Gpu, Health, Inventory, Resource, Share

ALL = VgpuManagerOptions(offer_cores=True, offer_memory=True)


def offered(inventory: Inventory = INVENTORY, **options: object) -> dict[str, Resource]:
    """The resources by name."""
    found = resources_of(inventory, msgspec.structs.replace(ALL, **options))
    return {resource.name: resource for resource in found}


def cautions(inventory: Inventory, **options: object) -> tuple[str, ...]:
    """The sentences about that offer."""
    return cautions_of(inventory, msgspec.structs.replace(ALL, **options))


def ledger(inventory: Inventory, **options: object) -> Ledger:
    """A ledger of that offer."""
    book = Ledger()
    book.observe(inventory)
    book.offer(offered(inventory, **options).values())
    return book


def test_ids_are_those_of_the_contract() -> None:
    """``vgpu-manager:§13.2``: ten slots of each card, and its compute and memory in packed ids."""
    found = offered()
    assert [entry.id for entry in found[NUMBER].ids] == [
        f"{uuid}::{number}" for uuid in (U0, U1) for number in range(10)
    ]
    assert [found[CORES].ids[place].id for place in (0, 1, 99, 100, 101, 199)] == [
        "AA",
        "gAI",
        "gMYB",
        "AQ",
        "gQI",
        "gcYB",
    ]
    assert [found[MEMORY].ids[place].id for place in (0, 24575, 24576, -1)] == [
        "AA",
        "gP7_Ag",
        "AQ",
        "gf7_Ag",
    ]


def test_only_slots_have_topology() -> None:
    """And a card whose NUMA node the kernel does not know has none."""
    unknown = msgspec.structs.replace(INVENTORY.gpus[1], numa_node=None)
    inventory = msgspec.structs.replace(INVENTORY, gpus=(INVENTORY.gpus[0], unknown))
    found = offered(inventory)
    assert {entry.device: entry.numa_node for entry in found[NUMBER].ids} == {U0: 0, U1: None}
    assert {entry.numa_node for entry in found[MEMORY].ids} == {None}


@pytest.mark.parametrize("prefers", [True, False])
def test_only_slots_are_booked_and_answered(prefers: bool) -> None:
    """PreStartContainer is always called; GetPreferredAllocation where its gate is on."""
    found = offered(prefer_claimed=prefers)
    number = found[NUMBER]
    assert (number.decided_by, number.pre_start_required, number.offers_preference) == (
        Decider.POD,
        True,
        prefers,
    )
    for name in (CORES, MEMORY):
        counted = found[name]
        assert (counted.decided_by, counted.pre_start_required, counted.offers_preference) == (
            Decider.NOBODY,
            False,
            False,
        )


def test_quotas_are_off_unless_asked_for() -> None:
    """Their gates are off by default."""
    assert [each.name for each in resources_of(INVENTORY, VgpuManagerOptions())] == [NUMBER]
    assert list(offered(offer_cores=False)) == [NUMBER, MEMORY]


def test_another_domain_has_other_names() -> None:
    """``--domain`` replaces them all."""
    assert list(offered(keys=Keys("example.com"))) == [
        "example.com/vgpu-number",
        "example.com/vgpu-cores",
        "example.com/vgpu-memory",
    ]


def test_scaling_and_unit_change_the_counts_of_unequal_cards() -> None:
    """Each card counts by its own memory; all of them have the same percents."""
    small = msgspec.structs.replace(INVENTORY.gpus[1], memory_mib=15109)
    inventory = msgspec.structs.replace(INVENTORY, gpus=(INVENTORY.gpus[0], small))
    found = offered(inventory, memory_scaling=1.5, memory_factor=4, cores_scaling=1.1)
    assert len(found[MEMORY].ids) == 36864 // 4 + 22663 // 4
    assert len(found[CORES].ids) == 2 * 110
    assert (found[NUMBER].memory_scaling, found[NUMBER].cores_scaling) == (1.5, 1.1)


def test_cores_and_memory_have_the_same_texts() -> None:
    """Only this family's lists do that, and nobody holds anything through them. Each is looked up
    by its own resource.
    """
    book = ledger(INVENTORY)
    assert book.offered_ids(CORES) == 200
    assert book.offered_ids(MEMORY) == 49152
    assert book.listing(CORES)[0].id.id == book.listing(MEMORY)[0].id.id == "AA"


@pytest.mark.parametrize(
    "excluded", [{"excluded_uuids": frozenset({U1})}, {"excluded_indices": frozenset({1})}]
)
def test_an_excluded_card_is_listed_as_unhealthy(excluded: dict[str, object]) -> None:
    """Hidden, it would shift what schedulers count. Nothing of it is given out."""
    book = ledger(INVENTORY, **excluded)
    for name in (NUMBER, CORES, MEMORY):
        assert {(entry.id.device, entry.healthy) for entry in book.listing(name)} == {
            (U0, True),
            (U1, False),
        }
    assert book.free_ids(NUMBER) == 10
    with pytest.raises(UnhealthyDeviceError, match=r"excluded by vgpuManager\.excludeDevices"):
        book.reserve(NUMBER, [f"{U1}::0"], [Share(U1, 1024)])


def test_an_excluded_card_stays_with_other_families() -> None:
    """It is no GPU that this family and another one could race for."""
    other = Resource("example.com/gpu", "other", (), decided_by=Decider.POD)
    book = Ledger()
    book.observe(INVENTORY)
    book.offer([*offered(excluded_uuids=frozenset({U1})).values(), other])
    assert book.shared_gpus("other") == {U0}


def test_an_ill_card_loses_its_slots_at_once_and_gets_them_back() -> None:
    """``vgpu-manager:D8``, ``vgpu-manager:D9``: the replaced plugin ends, and forgets it."""
    book = ledger(INVENTORY)
    well = book.listing(NUMBER)
    ill = msgspec.structs.replace(INVENTORY.gpus[0], health=Health(ok=False, reason="XID 79"))
    book.observe(msgspec.structs.replace(INVENTORY, gpus=(ill, INVENTORY.gpus[1])))
    assert [entry.healthy for entry in book.listing(NUMBER)] == [False] * 10 + [True] * 10
    assert book.offered_ids(NUMBER) == 10
    book.observe(INVENTORY)
    assert book.listing(NUMBER) == well


def test_a_divided_card_has_no_slots() -> None:
    """Its instances have a resource of their own."""
    divided = msgspec.structs.replace(
        INVENTORY.gpus[0], mig_enabled=True, mig_instances=golden_slices()
    )
    inventory = msgspec.structs.replace(INVENTORY, gpus=(divided, INVENTORY.gpus[1]))
    assert {entry.device for entry in offered(inventory)[NUMBER].ids} == {U1}
    assert offered(inventory)[CORES].ids[0].id == "AQ"  # the number stays that of the card
    assert shared_gpus(inventory, ALL) == (INVENTORY.gpus[1],)


def test_a_node_of_divided_cards_offers_no_slots() -> None:
    """With the strategy ``single`` the resource is not even registered (vgpu-manager §2.1)."""
    assert offered(mig_strategy="single") == {}
    assert offered(Inventory(1)) == {}


def test_a_lost_card_keeps_its_number() -> None:
    """NVML moves the numbers up; schedulers and the kubelet's checkpoint do not."""
    moved = msgspec.structs.replace(INVENTORY.gpus[1], index=0)
    lost = msgspec.structs.replace(INVENTORY.gpus[0], present=False)
    found = offered(msgspec.structs.replace(INVENTORY, gpus=(lost, moved)))
    assert found[CORES].ids[100].id == "AQ"
    assert found[CORES].ids[100].device == U1


def test_a_list_that_is_too_long_is_left_out_with_the_unit_that_fits() -> None:
    """``vgpu-manager:D7``: 655,360 ids are three times what the kubelet takes, and the slots are
    offered all the same.
    """
    inventory = cards(8)
    assert list(offered(inventory)) == [NUMBER, CORES]
    (caution,) = cautions(inventory)
    assert caution.startswith(
        "nvidia.com/vgpu-memory is not offered: 655360 ids make a device list"
    )
    assert "vgpuManager.deviceMemoryFactor: 4 would fit" in caution
    assert MEMORY in offered(inventory, memory_factor=4)
    assert cautions(inventory, memory_factor=4) == ()


def test_compute_that_is_too_much_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no unit to change."""
    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: 2000})
    (caution,) = cautions(INVENTORY, offer_memory=False)
    assert caution.startswith("nvidia.com/vgpu-cores is not offered: 200 ids")
    assert "vgpuManager.deviceCoresScaling: choose less" in caution


def test_slots_that_are_too_many_offer_nothing() -> None:
    """Without them nothing can be given; the reason names the setting."""
    with pytest.raises(OfferError) as caught:
        offered(cards(8), split=65536)
    assert "vgpuManager.deviceSplitCount: choose less" in caught.value.reasons[NUMBER]


def test_cards_beyond_the_library_are_listed_and_given_to_nobody() -> None:
    """``vgpu-manager:D32``: a claim on such a card ends the replaced plugin."""
    inventory = cards(18, 4096)
    book = ledger(inventory)
    assert book.offered_ids(NUMBER) == 160
    assert len(book.listing(NUMBER)) == 180
    (caution,) = cautions(inventory)
    assert caution.startswith("GPU 16 (GPU-00000016-")
    assert "GPU 17 (" in caution
    with pytest.raises(UnhealthyDeviceError, match=r"libvgpu-control\.so knows 16 GPUs"):
        book.reserve(
            NUMBER,
            ["GPU-00000016-aaaa-bbbb-cccc-000000000000::0"],
            [Share("GPU-00000016-aaaa-bbbb-cccc-000000000000", 1)],
        )


def test_more_cards_than_ids_can_tell_apart() -> None:
    """The number of a card has one byte."""
    found = offered(cards(300, 8))
    assert {entry.device for entry in found[MEMORY].ids} == {gpu.uuid for gpu in cards(256, 8).gpus}


@given(
    st.lists(st.tuples(st.integers(0, 300_000), st.booleans()), max_size=20),
    st.floats(0.01, 100),
    st.integers(1, 65536),
    st.integers(1, 200),
)
def test_any_node_is_offered_within_the_budget(
    sizes: list[tuple[int, bool]], scaling: float, factor: int, split: int
) -> None:
    """Unequal cards, any settings: the lists fit, or a sentence says what would."""
    gpus = tuple(
        Gpu(f"GPU-{number}", number, number, "X", memory, mig_enabled=mig)
        for number, (memory, mig) in enumerate(sizes)
    )
    inventory = Inventory(1, gpus)
    options = {"memory_scaling": scaling, "memory_factor": factor, "split": split}
    began = time.perf_counter()
    found, sentences = offered(inventory, **options), cautions(inventory, **options)
    assert time.perf_counter() - began < 5
    for resource in found.values():
        assert isinstance(resource.ids, NumberedIds)
        assert list_size_bytes(resource.ids) <= MESSAGE_BUDGET_BYTES
    if any(not mig for _, mig in sizes):
        left_out = {CORES, MEMORY} - found.keys()
        assert {name for name in (CORES, MEMORY) if any(name in text for text in sentences)} == (
            left_out
        )


@pytest.mark.parametrize(
    ("card", "number", "text"),
    [
        (0, 0, "AA"),
        (1, 0, "AQ"),
        (0, 1, "gAI"),
        (1, 1, "gQI"),
        (0, 99, "gMYB"),
        (1, 99, "gcYB"),
        (0, 24575, "gP7_Ag"),
        (1, 24575, "gf7_Ag"),
    ],
)
def test_packed_ids_are_those_of_the_contract(card: int, number: int, text: str) -> None:
    """``vgpu-manager:§13.2``: the kubelet's checkpoint may hold them for running pods."""
    assert PackedIds(card).text(number) == text
    assert PackedIds(card).number(text) == number
    assert PackedIds(card + 1).number(text) is None


@given(st.integers(0, PACKED_CARDS - 1), st.integers(0, 1 << 40))
def test_each_number_has_one_text(card: int, number: int) -> None:
    """And a greater number has none that is shorter, which lists rely on."""
    codec = PackedIds(card)
    assert codec.number(codec.text(number)) == number
    assert len(codec.text(number)) <= len(codec.text(number + 1))


@given(st.integers(0, PACKED_CARDS - 1), st.text(max_size=20))
def test_any_other_text_is_no_number_or_the_one_of_its_text(card: int, text: str) -> None:
    """The kubelet's records may hold anything: nothing raises, and no id has two texts."""
    number = PackedIds(card).number(text)
    assert number is None or PackedIds(card).text(number) == text


@pytest.mark.parametrize(
    "text",
    ["", "A", "AB", "AA==", "gAA", "AAA", "ä", "A" * 10**6, "/w", "+w", "A A", "AA\n", "\0"],
)
def test_texts_in_another_form_stand_for_no_number(text: str) -> None:
    """Another form of a number would be a second id for one unit, and a long one costs nothing."""
    began = time.perf_counter()
    assert PackedIds(0).number(text) is None
    assert time.perf_counter() - began < 1


def test_codecs_of_one_card_are_equal() -> None:
    """Lists are compared by them: an unchanged offer is no new message to the kubelet."""
    assert PackedIds(3) == PackedIds(3)
    assert PackedIds(3) != PackedIds(4)
