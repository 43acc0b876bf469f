"""The time for which a scheduler keeps a pod's cards until the pod is bound, as the pod's owner has
set it by annotation (vgpu-manager §4.1).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vgpu_agent.families.vgpu_manager.keys import Keys
    from vgpu_agent.pods import Pod

LEAST_GRACE_SECONDS = 1.0
# Go's time.ParseDuration; a minus is left out, since no duration here may be negative
_PART = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)(?P<unit>ns|us|µs|μs|ms|s|m|h)")
_MOST_SECONDS = 2**63 // 10**9  # Go counts nanoseconds in 64 bits
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 0.001, "s": 1.0}
_UNIT_SECONDS |= {"m": 60.0, "h": 3600.0}
_LONGEST_DURATION = 64  # characters


def grace_seconds(pod: Pod, keys: Keys) -> float | None:
    """Return the time that the pod's annotation asks for; None without a valid one."""
    seconds = seconds_of(pod.annotations.get(keys.stuck_grace, "").strip())
    return seconds if seconds >= LEAST_GRACE_SECONDS else None


def seconds_of(duration: str) -> float:
    """Return the seconds in a duration as Go reads it (``1m30s``); -1 where it is none."""
    seconds = 0.0
    begin = place = int(duration.startswith("+"))
    while place < len(duration) <= _LONGEST_DURATION:
        found = _PART.match(duration, place)
        if found is None:
            return -1.0
        seconds += float(found["number"]) * _UNIT_SECONDS[found["unit"]]
        place = found.end()
    is_whole = begin < place == len(duration)
    return seconds if is_whole and seconds <= _MOST_SECONDS else -1.0
