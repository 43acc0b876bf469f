"""Messages to the owners of pods: a container was started, but not as its pod asked.

Either a scheduler assigned more of a device than the device has (`overcommits`), or a family could
not follow an annotation of the pod. `cluster` turns each message into an event, with its rate
limit.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu_agent.families.family import Remark
    from vgpu_agent.pods import Pod

_MAX_WAITING = 256


class Notice(NamedTuple):
    """A message to a pod's owner about one of its containers; ``reason`` becomes the event's."""

    pod: Pod
    container: str
    reason: str
    text: str


class Notices:
    """The messages that were not sent yet.

    State: in memory only. The oldest message is dropped when there are too many.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[Notice] = collections.deque(maxlen=_MAX_WAITING)

    def add(self, pod: Pod, container: str, reason: str, text: str) -> None:
        """Queue a message."""
        self._waiting.append(Notice(pod, container, reason, text))

    def add_remarks(self, pod: Pod, container: str, remarks: Iterable[Remark]) -> None:
        """Queue the remarks of a family on its decision."""
        for reason, text in remarks:
            self.add(pod, container, reason, f"container {container}: {text}")

    def take(self) -> tuple[Notice, ...]:
        """Return the messages that were not sent yet; they count as sent from now on."""
        taken = tuple(self._waiting)
        self._waiting.clear()
        return taken
