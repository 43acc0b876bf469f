"""The family's section of settings."""

# Without `from __future__ import annotations`: msgspec would evaluate each annotation, a text then, twice at each start.

from typing import Annotated

import msgspec
from msgspec import Meta


class Slot(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The family `example-slot`."""

    per_gpu: Annotated[int, Meta(ge=1, le=100, description="How many slots a GPU has.")] = 4
