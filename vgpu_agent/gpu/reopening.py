"""The choice of the moment to reopen the driver, the only way to see cards that came or went.

Opening takes the driver seconds on some nodes, so it is not done at every poll but for a reason:
cards do not answer, or answer again, the kernel module drives different cards than before, or the
driver failed as a whole. A reason that stays is tried again after pauses that double, up to
`_LONGEST_PAUSE_POLLS` polls. After an opening with which not even the cards could be counted, there
is no reading: the pause stays as it is, and the next poll tries again.

Called by `watch` after each reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu_agent.gpu.session import Snapshot

_LONGEST_PAUSE_POLLS = 6


class Reopening:
    """The decision about the next opening.

    Attributes:
        interval_seconds: the interval of the polls, and the first pause.
        driver_failed: set by the caller when the driver's event queue could not be waited for, or
            when the cards could not be counted; a reading with the driver reopened clears it.
    """

    def __init__(self, interval_seconds: float) -> None:
        self.interval_seconds = interval_seconds
        self.driver_failed = False
        self._wanted = False  # a reason to reopen was found at the last reading
        self._not_before = 0.0  # monotonic seconds
        self._pause = 0.0  # seconds after the last opening; 0 where the next one need not wait
        # of the last reading: the UUIDs of the cards that answered, and the PCI addresses of those
        # that the kernel module drives
        self._answering: frozenset[str] | None = None
        self._driven: frozenset[str] | None = None

    def due(self, now: float) -> bool:
        """Tell whether the next reading should reopen the driver (``now``: monotonic seconds)."""
        return (self._wanted or self.driver_failed) and now >= self._not_before

    def note_reading(
        self, snapshot: Snapshot, known: Iterable[str], *, reopened: bool, now: float
    ) -> None:
        """Take note of a reading.

        Args:
            snapshot: the reading.
            known: the UUIDs of all GPUs of the inventory before it.
            reopened: the driver was reopened for it.
            now: monotonic seconds.
        """
        answering = frozenset(card.gpu.uuid for card in snapshot.reading.cards)
        incomplete = bool(snapshot.reading.failures) or not answering >= set(known)
        changed = self._answering not in {None, answering} or self._driven not in {
            None,
            snapshot.driven_cards,
        }
        if changed and not reopened:
            self._not_before = self._pause = 0.0  # a new reason: at once, whatever the pauses were
        if reopened:
            self.driver_failed = False
            self._pause = min(
                max(self.interval_seconds, self._pause * 2),
                self.interval_seconds * _LONGEST_PAUSE_POLLS,
            )
            self._not_before = now + self._pause
        self._wanted = incomplete or (changed and not reopened)
        if not self._wanted and not reopened:
            self._not_before = self._pause = 0.0
        self._answering, self._driven = answering, snapshot.driven_cards
