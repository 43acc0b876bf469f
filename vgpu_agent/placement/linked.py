"""Choose devices with good links to each other.

Families that place pods by the links between GPUs (vgpu-manager §5.6) supply the score of each
pair's link; this module finds the devices that are connected and, among them, the best set. Pure
functions with bounded work: where there are more than `MAX_SETS` possible sets, the search adds one
device after the other to a set instead of comparing all sets.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    # takes the way of a search (`EXHAUSTIVE` or `GREEDY`), and among how many devices it chose
    See = Callable[[str, int], None]

MAX_SETS = 50_000

# The two ways to search, as vgpu-manager's metrics call them (vgpu-manager §5.10).
EXHAUSTIVE, GREEDY = "exhaustive", "greedy"

# A context variable, because there are six function calls between the one that wants searches
# counted and `best_set`, and most callers (an agent, a dry run, an explanation) count nothing.
_see: contextvars.ContextVar[See | None] = contextvars.ContextVar("_see", default=None)


@contextlib.contextmanager
def searches_seen_by(see: See) -> Iterator[None]:
    """Call ``see`` with each search that `best_set` makes meanwhile in this asyncio task:
    `EXHAUSTIVE` or `GREEDY`, and the number of devices among which it chose. Where all links are
    equally good it searches nothing.
    """
    token = _see.set(see)
    try:
        yield
    finally:
        _see.reset(token)


def components(
    devices: Sequence[str], linked: Callable[[str, str], bool]
) -> tuple[tuple[str, ...], ...]:
    """Return the groups of devices that are linked directly or through others of ``devices``; the
    groups, and the devices in each, are in the order of ``devices``.
    """
    groups: list[tuple[str, ...]] = []
    left = list(devices)
    while left:
        found, seen = [left[0]], {left[0]}
        for device in found:  # grows meanwhile
            for other in left:
                if other not in seen and linked(device, other):
                    seen.add(other)
                    found.append(other)
        groups.append(tuple(device for device in left if device in seen))
        left = [device for device in left if device not in seen]
    return tuple(groups)


def quality(devices: Sequence[str], score: Callable[[str, str], int]) -> int:
    """Return the sum of the scores of all pairs of ``devices``; more is better."""
    return sum(
        score(device, other)
        for place, device in enumerate(devices)
        for other in devices[place + 1 :]
    )


def best_set(
    devices: Sequence[str],
    count: int,
    score: Callable[[str, str], int],
    *,
    beside: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the ``count`` of ``devices`` with the best links to each other and to ``beside``, in
    the order of ``devices``.

    ``beside`` are devices that are chosen already and are not among ``devices``. Of equally good
    sets it is the one that leaves the other devices the better links, then the first. With more
    than `MAX_SETS` possible sets it is a good one, and not always the best.
    """
    if not 0 < count < len(devices):
        return tuple(devices[:count])
    scores = {
        one: {other: score(one, other) for other in devices if other != one} for one in devices
    }
    # of each device: the score of its links to ``beside``
    fixed = {one: sum(score(one, other) for other in beside) for one in devices}
    different_scores = {each for by_other in scores.values() for each in by_other.values()}
    if len(different_scores) == 1 and len(set(fixed.values())) == 1:
        return tuple(devices[:count])
    is_greedy = math.comb(len(devices), count) > MAX_SETS
    if (see := _see.get()) is not None:
        see(GREEDY if is_greedy else EXHAUSTIVE, len(devices))
    search = _one_after_the_other if is_greedy else _best_of_all
    return search(devices, count, scores, fixed)


def _best_of_all(
    devices: Sequence[str],
    count: int,
    scores: Mapping[str, Mapping[str, int]],
    fixed: Mapping[str, int],
) -> tuple[str, ...]:
    """Compare all sets. ``scores`` has the score of each pair's link, ``fixed`` the sum for the
    links of each device to those beside.
    """
    # of each device: the score of its links to all others of ``devices``
    sums = {one: sum(scores[one].values()) for one in devices}
    best: tuple[tuple[int, int], tuple[str, ...]] | None = None

    # `within` is the score of the links of the chosen devices to each other, `reached` that of the
    # same and of their links to ``beside``
    def extend(chosen: tuple[str, ...], first: int, reached: int, within: int) -> None:
        nonlocal best
        if len(chosen) == count:
            # the score of all links with a chosen device; the other devices keep the rest
            lost = sum(sums[one] for one in chosen) - within
            rank = (reached, -lost)
            if best is None or rank > best[0]:
                best = rank, chosen
            return
        for place in range(first, len(devices) - (count - len(chosen)) + 1):
            device = devices[place]
            gained = sum(scores[device][one] for one in chosen)
            extend((*chosen, device), place + 1, reached + gained + fixed[device], within + gained)

    extend((), 0, 0, 0)
    return best[1] if best else ()


def _one_after_the_other(
    devices: Sequence[str],
    count: int,
    scores: Mapping[str, Mapping[str, int]],
    fixed: Mapping[str, int],
) -> tuple[str, ...]:
    """Begin a set with each device, and add each time the device with the best links to the set and
    to those beside (arguments as for `_best_of_all`). Return the best of these sets.
    """

    def grown_from(first: str) -> tuple[int, set[str]]:
        chosen, reached = {first}, fixed[first]
        while len(chosen) < count:
            gains = {
                device: fixed[device] + sum(scores[device][one] for one in chosen)
                for device in devices
                if device not in chosen
            }
            device = max(gains, key=gains.__getitem__)
            chosen.add(device)
            reached += gains[device]
        return reached, chosen

    _, chosen = max(map(grown_from, devices), key=lambda grown: grown[0])
    return tuple(device for device in devices if device in chosen)
