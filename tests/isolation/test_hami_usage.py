"""Usage read from regions that are built byte by byte after the contract, and from junk."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden import U0, U1
from tests.regions import V0_BYTES, V1_BYTES, Device, Slot, v0, v1
from vgpu_agent.isolation.hami_region import SIZE, DeviceLimit, region
from vgpu_agent.isolation.hami_usage import DeviceUse, RegionUse, Unreadable, read_region

MIB = 1 << 20
TWO = (Device(U0, 3000 * MIB, 50), Device(U1, 4000 * MIB))
NOW = 1_795_200_000


class Asked:
    """Bytes, and which of them were asked for."""

    def __init__(self, content: bytes | bytearray) -> None:
        self.content = bytes(content)
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, offset: int, length: int) -> bytes:
        self.ranges.append((offset, length))
        return self.content[offset : offset + length]


def read(
    content: bytes | bytearray, **options: Callable[[int, int], bool]
) -> RegionUse | Unreadable | None:
    """The whole file, read."""
    return read_region(len(content), Asked(content), **options)


@pytest.mark.parametrize("minor", [1, 2])
def test_versions_1_1_and_1_2_sum_the_running_processes(minor: int) -> None:
    """volcano-vgpu:D7: Σ used[i].total and Σ sm over slots that are not free, per device; limits
    and the last kernel as they are.
    """
    slots = [
        Slot({0: 700 * MIB, 1: 5 * MIB}, {0: 30}),
        Slot({0: 999 * MIB}, {0: 9}, status=0),
        Slot({0: 300 * MIB}, {0: 12}, status=2),
    ]
    assert read(v1(TWO, slots, minor=minor, last_kernel=NOW)) == RegionUse(
        (
            DeviceUse(0, U0, 1000 * MIB, 3000 * MIB, 42, 50),
            DeviceUse(1, U1, 5 * MIB, 4000 * MIB, 0, 100),
        ),
        NOW,
        2,
    )


def test_the_layout_before_versions() -> None:
    """1,197,897 bytes: other offsets, a shorter slot, and no time of the last kernel."""
    slots = [Slot({0: 700 * MIB, 1: 5 * MIB}, {1: 20}), Slot({1: 6 * MIB}, {1: 22})]
    assert read(v0(TWO, slots)) == RegionUse(
        (
            DeviceUse(0, U0, 700 * MIB, 3000 * MIB, 0, 50),
            DeviceUse(1, U1, 11 * MIB, 4000 * MIB, 42, 100),
        ),
        0,
        2,
        limits_cores=False,
    )


def test_a_region_that_the_agent_has_made_and_nobody_has_used() -> None:
    """Limits are there before the first process. Nothing is used, and no kernel ran."""
    content = bytearray(SIZE)
    for offset, part in region([DeviceLimit(U0, 3000, 50)]):
        content[offset : offset + len(part)] = part
    assert read(content) == RegionUse((DeviceUse(0, U0, 0, 3000 * MIB, 0, 50),))


def test_only_slots_in_use_are_copied() -> None:
    """volcano-vgpu:D20: the head, proc_num, as many slots as it says and the last kernel;
    never the 1024 slots of two megabytes.
    """
    asked = Asked(v1(TWO, [Slot({0: 1}), Slot({0: 2}), Slot({0: 4})], in_use=2))
    found = read_region(V1_BYTES, asked)
    assert isinstance(found, RegionUse)
    assert found.devices[0].used_bytes == 3
    slots = [(offset, length) for offset, length in asked.ranges if 1_856 <= offset < 2_008_896]
    assert slots == [(1_856, 1_960), (3_816, 1_960)]
    assert sum(length for _, length in asked.ranges) < 8192


@pytest.mark.parametrize(("claimed", "counted"), [(-1, 0), (2**31 - 1, 1024)])
def test_a_number_of_slots_that_cannot_be(claimed: int, counted: int) -> None:
    """The container may write any number there. There are 1024 slots."""
    content = v1([Device(U0)], [Slot({0: 1})] * 1024, in_use=claimed)
    found = read(content)
    assert isinstance(found, RegionUse)
    assert found.devices[0].used_bytes == counted


def test_a_number_of_devices_that_cannot_be() -> None:
    """There are 16 places. Those without a name are none."""
    content = v1(TWO)
    struct.pack_into("<Q", content, 56, 2**64 - 1)
    found = read(content)
    assert isinstance(found, RegionUse)
    assert [device.uuid for device in found.devices] == [U0, U1]


def test_processes_that_are_gone_do_not_count() -> None:
    """One that was killed leaves status 1 and all its memory behind (hami-core §2.4)."""
    content = v1(
        [Device(U0)],
        [Slot({0: 100}, {0: 10}, pid=7, hostpid=4007), Slot({0: 1}, {0: 2}, pid=8, hostpid=4008)],
    )
    found = read(content, is_alive=lambda hostpid, pid: (hostpid, pid) == (4008, 8))
    assert found == RegionUse((DeviceUse(0, U0, 1, 0, 2, 100),), 0, 1)


@pytest.mark.parametrize(
    "uuid", [b"GPU-\xff\xfe", b'GPU-1"} 1\n', b"A" * 96, b"GPU-" + b"a" * 92, b""]
)
def test_a_uuid_that_no_driver_gave_is_no_device(uuid: bytes) -> None:
    """The text would become a label. The other devices keep their places."""
    found = read(v1([Device(uuid, 5), Device(U1, 6)]))
    assert isinstance(found, RegionUse)
    assert [(device.index, device.uuid) for device in found.devices] == [(1, U1)]


def test_nothing_is_said_before_the_library_has_been_there() -> None:
    """Empty, or of full size with the magic still to come:
    no process has used CUDA yet, which is no fault.
    """
    assert read(b"") is None
    content = v1(TWO)
    content[0:4] = bytes(4)
    assert read(content) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (v1(TWO, minor=3), "version 1.3"),
        (v1(TWO) + bytes(32), "2008985 bytes"),  # the layout of 2.8.1, whose slots lie elsewhere
        (v1(TWO)[:-1], "2008952 bytes"),
        (v0(TWO)[:804_681], "804681 bytes"),
        (v0(TWO) + bytes(V1_BYTES - V0_BYTES), "version 0.0"),
        (b"\x7fELF" + bytes(V1_BYTES), "begins with 1179403647"),
        (b"hello", "5 bytes"),
    ],
)
def test_any_other_layout_is_refused_with_a_reason(content: bytes, words: str) -> None:
    """Size and version decide together. A layout
    that is nearly right would give wrong numbers instead of none.
    """
    found = read(content)
    assert isinstance(found, Unreadable)
    assert words in found.reason


@pytest.mark.parametrize("left", [0, 4, 11, 12, 1_600, 1_855, 1_860, 3_815, 2_008_890, 2_008_914])
def test_a_file_that_is_cut_short_while_it_is_read(left: int) -> None:
    """volcano-vgpu:D20: its size was that of a region a moment ago.
    There is nothing to say now, and nothing breaks.
    """
    asked = Asked(v1(TWO, [Slot({0: 1})])[:left])
    assert read_region(V1_BYTES, asked) is None


_MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, 6_000) | st.integers(2_008_880, V1_BYTES - 64),
        st.binary(min_size=1, max_size=64),
    ),
    max_size=8,
)
_SOUND = bytes(
    v1(TWO, [Slot({0: 5 * MIB}, pid=3, hostpid=30), Slot({1: 6 * MIB})], last_kernel=NOW)
)
_SOUND_V0 = bytes(v0(TWO, [Slot({0: 5 * MIB})]))


@settings(max_examples=60, deadline=None)
@given(
    base=st.sampled_from([_SOUND, _SOUND_V0]),
    mutations=_MUTATIONS,
    cut=st.none() | st.integers(0, V1_BYTES),
)
def test_whatever_the_container_writes_is_read_or_refused(
    base: bytes, mutations: list[tuple[int, bytes]], cut: int | None
) -> None:
    """volcano-vgpu:D20: junk in the head, the slots or the tail, and any length: never an
    exception, never a device that is none.
    """
    content = bytearray(base)
    for offset, junk in mutations:
        at = offset % (len(content) - 64)
        content[at : at + len(junk)] = junk
    found = read_region(len(content), Asked(content[:cut]))
    assert found is None or isinstance(found, (RegionUse, Unreadable))
    if isinstance(found, RegionUse):
        assert all(
            device.uuid.startswith(("GPU-", "MIG-")) and 0 <= device.index < 16
            for device in found.devices
        )


@given(st.binary(max_size=200), st.sampled_from([None, V0_BYTES, V1_BYTES]))
def test_junk_of_any_size_is_no_region(junk: bytes, size: int | None) -> None:
    """Short files, and those that pretend to be long."""
    found = read_region(len(junk) if size is None else size, Asked(junk))
    assert found is None or isinstance(found, Unreadable)
