"""Placing a container that no GPU scheduler has placed (volcano-vgpu §8)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.errors import CapacityError
from vgpu_agent.model import DeviceRoom
from vgpu_agent.placement.rooms import (
    BINPACK,
    SPREAD,
    DeviceDemand,
    choose_rooms,
    type_refusal,
    uuid_refusal,
)

EMPTY = DeviceRoom("GPU-0", "", 24576, 24576, 100, 0, 10)


def _room(device: str, *, used_mib: int = 0, cores: int = 0, holders: int = 0) -> DeviceRoom:
    return DeviceRoom(device, "", 24576, 24576 - used_mib, 100 - cores, holders, 10 - holders)


def _demand(count: int = 1, memory_mib: int = 3000, cores: int = 0) -> DeviceDemand:
    return DeviceDemand(count, lambda _: memory_mib, cores, f"{count} × {memory_mib} MiB")


def _chosen(rooms: list[DeviceRoom], demand: DeviceDemand, policy: str) -> list[str]:
    return [room.device for room in choose_rooms(rooms, demand, policy=policy)]


def test_binpack_takes_the_fullest_that_fits() -> None:
    """The GPU with the most booked memory comes first, however many containers that is."""
    rooms = [
        _room("GPU-0", used_mib=1000, holders=3),
        _room("GPU-1", used_mib=20000, holders=1),
        _room("GPU-2", used_mib=22000, holders=1),
    ]
    assert _chosen(rooms, _demand(), BINPACK) == ["GPU-1"]


def test_spread_takes_the_one_with_the_fewest_containers() -> None:
    """The memory that they use does not matter."""
    rooms = [_room("GPU-0", used_mib=1000, holders=2), _room("GPU-1", used_mib=20000, holders=1)]
    assert _chosen(rooms, _demand(), SPREAD) == ["GPU-1"]


@pytest.mark.parametrize("policy", [BINPACK, SPREAD])
def test_on_equal_terms_the_lower_index_wins(policy: str) -> None:
    """``volcano-vgpu:G3``: with either policy the first pod goes to U0."""
    assert _chosen([_room("GPU-0"), _room("GPU-1")], _demand(), policy) == ["GPU-0"]


def test_several_are_several_different_devices() -> None:
    """A count of two never gives one GPU twice, though it would have room for both."""
    assert _chosen([_room("GPU-0"), _room("GPU-1")], _demand(2), BINPACK) == ["GPU-0", "GPU-1"]
    with pytest.raises(
        CapacityError,
        match=r"2 × 3000 MiB cannot be placed on this node, even when it is empty: GPU-0: fits",
    ):
        choose_rooms([_room("GPU-0")], _demand(2), policy=BINPACK)


def test_all_compute_needs_an_empty_device() -> None:
    """100 percent goes to a GPU without other holders."""
    assert _chosen([_room("GPU-0", holders=1), _room("GPU-1")], _demand(cores=100), BINPACK) == [
        "GPU-1"
    ]


@pytest.mark.parametrize(
    ("room", "demand", "text"),
    [
        (_room("GPU-0", used_mib=22000), _demand(), "2576 MiB free of 24576, 3000 wanted"),
        (
            _room("GPU-0", cores=60, holders=1),
            _demand(cores=50),
            "40 % of the compute free, 50 wanted",
        ),
        (_room("GPU-0", cores=100, holders=1), _demand(), "all of its compute is in use"),
        (
            _room("GPU-0", holders=1),
            _demand(cores=100),
            "100 % of the compute needs the whole GPU; containers on it: 1",
        ),
        (_room("GPU-0", holders=10), _demand(), "10 containers share it already"),
        (msgspec.structs.replace(EMPTY, exclusive=True), _demand(), "a container holds all of it"),
        (msgspec.structs.replace(EMPTY, trouble="XID 79"), _demand(), "XID 79"),
    ],
)
def test_the_error_says_what_each_device_lacks(
    room: DeviceRoom, demand: DeviceDemand, text: str
) -> None:
    """The pod's status says which of its requests does not fit, and by how much."""
    with pytest.raises(CapacityError, match=f"GPU-0: .*{text}"):
        choose_rooms([room], demand, policy=SPREAD)


def test_a_node_without_devices_says_so() -> None:
    """There is nothing to list then."""
    with pytest.raises(CapacityError, match="it has no GPU to share"):
        choose_rooms([], _demand(), policy=SPREAD)


def test_a_device_that_the_pod_does_not_want_is_passed_over() -> None:
    """The error has the reason in place of the lack of room."""
    rooms = [_room("GPU-0"), _room("GPU-1")]
    assert [
        room.device
        for room in choose_rooms(rooms, _demand(), policy=BINPACK, refused={"GPU-0": "no"})
    ] == ["GPU-1"]
    with pytest.raises(CapacityError, match="GPU-0: not this one; GPU-1: fits"):
        choose_rooms(rooms, _demand(2), policy=BINPACK, refused={"GPU-0": "not this one"})


@pytest.mark.parametrize(
    ("wanted", "unwanted", "allowed"),
    [
        (None, None, True),
        ("a10", None, True),
        ("V100,A10", None, True),
        ("A100", None, False),
        ("V100", None, False),
        ("A10", "A10", True),
        (None, "A10", False),
        (None, "a1", False),
        (None, "V100, T4", True),
        ("", None, False),
        (None, "", True),
    ],
)
def test_types_match_by_any_part_of_the_name(
    wanted: str | None, unwanted: str | None, *, allowed: bool
) -> None:
    """Case does not matter, a part suffices, and wanted types make unwanted ones meaningless."""
    assert (type_refusal("NVIDIA-NVIDIA A10", wanted=wanted, unwanted=unwanted) == "") is allowed


@pytest.mark.parametrize(
    ("wanted", "unwanted", "allowed"),
    [
        (None, None, True),
        (" GPU-0 ,GPU-1", None, True),
        ("GPU-1", None, False),
        ("GPU-0", "GPU-0", False),
        (None, "GPU", True),
    ],
)
def test_uuids_match_exactly_and_unwanted_wins(
    wanted: str | None, unwanted: str | None, *, allowed: bool
) -> None:
    """Text around a UUID does not matter, and a part of a UUID does not match."""
    assert (uuid_refusal("GPU-0", wanted=wanted, unwanted=unwanted) == "") is allowed


ROOMS = st.lists(
    st.builds(
        DeviceRoom,
        device=st.uuids().map(lambda uuid: f"GPU-{uuid}"),
        trouble=st.sampled_from(["", "", "ill"]),
        memory_mib=st.just(1000),
        memory_free_mib=st.integers(0, 1000),
        cores_free_percent=st.integers(0, 100),
        holders=st.integers(0, 3),
        holders_free=st.integers(0, 3),
    ),
    max_size=8,
    unique_by=lambda room: room.device,
)


@given(
    rooms=ROOMS,
    count=st.integers(1, 3),
    memory=st.integers(1, 1000),
    cores=st.integers(0, 100),
    policy=st.sampled_from([BINPACK, SPREAD]),
)
def test_what_is_chosen_has_room(
    rooms: list[DeviceRoom], count: int, memory: int, cores: int, policy: str
) -> None:
    """Any node gives as many different devices as wanted, each with room, or an error."""
    try:
        chosen = choose_rooms(rooms, _demand(count, memory, cores), policy=policy)
    except CapacityError:
        fit = [
            room
            for room in rooms
            if not room.trouble and room.holders_free and room.memory_free_mib >= memory
        ]
        fit = [
            room
            for room in fit
            if room.cores_free_percent >= max(cores, 1) and (cores < 100 or not room.holders)
        ]
        assert len(fit) < count
        return
    assert len({room.device for room in chosen}) == count
    assert all(
        room.memory_free_mib >= memory and room.cores_free_percent >= cores and not room.trouble
        for room in chosen
    )
