"""GPUs that a family is no longer offered,
and that the kubelet may still give to its pods for a moment.

A scheduler reads the Node, and the Node is a moment behind: some time passes between the decision
that a family gets no more of a GPU and the last pod that was bound by an older count. The kubelet
fails a pod for which it has no Healthy id. So the count on the Node goes down first, and the ids
stay Healthy at the kubelet until schedulers have had time to read the new count. Pods that come in
that time get what their scheduler saw.

That is for GPUs that are kept for others (claims, turns), and, where the pod decides, for those
that another family has; never for unhealthy ones. Such a time of a GPU and a family is a
*withdrawal*. `arbitration`, which decides what each family is offered, holds one `Withdrawals` and
reports every change of the offers to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

WITHDRAWAL_SECONDS = 0.4
"""Time for a scheduler that was about to bind when the Node changed, and for its pod to reach the
kubelet.
"""

LONGEST_WITHDRAWAL_SECONDS = 3.0
"""The longest wait for the write to the Node. An API server that takes longer binds no pods."""


class Withdrawals:
    """State: the GPUs that each family was offered last,
    and until when the kubelet may still grant GPUs that the family is no longer offered.

    Each call of `follow` that withdraws something begins a new round. The numbers of the rounds,
    which the caller chooses, grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offered: frozenset[tuple[str, str]] = frozenset()
        # (GPU, family) → the end of its withdrawal, on `_clock`
        self._until: dict[tuple[str, str], float] = {}
        # the agent writes the counts to the Node, and calls `note_written_counts` after it
        self._are_written = False
        # (GPU, family) whose withdrawal the counts on the Node do not show yet → its round, and
        # when that began
        self._unwritten: dict[tuple[str, str], tuple[int, float]] = {}

    def follow(
        self, offered: Collection[tuple[str, str]], number: int, *, listed: bool = True
    ) -> bool:
        """Take note of each (GPU, family) that is offered now; tell whether
        any is offered no longer.

        Args:
            offered: each GPU and each family that is offered it.
            number: the number of the round, if this call begins one.
            listed: the kubelet has been sent a list; before, it has nothing to keep.
        """
        now, before, self._offered = self._clock(), self._offered, frozenset(offered)
        for each in self._until.keys() & self._offered:
            self._forget(each)
        if not listed:
            return False
        withdrawn = before - self._offered
        if self._are_written:
            self._unwritten.update(dict.fromkeys(withdrawn, (number, now)))
        seconds = LONGEST_WITHDRAWAL_SECONDS if self._are_written else WITHDRAWAL_SECONDS
        self._until.update(dict.fromkeys(withdrawn, now + seconds))
        return bool(withdrawn)

    def note_written_counts(self, number: int | None) -> bool:
        """Take note that the Node has the counts of all rounds up to ``number``, or, with None,
        that the agent cannot write them. Return whether a withdrawal ends earlier because of that.

        A scheduler's bind that was under way is expected to take as long as that write did.
        """
        self._are_written, now, changed = number is not None, self._clock(), False
        for each, (round_, began) in list(self._unwritten.items()):
            if number is None or round_ <= number:
                changed = True
                del self._unwritten[each]
                left = max(WITHDRAWAL_SECONDS, now - began)
                self._until[each] = min(self._until[each], now + left)
        return changed

    def still_at_kubelet(self, gpu: str, family: str) -> bool:
        """Tell whether the kubelet may still give the GPU to pods of the family."""
        return self._clock() < self._until.get((gpu, family), 0.0)

    def seconds_at_kubelet(self, gpu: str) -> float:
        """Return how long the kubelet may still give the GPU to a family that is not offered it;
        the next turn of the GPU does not begin before that.
        """
        ends = (until for (each, _), until in self._until.items() if each == gpu)
        return max(0.0, max(ends, default=0.0) - self._clock())

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next withdrawal is over, 0 if one is; None when there is none."""
        return max(0.0, min(self._until.values()) - self._clock()) if self._until else None

    def end(self) -> bool:
        """Forget the withdrawals that are over; tell whether there were any."""
        now = self._clock()
        over = [each for each, until in self._until.items() if until <= now]
        for each in over:
            self._forget(each)
        return bool(over)

    def _forget(self, each: tuple[str, str]) -> None:
        del self._until[each]
        self._unwritten.pop(each, None)
