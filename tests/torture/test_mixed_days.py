"""Torture of mixed nodes: GPUs that several families share out, one family that floods, and
schedulers that see the node late.

No container ever gets a wrong share, no GPU ever serves two families, and every pod ends.
``TORTURE_MIXED_PODS=100000`` makes the long runs as long as a release needs. ``TORTURE_SEED=<n>``
plays that one day. Each prints its figures beside the bounds of `tests.torture.mixed.bounds`, to
which `tests.torture.test_mixed_bounds` holds the days of three families.

On the days of five families, pods of three of them have shares by their schedulers' claims, and
four schedulers know nothing of each other. They are half as many.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import io
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.torture.faults import Faults
from tests.torture.mixed import bounds
from tests.torture.mixed.day import QUIET, TROUBLED, Outcome, play
from tests.torture.mixed.judge import Figures
from tests.torture.mixed.plan import ALL_FAMILIES, FAMILIES
from vgpu_agent import log

_PODS_OF_A_DAY = 400
_QUICK_DAYS = 1


@functools.cache
def days(
    count: int,
    *,
    first_seed: int,
    faults: Faults,
    on_all_cores: bool,
    families: Sequence[str],
) -> tuple[Figures, list[Outcome]]:
    """Play so many days, print what they came to,
    and return the figures of all and the days that are not faultless.

    The same days are played once, whatever is asked about them.
    """
    if chosen := os.environ.get("TORTURE_SEED"):
        first_seed, count, on_all_cores = int(chosen), 1, False
    seeds = range(first_seed, first_seed + count)
    began, figures, failed, counts = (
        time.perf_counter(),
        Figures(),
        list[Outcome](),
        collections.Counter[str](),
    )
    for outcome in _played(seeds, faults, families, on_all_cores=on_all_cores):
        figures.add(outcome.figures, outcome.seed)
        counts += outcome.counts
        failed += [] if outcome.faultless else [outcome]
    seconds = time.perf_counter() - began
    troubles = {
        event: counts[event]
        for event in ("agent killed", "kubelet killed", "API away", "node reboots")
    }
    kind = "troubled" if faults is TROUBLED else "quiet"
    print(  # noqa: T201
        f"\n{kind} days of {len(families)} families, seeds {first_seed} to {seeds[-1]}, "
        f"{seconds:.0f} s, {troubles}:\n{figures.text()}"
    )
    return figures, failed


def _played(
    seeds: range, faults: Faults, families: Sequence[str], *, on_all_cores: bool
) -> Iterator[Outcome]:
    play_day = functools.partial(play, pods=_PODS_OF_A_DAY, faults=faults, families=families)
    if not on_all_cores:
        yield from map(play_day, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        mp_context=context, initializer=_log_into_nothing
    ) as pool:
        yield from pool.map(play_day, seeds)


def _log_into_nothing() -> None:
    log.configure(level="error", stream=io.StringIO())


def _check(failed: list[Outcome]) -> None:
    seeds = [outcome.seed for outcome in failed]
    assert not failed, (
        f"{len(failed)} days are not faultless; play one again with TORTURE_SEED={seeds}\n"
        f"{failed[0].text()}"
    )


def many_days(faults: Faults, families: Sequence[str] = FAMILIES) -> tuple[Figures, list[Outcome]]:
    """The days of the long run."""
    pods = int(os.environ.get("TORTURE_MIXED_PODS", "2000"))
    if families is ALL_FAMILIES:
        pods //= 2
    return days(
        max(1, pods // _PODS_OF_A_DAY),
        first_seed=1000 if faults is QUIET else 5000,
        faults=faults,
        on_all_cores=True,
        families=families,
    )


_EACH_NUMBER_OF_FAMILIES = pytest.mark.parametrize(
    "families", [FAMILIES, ALL_FAMILIES], ids=["three", "five"]
)


@pytest.mark.torture
@_EACH_NUMBER_OF_FAMILIES
def test_a_mixed_day_never_gives_a_wrong_share_or_a_gpu_to_two_families(
    families: Sequence[str],
) -> None:
    """The short run on a node on which nothing fails."""
    figures, failed = days(
        _QUICK_DAYS, first_seed=0, faults=QUIET, on_all_cores=False, families=families
    )
    _check(failed)
    assert figures.started > 0.9 * _PODS_OF_A_DAY * _QUICK_DAYS
    assert figures.waited_seconds.keys() == set(families)


@pytest.mark.torture
def test_lists_to_kubelet_are_few_on_a_mixed_day() -> None:
    """The kubelet rewrites its checkpoint for each list, and a burst of changes is one."""
    figures, _ = days(
        _QUICK_DAYS, first_seed=0, faults=QUIET, on_all_cores=False, families=FAMILIES
    )
    assert all(
        number <= bounds.LISTS_OF_A_FAMILY_PER_POD_EVENT * figures.pod_events
        for number in figures.lists.values()
    )


@pytest.mark.torture
@_EACH_NUMBER_OF_FAMILIES
def test_a_mixed_day_stays_right_while_agent_kubelet_and_api_server_come_and_go(
    families: Sequence[str],
) -> None:
    """The short run with restarts: what is held is rebuilt before anything is offered."""
    figures, failed = days(
        _QUICK_DAYS, first_seed=0, faults=TROUBLED, on_all_cores=False, families=families
    )
    _check(failed)
    assert figures.started


@pytest.mark.torture
@pytest.mark.timeout(7200)
@_EACH_NUMBER_OF_FAMILIES
def test_many_quiet_mixed_days(families: Sequence[str]) -> None:
    """The long run on nodes on which nothing fails:
    0 wrong, 0 moments of two families, every pod ends.
    """
    _check(many_days(QUIET, families)[1])


@pytest.mark.torture
@pytest.mark.timeout(7200)
@_EACH_NUMBER_OF_FAMILIES
def test_many_troubled_mixed_days(families: Sequence[str]) -> None:
    """The long run on nodes on which everything fails:
    0 wrong, 0 moments of two families, every pod ends.
    """
    _check(many_days(TROUBLED, families)[1])
