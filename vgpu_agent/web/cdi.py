"""The JSON shape of the CDI devices for containers; used by `debug`. Fields may be added; they are never renamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.web.moments import When, when

if TYPE_CHECKING:
    from vgpu_agent.status import CdiStatus


class CdiSpecView(msgspec.Struct, frozen=True):
    """One spec: its path, its devices, when it was made, and why it is not as it should be."""

    kind: str = ""
    path: str = ""
    devices: tuple[str, ...] = ()
    made: When = When()
    error: str = ""


class CdiView(msgspec.Struct, frozen=True):
    """The state of CDI; ``source`` is ``generated`` or ``toolkit``, and empty where containers receive no CDI names."""

    source: str = ""
    strategies: tuple[str, ...] = ()
    specs: tuple[CdiSpecView, ...] = ()


def view(status: CdiStatus, now: float) -> CdiView:
    """Show how containers receive their devices."""
    specs = tuple(CdiSpecView(each.kind, each.path, each.devices, when(each.made_at, now), each.error) for each in status.specs)
    return CdiView(status.source, status.strategies, specs)
