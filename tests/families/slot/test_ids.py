"""Ids in a family's own form, at every place that knows ids: many at the price of few."""

from __future__ import annotations

import time
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.families.slot.family import SlotFamily
from tests.families.slot.ids import Packed
from tests.families.slot.settings import RESOURCE
from tests.golden import U0, U1, golden_inventory
from vgpu_agent.device_ids import NumberedIds, NumberedList, list_size_bytes
from vgpu_agent.errors import UnknownDeviceError
from vgpu_agent.kubelet.codec import DeviceListEncoder, check_budget
from vgpu_agent.kubelet.held_ids import SeenNumbers, decode_allocatable
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Share
from vgpu_agent.sim.protocol import deviceplugin_pb2 as google
from vgpu_agent.sim.protocol import podresources_pb2 as google_resources

PER_GPU = 10_000
LAST = Packed(1).text(PER_GPU - 1)


@pytest.fixture
def ledger() -> Ledger:
    """A node with two GPUs, and twenty thousand slots."""
    ledger = Ledger()
    ledger.observe(golden_inventory())
    ledger.offer(SlotFamily(PER_GPU).resources(golden_inventory()))
    return ledger


@pytest.mark.parametrize(
    ("gpu", "number", "text"),
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
def test_ids_are_those_of_the_contract(gpu: int, number: int, text: str) -> None:
    """vgpu-manager §13.2, all of its vectors."""
    assert Packed(gpu).text(number) == text
    assert Packed(gpu).number(text) == number
    assert Packed(gpu + 1).number(text) is None


@given(st.integers(0, 255), st.integers(0, 1 << 40))
def test_each_number_has_one_text(gpu: int, number: int) -> None:
    """And a greater number has none that is shorter, which lists rely on."""
    codec = Packed(gpu)
    assert codec.number(codec.text(number)) == number
    assert len(codec.text(number)) <= len(codec.text(number + 1))


@pytest.mark.parametrize(
    "text", ["", "A", "AB", "AA==", "gAA", "AAA", "ä", "A" * 10**6, "/w", "\0"]
)
def test_other_texts_stand_for_no_number(text: str) -> None:
    """Another form of a number would be a second id for one slot."""
    assert Packed(0).number(text) is None


def test_ids_are_looked_up_without_a_table_of_them(ledger: Ledger) -> None:
    """The last one costs what the first one costs, and nothing is kept for any."""
    (resource,) = SlotFamily(1_000_000).resources(golden_inventory())
    tracemalloc.start()
    ledger.offer([resource])
    assert ledger.offered_ids(RESOURCE) == len(resource.ids) == 2_000_000
    assert list_size_bytes(resource.ids) > 2_000_000
    with pytest.raises(UnknownDeviceError):
        ledger.reserve(RESOURCE, ["gAA"], [Share(U0)])
    ledger.reserve(RESOURCE, [Packed(1).text(999_999)], [Share(U1)])
    kept = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept < 1_000_000


def test_twenty_thousand_ids_are_served(ledger: Ledger) -> None:
    """The kubelet's list has exactly them, its size is known beforehand, and what the kubelet says
    that it has is compared by number.
    """
    listing = ledger.listing(RESOURCE)
    assert isinstance(listing, NumberedList)
    message = DeviceListEncoder().encode(listing)
    sent = google.ListAndWatchResponse.FromString(message).devices
    assert [device.id for device in sent] == [
        Packed(gpu).text(number) for gpu in (0, 1) for number in range(PER_GPU)
    ]
    (resource,) = ledger.resources
    ill = NumberedList(tuple((block, False) for block, _ in listing.blocks))
    assert len(DeviceListEncoder().encode(ill)) == list_size_bytes(resource.ids)
    check_budget(resource)

    allocatable = google_resources.AllocatableResourcesResponse()
    for device in [*sent[5:], google.Device(id="gAA")]:
        allocatable.devices.add(resource_name=RESOURCE, device_ids=[device.id])
    assert isinstance(resource.ids, NumberedIds)
    seen = decode_allocatable(allocatable.SerializeToString(), {RESOURCE: resource.ids})[RESOURCE]
    assert isinstance(seen, SeenNumbers)
    assert [seen.count_missing(block) for block in resource.ids.blocks] == [5, 0]
    assert seen.unknown == {"gAA"}


def test_ids_that_are_given_out_are_those_of_their_gpu(ledger: Ledger) -> None:
    """They are booked by text, also after fewer are offered: then one is foreign."""
    grant = ledger.reserve(RESOURCE, [LAST], [Share(U1)])
    assert ledger.find(RESOURCE, [LAST]) == grant
    assert ledger.free_ids(RESOURCE) == 2 * PER_GPU - 1
    ledger.offer(SlotFamily(PER_GPU - 1).resources(golden_inventory()))
    assert ledger.foreign_ids == (LAST,)
    assert ledger.free_ids(RESOURCE) == 2 * (PER_GPU - 1)


def test_an_unchanged_offer_is_no_change(ledger: Ledger) -> None:
    """Codecs are compared by what they are: a new list to the kubelet is work on both sides."""
    before = ledger.listing(RESOURCE)
    ledger.offer(SlotFamily(PER_GPU).resources(golden_inventory()))
    assert ledger.listing(RESOURCE) == before


def test_ids_alike_of_two_resources_are_found(ledger: Ledger) -> None:
    """The health of one id would be two devices' (kubelet V17)."""
    (resource,) = ledger.resources
    more = msgspec.structs.replace(resource, name="example.com/more")
    began = time.perf_counter()
    with pytest.raises(ValueError, match="device id AA is offered by"):
        ledger.offer([resource, more])
    assert time.perf_counter() - began < 1
