"""Options of the `nvidia` family as tests say them, and what it makes of the golden node."""

from __future__ import annotations

from typing import Any

from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.ids import IKTOS_SEPARATOR
from vgpu_agent.families.nvidia.options import GPU_RESOURCE, NvidiaOptions, SharedEntry
from vgpu_agent.model import Inventory, Resource


def shared_by(
    replicas: int, *, name: str = GPU_RESOURCE, published: str = "", **options: Any
) -> NvidiaOptions:
    """Every device of ``name`` so often."""
    return NvidiaOptions(shared=(SharedEntry(name, replicas, published or name),), **options)


def iktos(*entries: tuple[str, str, int], **options: Any) -> NvidiaOptions:
    """Return options as iktos's ``resourceConfig`` has them: ``("gpu", "sharedgpu", 4)``."""
    shared = tuple(
        SharedEntry(f"nvidia.com/{original}", replicas, f"nvidia.com/{new}")
        for original, new, replicas in entries
    )
    return NvidiaOptions(shared=shared, separator=IKTOS_SEPARATOR, suffix_always=True, **options)


def offered(options: NvidiaOptions, inventory: Inventory) -> dict[str, list[str]]:
    """Resource → its ids, in order."""
    return {
        resource.name: [entry.id for entry in resource.ids]
        for resource in NvidiaFamily(options).resources(inventory)
    }


def only_resource(options: NvidiaOptions, inventory: Inventory) -> Resource:
    """The one resource that there is."""
    (resource,) = NvidiaFamily(options).resources(inventory)
    return resource


def refused(options: NvidiaOptions, inventory: Inventory) -> tuple[str, ...]:
    """Return the withheld resources with the reasons."""
    return tuple(
        f"{name}: {reason}"
        for name, reason in NvidiaFamily(options).shortfall(inventory).refused.items()
    )


def cautions(options: NvidiaOptions, inventory: Inventory) -> tuple[str, ...]:
    """Return the cautions about the offered resources."""
    return NvidiaFamily(options).shortfall(inventory).cautions
