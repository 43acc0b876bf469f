"""The desired state of our Node for Volcano's schedulers:
register annotation (the list of GPUs), handshake, and the name of their lock (an annotation with
which a scheduler keeps others from binding pods to the node; `node_lock` releases it).

All are expressed as desired state; `cluster` writes the difference. Schedulers of every version are
served at once. New ones read the register annotation only. Old ones also want their *handshake*
answered: an annotation in which they ask whether the device plugin is alive (volcano-vgpu §2).
Called by `family`.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING

from vgpu_agent.nodes import DesiredNode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vgpu_agent.model import Gpu

REGISTER = "volcano.sh/node-vgpu-register"
HANDSHAKE = "volcano.sh/node-vgpu-handshake"
LOCK = "hamivgpu"  # the key of an annotation, without a domain
TYPE_PREFIX = "NVIDIA-"

_SEPARATORS = re.compile(r"[,:\s]+")


def card_type(gpu: Gpu) -> str:
    """Return the type of a card as pods select it: ``NVIDIA-NVIDIA A10``;
    without characters of the product name that would separate fields of the annotation.
    """
    return TYPE_PREFIX + _SEPARATORS.sub(" ", gpu.name).strip()


def register_text(
    gpus: Iterable[Gpu],
    units: Mapping[str, int],
    *,
    split: int,
    available: Mapping[str, bool],
    mode: str,
) -> str:
    """Return the register annotation: one entry for each GPU, in the order of ``gpus``, which is
    the order in which schedulers count GPUs (volcano-vgpu §2.1).

    ``units`` has the memory of each GPU in units of the memory resource, ``split`` is the number of
    containers that may share one GPU, and ``available`` says by UUID which GPUs new containers may
    get. Every entry has the same ``mode``, how the node shares its GPUs (``hami-core`` or ``mig``),
    and schedulers read that of the last one.

    A GPU that must not be given away is announced with count 0: schedulers read the health and
    ignore it, while a count of 0 keeps new pods off and the accounting of the old ones right
    (volcano-vgpu D6).
    """
    return "".join(
        f"{gpu.uuid},{split if available[gpu.uuid] else 0},{units[gpu.uuid]},{card_type(gpu)},"
        f"{'true' if available[gpu.uuid] else 'false'},{mode}:"
        for gpu in gpus
    )


def desired_handshake(present: str | None, *, now: float, pause_seconds: float) -> DesiredNode:
    """Return an answer where there is none, where a scheduler asks (``Requesting``), or where it
    ignores the node's GPUs because no answer came (``Deleted``); nothing while our last answer is
    there (volcano-vgpu §2.3).

    ``present`` is the handshake annotation of the Node, None without one, ``now`` is unix seconds,
    and ``pause_seconds`` is the least time between two answers.
    """
    if present is not None and "Requesting" not in present and "Deleted" not in present:
        return DesiredNode()
    return DesiredNode(
        annotations={HANDSHAKE: f"Reported {_written(now)}"},
        min_write_interval_seconds={HANDSHAKE: pause_seconds},
    )


def cleanup(*, now: float) -> DesiredNode:
    """Return the desired state of a node that the agent leaves for good: nothing that makes a
    scheduler send pods (volcano-vgpu D24).
    """
    return DesiredNode(
        annotations={REGISTER: None, HANDSHAKE: f"Deleted_{_scheduler_time(now)}", LOCK: None}
    )


def _written(now: float) -> str:
    """Return the time as Go writes it, as in the plugin's answers."""
    return f"{_utc(now):%Y-%m-%d %H:%M:%S} +0000 UTC"


def _scheduler_time(now: float) -> str:
    """Return the time in the form in which schedulers write it."""
    return f"{_utc(now):%Y.%m.%d %H:%M:%S}"


def _utc(now: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(now, dt.UTC)
