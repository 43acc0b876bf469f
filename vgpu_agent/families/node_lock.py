"""The node lock of Volcano's schedulers, and when this agent releases it.

With ``deviceshare.NodeLockEnable`` a scheduler writes the time into an annotation of the Node
before it binds a pod, and binds no other pod to that node until the annotation is gone or five
minutes old (volcano-vgpu §2.4, volcano-gpushare §2). So a burst of pods takes one lock after the
other, and several of them within a second have the same text. They are distinguished by the moments
at which the watch showed them.

Both Volcano families ask for its removal in `desired_node`; `allocation` keeps the one `NodeLocks`.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING

from vgpu_agent.nodes import DesiredNode

if TYPE_CHECKING:
    from vgpu_agent.nodes import Node

# The scheduler writes whole seconds, and its clock is not ours: a lock whose time is less than this
# after an Allocate counts as taken before it.
CLOCK_TOLERANCE_SECONDS = 1.0

# The pod of a lock that has existed for this long was refused by the kubelet, was deleted, or never
# bound.
LONGEST_HELD_SECONDS = 10.0

_RFC_3339 = re.compile(r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)\Z", re.ASCII)


class NodeLocks:
    """The locks of this node, and the decision of when one can be released.

    State: the times since which the last lock under each key has existed or been gone, in memory. A
    restarted agent treats its first reading of the kubelet's records as an Allocate, so it releases
    a lock of that moment at once.
    """

    def __init__(self) -> None:
        # key → when the watch first showed the present lock, unix seconds
        self._standing: dict[str, float] = {}
        self._free_since: dict[str, float] = {}  # key → when the lock before it was gone

    def desired_state(
        self, node: Node, key: str, *, allocated_at: float | None, now: float
    ) -> DesiredNode:
        """Return the removal of the lock once the Allocate for which it was taken has been
        answered, regardless of the pod's fate.

        A lock that was taken after our last Allocate belongs to a pod that is still on its way. It
        stays until that pod's Allocate, or for `LONGEST_HELD_SECONDS`. The removal is guarded: it
        fails when the Node has changed since it was read, so a lock that was taken meanwhile stays.
        A text that is no time is left alone: the keys have no domain as a prefix, so it may belong
        to somebody else.

        Args:
            node: our Node as the watch shows it.
            key: the annotation.
            allocated_at: unix seconds of the last Allocate; None when there was none.
            now: unix seconds.
        """
        text = node.annotations.get(key)
        if text is None:
            if self._standing.pop(key, None) is not None:
                self._free_since[key] = now
            return DesiredNode()
        taken_at = taken(text)
        if taken_at is None:
            return DesiredNode()
        # `Node.seen_at`: when the watch first showed an annotation's present value
        seen_at = node.seen_at.get(key, self._standing.get(key, now))
        if self._standing.get(key, seen_at) != seen_at:
            self._free_since[key] = seen_at  # one lock followed the other between two calls
        self._standing[key] = seen_at
        served = allocated_at is not None and (
            seen_at <= allocated_at or self._shown_late(key, taken_at, allocated_at)
        )
        # Negative when the clock was set back meanwhile; then the lock's age is unknown.
        if served or not 0 <= now - seen_at < LONGEST_HELD_SECONDS:
            return DesiredNode(annotations={key: None}, guarded=frozenset({key}))
        return DesiredNode()

    def _shown_late(self, key: str, taken_at: float, allocated_at: float) -> bool:
        """Tell whether the lock was taken for the Allocate at ``allocated_at`` although the watch
        showed it only afterwards.

        Another lock that existed during that Allocate was taken for it instead.
        """
        return (
            taken_at <= allocated_at + CLOCK_TOLERANCE_SECONDS
            and self._free_since.get(key, 0.0) <= allocated_at
        )


def taken(text: str) -> float | None:
    """Return when the lock was taken, in unix seconds; None when the text is no RFC 3339 time."""
    if not _RFC_3339.match(text):
        return None
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):  # the 31st of February, the year 0
        return None
