"""The families that the torture test plays: each with its resources, its scheduler's annotations
and its variables in a container.

The episode, the kubelet's model and the faults are the same for all of them. Nothing here knows the
agent.
"""

from __future__ import annotations

import dataclasses
import os.path
import random
import re
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from tests.torture.extender_model import ExtenderModel
from tests.torture.gpushare_model import GpushareModel
from tests.torture.plan import MEMORY_FACTOR_MIB, NUMBER, Card, PlannedPod, Request
from tests.torture.scheduler_model import Placement, SchedulerModel, Slice
from vgpu_agent.isolation.edits import Edits

REGION = "/tmp/cudevshr.cache"
CONTROL = "/etc/vgpu-manager/config"


class Scheduler(Protocol):
    """A model of a family's scheduler."""

    def place(
        self, uid: str, pod: PlannedPod, *, now: float, usable: Collection[str] | None = None
    ) -> Placement | None:
        """Choose among the cards that are ``usable``; None when they do not fit now."""

    def take_back(self, uid: str) -> None:
        """Forget a pod."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dialect:
    """One family's words.

    Attributes:
        name: of the family.
        number: the resource that counts cards.
        claims_all: the scheduler gives cards to init containers and sidecars too.
        overlapping: the scheduler counts pods that are being deleted as gone, although they still
            run (volcano-vgpu:D17).
        scheduler: makes the model.
        slices: reads a container's cards and limits; ``order`` is that of the PCI bus.
        directory: path in the container of a mount whose source says whose grant it is; empty where
            nothing in the container says so.
        effective: the request as the family understands it.
    """

    name: str
    number: str
    claims_all: bool
    overlapping: bool
    scheduler: Callable[[random.Random, Sequence[Card], str], Scheduler]
    slices: Callable[[Edits, Sequence[str]], list[Slice]]
    directory: str
    effective: Callable[[Request], Request] = lambda request: request

    def owner(self, edits: Edits) -> tuple[str, str]:
        """Return pod and container that the mounted directory names."""
        sources = [
            os.path.dirname(mount.host_path)
            for mount in edits.mounts
            if mount.container_path == self.directory
        ]
        uid, _, container = (
            os.path.basename(sources[0]).partition("_") if sources else ("nobody", "", "")
        )
        return uid, container


def _visible(edits: Edits, order: Sequence[str]) -> list[str]:
    shown = edits.environment.get("NVIDIA_VISIBLE_DEVICES", "")
    uuids = [uuid for uuid in shown.split(",") if uuid]
    if len(set(uuids)) != len(uuids) or not set(uuids) <= set(order):
        raise ValueError(f"it is shown the cards {uuids}")
    return sorted(uuids, key=order.index)


def _units(limit: str) -> int:
    mib = int(limit.removesuffix("m"))
    if not limit.endswith("m") or mib % MEMORY_FACTOR_MIB:
        raise ValueError(f"{limit!r} is no memory limit that anybody asked for")
    return mib // MEMORY_FACTOR_MIB


def _volcano_slices(edits: Edits, order: Sequence[str]) -> list[Slice]:
    """Read volcano-vgpu §4.1: limits are numbered as CUDA numbers cards inside the container."""
    environment = edits.environment
    cores = int(environment.get("CUDA_DEVICE_SM_LIMIT", "0"))
    return [
        Slice(uuid, _units(environment.get(f"CUDA_DEVICE_MEMORY_LIMIT_{place}", "")), cores)
        for place, uuid in enumerate(_visible(edits, order))
    ]


def _manager_slices(edits: Edits, order: Sequence[str]) -> list[Slice]:
    """Read vgpu-manager §7.3: limits are numbered by the cards' indices on the host."""
    environment, uuids = edits.environment, _visible(edits, order)
    numbered = {f"CUDA_MEM_LIMIT_{index}" for index in map(order.index, uuids)}
    limited = {key for key in environment if re.fullmatch(r"CUDA_MEM_LIMIT_\d+", key)}
    if limited != numbered:
        raise ValueError(f"it sees {uuids}, and {sorted(limited)} limit it")
    return [
        Slice(
            uuid,
            _units(environment[f"CUDA_MEM_LIMIT_{order.index(uuid)}"]),
            # all of the compute is no limit
            int(environment[f"CUDA_CORE_LIMIT_{order.index(uuid)}"] or "0"),
        )
        for uuid in uuids
    ]


def _gpushare_slices(edits: Edits, order: Sequence[str]) -> list[Slice]:
    """Read volcano-gpushare §4: one card, by its number, and a budget of its memory."""
    environment = edits.environment
    number = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    if not number.isdecimal() or int(number) >= len(order):
        raise ValueError(f"it is shown the cards {number!r}")
    units = _units(f"{environment.get('VOLCANO_GPU_ALLOCATED', '')}m")
    return [Slice(order[int(number)], units, 0)]


VOLCANO = Dialect(
    "volcano-vgpu",
    NUMBER,
    claims_all=False,
    overlapping=True,
    scheduler=lambda rng, cards, node: SchedulerModel(rng, cards, node=node),
    slices=_volcano_slices,
    directory=REGION,
)
VGPU_MANAGER = Dialect(
    "vgpu-manager",
    "nvidia.com/vgpu-number",
    claims_all=True,
    overlapping=False,
    scheduler=lambda rng, cards, node: ExtenderModel(rng, cards, node=node),
    slices=_manager_slices,
    directory=CONTROL,
    # A container's variable is empty for all of the compute as for no limit.
    effective=lambda request: dataclasses.replace(request, cores=request.cores % 100),
)
GPUSHARE = Dialect(
    "volcano-gpushare",
    "volcano.sh/gpu-memory",
    claims_all=True,
    overlapping=False,
    scheduler=lambda _, cards, __: GpushareModel(cards),
    slices=_gpushare_slices,
    directory="",
)
DIALECTS = {dialect.name: dialect for dialect in (VOLCANO, VGPU_MANAGER)}
