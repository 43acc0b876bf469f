"""The pods of an episode: drawn at random,
so that every shape that the issue names occurs in every thousand.

Used by `episode`; nothing here knows the agent. Words of kubelet and of Volcano only.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import random
from collections.abc import Iterator

NUMBER = "volcano.sh/vgpu-number"
MEMORY = "volcano.sh/vgpu-memory"
CORES = "volcano.sh/vgpu-cores"

# One unit of the memory resource. Large, because each unit is a device id, and ids are not what is
# tested here.
MEMORY_FACTOR_MIB = 1024
SPLIT = 10


class Kind(enum.StrEnum):
    """The kinds of containers."""

    INIT = "init"
    SIDECAR = "sidecar"
    MAIN = "main"


class Origin(enum.StrEnum):
    """The origins of pods."""

    VOLCANO = "volcano"  # the scheduler's annotations say what each main container gets
    PLAIN = "plain"  # nodeName, or a scheduler that only counts: the agent chooses the cards
    STATIC = "static"  # a file on the node; the API server has a mirror of it under another UID
    OTHER = "other"  # no GPU at all


class Ending(enum.StrEnum):
    """The endings of pods."""

    COMPLETES = "completes"
    DELETED = "deleted"
    FORCED = "deleted by force"
    EARLY = "deleted before it has started"


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """A GPU: its UUID and its memory in units of the memory resource."""

    uuid: str
    units: int


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A container's limits: cards, memory units on each (None:
    all of it), percent of the compute of each.

    ``resource`` is the one that counts the cards.
    """

    number: int
    memory: int | None
    cores: int
    resource: str = NUMBER

    @property
    def limits(self) -> dict[str, int]:
        """Return the limits as the pod has them."""
        limits = {self.resource: self.number}
        if self.memory is not None:
            limits[self.resource.replace("number", "memory")] = self.memory
        if self.cores:
            limits[self.resource.replace("number", "cores")] = self.cores
        return limits


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedContainer:
    """One container; times are virtual seconds.

    Attributes:
        run_seconds: for a plain init container, how long it runs; otherwise how long until each of
            its crashes.
    """

    name: str
    kind: Kind
    request: Request | None
    pull_seconds: float
    run_seconds: float
    crashes: int = 0


@dataclasses.dataclass(frozen=True)
class PlannedPod:
    """One pod and its fate.

    Attributes:
        returns: how many times it comes back under its name, each time with other requests.
    """

    name: str
    origin: Origin
    containers: tuple[PlannedContainer, ...]
    run_seconds: float
    ending: Ending
    returns: int = 0

    @functools.cached_property
    def needs(self) -> dict[str, int]:
        """Return the number of ids the kubelet needs for the pod:
        those of plain init containers are used again by later ones.
        """
        needed, reusable = collections.Counter[str](), collections.Counter[str]()
        for container in sorted(self.containers, key=lambda each: each.kind is Kind.MAIN):
            for resource, number in (container.request.limits if container.request else {}).items():
                reused = min(number, reusable[resource])
                needed[resource] += number - reused
                reusable[resource] += number - reused if container.kind is Kind.INIT else -reused
        return dict(needed)


@dataclasses.dataclass(frozen=True, slots=True)
class Mix:
    """The composition of an episode; shares of 1."""

    plain: float = 0.08
    static: float = 0.03
    other: float = 0.05
    init: float = 0.2
    sidecar: float = 0.15
    several: float = 0.3
    returns: float = 0.2

    @classmethod
    def draw(cls, rng: random.Random) -> Mix:
        """Mostly Volcano's pods among some others; at times only one sort."""
        kind = rng.random()
        if kind < 0.25:
            return cls(plain=0.0, static=0.0)
        if kind < 0.35:
            return cls(plain=0.85, static=0.1)
        if kind < 0.5:
            return cls(init=0.6, sidecar=0.4, several=0.6)
        return cls()


class Planner:
    """Draws pods; the same ``rng`` draws the same pods."""

    def __init__(
        self, rng: random.Random, mix: Mix, *, resource: str = NUMBER, claims_all: bool = False
    ) -> None:
        """Build it; the scheduler of the family with that resource gives cards to sidecars too
        where it ``claims_all``.
        """
        self._rng, self._mix = rng, mix
        self._resource, self._claims_all = resource, claims_all
        self._drawn = 0

    def bursts(self, pods: int) -> Iterator[tuple[float, list[PlannedPod]]]:
        """(seconds to wait, pods that arrive at once) until ``pods`` have been drawn;
        often twins of one shape.
        """
        rng = self._rng
        while pods > 0:
            size = min(pods, rng.choice((1, 1, 2, 3, 5, 8, 13, 20)))
            pods -= size
            twins = rng.random() < 0.4
            model = self.pod()
            burst = [self._twin(model) if twins else self.pod() for _ in range(size - 1)]
            yield rng.choice((0.0, 0.3, 2.0, 10.0, 40.0)) * rng.random(), [model, *burst]

    def pod(self, name: str | None = None, origin: Origin | None = None) -> PlannedPod:
        """One pod; of that name when it is another's successor."""
        rng, mix = self._rng, self._mix
        if name is None:
            self._drawn += 1
            name = f"pod-{self._drawn}"
        if origin is None:
            dice = rng.random()
            bounds = (
                (mix.plain, Origin.PLAIN),
                (mix.plain + mix.static, Origin.STATIC),
                (mix.plain + mix.static + mix.other, Origin.OTHER),
            )
            origin = next((kind for bound, kind in bounds if dice < bound), Origin.VOLCANO)
        ending = rng.choices(tuple(Ending), (50, 35, 5, 10))[0]
        returns = rng.choice((1, 2)) if rng.random() < mix.returns else 0
        return PlannedPod(
            name, origin, tuple(self._containers(origin)), self._short(200.0), ending, returns
        )

    def successor(self, before: PlannedPod) -> PlannedPod:
        """The next pod of that name."""
        return dataclasses.replace(self.pod(before.name, before.origin), returns=before.returns - 1)

    def _twin(self, model: PlannedPod) -> PlannedPod:
        """A pod of the same shape whose memory differs, so that a mix-up is seen."""
        self._drawn += 1
        containers = tuple(
            dataclasses.replace(
                each,
                request=each.request and self._request(each.request.number),
                pull_seconds=self._pull(),
            )
            for each in model.containers
        )
        return dataclasses.replace(
            model, name=f"pod-{self._drawn}", containers=containers, run_seconds=self._short(200.0)
        )

    def _containers(self, origin: Origin) -> Iterator[PlannedContainer]:
        rng, mix = self._rng, self._mix
        gpu = origin is not Origin.OTHER
        first = self._request()
        if rng.random() < mix.init:
            for place in range(rng.choice((1, 1, 2, 3))):
                request = self._init_request(first) if gpu and rng.random() < 0.6 else None
                yield PlannedContainer(
                    f"init-{place}", Kind.INIT, request, self._pull(), self._short(20.0)
                )
        if rng.random() < mix.sidecar:
            request = (
                self._asking(1, 1, 0)
                if gpu and (origin is not Origin.VOLCANO or self._claims_all) and rng.random() < 0.2
                else None
            )
            yield PlannedContainer(
                "side",
                Kind.SIDECAR,
                request,
                self._pull(),
                self._short(30.0),
                rng.choice((0, 0, 0, 1)),
            )
        if rng.random() < 0.2:
            yield PlannedContainer("proxy", Kind.MAIN, None, self._pull(), 5.0)
        if gpu:
            several = rng.choice((2, 2, 3)) if rng.random() < mix.several else 1
            for place in range(several):
                request = first if place == 0 else self._request()
                if origin is not Origin.VOLCANO and several > 1:
                    # small, so that two half-started pods never wait for each other's rest
                    request = self._asking(1, 1, 0)
                crashes = rng.choice((0, 0, 0, 0, 0, 1, 2, 5))
                yield PlannedContainer(
                    f"work-{place}", Kind.MAIN, request, self._pull(), self._short(20.0), crashes
                )
        else:
            yield PlannedContainer("main", Kind.MAIN, None, self._pull(), 5.0)

    def _request(self, number: int | None = None) -> Request:
        rng = self._rng
        number = number or rng.choices((1, 2, 3), (85, 12, 3))[0]
        memory = None if rng.random() < 0.02 else rng.choice((1, 2, 2, 3, 3, 4, 5, 6))
        return self._asking(number, memory, rng.choice((0, 0, 0, 0, 10, 25, 30, 50)))

    def _init_request(self, main: Request) -> Request:
        """Return a request as large as the main container's, smaller, or larger."""
        rng = self._rng
        number = rng.choice((main.number, main.number, max(1, main.number - 1), main.number + 1))
        memory = rng.choice((main.memory or 1, 1, 2))
        return self._asking(number, memory, rng.choice((0, main.cores)))

    def _asking(self, number: int, memory: int | None, cores: int) -> Request:
        return Request(number, memory, cores, self._resource)

    def _pull(self) -> float:
        return self._rng.random() * self._rng.choices((0.0, 2.0, 30.0, 300.0), (30, 40, 24, 6))[0]

    def _short(self, longest: float) -> float:
        return self._rng.random() * self._rng.choice((0.1, 0.3, 1.0)) * longest
