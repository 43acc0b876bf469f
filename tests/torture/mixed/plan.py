"""The pods of a mixed day: short jobs, long jobs, and one family that floods the node;
drawn from a seed.

Used by `day`. Words of kubelet and of the replaced plugins only; nothing here knows the agent.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.torture import dialects
from tests.torture.plan import (
    NUMBER,
    Card,
    Ending,
    Kind,
    Origin,
    PlannedContainer,
    PlannedPod,
    Request,
)

NVIDIA, AWS, VOLCANO = "nvidia", "aws", "volcano-vgpu"
MANAGER, GPUSHARE = "vgpu-manager", "volcano-gpushare"
RESOURCES: Mapping[str, str] = {
    NVIDIA: "nvidia.com/gpu",
    AWS: "k8s.amazonaws.com/vgpu",
    VOLCANO: NUMBER,
    MANAGER: dialects.VGPU_MANAGER.number,
    GPUSHARE: dialects.GPUSHARE.number,
}
FAMILIES = (NVIDIA, AWS, VOLCANO)
"""The families of most days."""
ALL_FAMILIES = tuple(RESOURCES)
"""The families of the fullest days. One configuration of the agent offers them all; of Volcano's
schedulers it takes two, since one of them serves one family (docs/mixed-nodes.md).
"""
BY_IDS = (NVIDIA, AWS)
BY_POD: Mapping[str, dialects.Dialect] = {
    VOLCANO: dialects.VOLCANO,
    MANAGER: dialects.VGPU_MANAGER,
    GPUSHARE: dialects.GPUSHARE,
}
_FAMILY_OF = {resource: family for family, resource in RESOURCES.items()}

REPLICAS = 4
"""Shares of each GPU that `NVIDIA` and `AWS` offer."""

CARDS = tuple(Card(f"GPU-{place:08x}-aaaa-bbbb-cccc-{place:012x}", 24) for place in range(1, 5))

_ID = re.compile(r"(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:::|-)\d+")
_NUMBERED_ID = re.compile(r"(\d+)-\d+")


def family_of(plan: PlannedPod) -> str:
    """The family whose resource the pod asks for."""
    return next(
        _FAMILY_OF[each.request.resource] for each in plan.containers if each.request is not None
    )


def gpus_behind(ids: Iterable[str]) -> frozenset[str]:
    """The GPUs that ids name, by UUID or by number; those of `BY_POD` decide nothing."""
    ids = tuple(ids)
    named = {found[1] for id_ in ids if (found := _ID.fullmatch(id_))}
    numbers = {int(found[1]) for id_ in ids if (found := _NUMBERED_ID.fullmatch(id_))}
    return frozenset(named | {CARDS[number].uuid for number in numbers})


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """Pods that are created at one moment.

    Attributes:
        pause_seconds: since the moment before.
        flood: how many pods of the flooding family must wait at this moment; the day adds what is
            missing.
    """

    pause_seconds: float
    pods: tuple[PlannedPod, ...]
    flood: int


class Planner:
    """Draws the pods of one day.

    State: how many were drawn, for their names.
    """

    def __init__(self, rng: random.Random, families: Sequence[str] = FAMILIES) -> None:
        self._rng = rng
        self._families = families
        self.flooding = rng.choice(families)
        self._drawn: collections.Counter[str] = collections.Counter()

    def arrivals(self) -> Iterator[Arrival]:
        """One moment after the other, for ever;
        the flood comes and goes, so that GPUs change hands.
        """
        rng, floods = self._rng, True
        others = [family for family in self._families if family != self.flooding]
        while True:
            pods = tuple(
                self.pod(rng.choice(others)) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))
            )
            yield Arrival(rng.expovariate(1 / 8.0), pods, rng.choice((2, 4, 8)) if floods else 0)
            if rng.random() < 0.06:
                floods = not floods

    def pod(self, family: str) -> PlannedPod:
        """A short or a long job of the family; a pod of the flood where the family floods."""
        rng = self._rng
        self._drawn[family] += 1
        if family == self.flooding:
            run_seconds = 2.0 + rng.random() * 30.0
        else:
            run_seconds = rng.choice(
                (3.0 + rng.random() * 20.0, 3.0 + rng.random() * 20.0, 60.0 + rng.random() * 240.0)
            )
        containers = [self._main("main", family)]
        if rng.random() < 0.15:
            containers.insert(
                0,
                PlannedContainer("init", Kind.INIT, None, self._pull(), 1.0 + rng.random() * 15.0),
            )
        if family in (MANAGER, GPUSHARE):
            containers = [*self._inits(family), *containers, *self._more(family)]
        ending = rng.choices((Ending.COMPLETES, Ending.DELETED, Ending.EARLY), (70, 26, 4))[0]
        origin = Origin.VOLCANO if family in BY_POD else Origin.PLAIN
        return PlannedPod(
            f"{family}-{self._drawn[family]}", origin, tuple(containers), run_seconds, ending
        )

    def _main(self, name: str, family: str) -> PlannedContainer:
        rng = self._rng
        return PlannedContainer(
            name,
            Kind.MAIN,
            self._request(family),
            self._pull(),
            5.0 + rng.random() * 20,
            rng.choice((0,) * 9 + (1,)),
        )

    def _inits(self, family: str) -> Iterator[PlannedContainer]:
        """Init containers with shares of their own."""
        rng = self._rng
        for place in range(rng.choice((0, 0, 0, 0, 1, 2))):
            run_seconds = 1.0 + rng.random() * 10.0
            yield PlannedContainer(
                f"prepare-{place}", Kind.INIT, self._request(family), self._pull(), run_seconds
            )

    def _more(self, family: str) -> Iterator[PlannedContainer]:
        """A second main container."""
        if self._rng.random() < 0.2:
            yield self._main("second", family)

    def _request(self, family: str) -> Request:
        rng = self._rng
        if family == VOLCANO:
            return Request(1, rng.choice((2, 4, 6, 8, 12)), rng.choice((0, 0, 10, 25)))
        if family == MANAGER:
            memory, cores = rng.choice((2, 4, 6, 8, 12)), rng.choice((0, 0, 10, 25))
            return Request(rng.choice((1, 1, 1, 1, 2)), memory, cores, RESOURCES[family])
        if family == GPUSHARE:  # its number is one of units of memory
            return Request(rng.choice((2, 4, 6, 8, 12)), None, 0, RESOURCES[family])
        return Request(1, None, 0, RESOURCES[family])

    def _pull(self) -> float:
        return self._rng.random() * self._rng.choices((0.2, 2.0, 15.0, 90.0), (50, 35, 12, 3))[0]
