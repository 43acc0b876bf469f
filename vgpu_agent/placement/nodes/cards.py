"""The cards of a Node, as a scheduler sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vgpu_agent.placement.nodes.reasons import Reason


class Card(msgspec.Struct, frozen=True, cache_hash=True):
    """A card of a Node; its number is its place among the Node's cards.

    Attributes:
        blocked: why no new container may get a share of it; None where one may.
        model: the product name.
        memory_mib: the memory with which its Node offers it, more or less than it has; in MiB, or
            in the Node's units where its annotation does not say how large a unit is.
        cores_percent: the compute with which its Node offers it, in percent of what it has.
        slots: the number of containers that may share it.
        numa: its NUMA node; None where it is not known.
    """

    blocked: Reason | None
    model: str
    memory_mib: int
    cores_percent: int
    slots: int
    numa: int | None


class Hardware(msgspec.Struct, frozen=True, cache_hash=True):
    """The part of a Node's description that does not change with pods, without UUIDs: Nodes of the
    same kind have equal `Hardware`.

    Attributes:
        cards: by number.
        memory_factor: the size of one unit of a pod's request, in the unit of `Card.memory_mib`.
            vgpu-manager's Nodes state it, in MiB. Volcano's do not, so there both are in the Node's
            own units, and the factor is 1.
        is_oversold: the cards are offered with more memory than they have; pods with a memory
            policy go only to such Nodes, or only to others.
        links: (card, other card, types of the link), sorted; empty where they are not known. The
            larger the type, the closer the cards: 7 means one NVLink, 8 two (vgpu-manager §3).
    """

    cards: tuple[Card, ...]
    memory_factor: int
    is_oversold: bool
    links: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


class NodeCards(msgspec.Struct, frozen=True):
    """The description of a Node's cards in its annotations.

    Attributes:
        hardware: its cards.
        uuids: of the cards, by number.
        rails: by number of the card, the operator's name of the network that the card is nearest
            to; empty text for none, and an empty tuple where the operator has named none.
    """

    hardware: Hardware
    uuids: tuple[str, ...]
    rails: tuple[str, ...] = ()


class Unfit(msgspec.Struct, frozen=True):
    """The reason why a Node cannot take any pod.

    Attributes:
        reason: for schedulers and metrics.
        note: details for explanations; empty where the reason says it all.
    """

    reason: Reason
    note: str = ""
