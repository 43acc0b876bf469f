"""The isolation backend `vgpu-control`: it makes vgpu-manager's libvgpu-control.so hold a container
to its shares.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vgpu_agent.isolation.edits import Provision


class ComputePolicy(enum.StrEnum):
    """How a container's compute is limited (vgpu-manager §4.1, §7.7)."""

    FIXED = "fixed"  # never more than its share
    BALANCE = "balance"  # more while the card is idle
    NONE = "none"  # not at all


@dataclasses.dataclass(frozen=True, slots=True)
class CardLimit:
    """The part of one card that a container has.

    Attributes:
        index: the card's NVML index, its place in the library's tables.
        uuid: of the card.
        cores_percent: of its compute; 0 and 100 limit nothing.
        memory_mib: of its memory as it is offered, which may be more than it has.
        card_cores_percent: the compute that the card offers, with scaling.
        card_memory_mib: the memory that the card offers, with scaling.
    """

    index: int
    uuid: str
    cores_percent: int
    memory_mib: int
    card_cores_percent: int = 100
    card_memory_mib: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ControlTarget:
    """The container that is to keep to its shares.

    Attributes:
        pod_uid: the kubelet's UID of the pod.
        pod: its name.
        namespace: its namespace.
        container: the container's name.
        ids: the kubelet's device ids, in its order.
        cards: in the order of the claim.
        policy: how compute is limited.
        memory_ratio: how many times a card's memory is offered.
        oversold: the container itself asks for more memory than the card has (CUDA_MEM_OVERSOLD).
        disabled: the container asks to run without the library (DISABLE_VGPU_CONTROL); whether that
            counts is the backend's setting.
        driver_version: e.g. ``570.86.10``.
        cuda_version: e.g. ``12.8``.
    """

    pod_uid: str
    pod: str
    namespace: str
    container: str
    ids: tuple[str, ...]
    cards: tuple[CardLimit, ...]
    policy: ComputePolicy = ComputePolicy.FIXED
    memory_ratio: float = 1.0
    oversold: bool = False
    disabled: bool = False
    driver_version: str = ""
    cuda_version: str = ""


class ControlBackend(Protocol):
    """What the family asks to put limits in force: `VgpuControl`, or nothing."""

    @property
    def name(self) -> str:
        """The glossary's name: ``vgpu-control`` or ``none``."""
        ...

    def provision(self, target: ControlTarget) -> Provision:
        """Return the edits of the container and the files that must be on the host.

        Raises:
            RequestRefusedError: the container cannot be limited; with the reason and the remedy.
        """
        ...
