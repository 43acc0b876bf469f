"""The facts of an inventory that a CDI spec depends on, and whether a name in it still stands for
the device that it is used for.

A UUID stands for one device forever. But the device nodes beside it in a spec open another device
once the driver was reloaded without a card that it had before, and has renumbered the cards. An
index stands for another device as soon as a GPU was unplugged or divided again. A container with
such a name would get a device that was not granted, so `controller` compares each device with the
present spec.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vgpu_agent.model import Inventory


_GPU_NODE = re.compile(r"/dev/nvidia\d+")


class Place(NamedTuple):
    """The place of a device: its index and its device nodes.

    Attributes:
        position: its index, ``0`` of a GPU, ``1:3`` of a MIG instance.
        nodes: the device nodes that open it.
    """

    position: str
    nodes: tuple[str, ...]


class Card(NamedTuple):
    """The facts about a GPU that a spec depends on. Health and use do not matter to a spec.

    Attributes:
        number: its index.
        minor: the number in the name of its device node, ``/dev/nvidia0``; -1 where there is none.
        instances: of each MIG instance the UUID, the index, and the capability nodes: the device
            nodes that open it together with that of its GPU.
    """

    uuid: str
    number: int
    minor: int
    in_mig_mode: bool
    instances: tuple[tuple[str, int, tuple[str, ...]], ...]


def present_cards(inventory: Inventory) -> tuple[Card, ...]:
    """The GPUs that the tool which writes specs, `nvidia_ctk`, would see now."""
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
    """UUID and place of each device that containers can be given:
    a GPU that is not in MIG mode, or a MIG instance.
    """
    for card in cards:
        own = (f"/dev/nvidia{card.minor}",) if card.minor >= 0 else ()
        if not card.in_mig_mode:
            yield card.uuid, Place(str(card.number), own)
        for uuid, number, nodes in card.instances:
            yield uuid, Place(f"{card.number}:{number}", (*own, *nodes))


def opens_another(paths: Iterable[str], place: Place) -> bool:
    """Tell whether these device nodes of a spec, by their paths in a container,
    open a GPU other than the one at ``place``.

    Return False where that is unknown: the spec names no node of a GPU, or the driver none of this
    one.
    """
    opened = {path for path in paths if _GPU_NODE.fullmatch(path)}
    own = {node for node in place.nodes if _GPU_NODE.fullmatch(node)}
    return bool(opened and own) and opened != own
