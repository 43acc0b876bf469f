"""Volcano's scheduler as its contract has it (volcano-vgpu §3.2, §3.4, §8), written anew:
its own ledger, its own annotations.

It shares no code with the agent's families on purpose; what it remembers in `Placement` is what the
torture test holds the agent to.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Sequence

from tests.torture.plan import SPLIT, Card, Kind, PlannedPod, Request


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """A part of one card: memory units and percent of its compute."""

    uuid: str
    units: int
    cores: int


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """A scheduler's decision: slices by container,
    and the annotations that carry them to the node.
    """

    slices: dict[str, tuple[Slice, ...]]
    annotations: dict[str, str]


@dataclasses.dataclass
class _Used:
    card: Card
    units: int = 0
    cores: int = 0
    pods: int = 0

    def fits(self, request: Request) -> bool:
        units = self.card.units if request.memory is None else request.memory
        alone = request.cores < 100 or self.pods == 0
        return (
            self.pods < SPLIT
            and self.card.units - self.units >= units
            and self.cores + request.cores <= 100
            and alone
        )


class SchedulerModel:
    """Places pods on the node's cards, binpack or spread, until each is taken back."""

    def __init__(self, rng: random.Random, cards: Sequence[Card], *, node: str) -> None:
        self._node = node
        self._policy = rng.choice(("binpack", "spread", "none"))
        self._cards = [_Used(card) for card in cards]
        self._placed: dict[str, Placement] = {}

    def place(
        self, uid: str, pod: PlannedPod, *, now: float, usable: Collection[str] | None = None
    ) -> Placement | None:
        """Choose cards for all main containers of the pod, one after another;
        None when they do not fit now.

        ``usable`` are the cards on which the node takes new pods, all of them when not given.
        """
        before = [dataclasses.replace(used) for used in self._cards]
        slices: dict[str, tuple[Slice, ...]] = {}
        for container in pod.containers:
            if container.kind is not Kind.MAIN or container.request is None:
                continue
            request = container.request
            chosen = [
                used
                for used in self._ordered()
                if used.fits(request) and (usable is None or used.card.uuid in usable)
            ][: request.number]
            if len(chosen) < request.number:
                self._cards = before
                return None
            for used in chosen:
                used.units += used.card.units if request.memory is None else request.memory
                used.cores += request.cores
                used.pods += 1
            slices[container.name] = tuple(
                Slice(
                    used.card.uuid,
                    used.card.units if request.memory is None else request.memory,
                    request.cores,
                )
                for used in chosen
            )
        text = ";".join(
            "".join(f"{each.uuid},NVIDIA,{each.units},{each.cores}:" for each in container)
            for container in slices.values()
        )
        annotations = {
            "volcano.sh/vgpu-node": self._node,
            "volcano.sh/vgpu-time": str(int(now)),
            "volcano.sh/bind-time": str(int(now)),
            "volcano.sh/bind-phase": "allocating",
            "volcano.sh/vgpu-ids-new": text,
            "volcano.sh/devices-to-allocate": text,
        }
        self._placed[uid] = placement = Placement(slices, annotations)
        return placement

    def take_back(self, uid: str) -> None:
        """Forget a pod: it has ended, or (as the real one has it) it is about to."""
        if placement := self._placed.pop(uid, None):
            by_uuid = {used.card.uuid: used for used in self._cards}
            for each in (part for container in placement.slices.values() for part in container):
                used = by_uuid[each.uuid]
                used.units -= each.units
                used.cores -= each.cores
                used.pods -= 1

    def _ordered(self) -> list[_Used]:
        if self._policy == "binpack":
            return sorted(self._cards, key=lambda used: -used.units)
        if self._policy == "spread":
            return sorted(self._cards, key=lambda used: used.pods)
        return self._cards[::-1]
