"""Withdrawals: kubelet has the ids of a family for a moment longer than schedulers know of them."""

from __future__ import annotations

import pytest

from tests.golden import U0, U1
from tests.ledger.book_parts import WHOLE, Clock, let_pass, make
from tests.ledger.test_claims import SHARE, VGPU, claim, counted, start, usable
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.withdrawals import (
    LONGEST_WITHDRAWAL_SECONDS,
    WITHDRAWAL_SECONDS,
    Withdrawals,
)

GPU = "nvidia.com/gpu"


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    """The golden node with three families, of which kubelet has been sent the lists."""
    ledger = make(clock, WHOLE, counted(VGPU), counted(SHARE))
    assert usable(ledger, GPU) == {U0, U1}
    return ledger


def test_schedulers_know_of_a_claim_before_kubelet_does(ledger: Ledger, clock: Clock) -> None:
    """A pod that was bound by the count of before finds Healthy ids.
    Without, kubelet fails it for good.
    """
    before = ledger.withdrawn.version
    ledger.claim([claim(U0, 1)])
    assert ledger.withdrawn.version > before
    assert (ledger.offered_ids(GPU), usable(ledger, GPU)) == (1, {U0, U1})
    assert ledger.turn_ends_in_seconds == pytest.approx(WITHDRAWAL_SECONDS)
    clock.now += WITHDRAWAL_SECONDS
    revision = ledger.revision.value
    ledger.end_turns()
    assert ledger.revision.value == revision + 1
    assert (ledger.offered_ids(GPU), usable(ledger, GPU)) == (1, {U1})
    assert ledger.turn_ends_in_seconds is None


def test_what_another_family_has_is_given_to_nobody_by_ids(ledger: Ledger) -> None:
    """A booking would be refused."""
    start(ledger, VGPU, "runs", U0)
    assert usable(ledger, GPU) == {U1}


def test_a_pod_that_decides_is_admitted_although_its_gpu_was_taken(
    ledger: Ledger, clock: Clock
) -> None:
    """Its ids name no GPU, so it can wait for its start where kubelet would have failed it."""
    start(ledger, SHARE, "quick", U0)
    assert usable(ledger, VGPU) == {U0, U1}
    assert ledger.offered_ids(VGPU) == 4
    clock.now += WITHDRAWAL_SECONDS
    assert usable(ledger, VGPU) == {U1}


def test_nothing_lasts_of_what_kubelet_was_never_told(clock: Clock) -> None:
    """After a restart claims are made before anything is offered."""
    ledger = make(clock, WHOLE, counted(VGPU))
    ledger.claim([claim(U0, 1)])
    assert usable(ledger, GPU) == {U1}


def test_a_gpu_that_is_offered_again_is_no_longer_withdrawn(clock: Clock) -> None:
    """The claim of a moment has gone. The end of its time must take nothing away."""
    withdrawals = Withdrawals(clock)
    withdrawals.follow([(U0, "a"), (U0, "b")], 1)
    assert withdrawals.follow([(U0, "a")], 1)
    assert withdrawals.still_at_kubelet(U0, "b")
    assert withdrawals.seconds_left == pytest.approx(WITHDRAWAL_SECONDS)
    assert not withdrawals.follow([(U0, "a"), (U0, "b")], 2)
    assert (withdrawals.still_at_kubelet(U0, "b"), withdrawals.seconds_left) == (False, None)
    assert not withdrawals.end()


def test_kubelet_keeps_the_ids_until_the_node_has_the_count(ledger: Ledger, clock: Clock) -> None:
    """A slow API server shows schedulers the older count for longer,
    and the pods that they bind by it would be failed.
    """
    ledger.note_written_counts(ledger.withdrawn.value)
    ledger.claim([claim(U0, 1)])
    clock.now += 2 * WITHDRAWAL_SECONDS
    ledger.end_turns()
    assert usable(ledger, GPU) == {U0, U1}
    ledger.note_written_counts(ledger.withdrawn.value - 1)
    assert ledger.turn_ends_in_seconds == pytest.approx(
        LONGEST_WITHDRAWAL_SECONDS - 2 * WITHDRAWAL_SECONDS
    ), "a write from before the claim says nothing about it"
    revision = ledger.revision.value
    ledger.note_written_counts(ledger.withdrawn.value)
    assert ledger.revision.value == revision + 1, "whoever waits for the end waits for less now"
    assert ledger.turn_ends_in_seconds == pytest.approx(2 * WITHDRAWAL_SECONDS), (
        "a bind under way may take as long as the write did"
    )
    assert usable(ledger, GPU) == {U0, U1}
    clock.now += 2 * WITHDRAWAL_SECONDS
    ledger.end_turns()
    assert (usable(ledger, GPU), ledger.turn_ends_in_seconds) == ({U1}, None)


def test_a_node_that_cannot_be_written_keeps_no_ids_for_long(ledger: Ledger, clock: Clock) -> None:
    """Without the API server nothing is bound; without the permission only kubelet counts, every
    ten seconds.
    """
    ledger.note_written_counts(ledger.withdrawn.value)
    ledger.claim([claim(U0, 1)])
    let_pass(ledger, clock, LONGEST_WITHDRAWAL_SECONDS)
    assert usable(ledger, GPU) == {U1}
    ledger.claim([claim(U0, 1), claim(U1, 1)])
    assert ledger.turn_ends_in_seconds == pytest.approx(LONGEST_WITHDRAWAL_SECONDS)
    ledger.note_written_counts(None)
    assert ledger.turn_ends_in_seconds == pytest.approx(WITHDRAWAL_SECONDS)
