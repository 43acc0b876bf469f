"""The annotations and labels of nodes and pods that vgpu-manager's extender reads and writes, in
the words of the simulated one.

Called by `ledger` and `extender`. The agent's family reads and writes the same formats from the
other end. Nothing is shared with it, so that a misreading on one side shows as a failing test and
not as agreement. Source of every format: vgpu-manager §3 and §4.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOREVER = str(2**63 - 1)
"""The ``predicate-time`` of a pod that waits for nothing (vgpu-manager §4.2)."""

FILTERING, ALLOCATING, SUCCEED, FAILED = "filtering", "allocating", "succeed", "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """The keys below one domain."""

    domain: str = "nvidia.com"

    def __call__(self, name: str) -> str:
        """Return the key of that name, such as ``pre-allocated``."""
        return f"{self.domain}/{name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """One entry of ``node-device-register``; memory in MiB and cores in percent, as offered."""

    index: int
    uuid: str
    type: str
    seats: int
    memory: int
    cores: int
    numa: int
    is_mig: bool
    is_healthy: bool


@dataclasses.dataclass(frozen=True, slots=True)
class NodeConfig:
    """The part of ``node-config-info`` that placing needs."""

    split: int
    memory_factor: int


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """One container's part of one card."""

    index: int
    uuid: str
    cores: int
    memory: int


Claims = dict[str, tuple[Claim, ...]]
"""The claims of each container, init containers first."""


def parse_register(text: str) -> tuple[Card, ...] | None:
    """The cards of a node; None when the value cannot be used.

    Ids must be 0 to n-1: a gap makes the real extender's process panic (vgpu-manager §3).
    """
    try:
        cards = tuple(map(_card, json.loads(text)))
    except (ValueError, TypeError, KeyError):
        return None
    return cards if [card.index for card in cards] == list(range(len(cards))) else None


def parse_config(text: str) -> NodeConfig | None:
    """The node's configuration; None when the value cannot be used."""
    try:
        found = json.loads(text)
        return NodeConfig(int(found["deviceSplit"]), int(found["memoryFactor"]))
    except (ValueError, TypeError, KeyError):
        return None


def write_claims(claims: Mapping[str, Sequence[Claim]]) -> str:
    """Write ``name[id_uuid_cores_memory,…];…``."""
    return ";".join(
        "{}[{}]".format(
            name,
            ",".join(
                f"{each.index}_{each.uuid}_{each.cores}_{each.memory}"
                for each in sorted(parts, key=lambda each: each.index)
            ),
        )
        for name, parts in claims.items()
    )


def read_claims(text: str) -> Claims | None:
    """Read them back; None when the text is empty or cannot be read."""
    claims: Claims = {}
    for segment in filter(None, text.replace(" ", "").split(";")):
        name, _, rest = segment.partition("[")
        pieces = [piece.split("_") for piece in rest.removesuffix("]").split(",") if piece]
        if not rest.endswith("]") or any(len(piece) != 4 for piece in pieces):
            return None
        try:
            claims[name] = tuple(
                Claim(int(index), uuid, int(cores), int(memory))
                for index, uuid, cores, memory in pieces
            )
        except ValueError:
            return None
    return claims or None


def _card(entry: Mapping[str, Any]) -> Card:
    return Card(
        index=int(entry["id"]),
        uuid=str(entry["uuid"]),
        type=str(entry["type"]),
        seats=int(entry["number"]),
        memory=int(entry["memory"]),
        cores=int(entry["core"]),
        numa=int(entry["numa"]),
        is_mig=bool(entry["mig"]),
        is_healthy=bool(entry["healthy"]),
    )
