"""When kubelet's records are read, and what the agent does with a kubelet that has just come back; on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from tests.agent.fake_server import FakeServer
from tests.golden import U0, U1, golden_inventory
from vgpu_agent.agent import verification
from vgpu_agent.agent.verification import Verification
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.node_families import Families
from vgpu_agent.config.settings import Kubelet
from vgpu_agent.families.nvidia import NvidiaFamily
from vgpu_agent.families.nvidia_options import NvidiaOptions
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet.pod_resources import PodResources
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Holding, KubeletRecords, Owner
from vgpu_agent.status import KubeletStatus

GPU = "nvidia.com/gpu"
HELD = KubeletRecords((Holding(GPU, (U0,), Owner("main", "uid", "default", "train")),))


class Records:
    """kubelet's records as the test sets them, and when they were read (loop time)."""

    def __init__(self) -> None:
        self.now = KubeletRecords()
        self.read_at: list[float] = []

    async def read(self, *_: object) -> KubeletRecords:
        """Stands in for `read_records`, which has tests of its own."""
        self.read_at.append(round(asyncio.get_running_loop().time(), 3))
        return self.now


class Parts:
    """A verification over the golden node."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.servers: list[FakeServer] = []
        self.ledger, self.journal, self.kubelet = Ledger(clock=self._clock), Journal(), KubeletStatus()
        self.allocator = Allocator(
            ledger=self.ledger, families=Families((NvidiaFamily(NvidiaOptions()),)), inventory=golden_inventory, journal=self.journal
        )
        self.allocator.refresh_offer()
        self.allocator.confirm(KubeletRecords(entries=()), reservation_seconds=60, initial=True)
        self.verification = Verification(
            allocator=self.allocator,
            ledger=self.ledger,
            settings=Kubelet(),
            kubelet=self.kubelet,
            pod_resources=PodResources(Kubelet().pod_resources_socket, timeout_seconds=1),
            journal=self.journal,
            servers=lambda: self.servers,
            clock=self._clock,
        )

    async def another(self) -> None:
        """Book an id for one more pod; the one that had it is gone."""
        for grant in self.ledger.grants:
            self.ledger.release(grant.number)
        await self.allocator.allocate(GPU, [U0])

    @staticmethod
    def _clock() -> float:
        return 1000.0 + asyncio.get_running_loop().time()


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """kubelet's records, in the place where the verification reads them."""
    records = Records()
    monkeypatch.setattr(verification, "read_records", records.read)
    return records


@contextlib.asynccontextmanager
async def verifying(records: Records) -> AsyncIterator[Parts]:
    """The parts, with the loop running in the background; begun inside the test, where time is virtual."""
    parts = Parts(records)
    task = asyncio.ensure_future(parts.verification.run(lambda: None))
    try:
        yield parts
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
async def test_when_nothing_happens_the_records_are_read_every_half_minute(records: Records) -> None:
    """pod-resources is left alone: once soon after the start, then every 30 s."""
    async with verifying(records):
        await asyncio.sleep(95)
        assert records.read_at == [1, 31, 61, 91]


@pytest.mark.looptime
async def test_an_allocate_is_followed_by_a_reading_a_second_later(records: Records) -> None:
    """Who it was is known soon, and then the pace is the usual one again."""
    async with verifying(records) as parts:
        await asyncio.sleep(5)
        await parts.allocator.allocate(GPU, [U0])
        records.now = HELD
        await asyncio.sleep(20)
        assert records.read_at == [1, 6]
        assert parts.ledger.grants[0].owner == HELD.holdings[0].owner


@pytest.mark.looptime
async def test_a_burst_of_pods_is_verified_when_it_is_over(records: Records) -> None:
    """A reading slows down starts that are under way, so it waits until bookings pause for a second; but for ten seconds at most."""
    async with verifying(records) as parts:
        await asyncio.sleep(5)
        for _ in range(5):
            await parts.another()
            await asyncio.sleep(0.5)
        await asyncio.sleep(1)
        assert records.read_at == [1, 8]
        await asyncio.sleep(100)  # until nobody is waited for any more
        del records.read_at[:]
        began = asyncio.get_running_loop().time()
        for _ in range(30):
            await parts.another()
            await asyncio.sleep(0.5)
        await asyncio.sleep(2)
        assert [round(at - began) for at in records.read_at] == [10, 16]


@pytest.mark.looptime
async def test_an_admission_that_failed_is_asked_after_less_and_less_often_until_it_expires(records: Records) -> None:
    """1, 2, 4, 8… s, and after reservationSeconds the ids are free."""
    async with verifying(records) as parts:
        await asyncio.sleep(5)
        await parts.allocator.allocate(GPU, [U0])
        await asyncio.sleep(100)
        pauses = [later - earlier for earlier, later in itertools.pairwise(records.read_at[1:])]
        assert pauses[:5] == [2, 4, 8, 16, 30]
        assert not parts.ledger.grants


@pytest.mark.looptime
async def test_an_admission_that_failed_delays_nobody_else(records: Records) -> None:
    """While one reservation is waited for in vain, the next pod is still named a second after its Allocate."""
    async with verifying(records) as parts:
        await asyncio.sleep(5)
        await parts.allocator.allocate(GPU, [U0])
        await asyncio.sleep(40)
        await parts.allocator.allocate(GPU, [U1])
        records.now = KubeletRecords((Holding(GPU, (U1,), Owner("main", "uid", "default", "train")),))
        await asyncio.sleep(1.5)
        assert [grant.owner and grant.owner.pod for grant in parts.ledger.grants] == [None, "train"]


@pytest.mark.looptime
async def test_what_is_shown_as_drift_is_the_drift(records: Records) -> None:
    """A pod that ended in the same pass is the normal course, and not what an operator should look into."""
    async with verifying(records) as parts:
        records.now = HELD
        await asyncio.sleep(2)
        records.now = KubeletRecords()
        await asyncio.sleep(30)
        records.now = KubeletRecords((Holding(GPU, (U1,), Owner("main", "other", "default", "serve")),))
        await asyncio.sleep(3)
        assert [entry.event for entry in parts.journal.entries][-2:] == ["ledger.adopted", "ledger.released"]
        assert [text.partition(":")[0] for text in parts.verification.drift_last] == ["ledger.adopted"]


@pytest.mark.looptime
async def test_a_pod_that_ended_is_confirmed_soon_after_it_was_missed(records: Records) -> None:
    """The second look does not wait half a minute."""
    async with verifying(records) as parts:
        records.now = HELD
        await asyncio.sleep(2)
        assert len(parts.ledger.grants) == 1
        records.now = KubeletRecords()
        await asyncio.sleep(30)
        assert parts.ledger.in_doubt
        await asyncio.sleep(2)
        assert not parts.ledger.grants


@pytest.mark.looptime
async def test_a_kubelet_that_has_just_come_back_takes_nothing_away(records: Records) -> None:
    """It lists no pods until it has heard of them again; grants stay for reservationSeconds."""
    async with verifying(records) as parts:
        records.now = HELD
        await asyncio.sleep(2)
        records.now = KubeletRecords()
        parts.kubelet.restarts_seen += 1
        await asyncio.sleep(60)
        assert len(parts.ledger.grants) == 1
        await asyncio.sleep(65 + 30)
        assert not parts.ledger.grants


@pytest.mark.looptime
async def test_the_rebuild_at_start_is_no_drift(records: Records) -> None:
    """What kubelet knows at start is in the book, and counted as nothing; what turns up later is counted."""
    async with verifying(records) as parts:
        records.now = HELD
        await parts.verification.rebuild()
        assert (len(parts.ledger.grants), parts.verification.drift_total) == (1, 0)
        parts.ledger.release(parts.ledger.grants[0].number)
        await asyncio.sleep(2)
        assert parts.verification.drift_total == 1
        assert "did not know" in parts.verification.drift_last[0]


@pytest.mark.looptime
async def test_trouble_with_the_records_is_said_once(records: Records) -> None:
    """An hour without pod-resources is one line, not a hundred and twenty."""
    async with verifying(records) as parts:
        records.now = KubeletRecords(complete=False, trouble="no socket")
        await asyncio.sleep(3600)
        assert [entry.event for entry in parts.journal.entries] == ["kubelet.records_incomplete"]
        assert parts.kubelet.records_trouble == "no socket"
        assert parts.verification.verified_at == 0.0


@pytest.fixture
def allocatable(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When kubelet was asked what can be allocated; it answers that nothing can."""
    asked_at: list[float] = []

    async def nothing(*_: object) -> dict[str, frozenset[str]]:
        asked_at.append(round(asyncio.get_running_loop().time(), 3))
        return {}

    monkeypatch.setattr(PodResources, "allocatable", nothing)
    return asked_at


@pytest.mark.looptime
async def test_ids_that_kubelet_does_not_list_are_looked_at_again_soon_and_registered_again(
    records: Records, allocatable: list[float]
) -> None:
    """A second look 2 s after the first, one new registration, then the usual pace: never more calls than passes."""
    async with verifying(records) as parts:
        parts.servers = [FakeServer()]
        await asyncio.sleep(30)
        assert allocatable == [1, 3]
        assert len(parts.servers[0].again) == 1
        assert set(allocatable) <= set(records.read_at)


@pytest.mark.looptime
async def test_a_silent_pod_resources_is_not_asked_a_second_question(records: Records, allocatable: list[float]) -> None:
    """The pass whose first call failed makes no second one, so that a timeout costs one."""
    async with verifying(records) as parts:
        parts.servers = [FakeServer()]
        records.now = KubeletRecords(complete=False, trouble="no socket")
        await asyncio.sleep(60)
        assert allocatable == []
