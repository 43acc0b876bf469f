"""The node lock of Volcano's schedulers: when this agent gives it back.

With ``deviceshare.NodeLockEnable`` a scheduler writes the time into an annotation of the Node before it binds a pod, and binds no other pod
to that node until the annotation is gone or five minutes old (volcano-vgpu contract §2.4, volcano-gpushare contract §2). Called by both
Volcano families from `node_wishes`.
"""

from __future__ import annotations

import datetime as dt
import re

from vgpu_agent.nodes import NodeWishes

# The scheduler's clock is not ours: a lock that seems to come after the Allocate by less than this was taken before it.
CLOCK_TOLERANCE_SECONDS = 1.0

_RFC_3339 = re.compile(r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)\Z", re.ASCII)


def unlocked(text: str | None, key: str, allocated_at: float | None) -> NodeWishes:
    """The wish that the lock be gone, once the Allocate that it was taken for has been answered; else none.

    A lock that was taken after our last Allocate belongs to a pod that is still on its way. The removal is guarded, so that one taken
    between our look and our write stays. A text that is no time is not the scheduler's, and left alone: the keys are bare words.

    Args:
        text: what stands on the Node; None for nothing.
        key: the annotation.
        allocated_at: unix seconds of the last Allocate; None when there was none.
    """
    if text is None or allocated_at is None:
        return NodeWishes()
    taken_at = taken(text)
    if taken_at is None or taken_at > allocated_at:
        return NodeWishes()
    return NodeWishes(annotations={key: None}, guarded=frozenset({key}))


def taken(text: str) -> float | None:
    """When the lock was taken, in unix seconds; None when the text is no RFC 3339 time."""
    if not _RFC_3339.match(text):
        return None
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):  # the 31st of February, the year 0
        return None
