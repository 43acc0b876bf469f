"""Nodes and pods for the tests of the scheduler, in the texts of vgpu-manager."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.scheduling.node_cards import read_cards
from vgpu_agent.placement.nodes.cards import NodeCards
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

KEYS = Keys()
MEMORY_MIB = 24576


def uuid(node: int, card: int) -> str:
    """The UUID of a card."""
    return f"GPU-00000000-0000-4000-8000-{node:06d}{card:06d}"


def entry(card: int, **changed: Any) -> dict[str, Any]:
    """The entry of a card in ``node-device-register``."""
    return {
        "id": card,
        "type": "NVIDIA A10",
        "uuid": uuid(0, card),
        "core": 100,
        "memory": MEMORY_MIB,
        "number": 10,
        "numa": card // 2,
        "mig": False,
        "busId": f"0000:{card:02x}:00.0",
        "capability": 8.6,
        "healthy": True,
        **changed,
    }


def node_texts(
    entries: Sequence[Mapping[str, Any]],
    links: Mapping[tuple[int, int], Sequence[int]] | None = None,
    **config: Any,
) -> dict[str, str]:
    """The annotations of a Node with these cards; ``links`` count in both directions."""
    settings = {"deviceSplit": 10, "coresScaling": 1, "memoryFactor": 1, "memoryScaling": 1}
    found = {
        KEYS.node_register: json.dumps(entries),
        KEYS.node_config: json.dumps({**settings, **config}),
    }
    if links is not None:
        both = {**links, **{(other, one): types for (one, other), types in links.items()}}
        found[KEYS.node_topology] = json.dumps(
            [
                {
                    "index": each["id"],
                    "links": {
                        str(other): types
                        for (one, other), types in both.items()
                        if one == each["id"]
                    },
                }
                for each in entries
            ]
        )
    return found


def cards(
    count: int = 2,
    links: Mapping[tuple[int, int], Sequence[int]] | None = None,
    changed: Mapping[int, Mapping[str, Any]] | None = None,
    **config: Any,
) -> NodeCards:
    """The cards of a Node; ``changed`` are fields of entries by card."""
    entries = [entry(card, **(changed or {}).get(card, {})) for card in range(count)]
    found = read_cards(node_texts(entries, links, **config), 10 * count, KEYS)
    assert isinstance(found, NodeCards)
    return found


def container(
    name: str = "main",
    number: int = 1,
    cores: int = 0,
    memory: int = 0,
    kind: ContainerKind = ContainerKind.MAIN,
) -> PodContainer:
    """A container that asks for cards."""
    limits = {KEYS.number: number, KEYS.cores: cores, KEYS.memory: memory}
    return PodContainer(name, kind, {key: value for key, value in limits.items() if value})


def pod(*containers: PodContainer, name: str = "train", **words: str) -> Pod:
    """A pod with these containers, and annotations by the end of their keys (``device_policy``)."""
    return Pod(
        f"uid-{name}",
        "default",
        name,
        containers=containers or (container(cores=10, memory=1024),),
        annotations={getattr(KEYS, key): word for key, word in words.items()},
    )
