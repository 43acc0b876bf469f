"""The start delay of pods that ask for vGPU, on a real node:
the third part of the benchmark, called by `__main__`.

etcd, API server, kubelet and containerd are real (`scripts/cluster`), so this needs root, and some
minutes the first time. The measurement and its fairness: `tests.real_node.start_times`, by which
the cluster tests judge more leniently.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from tests.bench.figures import Figure
from tests.real_node.rig import Rig
from tests.real_node.start_times import (
    NOTHING,
    PODS,
    WITH,
    WITHOUT,
    Rounds,
    with_coarse_units,
    with_units_of_a_mib,
)

_MAX_LATER = 1.2


def _figures(rounds: Rounds, unit: str, than: str) -> list[Figure]:
    """The best round of each kind in seconds, each kind as a multiple of the others,
    and what kubelet says of Allocate.
    """
    kinds, figures = list(rounds.seconds), []
    for kind in kinds:
        how = f"last of {PODS} Running, the best of {len(rounds.seconds[kind])} rounds in turn"
        figures.append(Figure(f"{unit}: {kind}", min(rounds.seconds[kind]), None, "s", how))
    for other, kind in itertools.combinations(kinds, 2):
        limit = _MAX_LATER if (kind, other) == (WITH, than) else None
        figures.append(
            Figure(
                f"{unit}: {kind} / {other}",
                rounds.later(kind, other),
                limit,
                "×",
                "the best of each",
            )
        )
    for kind in kinds:
        for resource, (milliseconds, calls) in rounds.allocating(kind).items():
            how = f"kubelet_device_plugin_alloc_duration_seconds, mean of {calls} calls"
            figures.append(
                Figure(f"{unit}: Allocate of {resource}, {kind}", milliseconds, None, "ms", how)
            )
    return figures


def _measure() -> list[Figure]:
    with Rig() as rig:
        coarse, fine = (
            with_coarse_units(rig, most_later=_MAX_LATER),
            with_units_of_a_mib(rig, most_later=_MAX_LATER),
        )
    return [*_figures(coarse, "64 MiB", WITHOUT), *_figures(fine, "1 MiB", NOTHING)]


async def measure(_folder: Path) -> list[Figure]:
    """All figures.

    Raises:
        RequirementError: this machine cannot hold a real node.
    """
    return await asyncio.to_thread(_measure)
