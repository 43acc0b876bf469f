"""Drains: a family that never returns a GPU gives one up, when the others have got nothing for long."""

from __future__ import annotations

import pytest

from tests.golden import U0, U1
from tests.ledger.book_parts import WHOLE, Clock, make
from tests.ledger.test_claims import VGPU, counted, start
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.drains import ENDS_BEFORE_A_DRAIN, Drains
from vgpu_agent.ledger.withdrawals import WITHDRAWAL_SECONDS

GPU = "nvidia.com/gpu"


def stream(ledger: Ledger, ends: int) -> None:
    """So many pods of Volcano end, and the place of each is taken by the next before the last one has gone."""
    for number in range(ends):
        for gpu in (U0, U1):
            start(ledger, VGPU, f"pod-{gpu}-{number}-{len(ledger.grants)}", gpu)
        for grant in ledger.grants[:-2]:
            ledger.release(grant.number)


@pytest.fixture
def clock() -> Clock:
    """A clock at 1000 s."""
    return Clock()


def test_a_gpu_with_a_stream_of_pods_is_drained_for_the_others(clock: Clock) -> None:
    """No agent sees pods that no scheduler can place, so it can only make room now and then."""
    ledger = make(clock, WHOLE, counted(VGPU))
    stream(ledger, ENDS_BEFORE_A_DRAIN // 2)
    assert ledger.offered_ids(VGPU) == 8
    stream(ledger, 2)
    assert ledger.offered_ids(VGPU) == 4
    (drained,) = [room for room in ledger.rooms(VGPU) if room.trouble]
    assert "many pods of volcano-vgpu in a row" in drained.trouble
    for grant in ledger.grants:
        if any(share.device == drained.device for share in grant.shares):
            ledger.release(grant.number)
    assert ledger.offered_ids(GPU) == 1, "the others come first"


def test_no_start_is_refused_for_a_drain(clock: Clock) -> None:
    """The pod was bound before."""
    ledger = make(clock, WHOLE, counted(VGPU))
    stream(ledger, ENDS_BEFORE_A_DRAIN)
    (drained,) = [room.device for room in ledger.rooms(VGPU) if room.trouble][:1]
    start(ledger, VGPU, "late", drained)


@pytest.mark.parametrize("given", [True, False])
def test_a_family_that_was_given_something_waits_for_nothing(given: bool) -> None:
    """Nor does one that is offered a GPU of which nobody has anything: its pods would have come."""
    drains = Drains()
    held = {number: ("a", frozenset({"g"})) for number in range(ENDS_BEFORE_A_DRAIN * 2)}
    drains.follow(held, ("a", "b"), ())
    rest = dict(list(held.items())[ENDS_BEFORE_A_DRAIN - 1 :])
    drains.follow(rest, ("a", "b"), ())
    drains.follow(rest | ({999: ("b", frozenset({"h"}))} if given else {}), ("a", "b"), () if given else ("b",))
    drains.follow(dict(list(rest.items())[1:]), ("a", "b"), ())
    assert not drains.why_drained("g", "a")


def test_a_drain_that_lasts_is_joined_by_another() -> None:
    """A holder may run for hours on the GPU that was chosen first."""
    drains = Drains()
    held = {number: ("a", frozenset({"g" if number % 2 else "h"})) for number in range(400)}
    drains.follow(held, ("a", "b"), ())
    rest = dict(list(held.items())[ENDS_BEFORE_A_DRAIN:])
    drains.follow(rest, ("a", "b"), ())
    assert [bool(drains.why_drained(gpu, "a")) for gpu in ("g", "h")].count(True) == 1
    drains.follow(dict(list(rest.items())[ENDS_BEFORE_A_DRAIN:]), ("a", "b"), ())
    assert all(drains.why_drained(gpu, "a") for gpu in ("g", "h"))


def test_kubelet_hears_of_a_drain_a_moment_after_schedulers(clock: Clock) -> None:
    """As with all that is kept from a family for others."""
    ledger = make(clock, WHOLE, counted(VGPU))
    ledger.listing(VGPU)
    stream(ledger, ENDS_BEFORE_A_DRAIN // 2 + 2)
    assert ledger.offered_ids(VGPU) < sum(entry.healthy for entry in ledger.listing(VGPU))
    clock.now += WITHDRAWAL_SECONDS
    assert ledger.offered_ids(VGPU) == sum(entry.healthy for entry in ledger.listing(VGPU))
