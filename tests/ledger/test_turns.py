"""Turns: a GPU that was returned is offered to one family after the other, and then to all."""

from __future__ import annotations

import collections

import pytest

from tests.golden import U0, U1, golden_inventory
from tests.ledger.book_parts import ILL, WHOLE, Clock, let_pass, make
from tests.ledger.test_claims import SHARE, VGPU, claim, counted, start
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.turns import TURN_SECONDS, Turns, round_seconds
from vgpu_agent.ledger.withdrawals import WITHDRAWAL_SECONDS

NAMES = ("nvidia.com/gpu", VGPU, SHARE)


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    """The golden node with three families."""
    return make(clock, WHOLE, counted(VGPU), counted(SHARE))


def served(ledger: Ledger, name: str, gpu: str) -> None:
    """A pod comes and ends again."""
    start(ledger, name, "passing", gpu)
    ledger.release(ledger.grants[-1].number)


def offered_to(ledger: Ledger, gpu: str) -> set[str]:
    """The resources of which schedulers are to know that they can have the GPU at this moment."""
    return {
        resource.name
        for resource in ledger.resources
        if not next(r for r in ledger.rooms(resource.name) if r.device == gpu).trouble
    }


def test_a_returned_gpu_is_offered_to_each_family_alone_and_then_to_all(
    ledger: Ledger, clock: Clock
) -> None:
    """Schedulers that are shown the same GPU at once each send a pod,
    and kubelet fails all but the first.
    """
    assert offered_to(ledger, U0) == set(NAMES), "what nobody has had is anybody's"
    served(ledger, VGPU, U0)
    turns = list[set[str]]()
    while ledger.turn_ends_in_seconds is not None:
        assert offered_to(ledger, U1) == set(NAMES)
        turns.append(offered_to(ledger, U0))
        let_pass(ledger, clock, TURN_SECONDS + 1e-6)
        if len(turns) < len(NAMES):
            assert offered_to(ledger, U0) == set(), (
                "until those are known that were bound at the last moment"
            )
            let_pass(ledger, clock, WITHDRAWAL_SECONDS)
    assert [len(turn) for turn in turns] == [1, 1, 1]
    assert set().union(*turns) == set(NAMES)
    assert turns[-1] == {VGPU}, "it had the GPU before"
    assert offered_to(ledger, U0) == set(NAMES)
    revision = ledger.revision.value
    ledger.end_turns()
    assert ledger.revision.value == revision


def test_the_families_that_did_not_have_the_gpu_take_turns_in_being_first(
    ledger: Ledger, clock: Clock
) -> None:
    """No family starves, even when one returns all the GPUs and uses none of the turns."""
    first = collections.Counter[str]()
    for returns in range(1, 9):
        served(ledger, VGPU, U0)
        first.update(offered_to(ledger, U0))
        let_pass(ledger, clock, round_seconds(len(NAMES)) + 1)
        if returns % 2 == 0:
            assert first == {"nvidia.com/gpu": returns // 2, SHARE: returns // 2}


def test_the_family_that_returned_the_gpu_is_not_the_first_to_have_it_again(ledger: Ledger) -> None:
    """Another family is to have it within two seconds of the last end."""
    served(ledger, VGPU, U0)
    assert offered_to(ledger, U0) != {VGPU}


def test_a_family_that_is_not_told_to_kubelet_loses_its_turn_to_the_next(
    ledger: Ledger, clock: Clock
) -> None:
    """Its library is on its way, say. The others do not wait for it,
    and when it is there it has its turn.
    """
    ledger.withhold(["nvidia"])
    served(ledger, VGPU, U0)
    assert offered_to(ledger, U0) == {SHARE}
    ledger.withhold([])
    let_pass(ledger, clock, 60)
    served(ledger, VGPU, U0)
    assert offered_to(ledger, U0) == {"nvidia.com/gpu"}
    ledger.withhold(["nvidia"])
    assert offered_to(ledger, U0) == {SHARE}, "from one moment to the next"
    let_pass(ledger, clock, TURN_SECONDS + WITHDRAWAL_SECONDS)
    assert offered_to(ledger, U0) == {VGPU}


def test_a_node_with_one_family_never_waits(clock: Clock) -> None:
    """There is no race, so no family gains from a second without the GPU."""
    ledger = make(clock, counted(VGPU))
    served(ledger, VGPU, U0)
    assert offered_to(ledger, U0) == {VGPU}
    assert ledger.turn_ends_in_seconds is None


def test_no_family_waits_for_one_that_is_not_served_now(clock: Clock) -> None:
    """Its library is missing, say, so its resources are not offered to the kubelet."""
    ledger = make(clock, counted(VGPU), counted(SHARE))
    ledger.offer([counted(VGPU), counted(SHARE)], paused=["volcano-gpushare"])
    served(ledger, VGPU, U0)
    assert VGPU in offered_to(ledger, U0)
    assert ledger.turn_ends_in_seconds is None


def test_a_family_that_is_not_served_now_is_never_the_first(ledger: Ledger, clock: Clock) -> None:
    """The two others would wait in vain."""
    ledger.offer(ledger.resources, paused=["volcano-gpushare"])
    for _ in range(6):
        served(ledger, VGPU, U0)
        assert offered_to(ledger, U0) <= {"nvidia.com/gpu", VGPU}
        clock.now += TURN_SECONDS


def test_a_gpu_that_falls_ill_with_its_last_holder_has_no_turn(clock: Clock) -> None:
    """A turn that no family can use would be lost."""
    ledger = make(clock, WHOLE, counted(VGPU))
    start(ledger, VGPU, "passing", U0)
    ledger.observe(golden_inventory(U0=ILL))
    ledger.release(ledger.grants[0].number)
    assert ledger.turn_ends_in_seconds is None


def test_a_claim_ends_a_turn_and_is_followed_by_one(ledger: Ledger, clock: Clock) -> None:
    """A GPU that is kept for a pod is that pod's family's.
    When the pod is deleted, all others would race for it.
    """
    served(ledger, VGPU, U0)
    ledger.claim([claim(U0, 1, "volcano-gpushare")])
    assert offered_to(ledger, U0) == {SHARE}
    ledger.claim([])
    assert len(offered_to(ledger, U0)) == 1
    let_pass(ledger, clock, WITHDRAWAL_SECONDS)
    assert ledger.turn_ends_in_seconds == pytest.approx(TURN_SECONDS - WITHDRAWAL_SECONDS)


def test_a_booking_does_not_wait_for_a_turn(ledger: Ledger, clock: Clock) -> None:
    """Turns decide to which family a GPU is shown. The kubelet would fail a pod for a refusal."""
    served(ledger, VGPU, U0)
    (first,) = offered_to(ledger, U0)
    other = next(name for name in (VGPU, SHARE) if name != first)
    start(ledger, other, "quick", U0)
    let_pass(ledger, clock, WITHDRAWAL_SECONDS)
    assert ledger.turn_ends_in_seconds is None


def test_a_round_ends_when_all_that_were_still_to_come_are_lost_in_a_pause(clock: Clock) -> None:
    """Nobody is left to offer the GPU to alone, e.g. because the plugin of the last family was
    refused.
    """
    turns, able = Turns(clock), [VGPU, SHARE]
    turns.follow({U0: VGPU}, lambda _gpu: able)
    turns.follow({}, lambda _gpu: able)
    clock.now += TURN_SECONDS
    assert turns.move_on()
    assert turns.why_waits(U0, SHARE), "the pause"
    turns.follow({}, lambda _gpu: [SHARE])
    assert turns.seconds_left is None
    assert not turns.why_waits(U0, SHARE)


def test_a_look_that_is_late_takes_nothing_from_the_pause_after_a_turn(clock: Clock) -> None:
    """A loop that was busy for a moment must not show two families the GPU at once."""
    turns = Turns(clock)
    turns.follow({"g": "a"}, lambda _: ("a", "b"))
    turns.follow({}, lambda _: ("a", "b"))
    assert (turns.why_waits("g", "a") != "", turns.why_waits("g", "b")) == (True, "")
    clock.now += TURN_SECONDS + WITHDRAWAL_SECONDS + 1
    assert turns.seconds_left == 0.0
    assert turns.move_on()
    assert turns.why_waits("g", "a")
    assert turns.why_waits("g", "b")
    assert turns.seconds_left == pytest.approx(WITHDRAWAL_SECONDS)
    assert turns.over_in_seconds == pytest.approx(WITHDRAWAL_SECONDS + TURN_SECONDS)
    clock.now += WITHDRAWAL_SECONDS
    assert turns.move_on()
    assert (turns.why_waits("g", "a"), turns.why_waits("g", "b") != "") == ("", True)


def test_the_next_turn_waits_until_schedulers_know_that_the_last_is_over(
    ledger: Ledger, clock: Clock
) -> None:
    """Schedulers bind by the counts in the Node's status. Until these are written, pods of the
    previous family may still be bound to the GPU. The wait does not shorten the next family's turn.
    """
    ledger.note_written_counts(ledger.withdrawn.value)
    served(ledger, VGPU, U0)
    ledger.note_written_counts(ledger.withdrawn.value)
    let_pass(ledger, clock, WITHDRAWAL_SECONDS)
    let_pass(ledger, clock, TURN_SECONDS - WITHDRAWAL_SECONDS)
    assert offered_to(ledger, U0) == set()
    let_pass(ledger, clock, 3 * WITHDRAWAL_SECONDS)
    assert offered_to(ledger, U0) == set(), "the Node is not written yet"
    ledger.note_written_counts(ledger.withdrawn.value)
    let_pass(ledger, clock, 3 * WITHDRAWAL_SECONDS)
    assert len(offered_to(ledger, U0)) == 1
    assert ledger.turn_ends_in_seconds == pytest.approx(TURN_SECONDS)
