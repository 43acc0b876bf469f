"""The YAML of ``nvidia-mig-parted``: written for one GPU, and read as the tool exports it.

Version 1 of the format has configurations with names. Each is a list of entries about some GPUs by
index, with the number of instances of each profile. Called by `parted`, which runs the tool. The
tool's output is checked here: the result is the division of each GPU, or the reason why the output
cannot be used.
"""

from __future__ import annotations

import collections
import json
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.config import yaml
from vgpu_agent.errors import MigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CURRENT = "current"  # what an export calls its only configuration

_MAX_GPUS = 64  # that the output may name
_MAX_INSTANCES = 8  # of one GPU, by NVML
_MAX_SHOWN = 200  # characters of the output in an error message


class Division(msgspec.Struct, frozen=True):
    """The division of one GPU: whether MIG mode is on,
    and the number of instances of each profile.
    """

    enabled: bool
    instances: Mapping[str, int]


def layout_file(index: int, profiles: Iterable[str]) -> str:
    """Write a configuration called `CURRENT` that divides the GPU of that NVML index, and leaves
    the others out. ``profiles`` has one entry for each MIG instance to be made, e.g. ``1g.10gb``.
    """
    counted = collections.Counter(profiles)
    entry = {"devices": [index], "mig-enabled": True, "mig-devices": dict(counted)}
    # JSON is YAML
    return json.dumps({"version": "v1", "mig-configs": {CURRENT: [entry]}}, indent=1) + "\n"


def read_export(text: str, gpus: int) -> Mapping[int, Division]:
    """Read the division of each GPU, by index; ``gpus`` is how many GPUs the driver shows.

    Raises:
        MigError: ``text`` is no export of that many GPUs; the message shows the error.
    """
    root, faults = yaml.parse(text)
    if root is None or faults:
        where = f"line {faults[0].line}: {faults[0].text}" if faults else "it is empty"
        raise MigError(f"its output is not YAML ({where}): {_shown(text)}")
    configurations = root.plain  # in Python's own types
    configurations = configurations.get("mig-configs") if isinstance(configurations, dict) else None
    if not isinstance(configurations, dict) or len(configurations) != 1:
        raise MigError(
            f"its output does not have exactly one configuration below mig-configs: {_shown(text)}"
        )
    (entries,) = configurations.values()
    found: dict[int, Division] = {}
    for entry in entries if isinstance(entries, list) else [None]:
        indices, division = _entry(entry, gpus)
        for index in indices:
            if index in found or not 0 <= index < min(gpus, _MAX_GPUS):
                raise MigError(
                    f"its output has GPU {index} twice, or it is not one of the node's {gpus}"
                )
            found[index] = division
    if len(found) != gpus:
        raise MigError(f"its output has {len(found)} GPUs, and the driver shows {gpus}")
    return found


def _entry(entry: Any, gpus: int) -> tuple[list[int], Division]:
    if not isinstance(entry, dict):
        raise MigError(f"its output has an invalid entry: {_shown(str(entry))}")
    devices, enabled, instances = (
        entry.get("devices"),
        entry.get("mig-enabled"),
        entry.get("mig-devices") or {},
    )
    if devices == "all":
        devices = list(range(gpus))
    if (
        not isinstance(devices, list)
        or not isinstance(enabled, bool)
        or not isinstance(instances, dict)
    ):
        raise MigError(
            "its output has an entry without devices, mig-enabled and mig-devices: "
            f"{_shown(str(entry))}"
        )
    numbers = (
        *((index, _MAX_GPUS) for index in devices),
        *((count, _MAX_INSTANCES) for count in instances.values()),
    )
    if not all(_is_number(value, most) for value, most in numbers):
        raise MigError(f"its output has impossible numbers: {_shown(str(entry))}")
    return devices, Division(enabled, {name: count for name, count in instances.items() if count})


def _is_number(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _shown(text: str) -> str:
    return ascii(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")
