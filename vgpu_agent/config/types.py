"""The kinds of value that settings are made of: addresses, paths, seconds; used by `settings` and
its sections.

Each carries its own check and the words for its expectation in an error.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# 0 to 65535
PORT = r"(0|[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
# [IPv6], IPv4, a name, or nothing
HOST = r"(\[[0-9A-Fa-f:.]+(%[0-9A-Za-z._-]+)?\]|[0-9A-Za-z._-]*)"
NODE_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"

Address = Annotated[
    str,
    Meta(
        pattern=rf"\A{HOST}:{PORT}\Z",
        extra={"expected": "an address HOST:PORT or :PORT, port 0 to 65535"},
    ),
]
AbsolutePath = Annotated[
    str, Meta(pattern=r"\A/", extra={"expected": "an absolute path", "path": True})
]
OptionalPath = Annotated[
    str, Meta(pattern=r"\A(/|\Z)", extra={"expected": 'an absolute path or ""', "path": True})
]
# The bounds keep a typing error from becoming a busy loop or a wait that the operating system
# refuses.
Seconds = Annotated[float, Meta(ge=0.01, le=86400)]
# 0 means "never", where the description allows it
OptionalSeconds = Annotated[float, Meta(ge=0, le=86400)]
Factor = Annotated[float, Meta(ge=0.01, le=100)]
# Looked for in PATH unless it is a path.
Program = Annotated[
    str,
    Meta(
        pattern=r"\A(/[^\0]*[^/\0]|[A-Za-z0-9_][A-Za-z0-9._-]*)\Z",
        extra={"expected": "the name of a program or its absolute path"},
    ),
]

DEVICE_MODES = ("gdrcopy", "gds", "mofed")
"""Other devices that NVIDIA's runtime and nvidia-ctk can add besides GPUs."""


def enabled_modes(**enabled: bool) -> tuple[str, ...]:
    """Return those of `DEVICE_MODES` that are true, in that order."""
    return tuple(mode for mode in DEVICE_MODES if enabled[mode])
