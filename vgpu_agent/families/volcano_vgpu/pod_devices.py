"""The values of the annotations ``volcano.sh/vgpu-ids-new`` and ``devices-to-allocate``, by which
Volcano's scheduler assigns GPUs to containers.

Read when a container's share is decided, written when the agent itself has placed a pod. Format:
volcano-vgpu §3.2, one segment for each container that asks, separated by ``;``, in it one
``<UUID>,NVIDIA,<memory>,<cores>:`` for each GPU. Any user who may edit the pod can write it, so
this module checks only its form. `decisions` checks the rest.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import AgentError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable

SEGMENT_END = ";"
_DEVICE_END = ":"
_TYPE = "NVIDIA"  # the type in the request, not the product name of the card

# More than any pod has; the API server accepts 256 KiB of annotations.
_MAX_DEVICES = 4096
_INTEGER = re.compile(r"-?[0-9]{1,18}\Z", re.ASCII)
_SHOWN = 80  # characters of an entry in an error


class DevicesTextError(AgentError):
    """The text is not in the form that this module describes;
    the message is the end of a sentence that names the pod and the annotation.
    """


class Assigned(msgspec.Struct, frozen=True):
    """One GPU of one container.

    Attributes:
        device: UUID of the GPU; of a MIG instance ``<UUID>[<group>-<position>]``: the UUID of its
            GPU, one of the divisions that the scheduler knows for the GPU's model, and a place in
            it.
        memory_units: in the node's units, of as many MiB as its memory factor says; as written, so
            perhaps negative.
        cores_percent: of the GPU's compute; as written.
    """

    device: str
    memory_units: int
    cores_percent: int

    @property
    def gpu(self) -> str:
        """UUID of the GPU, also of one of its MIG instances."""
        return self.device.partition("[")[0]


Segment = tuple[Assigned, ...]


def parse_pod_devices(text: str) -> tuple[Segment, ...]:
    """Return the GPUs of each container that asks for some, in the order of the pod; a container
    that has none yet has an empty segment.

    Raises:
        DevicesTextError: an entry has another form; the message shows it.
    """
    found = _parsed(text)
    if isinstance(found, str):
        raise DevicesTextError(found)
    return found


@functools.lru_cache(maxsize=16)  # it is asked for each container of a pod
def _parsed(text: str) -> tuple[Segment, ...] | str:
    """Return the segments, or what is wrong with the text."""
    if text.count(_DEVICE_END) + text.count(SEGMENT_END) > _MAX_DEVICES:
        return f"more than {_MAX_DEVICES} entries"
    try:
        return tuple(_segment(segment) for segment in text.split(SEGMENT_END))
    except DevicesTextError as err:
        return str(err)


def write_segment(assigned: Iterable[Assigned]) -> str:
    """Write one container's segment."""
    return "".join(
        f"{each.device},{_TYPE},{each.memory_units},{each.cores_percent}{_DEVICE_END}"
        for each in assigned
    )


def _segment(text: str) -> Segment:
    # Every entry ends with a colon, so the last piece is empty; schedulers skip empty pieces
    # anywhere.
    return tuple(_assigned(piece) for piece in text.split(_DEVICE_END) if piece)


def _assigned(piece: str) -> Assigned:
    fields = piece.split(",")
    if len(fields) < 4:
        raise DevicesTextError(
            f"{_shown(piece)} has {len(fields)} fields, expected <UUID>,NVIDIA,<memory>,<cores>"
        )
    uuid, kind, memory, cores = fields[:4]  # later schedulers may add fields
    if not uuid or not uuid.isprintable() or " " in uuid:
        raise DevicesTextError(f"{_shown(piece)} does not begin with the UUID of a GPU")
    if kind != _TYPE:
        raise DevicesTextError(f"{_shown(piece)} is of type {_shown(kind)}, expected {_TYPE}")
    return Assigned(uuid, _number(memory, "memory", piece), _number(cores, "cores", piece))


def _number(text: str, what: str, piece: str) -> int:
    if not _INTEGER.match(text):
        raise DevicesTextError(
            f"{_shown(piece)} has {_shown(text)} for its {what}, expected a whole number"
        )
    return int(text)


def _shown(text: str) -> str:
    return quoted(text, _SHOWN)
