"""What of an inventory a CDI spec of its devices depends on, and what a name in it stands for when it is made of indices.

A UUID is one device for ever. An index is another device once a GPU was unplugged or cut anew, while the spec still has it; a container
with such a name would get what it was not given. `cdi_side` compares the place of each device with that of when the spec was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vgpu_agent.model import Inventory


class Place(NamedTuple):
    """Where a device is found.

    Attributes:
        position: its index, ``0`` of a GPU, ``1:3`` of a slice.
        nodes: the device nodes that open it.
    """

    position: str
    nodes: tuple[str, ...]


class Card(NamedTuple):
    """A GPU as far as a spec goes; of each slice UUID, index and capability nodes. Health and use are nothing to a spec."""

    uuid: str
    number: int
    minor: int
    in_mig_mode: bool
    slices: tuple[tuple[str, int, tuple[str, ...]], ...]


def shape(inventory: Inventory) -> tuple[Card, ...]:
    """The GPUs that a tool would see now."""
    return tuple(
        Card(
            gpu.uuid,
            gpu.index,
            gpu.minor,
            gpu.mig_enabled,
            tuple((each.uuid, each.index, each.capability_nodes) for each in gpu.mig_instances),
        )
        for gpu in inventory.gpus
        if gpu.present
    )


def places(cards: Iterable[Card]) -> Iterator[tuple[str, Place]]:
    """UUID and place of each device that containers can be given: a GPU that is not in MIG mode, or a slice."""
    for card in cards:
        node = f"/dev/nvidia{card.minor}"
        if not card.in_mig_mode:
            yield card.uuid, Place(str(card.number), (node,))
        for uuid, number, nodes in card.slices:
            yield uuid, Place(f"{card.number}:{number}", (node, *nodes))
