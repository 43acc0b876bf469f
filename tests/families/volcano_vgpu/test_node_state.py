"""The Node's desired state for Volcano's schedulers (volcano-vgpu §2)."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.families.volcano_vgpu.golden import INVENTORY, NODE, NUMBER, ROOMS, U0, U1, family
from vgpu_agent.families.family import NodeView
from vgpu_agent.families.volcano_vgpu.node_state import HANDSHAKE, LOCK, REGISTER
from vgpu_agent.model import DeviceRoom, Gpu, Inventory
from vgpu_agent.nodes import DesiredNode, Node

NOW = 1_795_200_692.0  # 2026-11-20T18:51:32Z
LOCKED = "2026-11-20T18:51:30Z"
G1 = (
    f"{U0},10,24576,NVIDIA-NVIDIA A10,true,hami-core:{U1},10,24576,NVIDIA-NVIDIA "
    "A10,true,hami-core:"
)


def _desired_state(
    annotations: dict[str, str] | None = None,
    *,
    rooms: tuple[DeviceRoom, ...] = ROOMS,
    allocated_at: float | None = None,
    inventory: Inventory = INVENTORY,
    **options: object,
) -> DesiredNode:
    node = Node(NODE, annotations={HANDSHAKE: "Reported earlier"} | (annotations or {}))
    allocated = {} if allocated_at is None else {NUMBER: allocated_at}
    return family(**options).desired_node(
        NodeView(node, inventory, {NUMBER: rooms} if rooms else {}, allocated, NOW)
    )


def _as_a_scheduler_reads(text: str) -> list[tuple[str, int, int, str]] | None:
    """UUID, count, memory and type of each card as volcano-vgpu §2.2 has it;
    None where the node would be dropped.
    """
    cards = []
    for piece in text.split(":"):
        if "," not in piece:
            continue
        fields = piece.split(",")
        if len(fields) < 6:
            return None
        cards.append((fields[0], int(fields[1]), int(fields[2]), fields[3]))
    return cards


def test_g1_the_register_annotation() -> None:
    """``volcano-vgpu:G1``: both cards, by minor number."""
    assert _desired_state().annotations == {REGISTER: G1}


def test_g13_six_fields_an_entry() -> None:
    """``volcano-vgpu:G13``: schedulers of every version read it: five fields would be too few for
    some, and a seventh is not needed.
    """
    text = _desired_state().annotations[REGISTER]
    assert text is not None
    assert [piece.count(",") for piece in text.rstrip(":").split(":")] == [5, 5]


def test_the_order_is_that_of_the_minor_numbers() -> None:
    """The position is the scheduler's index of the card."""
    swapped = Inventory(1, INVENTORY.gpus[::-1])
    assert _desired_state(inventory=swapped).annotations[REGISTER] == G1


@pytest.mark.parametrize(
    "trouble",
    ["XID 79", "the GPU serves nvidia until its last share is returned", "cordoned: maintenance"],
)
def test_a_card_that_cannot_be_had_is_announced_as_full(trouble: str) -> None:
    """``volcano-vgpu:D6``, ``volcano-vgpu:G13``: count 0 keeps pods off where health alone is
    ignored. The card keeps its index.
    """
    rooms = (msgspec.structs.replace(ROOMS[0], trouble=trouble), ROOMS[1])
    text = _desired_state(rooms=rooms).annotations[REGISTER]
    assert text == G1.replace(
        f"{U0},10,24576,NVIDIA-NVIDIA A10,true", f"{U0},0,24576,NVIDIA-NVIDIA A10,false"
    )


def test_a_resource_that_is_not_offered_is_announced_as_full() -> None:
    """``volcano-vgpu:D6``: without a library that limits, say,
    old schedulers must not send pods either.
    """
    text = _desired_state(rooms=()).annotations[REGISTER]
    assert _as_a_scheduler_reads(text or "") == [
        (U0, 0, 24576, "NVIDIA-NVIDIA A10"),
        (U1, 0, 24576, "NVIDIA-NVIDIA A10"),
    ]


def test_scaling_and_unit_are_announced() -> None:
    """``volcano-vgpu:D8``: memory in units, with its scaling,
    and the unit where a person looks for it.
    """
    desired_state = _desired_state(memory_scaling=1.5, factor=4, split=3)
    assert _as_a_scheduler_reads(desired_state.annotations[REGISTER] or "")[0] == (  # type: ignore[index]  # a sample of plain JSON
        U0,
        3,
        9216,
        "NVIDIA-NVIDIA A10",
    )
    assert desired_state.labels == {
        "vgpu-agent.internal/volcano-vgpu-memory-unit-mib": "4",
        "vgpu-agent.internal/volcano-vgpu-isolation": "none",
    }


def test_hidden_cards_are_not_announced() -> None:
    """``filterdevices``: the rest is counted from 0."""
    assert (
        _desired_state(hidden_uuids=frozenset({U0})).annotations[REGISTER] == G1.partition(":")[2]
    )


def test_a_node_without_cards_is_announced_as_none() -> None:
    """Before the driver has answered, though, the earlier content stays."""
    assert _desired_state(inventory=Inventory(version=1)) == DesiredNode(
        annotations={REGISTER: None}
    )
    assert _desired_state(inventory=Inventory()) == DesiredNode()


@given(name=st.text(max_size=40), memory=st.integers(0, 200_000), split=st.integers(1, 1000))
def test_no_name_of_a_card_breaks_the_annotation(name: str, memory: int, split: int) -> None:
    """Separators in a product name would shift every field after it."""
    inventory = Inventory(1, (Gpu(U0, 0, 0, name, memory), INVENTORY.gpus[1]))
    cards = _as_a_scheduler_reads(
        _desired_state(inventory=inventory, split=split).annotations[REGISTER] or ""
    )
    assert cards is not None
    assert [(uuid, count, units) for uuid, count, units, _ in cards] == [
        (U0, split, memory),
        (U1, split, 24576),
    ]


# -- the handshake of old schedulers ---------------------------------------------------------------


@pytest.mark.parametrize(
    "standing", ["Requesting_2026.11.20 18:51:00", "Deleted_2026.11.20 18:50:00"]
)
def test_a_question_is_answered(standing: str) -> None:
    """At most every 15 s, while old schedulers give up after 60."""
    desired_state = _desired_state({HANDSHAKE: standing})
    assert desired_state.annotations[HANDSHAKE] == "Reported 2026-11-20 18:51:32 +0000 UTC"
    assert desired_state.min_write_interval_seconds == {HANDSHAKE: 15.0}


def test_the_first_word_is_said_unasked() -> None:
    """Old schedulers know no node without a handshake."""
    desired_state = family().desired_node(NodeView(Node(NODE), INVENTORY, {NUMBER: ROOMS}, {}, NOW))
    assert desired_state.annotations[HANDSHAKE] == "Reported 2026-11-20 18:51:32 +0000 UTC"


@given(standing=st.text(max_size=80))
@pytest.mark.parametrize(
    "standing_for_sure",
    ["Reported 2026-11-20 18:00:00.123456789 +0000 UTC m=+30.1", "", "x" * 100_000],
)
def test_what_asks_for_nothing_gets_no_answer(standing: str, standing_for_sure: str) -> None:
    """Nothing is written as long as no scheduler asks, whatever the text is."""
    for text in (standing, standing_for_sure):
        asks = re.search("Requesting|Deleted", text) is not None
        assert (HANDSHAKE in _desired_state({HANDSHAKE: text}).annotations) is asks


# -- the node lock ---------------------------------------------------------------------------------


@pytest.mark.parametrize("allocated_at", [NOW, NOW - 2, NOW - 3])
def test_the_lock_goes_with_the_allocate_it_was_taken_for(allocated_at: float) -> None:
    """``volcano-vgpu:D19``: it is written in whole seconds by another clock,
    so a second of difference is none.
    """
    desired_state = _desired_state({LOCK: LOCKED}, allocated_at=allocated_at)
    assert desired_state.annotations == {REGISTER: G1, LOCK: None}
    assert desired_state.guarded == {LOCK}


@pytest.mark.parametrize("allocated_at", [None, NOW - 4, 0.0])
def test_a_lock_for_a_later_pod_stays(allocated_at: float | None) -> None:
    """``volcano-vgpu:D19``: its pod is still on its way to the kubelet."""
    assert LOCK not in _desired_state({LOCK: LOCKED}, allocated_at=allocated_at).annotations


def test_without_a_lock_nothing_is_taken_away() -> None:
    """Most schedulers take none."""
    assert _desired_state(allocated_at=NOW).annotations == {REGISTER: G1}


@given(text=st.text(max_size=60))
def test_any_lock_is_read_without_an_exception(text: str) -> None:
    """The result for any text is that the lock goes or stays."""
    assert _desired_state({LOCK: text}, allocated_at=NOW).annotations.get(LOCK) is None


def test_nothing_is_left_behind_by_an_agent_that_leaves() -> None:
    """``volcano-vgpu:D24``: no cards, no handshake that promises any, no lock, and none of the
    labels that the agent has put there.
    """
    cleanup = family().cleanup(NOW)
    assert cleanup.annotations == {
        REGISTER: None,
        HANDSHAKE: "Deleted_2026.11.20 18:51:32",
        LOCK: None,
    }
    assert cleanup.labels == dict.fromkeys(_desired_state().labels)
    assert cleanup.labels
