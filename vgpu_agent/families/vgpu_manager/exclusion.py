"""The GPUs that an operator keeps from containers: indices, ranges and UUIDs (vgpu-manager §1.2,
§1.6).

The replaced plugin understands ``0..2`` and not the ``0-2`` of its own help text, which excludes
nothing there (vgpu-manager D1). Here both are ranges.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

# The UUID of a MIG instance matches too, for the sake of a message of its own (`read_excluded`).
PATTERN = r"\A([0-9]{1,4}((\.\.|-)[0-9]{1,4})?|(GPU|MIG)-[0-9A-Fa-f-]{36})\Z"
EXPECTED = "indices (0), ranges (0-2 or 0..2) and UUIDs (GPU-…)"

_RANGE = re.compile(r"([0-9]{1,4})(?:\.\.|-)([0-9]{1,4})\Z")


class Excluded(NamedTuple):
    """The GPUs that are kept from containers.

    Attributes:
        uuids: those that are named by UUID.
        indices: those that are named by NVML index.
        problems: one sentence for each range whose first index is above its last, and for each MIG
            instance: only whole GPUs can be excluded.
    """

    uuids: frozenset[str] = frozenset()
    indices: frozenset[int] = frozenset()
    problems: tuple[str, ...] = ()


def read_excluded(words: Iterable[str]) -> Excluded:
    """Read words that match `PATTERN`."""
    uuids: set[str] = set()
    indices: set[int] = set()
    problems = []
    for word in words:
        if match := _RANGE.match(word):
            first, last = int(match[1]), int(match[2])
            if first > last:
                problems.append(f"{word}: expected the smaller index first, as in {last}-{first}")
            indices.update(range(first, last + 1))
        elif word.isdecimal():
            indices.add(int(word))
        elif word.startswith("MIG-"):
            problems.append(
                f"{word}: a single MIG instance cannot be excluded; give its GPU (GPU-…), which "
                "excludes all instances of it, or leave it out"
            )
        else:
            uuids.add(word)
    return Excluded(frozenset(uuids), frozenset(indices), tuple(problems))
