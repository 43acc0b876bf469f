"""The bytes of the shared region, read with the offsets of hami-core §2.2, layout 1.2."""

from __future__ import annotations

import struct

from vgpu_agent.isolation.hami_region import (
    MAGIC,
    MAX_DEVICES,
    SIZE,
    DeviceLimit,
    limit_parts,
    region,
)

LIMITS = (
    DeviceLimit("GPU-11111111-aaaa-bbbb-cccc-000000000001", 3000, 50),
    DeviceLimit("GPU-22222222-aaaa-bbbb-cccc-000000000002", 24576),
)


def whole(parts: tuple[tuple[int, bytes], ...]) -> bytes:
    """The file."""
    content = bytearray(SIZE)
    for offset, part in parts:
        content[offset : offset + len(part)] = part
    assert len(content) == SIZE
    return bytes(content)


def numbers(content: bytes, form: str, offset: int) -> tuple[int, ...]:
    """Little-endian numbers at an offset."""
    return struct.unpack_from(f"<{form}", content, offset)


def test_the_file_is_the_structure_and_one_byte() -> None:
    """The library seeks to the end of the structure and writes a byte."""
    assert SIZE == 2_008_952 + 1


def test_the_head_says_initialised_and_version_1_2() -> None:
    """Magic, major, minor, and sm_init_flag 0:
    a process that finds the magic does not stamp the region again.
    """
    assert MAGIC == 0x012FF74E
    assert numbers(whole(region(LIMITS)), "iIIi", 0) == (MAGIC, 1, 2, 0)


def test_nobody_owns_the_region_and_both_semaphores_are_free() -> None:
    """glibc's bit pattern of a shared sem_t with value 1; 32 bytes each."""
    content = whole(region(LIMITS))
    assert numbers(content, "Q", 16) == (0,)
    assert numbers(content, "QIIQQ", 24) == (1, 128, 0, 0, 0)
    assert numbers(content, "QIIQQ", 2_008_920) == (1, 128, 0, 0, 0)


def test_devices_stand_in_their_order() -> None:
    """device_num and 96 bytes for each uuid."""
    content = whole(region(LIMITS))
    assert numbers(content, "Q", 56) == (2,)
    assert [
        content[64 + 96 * place : 64 + 96 * (place + 1)].rstrip(b"\0").decode()
        for place in range(3)
    ] == [
        LIMITS[0].uuid,
        LIMITS[1].uuid,
        "",
    ]


def test_memory_limits_are_bytes_and_cores_percent_of_all_sixteen() -> None:
    """100 is no compute limit, also for the devices that the container does not have."""
    content = whole(region(LIMITS))
    assert numbers(content, "16Q", 1_600) == (3000 * 1024 * 1024, 24576 * 1024 * 1024, *[0] * 14)
    assert numbers(content, "16Q", 1_728) == (50, 100, *[100] * 14)


def test_there_are_no_processes_yet() -> None:
    """1024 slots of 1960 bytes, and proc_num."""
    content = whole(region(LIMITS))
    assert not any(content[1_856 : 1_856 + 1024 * 1960])
    assert numbers(content, "i", 2_008_896) == (0,)


def test_the_limiter_is_on_from_the_start() -> None:
    """utilization_switch 1, recent_kernel 2, priority 1.
    They would not be turned on later (hami-core §0.3.8).
    """
    assert numbers(whole(region(LIMITS)), "iiiQ", 2_008_900) == (1, 2, 1, 0)


def test_the_limiter_is_off_where_cores_are_not_limited() -> None:
    """This holds also for processes that have lost the variable which says so."""
    assert numbers(whole(region(LIMITS, limit_cores=False)), "i", 2_008_900) == (0,)


def test_renewing_touches_the_limits_alone() -> None:
    """Two arrays of sixteen. Everything else in the file belongs to the processes."""
    assert [(offset, len(part)) for offset, part in limit_parts(LIMITS)] == [
        (1_600, 128),
        (1_728, 128),
    ]
    assert set(limit_parts(LIMITS)) <= set(region(LIMITS))


def test_sixteen_devices_fit() -> None:
    """The uuids end where the limits begin."""
    content = whole(
        region([DeviceLimit(f"GPU-{place}", place + 1) for place in range(MAX_DEVICES)])
    )
    assert numbers(content, "16Q", 1_600) == tuple((place + 1) << 20 for place in range(16))
    assert content[64 + 96 * 15 :].startswith(b"GPU-15\0")
