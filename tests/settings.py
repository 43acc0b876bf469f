"""Settings with the sections and switches of the families, for tests."""

from __future__ import annotations

from typing import Any

from vgpu_agent.config import schema
from vgpu_agent.config.binding import Families
from vgpu_agent.config.settings import Settings
from vgpu_agent.families import registry  # noqa: F401 - the families bring their sections


def settings(**sections: Any) -> Settings:
    """Make settings with these sections and the defaults of all others,
    also of those that belong to families.
    """
    return schema.root()(**sections)


def switches(**on: bool) -> Families:
    """Make the section ``families`` with these switches, and the defaults of the others."""
    return type(settings().families)(**on)
