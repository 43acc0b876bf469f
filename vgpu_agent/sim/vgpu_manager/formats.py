"""The formats of the annotations and labels that vgpu-manager's scheduler extender reads and writes
on nodes and pods, for the simulated extender.

Used by `sim.vgpu_manager.ledger` and `sim.vgpu_manager.extender`. The agent's family `vgpu-manager`
has other code for the same formats, so a format that one of the two misreads makes a test fail.
Source of every format: vgpu-manager §3 and §4.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FINISHED_TIME = str(2**63 - 1)
"""The ``predicate-time`` (else: when the pod was filtered or bound) of a pod whose allocation has
succeeded or failed (vgpu-manager §4.2).
"""

# the values of the label `assigned-phase`: how far the allocation of a pod has come
FILTERING, ALLOCATING, SUCCEED, FAILED = "filtering", "allocating", "succeed", "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The keys of annotations and labels, all of which begin with one domain."""

    domain: str = "nvidia.com"

    def __call__(self, name: str) -> str:
        """Return the key for ``name``, such as ``nvidia.com/pre-allocated``."""
        return f"{self.domain}/{name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """One entry of ``node-device-register``.

    Attributes:
        type: the product name.
        seats: the number of containers that may share the card.
        memory: the offered memory in MiB.
        cores: the offered compute in percent.
        numa: the number of the NUMA node.
    """

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
    """The values of ``node-config-info`` that placement needs.

    Attributes:
        split: the number of containers that may share a card.
        memory_factor: the unit of requested memory, in MiB.
    """

    split: int
    memory_factor: int


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """One container's share of one card; memory in MiB and cores in percent."""

    index: int
    uuid: str
    cores: int
    memory: int


Claims = dict[str, tuple[Claim, ...]]
"""The claims of each container, init containers first."""


def parse_register(text: str) -> tuple[Card, ...] | None:
    """Parse ``node-device-register`` into the cards of a node; return None if it is invalid.

    The indices must be 0 to n-1: a gap makes the real extender panic (vgpu-manager §3).
    """
    try:
        cards = tuple(map(_card, json.loads(text)))
    except (ValueError, TypeError, KeyError):
        return None
    return cards if [card.index for card in cards] == list(range(len(cards))) else None


def parse_config(text: str) -> NodeConfig | None:
    """Parse ``node-config-info``; return None if it is invalid."""
    try:
        found = json.loads(text)
        return NodeConfig(int(found["deviceSplit"]), int(found["memoryFactor"]))
    except (ValueError, TypeError, KeyError):
        return None


def write_claims(claims: Mapping[str, Sequence[Claim]]) -> str:
    """Format claims as ``container[index_uuid_cores_memory,…];…``."""
    return ";".join(
        "{}[{}]".format(
            name,
            ",".join(
                f"{claim.index}_{claim.uuid}_{claim.cores}_{claim.memory}"
                for claim in sorted(of_container, key=lambda claim: claim.index)
            ),
        )
        for name, of_container in claims.items()
    )


def read_claims(text: str) -> Claims | None:
    """Parse the format of `write_claims`; return None if the text is empty or invalid."""
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
