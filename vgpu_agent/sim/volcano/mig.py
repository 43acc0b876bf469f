"""MIG instances in the ledger of the simulated Volcano scheduler: the group of a card, which is one
of the ways to divide it that the ConfigMap lists, and the position of a container's instance in it.

`ledger` calls it for each card of a node in the mode ``mig``. Rules: volcano-vgpu §4.3 (groups in
the order of the ConfigMap, the smallest instance that is large enough, and on a card in use only
instances of its group). The mistake volcano-vgpu D15 is imitated: an instance counts as used only
once its pod is seen to be bound, so pods of one round (one attempt of the scheduler to place all
waiting pods) get the same instance. The ConfigMap is read here and not by the agent's reader, so
that a misreading on one side makes a test fail.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

# How an annotation names an instance, after the UUID of the card.
_PLACE = re.compile(r"\[(?P<group>[^-]+)-(?P<position>\d+)\]$")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """One way to divide a card: the memory of each instance in MiB, by position."""

    name: str
    memory_mib: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Geometries:
    """The MIG part of the ConfigMap: ``factor`` is the MiB in one unit of the memory resource, and
    ``groups`` has the groups of each model. A model is a part of the text of a card's type, which
    contains the product name (``NVIDIA-NVIDIA A100-SXM4-40GB``).
    """

    factor: int = 1
    groups: tuple[tuple[str, tuple[Group, ...]], ...] = ()

    @classmethod
    def of(cls, device_config: str) -> Geometries:
        """The geometries in a ``device-config.yaml``; none for an empty text."""
        root: Any = (yaml.safe_load(device_config) or {}).get("nvidia", {})
        found = [
            (model, tuple(_group(group) for group in entry["allowedGeometries"]))
            for entry in root.get("knownMigGeometries") or ()
            for model in entry["models"]
        ]
        return cls(int(root.get("gpuMemoryFactor", 1)), tuple(found))

    def for_card(self, type_: str) -> tuple[Group, ...]:
        """The groups for a card of that type; without any the card is shared as in the mode
        ``hami-core``.
        """
        return next((groups for model, groups in self.groups if model in type_), ())


@dataclasses.dataclass(slots=True)
class InstanceUse:
    """The instances of one card: the groups by which it may be divided, the group by which it is
    (empty: not divided), and the used positions of that group. ``factor`` as in `Geometries`.
    """

    groups: tuple[Group, ...]
    factor: int
    group: str = ""
    used: set[int] = dataclasses.field(default_factory=set)

    def book(self, claimed: str) -> int:
        """Count an instance as used, and return its memory units; 0 for an instance that does not
        exist. ``claimed`` is the card's UUID in a pod's annotation, followed by
        ``[group-position]``.
        """
        match = _PLACE.search(claimed)
        found = next(
            (group for group in self.groups if match and group.name == match["group"]), None
        )
        if match is None or found is None or int(match["position"]) >= len(found.memory_mib):
            return 0
        self.group = found.name
        self.used.add(int(match["position"]))
        return found.memory_mib[int(match["position"])] // self.factor

    def find(self, units: int) -> str:
        """Return ``[group-position]`` of the smallest free instance with that many memory units;
        empty when there is none.
        """
        for group in self.groups:
            if self.group not in ("", group.name):
                continue
            free = [
                (memory, position)
                for position, memory in enumerate(group.memory_mib)
                if memory >= units * self.factor and position not in self.used
            ]
            if free:
                return f"[{group.name}-{min(free)[1]}]"
        return ""


def _group(group: dict[str, Any]) -> Group:
    each: Sequence[dict[str, Any]] = group["geometries"]
    return Group(
        group["group"],
        tuple(profile["memory"] for profile in each for _ in range(profile["count"])),
    )
