"""The device ids of the `nvidia` family: a device's UUID alone, or with the number of a replica
behind it.

Three forms are read, whichever is offered today, so that running containers keep their devices over
a change of settings: ``<uuid>`` a whole device, ``<uuid>::<n>`` a replica as NVIDIA's plugin counts
them (nvidia §4), ``<uuid>-replica-<n>`` one as iktos's fork of it does (k8s-gpu-sharing-plugin,
iktos §I.3). Under WSL one id stands for all GPUs, because containers cannot get single ones there
(nvidia A26). The GPU of a Tegra processor has a fixed word, `INTEGRATED`, as its UUID. Used by
`family` and `offers`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.model import INTEGRATED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NVIDIA_SEPARATOR = "::"
IKTOS_SEPARATOR = "-replica-"
EVERY_GPU = "all"

# A GPU, a MIG instance, a MIG instance as drivers before 470 name it (MIG-GPU-<uuid>/<gi>/<ci>).
# Nothing else: other plugins' ids begin with a UUID, too.
_UUID = r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}"
_WORDS = f"{EVERY_GPU}|{INTEGRATED}"
_ID = re.compile(
    rf"((?:GPU|MIG)-{_UUID}|MIG-GPU-{_UUID}/[0-9]{{1,4}}/[0-9]{{1,4}}|{_WORDS})(?:(?:::|"
    r"-replica-)(0|[1-9][0-9]{0,17}))?"
)


class ReadId(NamedTuple):
    """The parts of an id.

    Attributes:
        device: UUID of the GPU or MIG instance, or `EVERY_GPU`.
        replica: its number; None for the whole device.
    """

    device: str
    replica: int | None


def read(id_: str) -> ReadId | None:
    """Parse the id; None when it is not of this family."""
    found = _ID.fullmatch(id_)
    return ReadId(found[1], int(found[2]) if found[2] else None) if found else None


def devices_behind(ids: Iterable[str]) -> dict[str, bool]:
    """Map each UUID to whether one of its ids is the whole device; in the order of the ids (nvidia
    A3), without unknown ids.
    """
    devices: dict[str, bool] = {}
    for id_ in ids:
        if (known := read(id_)) is not None:
            devices[known.device] = devices.get(known.device, False) or known.replica is None
    return devices


def device_of_each(ids: Sequence[str]) -> list[str]:
    """Return the UUID of the device behind each id, in their order, as often as it is named. Ids of
    other plugins are left out.
    """
    return [known.device for id_ in ids if (known := read(id_)) is not None]


def has_replicas(ids: Iterable[str]) -> bool:
    """Tell whether a replica is among the ids."""
    return any(known is not None and known.replica is not None for known in map(read, ids))
