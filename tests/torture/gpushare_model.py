"""Volcano's scheduler with ``deviceshare.GPUSharingEnable`` as its contract has it
(volcano-gpushare §2, §3, §8), written anew: its own ledger, its own annotations.

A whole pod gets one card: the first by its number that has room for it. The scheduler takes all
cards for equally large.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tests.torture.plan import Card, Kind, PlannedPod
from tests.torture.scheduler_model import Placement, Slice


class GpushareModel:
    """Places pods on the node's cards, until each is taken back."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = tuple(cards)
        self._size = min(card.units for card in cards)
        self._taken: dict[str, tuple[str, int]] = {}  # pod's UID → card's UUID, units

    def place(
        self, uid: str, pod: PlannedPod, *, now: float, usable: Collection[str] | None = None
    ) -> Placement | None:
        """Choose the card of the pod; None when no card has room for it now.

        ``usable`` are the cards that are not named as unhealthy, all of them when not given.
        """
        asked = [
            (each.name, each.kind, each.request.number) for each in pod.containers if each.request
        ]
        together = sum(units for _, kind, units in asked if kind is not Kind.INIT)
        largest = max((units for _, kind, units in asked if kind is Kind.INIT), default=0)
        needed = max(together, largest)
        for number, card in enumerate(self._cards):
            taken = sum(units for uuid, units in self._taken.values() if uuid == card.uuid)
            if (usable is not None and card.uuid not in usable) or self._size - taken < needed:
                continue
            self._taken[uid] = card.uuid, needed
            return Placement(
                {name: (Slice(card.uuid, units, 0),) for name, _, units in asked},
                {
                    "volcano.sh/gpu-index": str(number),
                    "volcano.sh/predicate-time": str(int(now * 1e9)),
                },
            )
        return None

    def take_back(self, uid: str) -> None:
        """Forget a pod that has ended."""
        self._taken.pop(uid, None)
