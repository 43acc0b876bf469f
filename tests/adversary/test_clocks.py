"""Faults of the wall clock: a node boots with a wrong time and gets the right one later,
forward or back, by a day or by years.

A jump of the node's time must neither drop what the kubelet has just reserved nor keep it reserved
for ever.
"""

from __future__ import annotations

import time

import msgspec
import pytest

from tests.allocation.binding_parts import IDS, NUMBER, Place, a_pod, init, wants
from tests.golden import U0
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import KubeletRecords

DAY_SECONDS = 86_400.0


class Clocks:
    """The node's two clocks; `time` and what uses it by default see them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.steady = time.time(), time.monotonic()
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.steady)

    def passes(self, seconds: float) -> None:
        """Time goes on, for both."""
        self.wall += seconds
        self.steady += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Clocks that stand still, for everything that is made from now on."""
    made = Clocks(monkeypatch)
    defaults = Ledger.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "clock", lambda: made.steady)
    monkeypatch.setitem(defaults, "wall_clock", lambda: made.wall)
    return made


@pytest.mark.parametrize("jump", [DAY_SECONDS, -DAY_SECONDS])
async def test_a_clock_that_jumps_neither_drops_a_reservation_nor_keeps_it_for_ever(
    clocks: Clocks, jump: float
) -> None:
    """A reservation that is dropped too early lets two containers have one share,
    and one that stays takes it from all pods.
    """
    place = Place()
    await place.allocator.allocate(NUMBER, IDS[:1])

    def confirm() -> int:
        place.allocator.confirm(KubeletRecords((), entries=()), reservation_seconds=60)
        return len(place.ledger.grants)

    clocks.passes(30)
    clocks.wall += jump
    assert confirm() == 1
    clocks.passes(31)
    assert confirm() == 0


async def test_a_clock_that_is_set_back_does_not_change_which_container_started_last() -> None:
    """By that order an init container has ended, and its share is given on.
    The records keep it over restarts.
    """
    now = [1_000_000.0]
    place = Place()
    place.allocator._context.clock = lambda: now[0]
    pod = a_pod(
        "train",
        init("prepare"),
        "main",
        annotations=wants(prepare=f"{U0} 30000", main=f"{U0} 1000"),
    )
    place.book.replace([msgspec.structs.replace(pod, phase="Running")])
    await place.admit(pod, "prepare", IDS[:2], listed=False)
    await place.admit(pod, "main", IDS[:1])
    await place.start(IDS[:2])
    now[0] -= DAY_SECONDS
    await place.start(IDS[:1])
    stamps = {record.owner.container: record.decided_at for record in place.carrier.records}
    assert stamps["prepare"] < stamps["main"] < stamps["prepare"] + 1
