"""Fifty thousand ids at the price of few:
what is sent, compared and passed over by blocks says what single ids would say.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import constants
from tests.families.slot.ids import Packed
from tests.kubelet.backend import U0, U1, FakeBackend
from vgpu_agent.device_ids import (
    DECIMAL,
    DeviceId,
    IdBlock,
    ListedDevice,
    NumberedIds,
    NumberedList,
    list_size_bytes,
)
from vgpu_agent.errors import ConfigError, KubeletError
from vgpu_agent.grpc import wire
from vgpu_agent.kubelet import codec
from vgpu_agent.kubelet.held_ids import (
    PodResourcesReader,
    SeenNumbers,
    decode_allocatable,
    decode_pod_resources,
)
from vgpu_agent.kubelet.plugin import PluginService, SentList
from vgpu_agent.model import Decider, Holding, Owner, Resource
from vgpu_agent.sim.protocol import podresources_pb2 as google_resources
from vgpu_agent.status import PluginStatus

MEMORY = "volcano.sh/vgpu-memory"
IDS = NumberedIds((IdBlock(f"{U0}-memory-", 1200, U0), IdBlock(f"{U1}-memory-", 15, U1, 1)))
BLOCKS = st.lists(
    st.builds(
        IdBlock,
        st.text(min_size=1, max_size=140),
        st.integers(0, 1100),
        st.just("d"),
        st.none() | st.integers(0, 300),
        st.just(DECIMAL) | st.builds(Packed, st.integers(0, 255)),
    ),
    max_size=3,
)


def _allocatable(*ids: str, resource: str = MEMORY, topology: bool = False) -> bytes:
    response = google_resources.AllocatableResourcesResponse()
    for id_ in ids:
        entry = response.devices.add(resource_name=resource, device_ids=[id_])
        if topology:
            entry.topology.nodes.add(id=1)
    return response.SerializeToString()


def _seen(response: bytes) -> SeenNumbers:
    seen = decode_allocatable(response, {MEMORY: IDS})[MEMORY]
    assert isinstance(seen, SeenNumbers)
    return seen


@settings(max_examples=30, deadline=None)
@given(BLOCKS, st.booleans())
def test_a_block_is_encoded_as_its_ids_would_be(blocks: list[IdBlock], healthy: bool) -> None:
    """Byte for byte, with every length of number, any text before it,
    and its size known beforehand.
    """
    listed = NumberedList(
        tuple((block, healthy) for block in blocks),
        (ListedDevice(DeviceId("gone", "x"), healthy=False),),
    )

    assert codec.DeviceListEncoder().encode(listed) == codec.DeviceListEncoder().encode(
        list(listed)
    )
    assert list_size_bytes(NumberedIds(tuple(blocks))) == list_size_bytes(
        list(NumberedIds(tuple(blocks)))
    )


def test_a_long_list_is_encoded_in_parts_without_keeping_any() -> None:
    """At most 4096 ids at a time, so that an Allocate of another resource is answered in between.
    Nothing is kept for the next time.
    """
    encoder = codec.DeviceListEncoder()
    listed = NumberedList(((IdBlock(f"{U0}-memory-", 50_000, U0), True),))
    sizes = [len(part) for part in encoder.parts(listed)]

    assert len(sizes) >= 50_000 / codec.IDS_IN_A_PART
    assert max(sizes) <= codec.IDS_IN_A_PART * 80
    assert encoder._encoded == {}


async def test_other_calls_are_let_in_while_a_long_list_is_made() -> None:
    """A waiting task gets the event loop once for each part."""
    resource = Resource(
        MEMORY, "volcano-vgpu", NumberedIds((IdBlock("m-", 50_000, U0),)), decided_by=Decider.NOBODY
    )
    backend = FakeBackend(resource)
    turns, sent, done = 0, [], asyncio.Event()

    async def others() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    async def send(message: bytes) -> None:
        sent.append(len(message))
        done.set()
        service.end_streams()

    # they are numbered
    listed = NumberedList(tuple((block, True) for block in resource.ids.blocks))  # type: ignore[attr-defined]  # these ids have blocks
    # as the ledger answers
    backend.listing = lambda _: listed  # type: ignore[method-assign,assignment,return-value]  # replaced for the test
    service = PluginService(
        resource, backend, PluginStatus(MEMORY, "volcano-vgpu"), coalesce_seconds=0
    )
    task = asyncio.create_task(others())
    await service.stream_methods["/v1beta1.DevicePlugin/ListAndWatch"](b"", send)
    await task
    assert (len(sent), turns > 50_000 // codec.IDS_IN_A_PART) == (1, True)


def test_too_many_numbered_ids_name_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """kubelet V13 in the words of the setting of the unit, instead of replicas."""
    resource = Resource(
        MEMORY,
        "volcano-vgpu",
        NumberedIds((IdBlock("m-", 50_000, U0),)),
        ids_setting="volcanoVgpu.gpuMemoryFactor",
    )

    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: 600_000})
    with pytest.raises(ConfigError) as refusal:
        codec.check_budget(resource)
    assert "50000 ids make a device list of" in str(refusal.value)
    assert str(refusal.value).endswith(
        "volcanoVgpu.gpuMemoryFactor: change it so that there are 2 times fewer ids"
    )


def test_more_ids_than_can_be_looked_at_are_refused_at_once() -> None:
    """Replicas of four thousand million come from one wrong digit.
    The answer says how many would fit.
    """
    blocks = tuple(IdBlock(f"{uuid}::", 2**31 - 1, uuid) for uuid in (U0, U1))

    with pytest.raises(
        ConfigError,
        match=(
            r"4294967294 ids of up to 67 bytes .* replicas: at most 27388 for each of the 2 "
            r"devices would fit"
        ),
    ):
        codec.check_budget(Resource("nvidia.com/gpu", "nvidia", NumberedIds(blocks)))


@pytest.mark.parametrize("topology", [False, True])
@settings(max_examples=30, deadline=None)
@given(
    st.sets(st.sampled_from([entry.id for entry in IDS]), max_size=40),
    st.sets(st.sampled_from(["x", f"{U0}-memory-1200", "-"])),
)
def test_what_kubelet_lists_is_compared_by_number(
    topology: bool, ours: set[str], strangers: set[str]
) -> None:
    """Exactly our ids are seen, in any order and form. Every other id is a stranger."""
    seen = _seen(_allocatable(*sorted(ours | strangers, key=hash), topology=topology))

    assert sum(seen.count_missing(block) for block in IDS.blocks) == len(IDS) - len(ours)
    assert seen.unknown == strangers


def test_ids_of_ill_devices_need_not_be_listed() -> None:
    """Healthy blocks count; an id that is kept
    for its holder only is neither missing nor strange.
    """
    listed = NumberedList(
        ((IDS.blocks[0], False), (IDS.blocks[1], True)),
        (ListedDevice(DeviceId("gone", U0), healthy=False),),
    )
    sent = SentList(listed, seconds_ago=60)

    assert sent.offered == IDS
    assert sent.differences(_seen(_allocatable("gone", f"{U1}-memory-3"))) == (14, set())
    assert sent.differences(frozenset()) == (15, frozenset())


def _looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of the fields that are looked at one by one from now on."""
    looked: list[int] = []
    field = wire.read_field

    def look(encoded: bytes, position: int) -> tuple[int, int, int | bytes, int]:
        looked.append(position)
        return field(encoded, position)

    monkeypatch.setattr(wire, "read_field", look)
    return looked


def test_what_is_only_counted_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length of an entry is looked at once, however many there are;
    wanted entries between them are found.
    """
    response = google_resources.ListPodResourcesResponse()
    for pod in range(3):
        container = response.pod_resources.add(name=f"p{pod}", namespace="ns").containers.add(
            name="main"
        )
        for number in range(400):
            container.devices.add(
                resource_name=MEMORY, device_ids=[f"{U0}-memory-{pod * 400 + number}"]
            )
            if number == 200:
                container.devices.add(
                    resource_name="volcano.sh/vgpu-number", device_ids=[f"{U0}-{pod}"]
                )
    looked = _looked(monkeypatch)

    assert decode_pod_resources(
        response.SerializeToString(), {"volcano.sh/vgpu-number"}.__contains__
    ) == tuple(
        Holding(
            "volcano.sh/vgpu-number", (f"{U0}-{pod}",), Owner("main", namespace="ns", pod=f"p{pod}")
        )
        for pod in range(3)
    )
    assert len(looked) < 200


@given(st.binary(max_size=120), st.integers(0, 5))
def test_junk_between_entries_is_an_error_or_a_picture(junk: bytes, place: int) -> None:
    """Passing over entries makes nothing of nonsense."""
    entry = _allocatable(f"{U0}-memory-1")
    for decode in (
        lambda b: decode_allocatable(b, {MEMORY: IDS}),
        lambda b: decode_pod_resources(b, lambda _: False),
    ):
        try:
            decode(entry * place + junk)
        except KubeletError:
            continue


_ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["r", "other", "not-wanted"]),
        st.lists(st.text(max_size=3), min_size=1, max_size=2),
        st.booleans(),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(_ENTRIES)
def test_ids_that_are_read_in_runs_are_those_that_stand_there(
    entries: list[tuple[str, list[str], bool]],
) -> None:
    """This holds for all lengths, resources, numbers and topologies,
    in the order of each resource.
    """
    response = google_resources.ListPodResourcesResponse()
    container = response.pod_resources.add(name="p", namespace="ns").containers.add(name="c")
    expected: dict[str, list[str]] = {}
    for resource, ids, topology in entries:
        entry = container.devices.add(resource_name=resource, device_ids=ids)
        if topology:
            entry.topology.nodes.add(id=1)
        if resource != "not-wanted":
            expected.setdefault(resource, []).extend(ids)
    holdings = decode_pod_resources(response.SerializeToString(), lambda name: name != "not-wanted")

    assert {holding.resource: holding.ids for holding in holdings} == {
        name: tuple(dict.fromkeys(ids)) for name, ids in expected.items()
    }
    assert {holding.owner for holding in holdings} <= {Owner("c", namespace="ns", pod="p")}


@settings(max_examples=60, deadline=None)
@given(st.lists(_ENTRIES, max_size=6))
def test_one_answer_after_the_other_is_read_as_if_each_were_the_first(
    answers: list[list[tuple[str, list[str], bool]]],
) -> None:
    """Knowledge of one pod's entries never changes what is read of the next."""
    reader = PodResourcesReader(lambda name: name != "not-wanted")
    for place, entries in enumerate(answers):
        response = google_resources.GetPodResourcesResponse()
        response.pod_resources.name = f"p{place}"
        container = response.pod_resources.containers.add(name="c")
        for resource, ids, topology in entries:
            entry = container.devices.add(resource_name=resource, device_ids=ids)
            if topology:
                entry.topology.nodes.add(id=1)
        encoded = response.SerializeToString()
        assert reader.read(encoded) == decode_pod_resources(encoded, reader.is_wanted)


def _of_one_pod(*entries: tuple[str, str]) -> bytes:
    response = google_resources.GetPodResourcesResponse()
    response.pod_resources.name, response.pod_resources.namespace = "p", "n"
    container = response.pod_resources.containers.add(name="c")
    for resource, id_ in entries:
        container.devices.add(resource_name=resource, device_ids=[id_])
    return response.SerializeToString()


def test_a_reader_that_has_seen_too_much_to_learn_more_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pods of many plugins come and go on a node for months. What the last one holds is read as
    quickly as what the first held.
    """
    reader = PodResourcesReader("number".__eq__)
    for plugin in range(300):
        reader.read(_of_one_pod(*((f"plugin-{plugin}", f"id-{each}") for each in range(3))))
    answer = _of_one_pod(*((MEMORY, f"{each:05}") for each in range(2000)), ("number", "a"))
    reader.read(answer)
    looked = _looked(monkeypatch)
    assert [holding.ids for holding in reader.read(answer)] == [("a",)]
    assert len(looked) < 50


def test_a_strange_answer_does_not_colour_the_next() -> None:
    """A name that stands in two pieces, of which the last counts, and an answer that breaks off."""
    reader = PodResourcesReader("number".__eq__)
    good = _of_one_pod(("number", "a"))
    pieces = (
        wire.encode_field(1, b"num") + wire.encode_field(1, b"ber") + wire.encode_field(2, b"b")
    )
    reader.read(
        wire.encode_field(
            1, wire.encode_field(1, b"p") + wire.encode_field(3, wire.encode_field(2, pieces))
        )
    )
    with pytest.raises(KubeletError):
        reader.read(good[:-1])
    assert [holding.ids for holding in reader.read(good)] == [("a",)]
