"""The cards of a Node, as a scheduler sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vgpu_agent.placement.nodes.reasons import Reason


class Card(msgspec.Struct, frozen=True):
    """A card of a Node; its number is its place among the Node's cards.

    Attributes:
        blocked: why nothing of it may be given to a new container; None where it may.
        model: the product name.
        memory_mib: the memory with which it is offered.
        cores_percent: the compute with which it is offered.
        slots: for how many containers.
        numa: its NUMA node; None where it is not known.
    """

    blocked: Reason | None
    model: str
    memory_mib: int
    cores_percent: int
    slots: int
    numa: int | None


class Hardware(msgspec.Struct, frozen=True):
    """The part of a Node's description that does not change with pods, without UUIDs: Nodes of one
    kind have equal ones.

    Attributes:
        cards: by number.
        memory_factor: MiB in one unit of a pod's request.
        is_oversold: the cards are offered with more memory than they have.
        links: (card, other card, types of the link), sorted; empty where they are not known.
    """

    cards: tuple[Card, ...]
    memory_factor: int
    is_oversold: bool
    links: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


class NodeCards(msgspec.Struct, frozen=True):
    """The content of a Node's annotations.

    Attributes:
        hardware: its cards.
        uuids: of the cards, by number.
        rails: of the cards, by number: what the operator calls the network that a card is nearest
            to, empty for none; no entries where the operator has said nothing.
    """

    hardware: Hardware
    uuids: tuple[str, ...]
    rails: tuple[str, ...] = ()


class Unfit(msgspec.Struct, frozen=True):
    """The reason why a Node cannot take any pod.

    Attributes:
        reason: for schedulers and metrics.
        note: what exactly is wrong, for people; empty where the reason says all.
    """

    reason: Reason
    note: str = ""
