"""A drained GPU: one that gives its family nothing new for a while, so that it becomes free and
another family gets its turn. Pods that run on it stay until they end.

A family with a steady stream of short pods never returns a GPU, because each share that ends is
taken by the next pod. Pods that no scheduler can place are not visible on the node. The evidence
that such pods wait is a family that had pods here recently and has none now. When many pods of
other families have ended since then, the GPU on which pods end fastest is drained. When it is free,
it is offered to one family after the other, each alone for a while (`turns`), and its own family
comes last.

One GPU is drained at a time. If it is not free after another `ENDS_BEFORE_A_DRAIN` pods have ended,
a pod on it runs for long, and the next GPU is drained instead. `arbitration` holds one `Drains` and
tells it of every change of the grants.
"""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

ENDS_BEFORE_A_DRAIN = 48
"""Twelve times the four shares that a GPU often has:
the drain costs a small part of what the family gets in that time.
"""

RECENT_SECONDS = 3600.0
"""The time after the end of its last pod in which a family may count as waiting.
After that, nothing is drained for it.
"""

Held = tuple[str, frozenset[str]]  # family of a grant, and the GPUs of its shares


class Drains:
    """The drained GPU, if any.

    State: the grants at the last change, when each family last had one, and how many pods of other
    families have ended since. A new process begins without it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: Mapping[int, Held] = {}
        self._left_at: dict[str, float] = {}  # family → when it had something for the last time
        # family → ended pods of other families while it has nothing
        self._ends_of_others: collections.Counter[str] = collections.Counter()
        self._ends_on: collections.Counter[str] = collections.Counter()  # by GPU, since it was free
        self._drained: tuple[str, str] | None = None  # GPU and family
        self._ends_since = 0  # on the node, since that GPU was chosen
        self._tried: set[str] = set()  # GPUs that were drained in vain

    def follow(
        self,
        held: Mapping[int, Held],
        serves: Mapping[str, str],
        families: Collection[str],
        offered: Callable[[], Collection[str]],
    ) -> None:
        """Take note of a change of the grants and, if due, choose which GPU to drain.

        Args:
            held: the grants that have shares, by number.
            serves: GPU → the family that has shares of it.
            families: the families whose pods can start once they have a GPU: their resources are
                offered to the kubelet, and the agent starts their containers at the moment.
            offered: returns the families that are offered a free GPU; called only if needed.
        """
        for number in self._held.keys() - held.keys():
            ended, gpus = self._held[number]
            self._ends_on.update(gpus)
            self._ends_since += 1
            self._ends_of_others.update(family for family in families if family != ended)
            self._left_at[ended] = self._clock()
        self._held = held
        present = set(serves.values())
        for family in present:
            self._ends_of_others[family] = 0
        for gpu in self._ends_on.keys() - serves.keys():
            del self._ends_on[gpu]
        self._tried &= serves.keys()
        absent = [
            family for family in families if family not in present and self._ends_of_others[family]
        ]
        for family in offered() if absent else ():
            self._ends_of_others[family] = 0
        self._choose(serves, {family for family in absent if self._waits(family)})

    def _waits(self, family: str) -> bool:
        """Tell whether pods of the family may wait for a GPU that others keep."""
        recent = self._clock() - self._left_at.get(family, -math.inf) <= RECENT_SECONDS
        return recent and self._ends_of_others[family] >= ENDS_BEFORE_A_DRAIN

    def _choose(self, serves: Mapping[str, str], waiting: Collection[str]) -> None:
        if not waiting:
            self._drained, self._tried = None, set()
            return
        if self._drained is not None:
            gpu, family = self._drained
            if serves.get(gpu) == family and self._ends_since < ENDS_BEFORE_A_DRAIN:
                return
            self._tried.add(gpu)
        untried = [gpu for gpu in serves if gpu not in self._tried] or list(serves)
        gpu = min(untried, key=lambda gpu: (-self._ends_on[gpu], gpu), default="")
        self._drained, self._ends_since = ((gpu, serves[gpu]) if gpu else None), 0

    def why_drained(self, gpu: str, family: str) -> str:
        """Explain why ``family`` gets nothing new of ``gpu``, which it has;
        empty when the GPU is not drained.
        """
        if self._drained != (gpu, family):
            return ""
        return (
            f"the GPU has served many pods of {family} in a row, and is offered to the other "
            "families when its last share is returned"
        )
