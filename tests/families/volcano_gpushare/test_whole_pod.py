"""Placing whole pods where no GPU scheduler has."""

from __future__ import annotations

import pytest

from vgpu_agent.errors import CapacityError
from vgpu_agent.families.volcano_gpushare.whole_pod import first_idle, first_with_room
from vgpu_agent.model import DeviceRoom

ILL = DeviceRoom("ill", trouble="XID 79", memory_mib=100, memory_free_mib=100)
ALONE = DeviceRoom("alone", memory_mib=100, memory_free_mib=100, holders=1, exclusive=True)
HALF = DeviceRoom("half", memory_mib=100, memory_free_mib=50, holders=1)
EMPTY = DeviceRoom("empty", memory_mib=100, memory_free_mib=100)
ROOMS = (ILL, ALONE, HALF, EMPTY)


@pytest.mark.parametrize(("memory_mib", "device"), [(50, "half"), (51, "empty"), (100, "empty")])
def test_the_first_device_with_room_is_taken(memory_mib: int, device: str) -> None:
    """volcano-gpushare:S2: the lowest number that has room, neither packed nor spread; ill and
    exclusive ones are passed over.
    """
    assert first_with_room(ROOMS, memory_mib).device == device


def test_no_room_says_what_each_device_has() -> None:
    """The error names the request and the state of every device."""
    with pytest.raises(CapacityError) as refused:
        first_with_room(ROOMS, 101)
    assert str(refused.value) == (
        "no GPU has 101 MiB for the whole pod: ill: XID 79; alone: a container holds all of it; "
        "half: 50 MiB free of 100; empty: 100 MiB free of 100"
    )


def test_idle_devices_are_those_without_holders() -> None:
    """Only devices without any holder count, in their order."""
    other = DeviceRoom("other")
    assert first_idle((*ROOMS, other), 2) == (EMPTY, other)


def test_too_few_idle_devices_say_why() -> None:
    """The error names both numbers and what keeps each device."""
    with pytest.raises(CapacityError) as refused:
        first_idle(ROOMS, 2)
    assert str(refused.value) == (
        "2 idle GPUs are requested, 1 available: ill: XID 79; alone: a container holds all of "
        "it; half: containers on it: 1; empty: idle"
    )


def test_a_node_without_devices_says_so() -> None:
    """No device at all is an error as well."""
    with pytest.raises(CapacityError, match="this node offers none"):
        first_with_room((), 1)
