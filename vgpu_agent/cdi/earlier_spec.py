"""The GPUs' spec of an earlier agent, used for as long as none can be made anew.

NVIDIA's tool describes all GPUs or none, so one that is lost would keep a restarted agent from
offering the others.
The existing file is used where it is a sound spec of the current driver, which the names of its
libraries show.
`agent` checks, as for any spec, that each name in it still opens its device. Used by
`generated_specs`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from vgpu_agent.cdi import rules
from vgpu_agent.cdi.document import LARGEST_BYTES, Spec, decode
from vgpu_agent.errors import CdiError


class EarlierSpec(NamedTuple):
    """A spec, and when its file was written (unix seconds)."""

    spec: Spec
    at: float


def read(path: str, kind: str, driver_version: str) -> EarlierSpec | None:
    """The spec of ``kind`` in this file, if it was made for that driver;
    looks at the file system.
    """
    try:
        at = os.stat(path).st_mtime
        with open(path, "rb") as file:
            spec = decode(file.read(LARGEST_BYTES + 1))
    except (OSError, CdiError):
        return None  # it will be replaced; if that fails, the writer reports why
    if spec.kind != kind or rules.problems(spec) or not driver_version:
        return None
    library = f".so.{driver_version}"  # libcuda.so.580.95.05, and a dozen others
    mounts = [
        *spec.container_edits.mounts,
        *(mount for device in spec.devices for mount in device.container_edits.mounts),
    ]
    return (
        EarlierSpec(spec, at)
        if any(mount.container_path.endswith(library) for mount in mounts)
        else None
    )
