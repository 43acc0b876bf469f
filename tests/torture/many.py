"""Many episodes, one after the other or on all cores,
until kubelet has admitted as many containers as asked for.

Used by `test_torture`. Episodes share nothing, so it makes no difference where each of them is
played.
"""

from __future__ import annotations

import collections
import concurrent.futures
import io
import itertools
import multiprocessing
import os
from collections.abc import Iterator

from tests.torture.dialects import DIALECTS, VOLCANO
from tests.torture.episode import Outcome, play
from tests.torture.real_agent import RealAgent
from vgpu_agent import log


def one_by_one(
    *, early: bool, first_seed: int, containers: int, family: str = VOLCANO.name
) -> Iterator[Outcome]:
    """Here and now."""
    for seed in itertools.count(first_seed):
        outcome = _play(seed, early, family)
        yield outcome
        containers -= outcome.containers
        if containers <= 0:
            return


def on_all_cores(
    *, early: bool, first_seed: int, containers: int, family: str = VOLCANO.name
) -> Iterator[Outcome]:
    """In as many processes as there are cores."""
    seeds = itertools.count(first_seed)
    cores = os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        cores, mp_context=context, initializer=_log_into_nothing
    ) as pool:
        playing = collections.deque(
            pool.submit(_play, seed, early, family) for seed in itertools.islice(seeds, 2 * cores)
        )
        while playing:
            outcome = playing.popleft().result()
            yield outcome
            containers -= outcome.containers
            if containers > 0:
                playing.append(pool.submit(_play, next(seeds), early, family))


def _play(seed: int, early: bool, family: str) -> Outcome:
    return play(seed, RealAgent, early=early, dialect=DIALECTS[family])


def _log_into_nothing() -> None:
    log.configure(level="error", stream=io.StringIO())
