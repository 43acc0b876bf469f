"""Drains: a family that never returns a GPU gives one up for a family that had pods here lately
and has none now.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.golden import U0, U1
from tests.ledger.book_parts import WHOLE, Clock, make, whole_shares
from tests.ledger.test_claims import VGPU, counted, start
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.drains import ENDS_BEFORE_A_DRAIN, RECENT_SECONDS, Drains
from vgpu_agent.ledger.withdrawals import WITHDRAWAL_SECONDS

GPU = "nvidia.com/gpu"
FAMILIES = ("a", "b")


class Stream:
    """Pods of family ``a`` that end one after the other on the GPUs ``g`` and ``h``;
    ``b`` had a pod before them.
    """

    def __init__(self, clock: Clock) -> None:
        self.drains = Drains(clock)
        self.held = {
            number: ("a", frozenset({"g" if number % 3 else "h"})) for number in range(1000)
        }
        self.follow(self.held | {-1: ("b", frozenset({"i"}))})
        self.follow(self.held)

    def follow(
        self, held: dict[int, tuple[str, frozenset[str]]], offered: Iterable[str] = ()
    ) -> None:
        """Tell of a change."""
        serves = {gpu: family for family, gpus in held.values() for gpu in gpus}
        self.drains.follow(held, serves, FAMILIES, lambda: tuple(offered))

    def end(self, pods: int) -> None:
        """So many pods of ``a`` end."""
        self.held = dict(list(self.held.items())[pods:])
        self.follow(self.held)

    def drained(self) -> list[str]:
        """The GPUs of which ``a`` gets nothing new."""
        return [gpu for gpu in ("g", "h") if self.drains.why_drained(gpu, "a")]


def test_the_gpu_on_which_pods_end_fastest_is_drained_for_a_family_that_was_here(
    clock: Clock,
) -> None:
    """It becomes free soonest, and one at a time costs least."""
    stream = Stream(clock)
    stream.end(ENDS_BEFORE_A_DRAIN - 1)
    assert stream.drained() == []
    stream.end(1)
    assert stream.drained() == ["g"]
    assert not stream.drains.why_drained("g", "b")


def test_nothing_is_drained_for_a_family_that_had_no_pod_here_lately(clock: Clock) -> None:
    """Nobody is known to want it, and a drain costs shares."""
    stream = Stream(clock)
    clock.now += RECENT_SECONDS + 1
    stream.end(3 * ENDS_BEFORE_A_DRAIN)
    assert stream.drained() == []
    never = Drains(clock)
    serves = {"g": "a", "h": "a"}
    never.follow(stream.held, serves, FAMILIES, tuple)
    never.follow(
        dict(list(stream.held.items())[2 * ENDS_BEFORE_A_DRAIN :]), serves, FAMILIES, tuple
    )
    assert not never.why_drained("g", "a")


@pytest.mark.parametrize("how", ["given something", "offered something"])
def test_a_family_that_gets_something_waits_no_longer(clock: Clock, how: str) -> None:
    """A family that is offered a free GPU would have sent its pods."""
    stream = Stream(clock)
    stream.end(ENDS_BEFORE_A_DRAIN)
    if how == "given something":
        stream.follow(stream.held | {-2: ("b", frozenset({"i"}))})
    else:
        stream.follow(stream.held, ("b",))
    assert stream.drained() == []
    stream.end(ENDS_BEFORE_A_DRAIN - 1)
    assert stream.drained() == []


def test_a_drain_that_lasts_gives_way_to_another_gpu(clock: Clock) -> None:
    """A pod runs for long on the first one; its family gets it back."""
    stream = Stream(clock)
    stream.end(ENDS_BEFORE_A_DRAIN)
    stream.end(ENDS_BEFORE_A_DRAIN)
    assert stream.drained() == ["h"]
    stream.end(ENDS_BEFORE_A_DRAIN)
    assert stream.drained() == ["g"]


def test_a_drain_ends_when_the_gpu_is_free(clock: Clock) -> None:
    """The round of turns begins."""
    stream = Stream(clock)
    stream.end(ENDS_BEFORE_A_DRAIN)
    stream.held = {number: held for number, held in stream.held.items() if "g" not in held[1]}
    stream.follow(stream.held, ("b",))
    assert stream.drained() == []


def flood(ledger: Ledger, ends: int) -> None:
    """So many pods of Volcano end, and the place of each is taken by the next
    before the last one has gone.
    """
    for number in range(ends // 2):
        for gpu in (U0, U1):
            start(ledger, VGPU, f"pod-{gpu}-{number}-{len(ledger.grants)}", gpu)
        for grant in ledger.grants[:-2]:
            ledger.release(grant.number)


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    """A node of two families."""
    return make(clock, WHOLE, counted(VGPU))


def test_a_flooded_node_gives_a_gpu_to_the_family_that_waits(ledger: Ledger, clock: Clock) -> None:
    """The family that had it comes last."""
    grant = ledger.reserve(GPU, [U0], whole_shares([U0]))
    start(ledger, VGPU, "first", U1)
    ledger.release(grant.number)
    clock.now += 60
    ledger.end_turns()
    flood(ledger, ENDS_BEFORE_A_DRAIN)
    flood(ledger, 8)
    (drained,) = [room for room in ledger.rooms(VGPU) if room.trouble]
    assert "many pods of volcano-vgpu in a row" in drained.trouble
    assert ledger.offered_ids(VGPU) == 4
    start(ledger, VGPU, "late", drained.device)  # it was bound before the drain
    clock.now += WITHDRAWAL_SECONDS
    for held in ledger.grants:
        if any(share.device == drained.device for share in held.shares):
            ledger.release(held.number)
    assert ledger.offered_ids(GPU) == 1
    assert ledger.offered_ids(VGPU) == 4
