"""The golden node in a ledger, and kubelet's records of it, for tests of the book;
and a clock that a test moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tests.golden import U0, U1, golden_inventory
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.reconciliation import InterpretedHolding
from vgpu_agent.model import (
    Grant,
    Health,
    Holding,
    Inventory,
    KubeletRecords,
    Owner,
    Resource,
    Share,
)

ILL = Health(ok=False, reason="XID 79: the GPU has fallen off the bus")
TRAIN = Owner("main", "uid-train", "default", "train")
SERVE = Owner("main", "uid-serve", "default", "serve")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Unix seconds."""
        return self.now


def replicated(
    count: int, *, name: str = "nvidia.com/gpu", family: str = "nvidia", prefix: str = ""
) -> Resource:
    """Both golden GPUs, ``count`` replicas each."""
    ids = tuple(
        DeviceId(f"{prefix}{uuid}::{n}", uuid, numa)
        for uuid, numa in ((U0, 0), (U1, 1))
        for n in range(count)
    )
    return Resource(name, family, ids, holders_per_device=count)


WHOLE = Resource("nvidia.com/gpu", "nvidia", (DeviceId(U0, U0, 0), DeviceId(U1, U1, 1)))


def whole_shares(ids: Sequence[str]) -> list[Share]:
    """A whole GPU for each id."""
    return [Share(id_, 40960, 100, exclusive=True) for id_ in ids]


def replica_shares(ids: Sequence[str]) -> tuple[Share, ...]:
    """A place on each GPU behind the ids."""
    return tuple(Share(uuid) for uuid in dict.fromkeys(id_.partition("::")[0] for id_ in ids))


def interpret(holding: Holding) -> InterpretedHolding | None:
    """Read a holding the way the nvidia family does."""
    if not holding.resource.startswith("nvidia.com/"):
        return None
    whole = all("::" not in id_ for id_ in holding.ids)
    return InterpretedHolding(
        "nvidia", tuple(whole_shares(holding.ids)) if whole else replica_shares(holding.ids)
    )


def make(clock: Clock, *resources: Resource, inventory: Inventory | None = None) -> Ledger:
    """A ledger that knows the golden node and offers ``resources``."""
    ledger = Ledger(clock=clock, wall_clock=clock)
    ledger.observe(inventory or golden_inventory())
    ledger.offer(resources)
    return ledger


def book(ledger: Ledger, *ids: str) -> Grant:
    """Reserve ids of ``nvidia.com/gpu``."""
    whole = all("::" not in id_ for id_ in ids)
    return ledger.reserve(
        "nvidia.com/gpu", ids, whole_shares(ids) if whole else replica_shares(ids)
    )


def reconcile(
    ledger: Ledger,
    *holdings: Holding,
    complete: bool = True,
    initial: bool = False,
    may_release: bool = True,
) -> list[str]:
    """Verify against kubelet's records; the events of the corrections."""
    corrections = ledger.reconcile(
        KubeletRecords(holdings, complete),
        interpret,
        reservation_seconds=60,
        initial=initial,
        may_release=may_release,
    )
    assert ledger.audit() == []
    return [correction.event for correction in corrections]


def held(*ids: str, owner: Owner = TRAIN, resource: str = "nvidia.com/gpu") -> Holding:
    """One line of kubelet's records."""
    return Holding(resource, ids, owner)


def words(ledger: Ledger, resource: str = "nvidia.com/gpu") -> dict[str, bool]:
    """Id → healthy, as in the list for the kubelet."""
    return {entry.id.id: entry.healthy for entry in ledger.listing(resource)}


class HasTime(Protocol):
    """A clock that tests move on."""

    now: float


def let_pass(ledger: Ledger, clock: HasTime, seconds: float) -> None:
    """Let so much time pass, and end turns whenever one is over, as the agent does."""
    until = clock.now + seconds
    while (left := ledger.turn_ends_in_seconds) is not None and clock.now + left <= until:
        clock.now += max(left, 1e-6)
        ledger.end_turns()
    clock.now = max(clock.now, until)
    ledger.end_turns()
