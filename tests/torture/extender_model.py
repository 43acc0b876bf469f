"""vgpu-manager's extender as its contract has it (vgpu-manager §4.2, §4.4, §5.3, §5.5), written
anew: its own ledger, its own annotations.

Every container with GPUs has a claim, init containers and sidecars too. A pod takes of each card
its sidecars and the larger of its main containers together and its largest init container.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Collection, Iterable, Sequence

from tests.torture.plan import MEMORY_FACTOR_MIB, SPLIT, Card, Kind, PlannedPod, Request
from tests.torture.scheduler_model import Placement, Slice

_Use = tuple[int, int, int]
"""Units of memory, percent of compute, and holders of a card."""
_NOTHING: _Use = (0, 0, 0)


class ExtenderModel:
    """Places pods on the node's cards, binpack or spread, until each is taken back."""

    def __init__(self, rng: random.Random, cards: Sequence[Card], *, node: str) -> None:
        self._node = node
        self._policy = rng.choice(("binpack", "spread", "none"))
        self._cards = tuple(cards)
        self._taken: dict[str, dict[str, _Use]] = {}
        self._used = dict.fromkeys((card.uuid for card in self._cards), _NOTHING)  # all together

    def place(
        self, uid: str, pod: PlannedPod, *, now: float, usable: Collection[str] | None = None
    ) -> Placement | None:
        """Choose cards for all containers of the pod; None when they do not fit now.

        ``usable`` are the cards that are healthy by the Node, all of them when not given.
        """
        cards = [card for card in self._cards if usable is None or card.uuid in usable]
        used, beside, chosen, sums = (
            dict(self._used),
            dict(self._used),
            dict[str, tuple[Slice, ...]](),
            dict[Kind, dict[str, _Use]](),
        )
        asking = [each for each in pod.containers if each.request is not None]
        for kind in (Kind.SIDECAR, Kind.MAIN, Kind.INIT):
            sums[kind] = {}
            for container in asking:
                if container.kind is not kind or container.request is None:
                    continue
                parts = self._choose(
                    container.request, cards, beside if kind is Kind.INIT else used
                )
                if not parts:
                    return None
                chosen[container.name] = parts
                takes = [(part.uuid, (part.units, part.cores, 1)) for part in parts]
                if kind is Kind.INIT:
                    _larger(sums[kind], takes)
                    continue
                _add(used, takes)
                _add(sums[kind], takes)
                if kind is Kind.SIDECAR:
                    _add(beside, takes)
        together = dict(sums[Kind.MAIN])
        _larger(together, sums[Kind.INIT].items())
        _add(together, sums[Kind.SIDECAR].items())
        self._taken[uid] = together
        _add(self._used, together.items())
        slices = {each.name: chosen[each.name] for each in asking}
        return Placement(
            {name: tuple(map(_as_seen, parts)) for name, parts in slices.items()},
            {
                "nvidia.com/predicate-node": self._node,
                "nvidia.com/predicate-time": str(int(now * 1e9)),
                "nvidia.com/pre-allocated": self._text(slices),
                "nvidia.com/real-allocated": "",
            },
        )

    def take_back(self, uid: str) -> None:
        """Forget a pod that has ended."""
        for uuid, use in self._taken.pop(uid, {}).items():
            self._used[uuid] = _joined(operator.sub, self._used[uuid], use)

    def _choose(
        self, request: Request, cards: Iterable[Card], used: dict[str, _Use]
    ) -> tuple[Slice, ...]:
        cores = request.cores or (100 if request.memory is None else 0)

        def fits(card: Card) -> bool:
            units, taken, holders = used[card.uuid]
            asked = card.units if request.memory is None else request.memory
            free = 100 - taken
            return units + asked <= card.units and free >= max(1, cores) and holders < SPLIT

        found = sorted(filter(fits, cards), key=self._order(used))[: request.number]
        if len(found) < request.number:
            return ()
        return tuple(
            Slice(card.uuid, card.units if request.memory is None else request.memory, cores)
            for card in sorted(found, key=self._cards.index)
        )

    def _order(self, used: dict[str, _Use]) -> Callable[[Card], int]:
        if self._policy == "binpack":
            return lambda card: -used[card.uuid][0]
        if self._policy == "spread":
            return lambda card: used[card.uuid][0]
        return self._cards.index

    def _text(self, slices: dict[str, tuple[Slice, ...]]) -> str:
        order = [card.uuid for card in self._cards]
        return ";".join(
            "{}[{}]".format(
                name,
                ",".join(
                    f"{order.index(part.uuid)}_{part.uuid}_{part.cores}_"
                    f"{part.units * MEMORY_FACTOR_MIB}"
                    for part in parts
                ),
            )
            for name, parts in slices.items()
        )


def _as_seen(part: Slice) -> Slice:
    """Return what a container sees: all of the compute is no limit to it."""
    return Slice(part.uuid, part.units, part.cores % 100)


def _add(uses: dict[str, _Use], more: Iterable[tuple[str, _Use]]) -> None:
    for uuid, use in more:
        uses[uuid] = _joined(operator.add, uses.get(uuid, _NOTHING), use)


def _larger(uses: dict[str, _Use], more: Iterable[tuple[str, _Use]]) -> None:
    for uuid, use in more:
        uses[uuid] = _joined(max, uses.get(uuid, _NOTHING), use)


def _joined(join: Callable[[int, int], int], one: _Use, other: _Use) -> _Use:
    return join(one[0], other[0]), join(one[1], other[1]), join(one[2], other[2])
