"""Withdrawals: kubelet has the ids of a family for a moment longer than schedulers know of them."""

from __future__ import annotations

import pytest

from tests.golden import U0, U1
from tests.ledger.book_parts import WHOLE, Clock, make
from tests.ledger.test_claims import SHARE, VGPU, claim, counted, start, usable
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.withdrawals import WITHDRAWAL_SECONDS, Withdrawals

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
    withdrawals.follow([(U0, "a"), (U0, "b")])
    assert withdrawals.follow([(U0, "a")])
    assert withdrawals.lasts(U0, "b")
    assert withdrawals.seconds_left == pytest.approx(WITHDRAWAL_SECONDS)
    assert not withdrawals.follow([(U0, "a"), (U0, "b")])
    assert (withdrawals.lasts(U0, "b"), withdrawals.seconds_left) == (False, None)
    assert not withdrawals.end()
