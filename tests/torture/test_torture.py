"""Torture: randomised pods on a model of a node on which everything may fail, against the real ledger, allocator, family and backend.

Late mode: no container ever starts with anything but its own share, and everything that fits starts in the end. Early mode: the guess of
Allocate may be wrong, but a wrong one never gets past PreStartContainer. The short ones run with the unit tests, the long ones
(``scripts/test torture``) play 100,000 containers in each mode. ``TORTURE_SEED=<n>`` plays that one episode in both.
"""

from __future__ import annotations

import collections
import os
import time

import pytest

from tests.torture.episode import Outcome, play
from tests.torture.real_agent import RealAgent

_FULL = 100_000
_QUICK = 1_000


def _torture(containers: int, *, early: bool, first_seed: int) -> collections.Counter[str]:
    """Play episodes until kubelet has admitted that many containers with GPUs.

    Raises:
        AssertionError: with the story of the first episode that was not faultless.
    """
    chosen = os.environ.get("TORTURE_SEED")
    seed, last = (int(chosen), int(chosen)) if chosen else (first_seed, None)
    began, total, counts = time.perf_counter(), 0, collections.Counter[str]()
    failed: list[Outcome] = []
    while total < containers:
        outcome = play(seed, RealAgent, early=early)
        total += outcome.containers
        counts += outcome.counts
        if not outcome.faultless:
            failed.append(outcome)
        if seed == last:
            break
        seed += 1
    mode = "early" if early else "late"
    print(f"{mode}: {total} containers, seeds {chosen or first_seed} to {seed}, {time.perf_counter() - began:.0f} s: {dict(counts)}")  # noqa: T201 - seeds and counts belong in the report
    again = f"play it again with TORTURE_SEED={failed[0].seed}" if failed else ""
    assert not failed, f"{mode}: {len(failed)} episodes (seeds {[each.seed for each in failed[:20]]}); {again}\n{failed[0].text()}"
    return counts


def test_a_thousand_containers_bound_late_all_get_their_own_share() -> None:
    """The short run: restarts, outages and image pulls of minutes, and not one container with another's share."""
    counts = _torture(_QUICK, early=False, first_seed=0)
    assert counts["started"] > _QUICK


def test_a_thousand_containers_bound_early_never_start_with_anothers_share() -> None:
    """The short run: a wrong guess of Allocate is refused before the container starts."""
    counts = _torture(_QUICK, early=True, first_seed=0)
    assert counts["started"]
    assert counts["start refused"]


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_containers_bound_late_all_get_their_own_share() -> None:
    """The long run in late mode: 0 wrong, none refused for ever, nothing left over."""
    _torture(_FULL, early=False, first_seed=1000)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_containers_bound_early_never_start_with_anothers_share() -> None:
    """The long run in early mode: 0 wrong; those that were refused are counted."""
    _torture(_FULL, early=True, first_seed=1000)
