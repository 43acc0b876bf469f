"""NVIDIA's policy `aligned`: choose whole GPUs with NVLinks and PCI switches between them,
such that the remaining GPUs are close to each other, too.

Called through the `nvidia` family for GetPreferredAllocation of whole GPUs. The scores and the goal
are those of NVIDIA's plugin (nvidia §6.1): all available GPUs are divided into groups of the wanted
size, and the group is taken from the division with the highest score. NVIDIA's plugin tries every
division, which takes minutes on 16 GPUs. Here the search is exact up to `EXACT_GPUS` and
approximate above, always within milliseconds. Ties go to the GPUs that come first, so equal
requests get equal answers.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

from vgpu_agent.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.model import Link

EXACT_GPUS = 8

# By NVML's level of the common ancestor: same board, one switch, several switches, host bridge,
# same CPU, another CPU.
_PCI_SCORES = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}
_NVLINK_SCORE = 100  # of each direct link

_Group = tuple[int, ...]  # of GPUs: their indices among the available ones


def choose_group(
    *,
    available: Sequence[str],
    required: Sequence[str],
    size: int,
    links: Mapping[tuple[str, str], Link],
) -> list[str]:
    """Choose ``size`` of the ``available`` GPUs, all ``required`` ones among them;
    in the order of ``available``.

    Args:
        available: UUIDs; of equally good ones, those that come first are taken.
        required: those that must be in the answer.
        size: how many the container wants.
        links: how close each pair is; a pair that is not known counts as far apart.

    Raises:
        CapacityError: fewer are available than wanted, or a required one is not.
    """
    if missing := [uuid for uuid in required if uuid not in available]:
        raise CapacityError(f"not available: {', '.join(missing)}")
    if not len(required) <= size <= len(available):
        raise CapacityError(
            f"{size} GPUs are requested, {len(required)} of them by name, {len(available)} "
            "available"
        )
    if size in (0, len(available)):
        return list(available)[:size]
    search = _Search(
        [[_score(links, one, other) for other in available] for one in available], size
    )
    places = tuple(sorted(available.index(uuid) for uuid in dict.fromkeys(required)))
    return [available[place] for place in search.best(places)]


def _score(links: Mapping[tuple[str, str], Link], one: str, other: str) -> int:
    link = links.get((one, other))
    return _PCI_SCORES.get(link.pci, 0) + _NVLINK_SCORE * link.nvlinks if link is not None else 0


class _Search:
    """One search: the scores of all pairs, and the size of a group."""

    def __init__(self, scores: Sequence[Sequence[int]], size: int) -> None:
        self._scores = scores
        self._size = size
        self._group_score = functools.cache(self._sum)  # group → the score of its pairs together
        # GPUs → the score of their best division into groups
        self._exact_score = functools.cache(self._best_division)

    def best(self, required: _Group) -> _Group:
        """Return the group with ``required`` in the best division;
        of equally good ones, the group with the best score of its own, then the first.
        """
        count = len(self._scores)
        everything = tuple(range(count))
        exact = count <= EXACT_GPUS
        candidates: Iterable[_Group] = (
            self._all_groups(required) if exact else self._grown_groups(required)
        )
        rest: Callable[[_Group], int] = self._exact_score if exact else self._rough_score
        chosen, best = everything[: self._size], (-1, -1)
        for group in candidates:
            own = self._group_score(group)
            total = own + rest(tuple(place for place in everything if place not in group))
            if (total, own) > best:
                chosen, best = group, (total, own)
        return chosen

    def _all_groups(self, required: _Group) -> Iterable[_Group]:
        others = [place for place in range(len(self._scores)) if place not in required]
        for more in itertools.combinations(others, self._size - len(required)):
            yield tuple(sorted((*required, *more)))

    def _grown_groups(self, required: _Group) -> Iterable[_Group]:
        """Return groups that are grown from the required GPUs, or from each single GPU."""
        everything = tuple(range(len(self._scores)))
        seeds = [required] if required else [(place,) for place in everything]
        return sorted({self._grown(seed, everything) for seed in seeds})

    def _grown(self, seed: _Group, among: _Group) -> _Group:
        """Return ``seed`` with the closest of ``among``, one after the other."""
        group, left = list(seed), [place for place in among if place not in seed]
        closeness = {place: sum(self._scores[place][member] for member in group) for place in left}
        while len(group) < self._size and left:
            nearest = max(left, key=closeness.__getitem__)  # the first of several
            group.append(nearest)
            left.remove(nearest)
            for place in left:
                closeness[place] += self._scores[place][nearest]
        return tuple(sorted(group))

    def _sum(self, group: _Group) -> int:
        return sum(self._scores[one][other] for one, other in itertools.combinations(group, 2))

    def _best_division(self, places: _Group) -> int:
        """Return the score of the best division of ``places`` into groups;
        as few as possible are smaller than the wanted size.
        """
        if len(places) < 2:
            return 0
        first, others = places[0], places[1:]
        groups = -(-len(places) // self._size)
        smallest = max(1, len(places) - self._size * (groups - 1))
        return max(
            self._group_score((first, *more))
            + self._exact_score(tuple(place for place in others if place not in more))
            for size in range(smallest, min(self._size, len(places)) + 1)
            for more in itertools.combinations(others, size - 1)
        )

    def _rough_score(self, places: _Group) -> int:
        """Return the score of a division that is built greedily, each group from its closest
        GPUs.
        """
        score = 0
        while places:
            group = self._grown(places[:1], places)
            score += self._group_score(group)
            places = tuple(place for place in places if place not in group)
        return score
