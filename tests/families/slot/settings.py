"""The family's part of the configuration:
a section, a live key and a resource name that another family must not take.
"""

# Without `from __future__ import annotations`: msgspec would evaluate each annotation, a text then,
# twice at each start.

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from vgpu_agent.config.families import FamilySettings, OfferedName
from vgpu_agent.config.settings import Settings

FAMILY = "example-slot"
RESOURCE = "example.com/slot"


class Slot(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The family `example-slot`."""

    per_gpu: Annotated[int, Meta(ge=1, le=100, description="How many slots a GPU has.")] = 4
    directory: Annotated[
        str, Meta(description="Where the directories of containers are on the host.")
    ] = "/var/lib/example-slot"


def _names(_: Settings) -> Iterator[OfferedName]:
    yield OfferedName(RESOURCE, FAMILY, "families.exampleSlot")


SETTINGS = FamilySettings(
    FAMILY,
    "`example.com/slot`, for tests.",
    sections={"example_slot": Slot},
    live_paths=("exampleSlot.",),
    names=_names,
)
