"""The sums for chargeback: what they count, and that no restart makes one smaller."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.golden import U0, U1
from tests.ledger.book_parts import SERVE, TRAIN, Clock, book, held, make, reconcile, replicated
from tests.patience import FOR_EVER_SECONDS
from vgpu_agent.agent.records.share_seconds import ShareSeconds
from vgpu_agent.agent.state_file import StateFile
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Owner

GPU = "nvidia.com/gpu"
OF_TRAIN, OF_SERVE = ("default", "train", GPU), ("default", "serve", GPU)


class World:
    """A ledger of two GPUs with four shares each, and the sums of one process after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.clock = directory, Clock()
        self.ledger: Ledger = make(self.clock, replicated(4))
        self.sums = self._another()

    @classmethod
    async def begin(cls, directory: Path) -> World:
        """Begin with the file in ``directory``, if there is one."""
        world = cls(directory)
        await world.sums.load()
        return world

    def hold(self, *ids: str, owner: Owner = TRAIN) -> None:
        """Have the container hold ids; the kubelet names it at once."""
        book(self.ledger, *ids)
        others = [
            held(*grant.ids, owner=grant.owner) for grant in self.ledger.grants if grant.owner
        ]
        reconcile(self.ledger, *others, held(*ids, owner=owner))
        self.sums.advance()

    def end(self) -> None:
        """End all containers."""
        for grant in self.ledger.grants:
            self.ledger.release(grant.number)
        self.sums.advance()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds

    async def restart(self, *, orderly: bool = True, away_seconds: float = 0.0) -> None:
        """End the process and start the next one, with the same ledger."""
        if orderly:
            await self.sums.end(write=True)
        self.wait(away_seconds)
        self.sums = self._another()
        await self.sums.load()
        self.sums.advance()

    def _another(self) -> ShareSeconds:
        return ShareSeconds(str(self.directory), self.ledger, wall=self.clock, clock=self.clock)


async def test_a_sum_is_the_amount_of_the_resource_times_seconds(tmp_path: Path) -> None:
    """Two pods, one of them with two shares; it stands still after the end."""
    world = await World.begin(tmp_path)
    world.hold(f"{U0}::0", f"{U0}::1")
    world.wait(10)
    world.hold(f"{U1}::0", owner=SERVE)
    world.wait(5)
    assert world.sums.sums == {OF_TRAIN: 30.0, OF_SERVE: 5.0}
    world.end()
    world.wait(600)
    assert world.sums.sums == {OF_TRAIN: 30.0, OF_SERVE: 5.0}


@pytest.mark.looptime
async def test_a_burst_of_changes_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each Allocate changes the ledger, and the next one would wait while all grants are counted.
    The last change is counted too.
    """
    world, counted = await World.begin(tmp_path), list[int]()
    advance = ShareSeconds.advance

    def counting(sums: ShareSeconds) -> None:
        counted.append(len(world.ledger.grants))
        advance(sums)

    monkeypatch.setattr(ShareSeconds, "advance", counting)
    loop = asyncio.create_task(world.sums.run())
    await asyncio.sleep(1)
    del counted[:]
    for number in range(4):
        book(world.ledger, f"{U0}::{number}")
        await asyncio.sleep(0.01)
    await asyncio.sleep(1)
    loop.cancel()
    assert counted == [4]


async def test_a_reservation_without_a_pod_is_not_counted(tmp_path: Path) -> None:
    """Nobody could be charged for it."""
    world = await World.begin(tmp_path)
    book(world.ledger, f"{U0}::0")
    world.wait(10)
    assert world.sums.sums == {}


async def test_a_restart_continues_the_sums_and_adds_the_time_without_an_agent(
    tmp_path: Path,
) -> None:
    """The container ran on meanwhile."""
    world = await World.begin(tmp_path)
    world.hold(f"{U0}::0", f"{U0}::1")
    world.wait(10)
    await world.restart(away_seconds=100)
    assert world.sums.sums == {OF_TRAIN: 220.0}
    world.wait(1)
    assert world.sums.sums == {OF_TRAIN: 222.0}


async def test_a_crash_makes_no_sum_smaller(tmp_path: Path) -> None:
    """The file is older than the last scrape."""
    world = await World.begin(tmp_path)
    world.hold(f"{U0}::0")
    world.hold(f"{U1}::0", owner=SERVE)
    world.wait(10)
    await world.sums._write(final=False)
    world.wait(50)
    scraped = world.sums.sums
    (serve,) = (grant for grant in world.ledger.grants if grant.owner == SERVE)
    world.ledger.release(serve.number)
    await world.restart(orderly=False, away_seconds=5)
    assert world.sums.sums == {OF_TRAIN: 65.0}
    assert scraped[OF_TRAIN] == 60.0


async def test_an_agent_that_has_ended_its_sums_counts_no_more(tmp_path: Path) -> None:
    """In an update both it and its successor are scraped, and queries add up the two."""
    world = await World.begin(tmp_path)
    world.hold(f"{U0}::0")
    world.wait(10)
    await world.sums.end(write=True)
    world.wait(20)
    assert world.sums.sums == {OF_TRAIN: 10.0}


async def test_sums_end_where_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gives up after some seconds, and the successor counts all the same."""
    world = await World.begin(tmp_path)
    world.hold(f"{U0}::0")

    async def hang(*_: object) -> bool:
        await asyncio.sleep(FOR_EVER_SECONDS)
        return False

    monkeypatch.setattr(StateFile, "write", hang)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await world.sums.end(write=True)
    world.wait(20)
    assert world.sums.sums == {OF_TRAIN: 0.0}


async def test_another_pod_of_the_name_begins_anew_after_a_restart(tmp_path: Path) -> None:
    """The first pod of a StatefulSet has the same name each time, and held nothing meanwhile."""
    world = await World.begin(tmp_path)
    world.hold(f"{U0}::0")
    world.wait(10)
    await world.sums.end(write=True)
    world.end()
    world.hold(f"{U0}::0", owner=Owner("main", "uid-of-another", "default", "train"))
    await world.restart(orderly=False, away_seconds=100)
    assert world.sums.sums == {OF_TRAIN: 0.0}


async def test_sums_are_forgotten_an_hour_after_the_end(tmp_path: Path) -> None:
    """Until then each scraper has seen the last value, also over a restart."""
    world = await World.begin(tmp_path)
    world.hold(f"{U0}::0")
    world.wait(10)
    world.sums.advance()
    world.end()
    await world.restart(away_seconds=60)
    assert world.sums.sums == {OF_TRAIN: 10.0}
    world.wait(3600)
    assert world.sums.sums == {}


async def test_the_number_of_sums_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant may start pods of ever new names; those that hold something stay."""
    monkeypatch.setattr("vgpu_agent.agent.records.share_seconds._MAX_SUMS", 50)
    world = await World.begin(tmp_path)
    world.hold(f"{U1}::0", owner=SERVE)
    for number in range(120):
        world.hold(f"{U0}::0", owner=Owner("main", f"uid-{number}", "default", f"pod-{number}"))
        world.wait(0.1)
        for grant in world.ledger.grants:
            if grant.owner != SERVE:
                world.ledger.release(grant.number)
        world.sums.advance()
    assert len(world.sums.sums) == 50
    assert OF_SERVE in world.sums.sums
    assert ("default", "pod-119", GPU) in world.sums.sums


async def test_a_clock_that_was_wrong_adds_no_years(tmp_path: Path) -> None:
    """A node whose clock starts in 1970 until it is set."""
    world = await World.begin(tmp_path)
    world.hold(f"{U0}::0")
    world.wait(10)
    await world.restart(away_seconds=50 * 365 * 86400)
    assert world.sums.sums == {OF_TRAIN: 10.0}


async def test_a_probe_before_the_file_is_read_begins_no_sum(tmp_path: Path) -> None:
    """A new sum would hide the one in the file; and a stop before it leaves the file as it is."""
    world = await World.begin(tmp_path)
    world.hold(f"{U0}::0")
    world.wait(10)
    await world.sums.end(write=True)
    world.sums = world._another()
    assert world.sums.sums == {}
    await world.sums.end(write=True)
    await world.sums.load()
    assert world.sums.sums[OF_TRAIN] == pytest.approx(10.0)
