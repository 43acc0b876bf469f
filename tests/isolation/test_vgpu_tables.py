"""The tables that containers write to, whatever is in them."""

from __future__ import annotations

import random
import struct

import pytest

from vgpu_agent.isolation import vgpu_tables
from vgpu_agent.isolation.hami_usage import Unreadable
from vgpu_agent.isolation.vgpu_tables import (
    MAX_PROCESSES,
    SM_NODE_SIZE,
    SM_NODE_USED,
    SM_UTIL_SIZE,
    SM_UTIL_SLOT_SIZE,
    VMEM_ROW,
    VMEM_SIZE,
    VMEM_USED,
    SmUse,
    Spilled,
    read_sm_node,
    read_vmem,
    sm_node_head,
    vmem_head,
)

SLOTS, VMEM_SLOT, VMEM_COUNT, SM_SLOT = 128, 16_392, 16_384, 128


def vmem(*changes: tuple[int, bytes]) -> bytearray:
    """A ledger, empty but for these."""
    return filled(VMEM_SIZE, vmem_head(), changes)


def sm_node(*changes: tuple[int, bytes]) -> bytearray:
    """A table of compute, empty but for these."""
    return filled(SM_NODE_SIZE, sm_node_head(), changes)


def filled(size: int, head: bytes, changes: tuple[tuple[int, bytes], ...]) -> bytearray:
    """A table of that size."""
    table = bytearray(size)
    table[: len(head)] = head
    for at, part in changes:
        table[at : at + len(part)] = part
    return table


def read_ledger(table: bytearray) -> tuple[Spilled, ...] | Unreadable:
    """The rows that the agent reads in a ledger."""
    return read_vmem(len(table), lambda at, size: bytes(table[at : at + size]))


def read_compute(table: bytearray) -> tuple[SmUse, ...] | Unreadable:
    """The values that the agent reads in a table of compute."""
    return read_sm_node(len(table), lambda at, size: bytes(table[at : at + size]))


def test_the_layouts_add_up() -> None:
    """vgpu-manager §7.7: the sizes follow from the strides."""
    assert SLOTS + 16 * VMEM_SLOT == VMEM_USED == 262_400
    assert SLOTS + 16 * SM_SLOT == SM_NODE_USED == 2176
    assert 16 * SM_UTIL_SLOT_SIZE == SM_UTIL_SIZE == 1_311_232
    assert vgpu_tables.SM_UTIL_COMPUTE + 1024 * 24 == vgpu_tables.SM_UTIL_COMPUTE_COUNT
    assert vgpu_tables.SM_UTIL_GRAPHICS + 1024 * 24 == vgpu_tables.SM_UTIL_GRAPHICS_COUNT
    assert 1024 * vgpu_tables.SM_UTIL_SAMPLE.size == vgpu_tables.SM_UTIL_SAMPLE_COUNT


def test_empty_tables_say_nothing() -> None:
    """A container finds empty tables at its start, so they are no error."""
    assert read_ledger(vmem()) == read_compute(sm_node()) == ()


def test_rows_are_read_as_far_as_the_count_goes() -> None:
    """Rows after the count belong to processes that have ended."""
    last = SLOTS + 15 * VMEM_SLOT
    rows = b"".join(VMEM_ROW.pack(pid, abs(pid) * 10) for pid in (7, 0, -1, 8, 9))
    table = vmem((last, rows), (last + VMEM_COUNT, struct.pack("<I", 4)))
    assert read_ledger(table) == (Spilled(15, 7, 70), Spilled(15, 8, 80))


def test_a_count_leads_nowhere_else() -> None:
    """A tenant writes any number there."""
    table = vmem((SLOTS + VMEM_COUNT, struct.pack("<I", MAX_PROCESSES + 1)))
    found = read_ledger(table)
    assert isinstance(found, Unreadable)
    assert found.reason == "it says that card 0 has 1025 rows, and a table has 1024"


def test_values_of_compute_stay_what_they_can_be() -> None:
    """They become metrics of that container."""
    slot = struct.pack("<5q15i", 0, 0, 0, 0, 9, 400, *[0] * 8, 2**31 - 1, -5, 2**30, 0, 0, 0)
    assert read_compute(sm_node((SLOTS + 2 * SM_SLOT, slot))) == (SmUse(2, 100, 0, 100, 1024, 9),)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (vmem()[:-1], "it has 327679 bytes instead of 327680"),
        (bytearray(), "it has 0 bytes instead of 327680"),
        (bytearray(VMEM_SIZE), "it begins with 0x0 instead of 0x564d4e44"),
        (
            vmem((4, struct.pack("<I", 2))),
            "it says version 2 of 262400 bytes; this agent reads version 1 of 262400",
        ),
    ],
)
def test_what_is_no_ledger_is_said_so(table: bytearray, said: str) -> None:
    """A newer library, or a tenant's own idea."""
    assert read_ledger(table) == Unreadable(said)


def test_a_table_that_becomes_shorter_while_it_is_read() -> None:
    """A container may cut it at any time."""
    cut = vmem((SLOTS + VMEM_COUNT, struct.pack("<I", 3)))[: SLOTS + VMEM_COUNT + 4]
    assert isinstance(read_vmem(VMEM_SIZE, lambda at, n: bytes(cut[at : at + n])), Unreadable)
    short = sm_node()[:200]
    assert isinstance(
        read_sm_node(SM_NODE_SIZE, lambda at, n: bytes(short[at : at + n])), Unreadable
    )
    rows = cut.replace(struct.pack("<I", 3), struct.pack("<I", 1024))
    assert isinstance(read_vmem(VMEM_SIZE, lambda at, n: bytes(rows[at : at + n // 2])), Unreadable)


def test_no_content_raises_anything() -> None:
    """Noise behind a right head."""
    noise = random.Random(15)
    for _ in range(20):
        for make, read, size in (
            (vmem, read_ledger, VMEM_SIZE),
            (sm_node, read_compute, SM_NODE_SIZE),
        ):
            table = make((16, noise.randbytes(size - 16)))
            found = read(table)
            assert isinstance(found, tuple | Unreadable)
