"""The JSON shape of how containers are told of devices by CDI; used by `debug`. Fields may be added; they are never renamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.web.moments import When, when

if TYPE_CHECKING:
    from vgpu_agent.status import CdiStatus


class CdiSpecView(msgspec.Struct, frozen=True):
    """One spec: where, of what, when it was made, and why it is not as it should be."""

    kind: str = ""
    path: str = ""
    devices: tuple[str, ...] = ()
    made: When = When()
    error: str = ""


class CdiView(msgspec.Struct, frozen=True):
    """``source`` is ``generated`` or ``toolkit``, and empty where no container is told of devices by CDI names."""

    source: str = ""
    strategies: tuple[str, ...] = ()
    specs: tuple[CdiSpecView, ...] = ()


def view(status: CdiStatus, now: float) -> CdiView:
    """How containers are told of devices."""
    specs = tuple(CdiSpecView(each.kind, each.path, each.devices, when(each.made_at, now), each.error) for each in status.specs)
    return CdiView(status.source, status.strategies, specs)
