"""Torture: randomised pods on a model of a node on which everything may fail, against the real
ledger, allocator, family and backend.

Late mode: no container ever starts with anything but its own share, and everything that fits starts
in the end. Early mode: the guess of Allocate may be wrong, but a wrong one never gets past
PreStartContainer. ``TORTURE_CONTAINERS`` is the length of the long runs: by itself ``scripts/test
torture`` plays 100,000 containers of each family in each mode, as part of all tests fewer.
``TORTURE_SEED=<n>`` plays that one episode in both.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.torture.dialects import VGPU_MANAGER, VOLCANO
from tests.torture.episode import Outcome
from tests.torture.many import on_all_cores, one_by_one

PlayMany = Callable[..., Iterator[Outcome]]

_MANY = int(os.environ.get("TORTURE_CONTAINERS", "5000"))
_QUICK = 1_000


def _torture(
    containers: int,
    *,
    early: bool,
    first_seed: int,
    play_many: PlayMany = one_by_one,
    family: str = VOLCANO.name,
) -> collections.Counter[str]:
    """Play episodes until kubelet has admitted that many containers with GPUs.

    Raises:
        AssertionError: with the story of the first episode that was not faultless.
    """
    if chosen := os.environ.get("TORTURE_SEED"):
        first_seed, containers, play_many = int(chosen), 0, one_by_one
    began, total, started, counts = time.perf_counter(), 0, 0, collections.Counter[str]()
    failed: list[Outcome] = []
    last = first_seed
    for outcome in play_many(
        early=early, first_seed=first_seed, containers=containers, family=family
    ):
        total, started, counts, last = (
            total + outcome.containers,
            started + outcome.started,
            counts + outcome.counts,
            outcome.seed,
        )
        failed += [] if outcome.faultless else [outcome]
    mode, seconds = "early" if early else "late", time.perf_counter() - began
    print(  # noqa: T201
        f"\n{mode}: seeds {first_seed} to {last}, {total} containers, {started} started, "
        f"{seconds:.0f} s: {dict(counts)}"
    )
    seeds = [outcome.seed for outcome in failed]
    assert not failed, (
        f"{mode}: {len(failed)} episodes are not faultless; play one again with "
        f"TORTURE_SEED={seeds}\n{failed[0].text()}"
    )
    return counts


@pytest.mark.torture
def test_a_thousand_containers_bound_late_all_get_their_own_share() -> None:
    """The short run: restarts, outages and image pulls of minutes,
    and not one container with another's share.
    """
    counts = _torture(_QUICK, early=False, first_seed=0)
    assert counts["started"] > _QUICK


@pytest.mark.torture
def test_some_hundred_containers_bound_early_never_start_with_anothers_share() -> None:
    """The short run: a wrong guess of Allocate is refused before the container starts."""
    # each costs more than twice as much, because many are refused again and again
    counts = _torture(_QUICK // 2, early=True, first_seed=0)
    assert counts["started"]
    assert counts["start refused"]


@pytest.mark.torture
def test_some_hundred_containers_of_vgpu_manager_all_get_their_own_claims() -> None:
    """The same model with the claims of vgpu-manager's extender, which init containers and sidecars
    have too; bound late, and early.
    """
    late = _torture(_QUICK // 2, early=False, first_seed=500, family=VGPU_MANAGER.name)
    assert late["started"] > _QUICK // 2
    early = _torture(_QUICK // 4, early=True, first_seed=500, family=VGPU_MANAGER.name)
    assert early["started"]


@pytest.mark.torture
@pytest.mark.timeout(max(7200, _MANY // 10))
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_many_containers_of_vgpu_manager_get_their_own_claims(early: bool) -> None:
    """The long run of the family: 0 wrong, nothing left over."""
    _torture(
        _MANY,
        early=early,
        first_seed=2000,
        play_many=on_all_cores,
        family=VGPU_MANAGER.name,
    )


@pytest.mark.torture
@pytest.mark.timeout(7200)
def test_many_containers_bound_late_all_get_their_own_share() -> None:
    """The long run in late mode: 0 wrong, none refused for ever, nothing left over."""
    _torture(_MANY, early=False, first_seed=1000, play_many=on_all_cores)


@pytest.mark.torture
@pytest.mark.timeout(7200)
def test_many_containers_bound_early_never_start_with_anothers_share() -> None:
    """The long run in early mode: 0 wrong. Those that were refused are counted."""
    _torture(_MANY, early=True, first_seed=1000, play_many=on_all_cores)
