"""GPUs that a family is no longer offered,
and that kubelet may still give to its pods for a moment.

A scheduler reads the Node, and the Node is a moment behind: some time passes between the decision
that a family gets no more of a GPU and the last pod that was bound by an older count. The kubelet
fails a pod for which it has no Healthy id. So the count on the Node goes down at once, and the ids
stay Healthy at the kubelet a little longer. Pods that come in that time get what their scheduler
saw.

That is for GPUs that are kept for others (claims, turns), never for those that another family has
or that are unhealthy. `book` holds one of these and reports every change to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

WITHDRAWAL_SECONDS = 0.4
"""A write to the Node, a scheduler that was about to bind, and the pod on its way to kubelet."""


class Withdrawals:
    """State: what each family was offered last,
    and until when kubelet may give out what it is offered no longer.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offered: frozenset[tuple[str, str]] = frozenset()
        self._until: dict[tuple[str, str], float] = {}

    def follow(self, offered: Collection[tuple[str, str]], *, listed: bool = True) -> bool:
        """Take note of each (GPU, family) that is offered now; whether any is offered no longer.

        Without ``listed`` kubelet has been sent no list yet, so nothing lasts.
        """
        now, before, self._offered = self._clock(), self._offered, frozenset(offered)
        for each in self._until.keys() & self._offered:
            del self._until[each]
        if not listed:
            return False
        self._until.update(dict.fromkeys(before - self._offered, now + WITHDRAWAL_SECONDS))
        return not before <= self._offered

    def lasts(self, gpu: str, family: str) -> bool:
        """Tell whether the kubelet may still give the GPU to pods of the family."""
        return self._clock() < self._until.get((gpu, family), 0.0)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next one is complete, 0 for one that is; None when there is none."""
        return max(0.0, min(self._until.values()) - self._clock()) if self._until else None

    def end(self) -> bool:
        """Forget those that are complete; whether there were any."""
        now = self._clock()
        over = [each for each, until in self._until.items() if until <= now]
        for each in over:
            del self._until[each]
        return bool(over)
