"""GPUs that give their family nothing new for a while, so that they become free and other families get their turn.

A family with a steady stream of short pods never returns a GPU: each share that ends is taken by the next pod. What waits for the others
cannot be seen, because no scheduler can place it. So it is counted how many holders of other families have ended since a family was last
given something, or offered a GPU of which nobody had anything. When that is too many, the GPU of another family whose holders end fastest
is drained. When it is free, its round begins (`turns`), and its family is the last.

On a node where nothing ends, nothing is drained. `book` holds one of these and tells it of every change.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ENDS_BEFORE_A_DRAIN = 48
"""Twelve rounds of the four shares that a GPU often has: the drain costs a small part of what the family gets in that time."""

_ENDS_BEFORE_ANOTHER = 16
"""The GPU that is drained may have a holder that runs for hours."""

Held = tuple[str, frozenset[str]]  # a family, and the GPUs of which the grant has something


class Drains:
    """State: the grants of before, what ended since each family got something, and the GPUs that are drained, with their family."""

    def __init__(self) -> None:
        self._held: Mapping[int, Held] = {}
        self._waited: collections.Counter[str] = collections.Counter()
        self._ends_on: collections.Counter[str] = collections.Counter()  # since the GPU was free
        self._drained: dict[str, str] = {}

    def follow(self, held: Mapping[int, Held], families: Collection[str], offered: Collection[str]) -> None:
        """Take note of a change.

        Args:
            held: the grants that have something, by number.
            families: those that are served.
            offered: those of them that are offered a GPU of which nobody has anything.
        """
        for number in self._held.keys() - held.keys():
            ended, gpus = self._held[number]
            self._ends_on.update(gpus)
            self._waited.update(family for family in families if family != ended)
        for family in {*offered, *(held[number][0] for number in held.keys() - self._held.keys())}:
            self._waited[family] = 0
        self._held = held
        serves = {gpu: family for family, gpus in held.values() for gpu in gpus}
        for gpu in self._ends_on.keys() - serves.keys():
            del self._ends_on[gpu]
        self._drained = {gpu: family for gpu, family in self._drained.items() if serves.get(gpu) == family}
        self._drain(serves, families)

    def _drain(self, serves: Mapping[str, str], families: Collection[str]) -> None:
        wanted = 0
        for family in sorted(families):
            if (beyond := self._waited[family] - ENDS_BEFORE_A_DRAIN) >= 0:
                wanted = max(wanted, 1 + beyond // _ENDS_BEFORE_ANOTHER)
        if not wanted:
            self._drained = {}
            return
        waiting = {family for family in families if self._waited[family] >= ENDS_BEFORE_A_DRAIN}
        open_to = [gpu for gpu, family in serves.items() if gpu not in self._drained and waiting - {family}]
        for gpu in sorted(open_to, key=lambda gpu: (-self._ends_on[gpu], gpu))[: max(0, wanted - len(self._drained))]:
            self._drained[gpu] = serves[gpu]

    def why_drained(self, gpu: str, family: str) -> str:
        """Why ``family`` gets nothing new of ``gpu``, which it has; empty when that is not so."""
        if self._drained.get(gpu) != family:
            return ""
        return f"the GPU has served many pods of {family} in a row, and is offered to the other families when its last share is returned"
