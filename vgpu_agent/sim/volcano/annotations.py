"""The annotations of nodes and pods that Volcano's scheduler reads and writes, as the simulated
scheduler implements them.

Called by the simulated scheduler's accounts of a node's cards (`ledger`, `gpushare`) and by
`scheduler`. The agent's families read and write the same formats from the other end. Nothing is
shared with them, so that a misreading on one side shows as a failing test and not as agreement. A
node's memory unit is a number of MiB, which its device plugin's setting ``gpu-memory-factor``
gives. Source of every format: volcano-vgpu §2 and §3, volcano-gpushare §2 and §3.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

REGISTER = "volcano.sh/node-vgpu-register"  # the node's cards, see `Registration`
# A scheduler writes ``Requesting_<time>``, and the node's device plugin, while it lives, answers
# with ``Reported <time>``. Without an answer the scheduler writes ``Deleted_<time>``, and ignores
# the node's cards until the plugin writes again.
HANDSHAKE = "volcano.sh/node-vgpu-handshake"
# The annotation by which the scheduler locks a node for a pod that it is about to bind, until the
# node's device plugin has served that pod; its value is the time of the locking.
VGPU_LOCK = "hamivgpu"
GPUSHARE_LOCK = "gpu"  # the same for GPU share
UNHEALTHY_IDS = "volcano.sh/gpu-unhealthy-ids"  # indices of cards that get no more pods

VGPU_NODE = "volcano.sh/vgpu-node"  # the node for which the pod's cards were chosen
VGPU_TIME = "volcano.sh/vgpu-time"  # when the cards were chosen, in unix seconds
VGPU_IDS = "volcano.sh/vgpu-ids-new"  # the cards of each container, see `format_claims`
DEVICES_TO_ALLOCATE = "volcano.sh/devices-to-allocate"  # those of containers not started yet
BIND_PHASE = "volcano.sh/bind-phase"  # ``allocating`` until the plugin writes how the start went
BIND_TIME = "volcano.sh/bind-time"
GPU_INDEX = "volcano.sh/gpu-index"  # of GPU share: the indices of the pod's cards
PREDICATE_TIME = "volcano.sh/predicate-time"  # of GPU share: when the card was chosen, in ns

# The pod's group, whose pods are scheduled together, and how many of them are needed at least.
GROUP_NAME = "scheduling.k8s.io/group-name"
GROUP_MIN_MEMBER = "scheduling.volcano.sh/group-min-member"

_FIELDS_OF_A_CARD = 6
_FIELDS_OF_A_CLAIM = 4
_HANDSHAKE_STAMP = "%Y.%m.%d %H:%M:%S"
HANDSHAKE_SECONDS = 60.0
"""The time that a node has to answer `Requesting` before it counts as dead (volcano-vgpu §2.3)."""
LOCK_SECONDS = 300.0
"""From this age on a node lock is void, and the scheduler may lock the node for another pod
(volcano-vgpu §2.4)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """One entry of the register annotation; ``memory`` is in the node's memory units, ``seats`` is
    how many containers may share it.
    """

    index: int
    uuid: str
    seats: int
    memory: int
    type: str


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    """The whole register annotation. ``mode`` is how the node shares its cards, ``mig`` or
    ``hami-core``: each entry names one, and the last entry decides.
    """

    cards: tuple[Card, ...]
    mode: str


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """One container's part of one card; ``memory`` in the node's memory units,
    ``cores`` in percent.
    """

    uuid: str
    memory: int
    cores: int


def parse_registration(text: str) -> Registration | None:
    """The cards of a node, or None when the scheduler ignores the whole node:
    no colon, or an entry of fewer than six fields.

    The health field is ignored, as by the real scheduler: a plugin shows a card that gets no more
    pods with 0 seats (volcano-vgpu §2.2, G13).
    """
    if ":" not in text:
        return None
    cards, mode = [], "hami-core"
    for index, piece in enumerate(text.split(":")):
        if "," not in piece:
            continue
        fields = piece.split(",")
        if len(fields) < _FIELDS_OF_A_CARD:
            return None
        uuid, seats, memory, type_, _health, mode_of_this = fields[:_FIELDS_OF_A_CARD]
        cards.append(Card(index, uuid, _number(seats), _number(memory), type_))
        mode = "mig" if mode_of_this == "mig" else "hami-core"
    return Registration(tuple(cards), mode)


def format_claims(containers: Sequence[Sequence[Claim]]) -> str:
    """The value of `VGPU_IDS`, the "pod devices string": one segment per container that asks for
    vGPU (volcano-vgpu §3.2).
    """
    return ";".join(
        "".join(f"{claim.uuid},NVIDIA,{claim.memory},{claim.cores}:" for claim in claims)
        for claims in containers
    )


def parse_claims(text: str) -> list[Claim]:
    """All claims of a pod devices string, of all containers; pieces that are no claims are left
    out.
    """
    pieces = [piece.split(",") for segment in text.split(";") for piece in segment.split(":")]
    return [
        Claim(piece[0], _number(piece[2]), _number(piece[3]))
        for piece in pieces
        if len(piece) >= _FIELDS_OF_A_CLAIM
    ]


def parse_indices(text: str) -> list[int]:
    """Parse a comma-separated list of card indices; other items are left out."""
    return [
        int(part)
        for part in (part.strip() for part in text.split(","))
        if part.isascii() and part.isdigit()
    ]


def handshake_stamp(word: str, now: float) -> str:
    """The value ``<word>_<time>`` of the handshake, ``word`` being ``Requesting`` or ``Deleted``,
    for unix time ``now``, in UTC. The real scheduler writes its local time, and reads it as UTC.
    """
    return f"{word}_{dt.datetime.fromtimestamp(now, dt.UTC).strftime(_HANDSHAKE_STAMP)}"


def judge_handshake(value: str | None, now: float) -> tuple[bool, str | None]:
    """Judge a node's handshake as Volcano's scheduler up to version 1.14.2 does.

    Args:
        value: of the annotation; None when there is none.
        now: unix seconds.

    Returns:
        True if the scheduler uses the node's GPUs; and the new value that it writes, or None.
    """
    if value is None or "Deleted" in value:
        return False, None
    if "Requesting" not in value:
        return True, handshake_stamp("Requesting", now)
    if _handshake_age(value, now) > HANDSHAKE_SECONDS:
        return False, handshake_stamp("Deleted", now)
    return True, None


def lock_stamp(now: float) -> str:
    """The value of a node lock taken at unix time ``now``: RFC 3339 in whole seconds."""
    return dt.datetime.fromtimestamp(now, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def lock_age(value: str, now: float) -> float | None:
    """Return the seconds since a node lock was taken, None when its time cannot be read."""
    try:
        return now - dt.datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError):
        return None


def _handshake_age(value: str, now: float) -> float:
    """Return the seconds since a ``Requesting_…`` was written; those since 1970 when its time
    cannot be read.
    """
    try:
        written = dt.datetime.strptime(value.partition("_")[2], _HANDSHAKE_STAMP).replace(
            tzinfo=dt.UTC
        )
    except ValueError:
        return now
    return now - written.timestamp()


def _number(text: str) -> int:
    """Parse the number in a field; 0 for anything else, as the real scheduler reads it."""
    try:
        return int(text)
    except ValueError:
        return 0
